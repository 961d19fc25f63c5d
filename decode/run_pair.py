"""The layer pair of :mod:`k3lab.decode.layer_pair` on the ranks that torchrun started, and the record of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels import Evidence, InputError, ModelCard
from ..kernels.device import Device
from .choices import Choice, Fallback, Finder, Tuned, choose
from .fitting import fitting_here
from .group import Group
from .layer_pair import over_ranks, pair_card
from .letters import letters
from .memory import check_memory, peak_memory, watch_memory
from .plan import TUNED_FAMILIES
from .run_options import check_context, check_seed
from .scope import digest
from .sharding import check_dcp

if TYPE_CHECKING:
    from .measure_bars import Load
    from .pair_rank import PairRank

KIND = "k3lab-layer-pair"
LETTER = 2**20
"""Bytes in which a rank tells what it measured."""
NOT_TIMED = "ranks shared GPUs and were time-sliced: launches and logits were checked, no times were kept"
ONE_BLOCK = "the cut-down model saves few blocks: its AttnRes reads fewer sources than in the middle of the whole one"
Say = Callable[[str, int, int], None]
Recorder = Callable[[Path], AbstractContextManager[object]]
Chosen = Mapping["Load", tuple[Choice, ...]]


@dataclass(frozen=True)
class Traces:
    """Where each rank's trace goes, who records it, and who reads it."""

    folder: Path
    record: Recorder
    """Raises OSError or InputError where it cannot write."""
    differences: Callable[[Path, Mapping[str, int], int], list[str]]
    """Lines for tuned kernels that a file of so many steps holds more or less often than planned; InputError for what is none."""


def check_pair(card: ModelCard, loads: Sequence[Load], *, tp: int, pairs: int, seed: int) -> ModelCard:
    """The cut-down model; raises InputError for what no group can measure."""
    part = pair_card(card, pairs)
    card.check_tp(tp)
    check_seed(seed)
    for load in loads:
        check_context(card, load.context + load.q_len)
        check_dcp(load.dcp, tp)
    return part


