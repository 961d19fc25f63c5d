"""One layer predicted family by family and kernel by kernel, on a GPU that need not be here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..kernels import Config, Family, InputError, Problem
from ..kernels.gpu_cards import GpuCard
from .compiling import compile_config, resources_of
from .cost_model import constants_of, link_gpus
from .predict import predict

NO_TIME = "floor"
"""Basis of a family that no engine serves: its byte floor stands for its time."""


def choice(owner: Family, problem: Problem, gpu: GpuCard, winner: tuple[str, Config] | None) -> tuple[Any, Config, str]:
    """(engine, config, what it is): the recorded winner where it is still a legal config, else the default engine's default.

    Raises:
        InputError: no engine serves the problem on the GPU.
    """
    serving = [engine for engine in owner.engines if engine.refuses(problem, gpu.arch) is None]
    if not serving:
        why = "it has no engine yet" if not owner.engines else f"no engine serves {problem.label} on {gpu.name}"
        raise InputError(f"{owner.name}: {why}")
    if winner is not None:
        for engine in serving:
            if engine.name == winner[0] and engine.space(problem, gpu).illegal(winner[1]) is None:
                return engine, winner[1], "recorded winner"
    engine = next((one for one in serving if one.name == owner.default_engine), serving[0])
    return engine, engine.space(problem, gpu).default, "default config"


def part(owner: Family, problem: Problem, gpu: GpuCard, winner: tuple[str, Config] | None = None) -> dict[str, Any]:
    """A family's place in the layer: its launches as compiled for the GPU, predicted microseconds, byte floor, error.

    Args:
        owner: the family.
        problem: which instance.
        gpu: the target.
        winner: engine and config of a recorded winner of this problem.
    """
    floor = owner.traffic(problem).bytes / gpu.read_bandwidth * 1e6
    base = {"family": owner.name, "problem": problem.label, "floor_us": round(floor, 3)}
    try:
        engine, config, basis = choice(owner, problem, gpu, winner)
    except InputError as error:
        return base | {"engine": None, "basis": NO_TIME, "us": None, "why": str(error), "kernels": []}
    found = resources_of(compile_config(engine, problem, config, gpu.arch))
    answer = predict(owner, engine, problem, config, gpu, None, found=found)
    return base | {
        "engine": engine.name,
        "basis": basis,
        "config": dict(config),
        "us": round(answer.microseconds, 3),
        "calibrated": constants_of(owner.name, engine.name)[1],
        "error": answer.error,
        "uncalibrated": answer.uncalibrated,
        "terms": answer.to_json()["terms"],
        "kernels": [
            {
                "kernel": one.kernel, "blocks": one.blocks, "threads": one.threads, "registers": one.registers,
                "shared_bytes": one.static_shared_bytes + one.dynamic_shared_bytes, "spills": one.spill_instructions,
            }
            for one in found
        ],
    }  # fmt: skip


def layer(
    parts: Sequence[tuple[Family, Problem]], gpu: GpuCard, winners: Mapping[tuple[str, str], tuple[str, Config]] | None = None
) -> dict[str, Any]:  # fmt: skip
    """The parts, and their sum; ``predicted`` where every part has a time, else ``partly predicted``.

    ``link_us`` is what links to other ranks make of the sum, ``link_gpus`` the cards whose ranks its constants were
    fitted to: none where they are guesses.

    Args:
        parts: families with their problems, in launch order.
        gpu: the target.
        winners: (family, problem label) to engine and config.
    """
    found = [part(owner, problem, gpu, (winners or {}).get((owner.name, problem.label))) for owner, problem in parts]
    timed = [one for one in found if one["us"] is not None]
    never = list(dict.fromkeys(name for one in timed for name in one["uncalibrated"]))
    return {
        "gpu": gpu.name,
        "parts": found,
        "launches": sum(len(one["kernels"]) for one in found),
        "floor_us": round(sum(one["floor_us"] for one in found), 3),
        "sum_us": round(sum(one["floor_us"] if one["us"] is None else one["us"] for one in found), 3),
        "link_us": round(sum(one["terms"].get("link", 0.0) for one in timed), 3),
        "link_gpus": list(link_gpus()),
        "evidence": "predicted" if len(timed) == len(found) else "partly predicted",
        "uncalibrated": never,
        "uncalibrated_engines": [f"{one['family']}/{one['engine']}" for one in timed if not one["calibrated"]],
    }
