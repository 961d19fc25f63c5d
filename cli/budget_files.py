"""``python -m k3lab.cli.budget_files [--check]``: the budgets of the package, computed from the families' bytes.

The published budget names one time a layer. Its split to families is ours: by the bytes each of them must move. The
budgets for other GPUs are derived, never measured: the bytes at the GPU's own read bandwidth, plus what each launch of
the published layer takes beyond its bytes. That part is latency (launches, hand-overs between blocks and ranks), which
a slower memory does not stretch; scaling it with the bytes would set a bar that even a stream without maths beats.

Written are ``traces/budgets/*.json`` and, with the numbers they were derived from, ``results/<gpu>/budgets/*.json``.
``--check`` writes nothing and tells which file is not what is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..decode.stock import target_layer
from ..kernels import K3, InputError
from ..kernels import family as find_family
from ..kernels.gpu_cards import GpuCard, gpu_card
from ..kernels.model_card import LayerKind
from ..kernels.whole_file import write_whole
from ..traces.budget import SCHEMA, Budget, Limit, load_budget
from ..traces.names_table import sequences
from ..traces.shares import floor_ns, shared_out

PUBLISHED = "gb300-tp16"
DERIVED = (("H200", 16, 8), ("H200", 8, 8))
"""(GPU, TP, rows) of the budgets derived from it."""
VERIFIED = {"kda": "verify8"}
"""One request whose 8 rows are verified together, as inferred of the published trace."""
PLAIN = {"kda": "plain", "mla": "bf16"}
"""Eight requests of one row, as the decode path here is run."""
SPLIT = (
    "ours, not the source's: the layer's time shared out by the bytes each family must move (every weight, state and"
    " activation once, experts by uniform routing); it knows no latency, so the share of a family that moves little is"
    " less than any launch takes"
)
RULE = (
    "bytes of each family over the GPU's read bandwidth, plus for each of its kernels what a kernel of the published"
    " layer takes beyond the bytes: latency of launches and hand-overs, which does not grow with the time of the bytes"
)


def layer_families(kind: LayerKind) -> tuple[str, ...]:
    """Families of a MoE layer in the order of their launches."""
    return ("attention_projection", kind, "output_projection", "router", "experts", "moe_tail", "attn_res")


def moved(kind: LayerKind, tp: int, rows: int, kinds: dict[str, str]) -> dict[str, int]:
    """Bytes one rank moves in a layer, by family."""
    found = {}
    for name in layer_families(kind):
        one = find_family(name)
        sort = kinds.get(name) or (kind if kind in one.kinds else None)
        found[name] = one.traffic(one.problem(K3, tp=tp, rows=rows, kind=sort)).bytes
    return found


def _published() -> tuple[Budget, Limit]:
    """The published budget and its one layer; its times and counts stand in its file alone."""
    budget = load_budget(PUBLISHED)
    return budget, budget.layers["kda"]


def _published_bytes() -> dict[str, int]:
    budget, _ = _published()
    return moved("kda", budget.tp, budget.rows or 0, VERIFIED)


def published_counts(kernels: int) -> dict[str, int]:
    """Most kernels a family has in any of the lists of launches that come to the published count."""
    lists = [launches for launches in sequences("vllm_latency_specialized").values() if len(launches) == kernels]
    counts = [Counter(launch["family"] for launch in launches) for launches in lists]
    return {name: max(count[name] for count in counts) for name in layer_families("kda")}


def published() -> dict[str, Any]:
    """The published budget's file with its split computed anew; what its source says is kept."""
    budget, layer = _published()
    assert layer.kernels is not None and layer.period_ns is not None  # both were published
    weights, counts = _published_bytes(), published_counts(layer.kernels)
    families = {
        name: {"kernels": counts[name], "period_ns": share}
        for name, share in shared_out(layer.period_ns, weights).items()
    }
    data = budget.to_json()
    data["layers"]["kda"]["families"] = families
    data["split"] = {"evidence": "inferred", "rule": SPLIT, "bytes": {"kda": weights}}
    return data


def launch_excess_ns() -> Fraction:
    """What a kernel of the published layer takes beyond the layer's bytes at its GPU's nominal bandwidth, ns."""
    budget, layer = _published()
    floor = floor_ns(sum(_published_bytes().values()), gpu_card(budget.gpu).read_bandwidth)
    return Fraction((layer.period_ns or 0) - floor, layer.kernels or 1)


