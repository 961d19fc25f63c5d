"""Where the time of one launch goes: when its warps pass the stages that a kernel names, by the GPU's clocks.

A build of the kernel that stamps them (:mod:`k3lab.kernels.stamps`) runs in the graph that also times a kernel: launches one after
the other, weights cold. What its last launch left is read after each replay. Stamps cost some nanoseconds each, so the same build's
own time stands beside them, and no such figure is a timing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernels import Engine, Family, InputError, Launch, Problem
from ..kernels.stamps import BLOCKS, BYTES, STAGES, TABLE_BYTES, WARPS
from .policy import TimingPolicy

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAUNCHES = 30
"""Launches that are read: every figure is their median."""


@dataclass(frozen=True)
class StageTime:
    """When the warps of a role pass a stage; microseconds since the launch's first stamp, medians over launches."""

    stage: str
    first_us: float
    median_us: float
    last_us: float


@dataclass(frozen=True)
class Role:
    """Warps that pass the same stages, in the order in which the median warp passes them."""

    launch: int
    """Place of the launch among the engine's."""
    warps: int
    blocks: int
    stages: tuple[StageTime, ...]


@dataclass(frozen=True)
class Stages:
    """What :func:`measure_stages` found."""

    kernels: tuple[str, ...]
    """Of the engine's launches."""
    roles: tuple[Role, ...]
    span_us: float
    """From the first stamp to the last."""
    stamped_us: float
    """The build with stamps, timed as any kernel is: what lies beyond the span is the launch, and code before the first stamp.
    In a chain what it adds to the predecessor, whose end lies shortly before the warps that wait for it are ``woken``.
    """
    launches: int
    chain: bool = False
    """Behind a predecessor with a programmatic edge (:mod:`.chain`)."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def stamps_of(table: NDArray[np.int64]) -> tuple[NDArray[np.float64], float]:
    """(microseconds since the launch's first stamp by [stage, block, warp], NaN where there is none; nanoseconds a clock tick).

    The timer of nanoseconds is one for the GPU but may step in coarse ones; ticks are exact, but each SM counts its own. So
    within a block ticks count, and its stamps together say where they lie.

    Args:
        table: int64 [stages, blocks, warps, 2], nanoseconds and ticks, zeros where nothing passed; blocks of an engine's launches
            one after the other. What is older than the first ``begin`` of the first launch is of a replay before and left out.

    Raises:
        ValueError: no warp has stamped its beginning.
    """
    nanoseconds, ticks = table[..., 0], table[..., 1]
    begun = nanoseconds[STAGES.index("begin"), :BLOCKS]
    if not begun.any():
        raise ValueError("no warp has stamped its beginning")
    start = begun[begun > 0].min()
    there = nanoseconds >= start
    times = np.full(nanoseconds.shape, np.nan)
    passed = [block for block in range(nanoseconds.shape[1]) if there[:, block].any()]
    spread = np.concatenate(
        [
            np.stack([nanoseconds[:, b][there[:, b]] - start, ticks[:, b][there[:, b]]], 1).astype(np.float64)
            - np.array([0.0, ticks[:, b][there[:, b]].min()])
            for b in passed
        ]
    )
    owner = np.concatenate([np.full(int(there[:, b].sum()), i) for i, b in enumerate(passed)])
    counts = np.bincount(owner)
    inner = spread - np.stack([np.bincount(owner, spread[:, k]) / counts for k in range(2)], 1)[owner]
    square = float((inner[:, 1] ** 2).sum())
    tick_ns = float((inner[:, 0] * inner[:, 1]).sum()) / square if square else 0.0
    for b in passed:
        here = there[:, b]
        own = (ticks[:, b][here] - ticks[:, b][here].min()) * tick_ns
        times[:, b][here] = own + np.mean(nanoseconds[:, b][here] - start - own)
    times -= np.nanmin(times)
    return times / 1e3, tick_ns


def roles_of(times: NDArray[np.float64]) -> tuple[Role, ...]:
    """Roles of the warps, launch by launch, the one of most warps first; microseconds by [replay, stage, block, warp]."""
    return tuple(
        role
        for place in range(times.shape[2] // BLOCKS)
        for role in _roles(times[:, :, place * BLOCKS : (place + 1) * BLOCKS], place)
    )


def _roles(times: NDArray[np.float64], place: int) -> list[Role]:
    passes = ~np.isnan(times).any(0)
    kinds, which = np.unique(passes.reshape(len(STAGES), -1), axis=1, return_inverse=True)
    roles = []
    for kind in range(kinds.shape[1]):
        own = (np.asarray(which).reshape(-1) == kind).reshape(passes.shape[1:])
        found = []
        for index in np.flatnonzero(kinds[:, kind]):
            of_warps = times[:, index][:, own]
            first, middle, last = (float(np.median(of(of_warps, axis=1))) for of in (np.min, np.median, np.max))
            found.append(StageTime(STAGES[int(index)], round(first, 3), round(middle, 3), round(last, 3)))
        if found:
            found.sort(key=lambda one: one.median_us)
            roles.append(Role(place, int(own.sum()), int(own.any(1).sum()), tuple(found)))
    return sorted(roles, key=lambda role: -role.warps)


def check_blocks(launches: Sequence[Launch]) -> None:
    """Raise InputError for a launch of more blocks than stamps are kept of: what it would tell is of a part of them."""
    for one in launches:
        if (blocks := math.prod(one.grid)) > BLOCKS:
            raise InputError(
                f"{one.kernel} has {blocks} blocks, and stamps are kept of {BLOCKS}; ask for fewer rows, or a larger --tp"
            )


def measure_stages(
    family: Family, engine: Engine, problem: Problem, config: Mapping[str, Any], arch: str, policy: TimingPolicy, *,
    seed: int = 0, launches: int = LAUNCHES, chain: bool = False,
) -> Stages:  # fmt: skip
    """Run the build with stamps on the current GPU, cold, and read when its warps passed.

    ``chain``: behind the predecessor of a chain timing, with what the kernel does ahead of its wait; else alone.

    Raises:
        InputError: the engine's first kernel stamps nothing, or one has more blocks than stamps are kept of.
        BrokenMeasurement: see :func:`k3lab.tuning.chain.require_edges`.
    """
    import torch

    from ..kernels.health import check_health
    from ..kernels.launch import Runner
    from .chain import pairs, predecessor_of, require_edges
    from .timing import capture_calls, input_copies, restorer, time_calls

    plain = engine.compile(problem, config, arch).launches
    check_blocks(plain)
    many = len(plain)
    table = torch.zeros(many * TABLE_BYTES // 8, dtype=torch.int64, device="cuda")
    compiled = engine.compile(problem, {**config, "stamps": table.data_ptr()}, arch)
    copies = input_copies(family, problem, policy, seed)
    restore = restorer(family, copies)
    runner = Runner(compiled)
    before_us = 0.0
    if chain:
        before = predecessor_of(family, copies, runner.carveout)
        before_us = time_calls([before], policy).median_us
        calls = pairs(before, runner, copies)
        require_edges(calls, compiled)
    else:
        calls = [runner.bind(tensors, pdl=False) for tensors in copies]
    captured = capture_calls(calls, policy)
    timed_us = captured.replayed(policy, restore).median_us - before_us
    found = []
    for _ in range(launches):
        if restore is not None:
            restore()
        captured.graph.replay()
        torch.cuda.synchronize()
        by_launch = table.cpu().numpy().reshape(many, len(STAGES), BLOCKS, WARPS, BYTES // 8)
        stamps = np.concatenate(by_launch, axis=1)
        if not stamps[STAGES.index("begin"), :BLOCKS].any():
            raise InputError(f"{family.name}/{engine.name} stamps no stages; see kernels/cute_stages.py")
        found.append(stamps_of(stamps)[0])
    check_health(runner.buffers)
    whole = np.stack(found)
    span = float(np.median([np.nanmax(one) for one in whole]))
    return Stages(
        tuple(launch.kernel for launch in compiled.launches),
        roles_of(whole),
        round(span, 3),
        round(timed_us, 3),
        launches,
        chain,
    )