def run_pair(
    card: ModelCard, group: Group, bundle: Finder | None, loads: Sequence[Load], *, pairs: int, seed: int = 0, samples: int = 30,
    time_sliced: bool = False, traces: Traces | None = None, model: str = "", say: Say | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure on all ranks; every rank calls it and gets the same record.

    Args:
        card: the whole model.
        group: of torchrun's ranks.
        bundle: of the tuned path; None measures ``auto`` alone.
        loads: what steps have to do.
        pairs: of layers, in the larger graphs.
        seed: of weights, ids and contexts.
        samples: replays of each graph.
        time_sliced: ranks share GPUs: no time is kept.
        traces: a trace a rank, of the first load on the tuned path, or without a bundle on ``auto``.
        model: what ``--model`` was, for the commands a fallback names.
        say: is told how far it is.

    Raises:
        InputError: it does not fit here.
        CollectiveError: a rank was late or is gone.
    """
    from .pair_rank import PairRank

    assert group.host
    part, device = check_pair(card, loads, tp=group.size, pairs=pairs, seed=seed), group.device
    for load in loads:
        check_memory(
            part, group.size, device, whole=False, requests=load.requests, context=-(-load.context // load.dcp),
            verify=load.q_len, one_rank=True,
        )  # fmt: skip
    watch_memory(device)
    bundle, choices = _chosen(part, group, bundle, loads, model)

    def measured() -> tuple[list[dict[str, Any]], PairRank]:
        own = PairRank(part, group, bundle, choices, seed, say or (lambda _what, _done, _of: None))
        return [own.measured(load, samples) for load in loads], own

    mine, rank = group.together("measuring", measured)
    told = {"rows": mine, "gpu": device.to_json() if device else None, "peak_memory_bytes": peak_memory(device)}
    every = letters(told, group.host, LETTER, "what a rank measured")
    untraced = _add_traces(every, rank, loads[0], traces) if traces else []
    rows = [
        _row(part, load, [one["rows"][place] for one in every], device, choices[load], time_sliced)
        for place, load in enumerate(loads)
    ]
    gpu = device.card if device else None
    return {
        "kind": KIND, "evidence": Evidence.MEASURED.value if gpu and not time_sliced else None, "model": card.name,
        "pairs": pairs, "tp": group.size, "dcp": loads[0].dcp, "ranks": group.words, "time_sliced": time_sliced,
        "seed": seed, "samples": samples, "bundle": digest(bundle), "rows": rows,
        "each": [{name: one[name] for name in one if name != "rows"} for one in every],
        "notes": [
            f"random weights (seed {seed}); layers of the model's widths, {pairs} of each kind", ONE_BLOCK,
            "a replay begins behind a barrier of all ranks; its time is the slowest rank's, a layer's the slope between graphs",
            *([NOT_TIMED] if time_sliced else [f"every time is the median of {samples} replays"]),
            *([] if device else [f"no GPU: {'the tuned path is its twins, and ' if bundle else ''}times say nothing about kernels"]),
            *([] if bundle else ["no bundle: auto alone was measured"]),
        ],
        "faults": [
            *[f"{row['rows']} rows, {name}: {fault}" for row in rows for name, own in row["backends"].items() for fault in own["faults"]],
            *[f"rank {place}, its trace: {line}" for place, one in enumerate(every) for line in one.get("trace", {}).get("differences", ())],
            *untraced,
        ],
    }  # fmt: skip


def _add_traces(every: Sequence[dict[str, Any]], rank: PairRank, load: Load, traces: Traces) -> list[str]:
    """Give every rank's record its ``trace``; faults where that failed: what was measured stands without it."""
    assert rank.group.host
    try:
        mine = rank.group.together("tracing", lambda: _traced(rank, load, traces))
        for one, trace in zip(every, letters(mine, rank.group.host, LETTER, "what a trace holds"), strict=True):
            one["trace"] = trace
    except RuntimeError as error:  # a rank that did not come, or a GPU that stopped
        return [f"tracing: {' '.join(str(error).split())}"]
    return []


def _traced(rank: PairRank, load: Load, traces: Traces) -> dict[str, Any]:
    made = rank.traced(load, traces.folder, traces.record)
    if made["lost"]:
        return {**made, "differences": [made["lost"]]}
    try:
        found = traces.differences(Path(made["file"]), made["planned"], made["steps"])
    except InputError as error:
        return {**made, "lost": str(error), "differences": [str(error)]}
    return {**made, "differences": found}


def _chosen(
    part: ModelCard, group: Group, bundle: Finder | None, loads: Sequence[Load], model: str
) -> tuple[Finder | None, Chosen]:
    """What the bundle offers that fits on every rank's GPU; nothing without a GPU or a bundle."""
    device = group.device

    def chosen(found: Finder | None) -> Chosen:
        if device is None or found is None:
            return dict.fromkeys(loads, ())
        return {
            load: choose(
                part, tp=group.size, rows=load.rows, gpu=device.need_card().name, bundle=found, only=TUNED_FAMILIES,
                objective="measured", model=model, form=load.form,
            )
            for load in loads
        }  # fmt: skip

    fits = fitting_here(bundle, [one for own in chosen(bundle).values() for one in own], group)
    return fits, chosen(fits)


def _row(
    part: ModelCard, load: Load, ranks: Sequence[Mapping[str, Any]], device: Device | None, choices: Sequence[Choice],
    time_sliced: bool,
) -> dict[str, Any]:  # fmt: skip
    gpu, backends = device.card if device else None, {}
    for name in ranks[0]:
        own = over_ranks(part, load, name, [one[name] for one in ranks], gpu)
        backends[name] = untimed(own) if time_sliced else own
    return {
        "rows": load.rows, "requests": load.requests, "tokens_a_request": load.q_len, "context": load.context, "dcp": load.dcp,
        "backends": backends,
        "tuned": [
            {"family": one.family, "kind": one.kind, "engine": one.engine, "evidence": one.evidence, "config": one.config}
            for one in choices if isinstance(one, Tuned)
        ],
        "fallbacks": [one.to_json() for one in choices if isinstance(one, Fallback)],
    }  # fmt: skip


def untimed(one: Mapping[str, Any]) -> dict[str, Any]:
    """The same without a time."""
    kept = ("launches", "off_auto", "distinct_experts", "routing_fault", "logits", "faults")
    layers = {kind: {name: own[name] for name in ("launches", "kernels")} for kind, own in one["layers"].items()}
    return {**{name: one[name] for name in kept}, "layers": layers}