def derived(card: GpuCard, tp: int, rows: int) -> dict[str, Any]:
    """A budget for a GPU nobody published one for."""
    excess, there = launch_excess_ns(), gpu_card(_published()[0].gpu)
    layers, weights = {}, {}
    for kind in ("kda", "mla"):
        target = target_layer(kind, dense=False)
        assert target is not None  # a MoE layer has one
        counts = Counter(launch.family for launch in target.sequence)
        weights[kind] = moved(kind, tp, rows, PLAIN)
        families = {
            name: {
                "kernels": counts[name],
                "period_ns": floor_ns(size, card.read_bandwidth) + round(counts[name] * excess),
            }
            for name, size in weights[kind].items()
        }
        period = sum(share["period_ns"] for share in families.values())
        layers[kind] = {"kernels": target.kernels, "period_ns": period, "families": families}
    return {
        "schema": SCHEMA,
        "name": f"{card.name.lower()}-tp{tp}",
        "evidence": "derived",
        "gpu": card.name,
        "tp": tp,
        "rows": rows,
        "inferred": ["kernels", "period_ns", "family shares"],
        "layers": layers,
        "split": {"evidence": "derived", "rule": RULE, "bytes": weights},
        "source": "Derived by k3lab from the published GB300 layer (gb300-tp16) and the bytes of this one; never measured.",
        "conditions": [
            f"{rows} requests of one row, MLA context 1024 tokens in BF16, uniform routing",
            f"the published layer's bytes at the {there.read_bandwidth_source} bandwidth of {there.name}, these at the"
            f" {card.read_bandwidth_source} one of {card.name}: should that layer have read more slowly, less of it was"
            " latency, and this bar is too high",
            "one rank: nothing is added for slower links between ranks",
            "a layer with experts; the dense first layer has no budget of its own",
        ],
    }  # fmt: skip


def provenance(card: GpuCard, tp: int, rows: int) -> dict[str, Any]:
    """The numbers a derived budget rests on."""
    (source, layer), there, budget = _published(), _published_bytes(), derived(card, tp, rows)
    speed = gpu_card(source.gpu)
    return {
        "evidence": "derived",
        "what": f"budget {budget['name']}: what a layer of the published path would take here; not a measurement",
        "made_by": "python -m k3lab.cli.budget_files",
        "rule": RULE,
        "published": {
            "name": source.name, "gpu": source.gpu, "tp": source.tp, "rows": source.rows, "kernels": layer.kernels,
            "period_ns": layer.period_ns, "kinds": VERIFIED, "bytes": there, "bytes_in_all": sum(there.values()),
            "read_bandwidth": speed.read_bandwidth, "read_bandwidth_is": speed.read_bandwidth_source,
            "floor_ns": floor_ns(sum(there.values()), speed.read_bandwidth),
            "beyond_the_bytes_per_kernel_ns": round(float(launch_excess_ns()), 3),
        },
        "here": {
            "gpu": card.name, "tp": tp, "rows": rows, "kinds": PLAIN,
            "read_bandwidth": card.read_bandwidth, "read_bandwidth_is": card.read_bandwidth_source,
            "read_bandwidth_from": card.sources["measured_read_bandwidth"],
            "floors_ns": {kind: {name: floor_ns(size, card.read_bandwidth) for name, size in sizes.items()}
                          for kind, sizes in budget["split"]["bytes"].items()},
        },
        "layers": budget["layers"],
    }  # fmt: skip


def files(root: Path) -> dict[Path, str]:
    """What each file must hold, by its path."""
    made: dict[Path, Any] = {root / "traces" / "budgets" / "gb300_tp16.json": published()}
    for name, tp, rows in DERIVED:
        card = gpu_card(name)
        made[root / "traces" / "budgets" / f"{name.lower()}_tp{tp}.json"] = derived(card, tp, rows)
        made[root / "results" / name.lower() / "budgets" / f"tp{tp}_rows{rows}.json"] = provenance(card, tp, rows)
    return {path: json.dumps(data, indent=1) + "\n" for path, data in made.items()}


def main(argv: Sequence[str]) -> int:
    """Entry point; 0 where all is well, 1 where ``--check`` found a difference, 2 where a file cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m k3lab.cli.budget_files", description="Budgets from the families' bytes.")  # fmt: skip
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where a file is not what is computed"
    )
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: the current folder)")
    asked = parser.parse_args(argv)
    try:
        made = files(asked.root)
        wrong = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
        if asked.check:
            for path in wrong:
                print(f"{path} is not what is computed; python -m k3lab.cli.budget_files writes it")
            return 1 if wrong else 0
        for path in wrong:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, made[path])
            print(f"wrote {path}")
    except (OSError, ValueError, InputError) as error:
        print(f"k3lab: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
