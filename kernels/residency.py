"""Whether the blocks of a launch can be on the GPU together: asked before it starts, never found out by a hang.

Blocks that wait for one another must all be there at once, and a cluster needs its blocks' room inside one GPC.
On a GPU the driver is asked. Without one a model of the GPU's card answers, on the careful side. Both take
an empty GPU: what a predecessor still holds frees itself, as long as it does not wait for this launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .contract import Launch

if TYPE_CHECKING:
    from .gpu_cards import GpuCard


MAX_CLUSTER = 16
"""Most blocks a cluster, with the size that is not portable allowed."""


@dataclass(frozen=True)
class Room:
    """Blocks of a launch that can be on the GPU at the same time."""

    blocks: int
    source: str
    """Who says so: the driver, or the model of a card."""


def concerned(launch: Launch) -> bool:
    """Whether the question arises: it has clusters, or its blocks wait for each other beyond one."""
    return launch.needs_residency or launch.cluster_blocks > 1


def refusal(launch: Launch, room: Room) -> str | None:
    """Why the launch must not start, or None."""
    if any(grid % cluster for grid, cluster in zip(launch.grid, launch.cluster, strict=True)):
        return f"{launch.kernel}: a grid of {launch.grid} blocks does not divide into clusters of {launch.cluster}"
    if room.blocks < launch.cluster_blocks:
        what = f"cluster of {launch.cluster_blocks} blocks" if launch.cluster_blocks > 1 else "block"
        return (
            f"{launch.kernel}: no {what} of {launch.threads} threads and {launch.shared_bytes} bytes of shared memory "
            f"each can be scheduled ({room.source})"
        )
    if launch.needs_residency and launch.blocks > room.blocks:
        return (
            f"{launch.kernel}: its {launch.blocks} blocks wait for each other, and only {room.blocks} can be on the "
            f"GPU at once ({room.source})"
        )
    return None


def room_by_card(launch: Launch, blocks_a_sm: int, gpu: GpuCard) -> Room:
    """The careful model: each layer of one block an SM holds, GPC by GPC, the whole clusters that fit in.

    Args:
        launch: grid and cluster.
        blocks_a_sm: blocks of the kernel that one SM holds, by registers, shared memory and threads.
        gpu: its card; the sizes of the GPCs are assumed, as the card says.
    """
    size = launch.cluster_blocks
    if size == 1:
        return Room(blocks_a_sm * gpu.sms, f"{blocks_a_sm} a SM on {gpu.name}")
    clusters = blocks_a_sm * sum(sms // size for sms in gpu.gpc_sms) if size <= MAX_CLUSTER else 0
    return Room(
        clusters * size, f"{clusters} clusters of {size} on {gpu.name} with GPCs of {_sizes(gpu.gpc_sms)} SMs (assumed)"
    )


def _sizes(gpcs: tuple[int, ...]) -> str:
    return ", ".join(f"{gpcs.count(size)} x {size}" for size in sorted(set(gpcs)))


def room_on_gpu(launch: Launch, function: Any, config: Any) -> Room:
    """What the driver says of a loaded kernel on the current device.

    Args:
        launch: grid and cluster.
        function: the loaded ``CUfunction``, its shared memory and cluster limits already raised.
        config: its ``CUlaunchConfig``.

    Raises:
        RuntimeError: the driver does not answer.
    """
    import cuda.bindings.driver as driver

    def answer(result: tuple[Any, ...]) -> Any:
        code, *values = result
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{launch.kernel}: the driver does not say what fits: {code.name}")
        return values[0]

    size = launch.cluster_blocks
    if size > MAX_CLUSTER:
        return Room(0, f"a cluster has at most {MAX_CLUSTER} blocks")
    if size > 1:
        code, clusters = driver.cuOccupancyMaxActiveClusters(function, config)
        if code == driver.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE:
            clusters = 0
        elif code != driver.CUresult.CUDA_SUCCESS:
            answer((code, clusters))
        return Room(clusters * size, f"the driver counts {clusters} clusters of {size}")
    device = answer(driver.cuCtxGetDevice())
    count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    sms = answer(driver.cuDeviceGetAttribute(count, device))
    a_sm = answer(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, launch.threads, launch.shared_bytes))
    return Room(sms * a_sm, f"the driver counts {a_sm} a SM on {sms} SMs")
