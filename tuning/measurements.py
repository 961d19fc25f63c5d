"""Measured trials of many studies as one compressed file: what the cost model is calibrated on.

A search's trials are no fair sample of its space (those are recordings, :mod:`k3lab.tuning.record`), but they are many
shapes. ``python -m k3lab.tuning.measurements FAMILY --out FILE STUDY...`` gathers a family's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels import InputError
from ..kernels.space import Config
from ..kernels.whole_file import write_whole
from .cubin import KernelResources

FORMAT = "k3lab-trials"
SCHEMA = 1


@dataclass(frozen=True)
class Measured:
    """One config that was measured."""

    family: str
    engine: str
    gpu: str
    problem: dict[str, Any]
    config: Config
    us: float
    """Microseconds, cold and isolated."""
    resources: tuple[KernelResources, ...]
    fair: bool
    """Of a whole space or a fair sample of it, and not of a search."""

    @property
    def shape(self) -> tuple[str, str, str]:
        """What configs are compared on: family, GPU and problem."""
        return self.family, self.gpu, json.dumps(self.problem, sort_keys=True)


def gather(family: str, studies: Iterable[Path]) -> dict[str, Any]:
    """The measured trials of a family's studies, each with its resources.

    Raises:
        InputError: no study holds one, or an engine's studies are of two kernel sources.
    """
    from .study import TuningStudy

    found: list[dict[str, Any]] = []
    sources: dict[str, dict[str, str]] = {}
    environments: list[Any] = []
    for path in sorted(studies):
        with TuningStudy.for_reading(path) as study:
            identity = study.identity
            if identity["family"] != family or identity["objective"] != "measured":
                continue
            source = {"source": identity["source_digest"]}
            if sources.setdefault(identity["engine"], source) != source:
                raise InputError(f"{path} is of another source of {identity['engine']} than the studies before it")
            where = study.note("environment")
            if where not in environments:
                environments.append(where)
            trials = [
                {
                    "config": dict(one.config),
                    "us": one.value,
                    "resources": [dict(each) for each in one.outcome.resources],
                }
                for one in study.trials()
                if one.ok and one.outcome is not None
            ]
            if trials:
                found.append({
                    "engine": identity["engine"], "gpu": identity["gpu"], "problem": identity["problem"],
                    "environment": environments.index(where), "trials": trials,
                })  # fmt: skip
    if not found:
        raise InputError(f"none of these is a measured study of {family} with a trial that ended ok")
    return {
        "format": FORMAT, "schema": SCHEMA, "family": family, "evidence": "measured", "gpu": found[0]["gpu"],
        "sources": sources, "environment": environments[0], "environments": environments, "studies": found,
    }  # fmt: skip


def write(path: Path, data: dict[str, Any]) -> None:
    """Write the file; the same data gives the same bytes."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n"
    write_whole(path, gzip.compress(text.encode(), mtime=0))


def load(path: Path) -> dict[str, Any]:
    """A file of trials, or a recorded space.

    Raises:
        InputError: it is neither.
    """
    from .record import checked, unpacked

    data = unpacked(path, "neither a recording nor a file of trials")
    if isinstance(data, dict) and data.get("format") == FORMAT:
        if data.get("schema") != SCHEMA:
            raise InputError(f"{path} has schema {data.get('schema')!r}, this k3lab reads schema {SCHEMA}")
        return data
    return checked(data, path)


def measured(paths: Iterable[Path]) -> Iterator[Measured]:
    """Every measured config of recordings and files of trials.

    Raises:
        InputError: a file is neither, or holds predicted values.
    """
    for path in paths:
        data = load(path)
        if data.get("evidence") != "measured":
            raise InputError(
                f"{path} holds {data.get('evidence')} values, which cannot judge the cost model; it takes measured ones"
            )
        if data["format"] == FORMAT:
            for study in data["studies"]:
                for one in study["trials"]:
                    yield Measured(
                        data["family"], study["engine"], study["gpu"], study["problem"], one["config"], one["us"],
                        tuple(KernelResources(**each) for each in one["resources"]), False,
                    )  # fmt: skip
            continue
        yield from recorded(data)


def recorded(recording: Mapping[str, Any]) -> Iterator[Measured]:
    """The configs of a recorded space that ended ok."""
    identity = recording["identity"]
    for one in recording["configs"]:
        if one["status"] == "ok":
            yield Measured(
                identity["family"], identity["engine"], identity["gpu"], identity["problem"], one["config"], one["value"],
                tuple(KernelResources(**each) for each in one["resources"]), True,
            )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m k3lab.tuning.measurements", description=__doc__)
    parser.add_argument("family")
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file to write, .json.gz")
    given = parser.parse_args(argv)
    try:
        data = gather(given.family, given.studies)
        write(given.out, data)
    except InputError as error:
        print(f"k3lab: {error}", file=sys.stderr)
        return 2
    count = sum(len(study["trials"]) for study in data["studies"])
    print(f"{count} measured configs of {len(data['studies'])} studies in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
