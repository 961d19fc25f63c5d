"""What the cost model sees of a config: what the compiler made, what the engine says of it, and the GPU's card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..kernels.contract import Traffic, Work
from ..kernels.gpu_cards import GpuCard
from ..kernels.residency import blocks_by_registers
from .cubin import KernelResources

MAX_BLOCKS_A_SM = 32
TENSOR = ("HMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "QMMA", "OMMA")
"""Base mnemonics of the tensor cores."""
LEAST_IN_FLIGHT = 32
"""Bytes a thread keeps under way where the engine does not say."""


@dataclass(frozen=True)
class Features:
    """Numbers of one config on one GPU; of several launches those of the largest, where a field says nothing else.

    Every field is a float, or an array with one element a config: the model is the same arithmetic for both.
    """

    launches: float
    memory_us: float
    """Bytes of the problem over the GPU's read bandwidth, in microseconds."""
    in_flight: float
    """Cold bytes under way on an SM, over bandwidth times one nanosecond an SM: nanoseconds of the bandwidth."""
    tail: float
    """Blocks of the busiest SM over the mean."""
    rounds: float
    """Rounds of resident blocks."""
    blocks_a_sm: float
    """Of the busiest SM."""
    warps_a_sm: float
    """Resident together."""
    l2_us: float
    """Bytes read again through the L2, at the read bandwidth of device memory."""
    scalar_us: float
    """Operations outside the tensor cores at two a cycle and lane, at :data:`CLOCK_HZ`."""
    tile_turns: float
    dependent_steps: float
    clustered: float
    """1 where the launch has clusters of more than one block."""
    shared_kb: float
    """Shared memory of a block."""
    instructions: float
    """Thousands, of all launches' code, as it lies in the cubins."""
    tensor_issue: float
    """Thousands of tensor-core instructions in the code, times warps of an SM, times rounds."""
    other_issue: float
    """The same of all others."""
    spills: float
    """Instructions on local memory, of all launches."""
    link_us: float
    """Bytes from other ranks over the links' bandwidth."""
    link_hops: float


CLOCK_HZ = 1.7e9


def resident_blocks(found: KernelResources, gpu: GpuCard) -> int:
    """Blocks of a kernel that fit on one SM together, by registers, shared memory and threads."""
    shared = found.dynamic_shared_bytes + max(found.static_shared_bytes, 1024)
    return min(
        blocks_by_registers(found.registers, found.threads, gpu),
        gpu.shared_per_sm // max(shared, 1),
        gpu.max_threads_per_sm // found.threads,
        MAX_BLOCKS_A_SM,
    )


def tensor_instructions(instructions: Mapping[str, int]) -> int:
    """Instructions of the tensor cores among all."""
    return sum(count for name, count in instructions.items() if name in TENSOR)


def features(
    found: Sequence[KernelResources], work: Work, traffic: Traffic, gpu: GpuCard, *, alone: bool = False
) -> Features:
    """The features of a config.

    Args:
        found: resources of each launch.
        work: what the config makes the GPU do.
        traffic: fewest bytes of the problem.
        gpu: where.
        alone: one GPU plays all ranks: nothing crosses a link.

    Raises:
        ValueError: not one block of the largest launch fits on an SM.
    """
    main = max(found, key=lambda kernel: kernel.blocks * kernel.threads)
    resident = resident_blocks(main, gpu)
    if resident == 0:
        raise ValueError(f"{main.kernel}: one block does not fit on an SM of {gpu.name}")
    bandwidth = gpu.read_bandwidth
    mean = main.blocks / gpu.sms
    busiest = math.ceil(mean)
    together = min(resident, busiest)
    rounds = math.ceil(mean / together)
    warps = together * main.threads / 32
    tensor = tensor_instructions(main.instructions)
    total = sum(main.instructions.values())
    return Features(
        launches=float(len(found)),
        memory_us=traffic.bytes / bandwidth * 1e6,
        in_flight=together * (work.in_flight_bytes or main.threads * LEAST_IN_FLIGHT) / (bandwidth / gpu.sms) * 1e9,
        tail=busiest / mean,
        rounds=float(rounds),
        blocks_a_sm=float(busiest),
        warps_a_sm=warps,
        l2_us=work.l2_bytes / bandwidth * 1e6,
        scalar_us=work.scalar_flops / (gpu.sms * 256 * CLOCK_HZ) * 1e6,
        tile_turns=float(work.tile_turns),
        dependent_steps=float(work.dependent_steps),
        clustered=float(main.cluster > 1),
        shared_kb=(main.static_shared_bytes + main.dynamic_shared_bytes) / 1024,
        instructions=sum(sum(kernel.instructions.values()) for kernel in found) / 1000,
        tensor_issue=tensor * warps * rounds / 1000,
        other_issue=(total - tensor) * warps * rounds / 1000,
        spills=float(sum(kernel.spill_instructions for kernel in found)),
        link_us=0.0 if alone else work.link_bytes / gpu.nvlink_bandwidth * 1e6,
        link_hops=0.0 if alone else float(work.link_hops),
    )
