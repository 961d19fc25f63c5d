"""The cost model's two constants of the link from times of real ranks: ``python -m k3lab.tuning.calibrate_link FILE``.

What a case takes over the links beyond what it takes over loopback on the same GPUs in the same run is the model's link
term: bytes from the others over a share of the links' bandwidth, and a time for each hop. Both are fitted to all cases of
the records together by least squares; ``--write`` puts them into every set of ``data/cost_model.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels import InputError, family
from ..kernels.gpu_cards import gpu_card
from ..kernels.whole_file import write_whole
from .cost_model import DATA, LINK, with_link
from .ranks.report import load

LEAST = 4
"""Cases that two constants are fitted to."""
LEAST_SHARE, MOST_SHARE = 0.02, 1.5
"""Shares of the links' bandwidth that can be believed."""


@dataclass(frozen=True)
class LinkPoint:
    """One case."""

    label: str
    bytes_us: float
    """Bytes from the other ranks over the links' bandwidth."""
    hops: float
    added_us: float
    """Measured over the links less over loopback."""


@dataclass(frozen=True)
class LinkFit:
    """The two constants, and how well they tell the cases."""

    link_share: float
    link_hop_us: float
    cases: int
    error_us: float
    """Root mean square of what the term is off."""


def points(data: Mapping[str, Any]) -> list[LinkPoint]:
    """The stable cases of a record.

    Raises:
        InputError: a case is of no engine or problem there is.
    """
    card = gpu_card(data["environment"]["gpu"]["card"])
    found = []
    for case in data["cases"]:
        if not all(name in case and case[name]["stable"] for name in ("real", "loopback")):
            continue
        owner = family(case["family"])
        work = owner.engine(case["engine"]).work(owner.problem_from_json(case["problem"]), case["config"])
        label = f"{case['family']}/{case['engine']} {case['exchange']} at {case['rows']} rows, {data['ranks']} ranks"
        added = case["real"]["us"] - case["loopback"]["us"]
        found.append(LinkPoint(label, work.link_bytes / card.nvlink_bandwidth * 1e6, float(work.link_hops), added))
    return found


def fit(found: Sequence[LinkPoint]) -> LinkFit:
    """Least squares of ``bytes_us / link_share + hops * link_hop_us``.

    Raises:
        InputError: too few cases, or they do not tell a share of the bandwidth and a hop apart.
    """
    if len(found) < LEAST:
        raise InputError(f"{len(found)} stable cases with times over links and loopback; {LEAST} are needed")
    # normal equations of two unknowns
    bb = sum(one.bytes_us**2 for one in found)
    bh = sum(one.bytes_us * one.hops for one in found)
    hh = sum(one.hops**2 for one in found)
    by = sum(one.bytes_us * one.added_us for one in found)
    hy = sum(one.hops * one.added_us for one in found)
    determinant = bb * hh - bh * bh
    if determinant <= 1e-9 * bb * hh or not bb:
        raise InputError("these cases do not tell bytes and hops apart: time several row counts")
    slope, hop = (by * hh - hy * bh) / determinant, (hy * bb - by * bh) / determinant
    if hop < 0:  # a hop costs nothing at least
        slope, hop = by / bb, 0.0
    if slope <= 0 or not LEAST_SHARE <= 1 / slope <= MOST_SHARE:
        share = f"{1 / slope:.3g} of the links' bandwidth" if slope > 0 else "no bandwidth at all"
        raise InputError(
            f"these cases fit {share}; a share of {LEAST_SHARE} to {MOST_SHARE} can be believed: what is timed hides the link"
        )
    off = [one.bytes_us * slope + one.hops * hop - one.added_us for one in found]
    return LinkFit(1 / slope, hop, len(found), (sum(one**2 for one in off) / len(off)) ** 0.5)


def written(model: Mapping[str, Any], made: LinkFit, names: Sequence[str], gpus: Sequence[str]) -> dict[str, Any]:
    """The cost model's file with the two constants in every set, where they come from, and for which GPUs' links they hold."""
    link = {name: float(f"{getattr(made, name):.4g}") for name in LINK}
    source = {
        "fitted_to": made.cases, "error_us": round(made.error_us, 3), "records": sorted(names), "gpus": sorted({*gpus}),
    }  # fmt: skip
    return with_link(model, {"link": {**source, **link}})


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m k3lab.tuning.calibrate_link", description=__doc__)
    parser.add_argument("records", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help=f"put them into {DATA.name}")
    given = parser.parse_args(argv)
    try:
        records = [load(path) for path in given.records]
        if len(kinds := {one["environment"]["gpu"]["card"] for one in records}) > 1:
            raise InputError(
                f"records of several GPUs: {', '.join(sorted(kinds))}; their links differ, fit one at a time"
            )
        found = [point for one in records for point in points(one)]
        made = fit(found)
    except (InputError, KeyError) as error:
        text = f"a record lacks {error}" if isinstance(error, KeyError) else str(error)
        print(f"k3lab: {text}", file=sys.stderr)
        return 2
    for one in found:
        told = one.bytes_us / made.link_share + one.hops * made.link_hop_us
        print(f"{one.label}: {one.added_us:.2f} us added, {told:.2f} by the fit")
    print(f"link_share {made.link_share:.4g}, link_hop_us {made.link_hop_us:.4g}, off by {made.error_us:.2f} us (rms)")
    if given.write:
        names = [f"{path.parent.name}/{path.name}" for path in given.records]
        data = written(json.loads(DATA.read_text()), made, names, sorted(kinds))
        write_whole(DATA, json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
