"""A study and a layer as plain data, for the report and the notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernels import K3, Family, InputError, ModelCard, Problem, family
from ..kernels.gpu_cards import GPU_CARDS, GpuCard, gpu_card

LAYER: tuple[tuple[str, bool], ...] = (
    ("attention_projection", True), ("", True), ("output_projection", False),
    ("router", False), ("experts", False), ("moe_tail", False),
)  # fmt: skip
"""Families of a MoE layer in launch order, and whether the layer kind is theirs; the empty name is the attention itself."""


def study_data(path: Path, owner: Family | None = None) -> dict[str, Any]:
    """Identity, trials, choice, what the parameters did, and byte floor of a study file.

    Args:
        path: the study's file.
        owner: its family, where that is not registered.

    Raises:
        InputError: the file is no study.
    """
    from ..tuning.effects import importance
    from ..tuning.study import TuningStudy

    with TuningStudy.for_reading(path) as study:
        identity, trials = study.identity, [trial.to_json() for trial in study.trials()]
        choice, environment = study.note("choice"), study.note("environment")
    owner = owner or family(identity["family"])
    problem = owner.problem_from_json(identity["problem"])
    gpu = gpu_card(identity["gpu"])
    moved = owner.traffic(problem).bytes
    return {
        "path": str(path),
        "family": identity["family"],
        "engine": identity["engine"],
        "problem": identity["problem"],
        "label": problem.label,
        "gpu": gpu.name,
        "evidence": identity["objective"],
        "bytes": moved,
        "floor_us": moved / gpu.read_bandwidth * 1e6,
        "bandwidth": gpu.read_bandwidth_source,
        "trials": trials,
        "importance": importance(ended(trials)),
        "choice": choice,
        "environment": environment,
    }


def ended(trials: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Config and time of the trials that ended ok."""
    return [(trial["config"], trial["value"]) for trial in trials if trial["value"] is not None]


def _known(
    studies: Sequence[Mapping[str, Any]],
    recorded: Sequence[Mapping[str, Any]],
    name: str,
    problem: dict[str, Any],
    gpu: str,
) -> tuple[float, str] | None:
    """Time and evidence of the problem on the GPU: measured before predicted, a study shown before a record."""
    found = [
        (study["evidence"] != "measured", False, study["choice"]["value_us"], study["evidence"])
        for study in studies
        if (study["family"], study["gpu"], study["problem"]) == (name, gpu, problem) and study["choice"]
    ]
    found += [
        (row["evidence"] != "measured", True, row["us"], row["evidence"])
        for row in recorded
        if (row["family"], row["gpu"], row["problem"]) == (name, gpu, problem)
    ]
    return min(found)[2:] if found else None


def layer_data(
    card: ModelCard,
    tp: int,
    rows: int,
    kind: str,
    gpu: GpuCard,
    studies: Sequence[dict[str, Any]] = (),
    recorded: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """One MoE layer, family by family: bytes, floor, and the time of a winner where a study or a record has one.

    ``sum_us`` takes the winner's time where one is known and the floor elsewhere, without what lies between kernels.
    Links to other ranks are in predicted times alone: measured ones are of a rank that plays all. ``evidence`` and
    ``basis`` say what the sum rests on. Only of floors alone is it a bound.

    Raises:
        InputError: no such kind, TP does not divide, rows out of range.
    """
    if kind not in ("kda", "mla"):
        raise InputError(f"layer kind {kind!r} is neither kda nor mla")
    parts = []
    for name, by_kind in LAYER:
        owner = family(name or kind)
        problem = owner.problem(card, tp=tp, rows=rows, kind=kind if by_kind and kind in owner.kinds else None)
        moved = owner.traffic(problem).bytes
        known = _known(studies, recorded, owner.name, problem.to_json(), gpu.name)
        parts.append({
            "family": owner.name,
            "bytes": moved,
            "floor_us": moved / gpu.read_bandwidth * 1e6,
            "time_us": known[0] if known else None,
            "evidence": known[1] if known else "floor",
        })  # fmt: skip
    evidence, basis = layer_basis(parts)
    return {
        "model": card.name,
        "tp": tp,
        "rows": rows,
        "kind": kind,
        "gpu": gpu.name,
        "bandwidth": gpu.read_bandwidth_source,
        "parts": parts,
        "floor_us": sum(part["floor_us"] for part in parts),
        "sum_us": sum(part["time_us"] or part["floor_us"] for part in parts),
        "evidence": evidence,
        "basis": basis,
    }


def layer_basis(parts: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Evidence of a layer's sum in a few words, and what it holds in one line."""
    counts = {
        word: sum(part["evidence"] == word for part in parts)
        for word in ("measured", "stale measured", "predicted", "stale predicted")
    }
    words = [word for word, count in counts.items() if count]
    if not words:
        return "lower bound", "byte floors alone; without collectives and gaps"
    won = " and ".join(f"{counts[word]} {word}" for word in words)
    whole = sum(counts.values()) == len(parts)
    held = f"{won} winner{'s' if sum(counts.values()) > 1 else ''}"
    held = held if whole else f"floors plus {held}"
    return (
        f"{'' if whole else 'partly '}{' and '.join(words)}",
        f"{held}; without gaps, links only in what is predicted",
    )


def floors(owner: Family, problem: Problem, sizes: Sequence[int], card: ModelCard = K3) -> list[dict[str, Any]]:
    """Byte floor of the same rows and kind at several TP sizes, on every GPU with a card."""
    fields = problem.to_json()
    found = []
    for tp in sizes:
        moved = owner.traffic(owner.problem(card, tp=tp, rows=problem.rows, kind=fields.get("kind"))).bytes
        found += [
            {
                "gpu": gpu.name,
                "tp": tp,
                "bytes": moved,
                "floor_us": moved / gpu.read_bandwidth * 1e6,
                "bandwidth": gpu.read_bandwidth_source,
            }
            for gpu in GPU_CARDS.values()
        ]
    return found
