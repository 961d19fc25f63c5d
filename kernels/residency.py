"""Whether the blocks of a launch can be on the GPU together: asked before it starts, never found out by a hang.

Blocks that wait for one another must all be there at once, and a cluster needs its blocks' room inside one GPC.
On a GPU the driver is asked. Without one a model of the GPU's card answers, on the careful side. Both take
an empty GPU: what a predecessor still holds frees itself, as long as it does not wait for this launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .contract import Launch

if TYPE_CHECKING:
    from .gpu_cards import GpuCard


MAX_CLUSTER = 16
"""Most blocks a cluster, with the size that is not portable allowed."""
MOST_LAYERS = 2
"""Blocks an SM up to which an uneven spread is worth an argument: with more, one beside its share costs little."""


@dataclass(frozen=True)
class Room:
    """Blocks of a launch that can be on the GPU at the same time."""

    blocks: int
    source: str
    """Who says so: the driver, or the model of a card."""


def concerned(launch: Launch) -> bool:
    """Whether the question arises: it has clusters, or its blocks wait for each other beyond one."""
    return launch.needs_residency or launch.cluster_blocks > 1


def padded_bytes(layers: int, per_sm: int, per_block: int, reserved: int, static: int) -> int:
    """Dynamic shared memory a block, the least with which no SM holds more than ``layers`` of them.

    Args:
        layers: blocks an SM.
        per_sm: shared memory of an SM.
        per_block: the most that a block may have, static and dynamic together.
        reserved: what the system takes beside each block's own.
        static: what the block has beside its dynamic memory.
    """
    return min(per_sm // (layers + 1) + 1 - reserved, per_block) - static


def register_limit(threads: int, gpu: GpuCard, a_sm: int = 1) -> int:
    """Registers a thread the compiler may use where so many blocks are to be on an SM: it counts a block's warps in fours."""
    return min(255, gpu.registers_per_sm // (128 * -(-threads // 128) * a_sm) // 8 * 8)


def blocks_by_registers(registers: int, threads: int, gpu: GpuCard) -> int:
    """Blocks that an SM has registers for, of so many a thread.

    A warp's come from one of the SM's four parts: two blocks of 7 warps need room for 4 warps in one of them.
    """
    a_warp = -(-max(registers, 1) // 8) * 8 * 32
    return gpu.registers_per_sm // 4 // a_warp * 4 // -(-threads // 32)


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
    a_sm = _blocks_a_sm(launch, function, launch.shared_bytes)
    return Room(sms * a_sm, f"the driver counts {a_sm} a SM on {sms} SMs")


def _blocks_a_sm(launch: Launch, function: Any, shared_bytes: int) -> int:
    import cuda.bindings.driver as driver

    code, a_sm = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, launch.threads, shared_bytes)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{launch.kernel}: the driver does not say what fits: {code.name}")
    return int(a_sm)


def even_bytes(launch: Launch, function: Any, config_of: Callable[[int], Any]) -> int:
    """Dynamic shared memory with which the blocks of a loaded kernel spread evenly over the current device.

    A kernel that starts behind a programmatic edge, while its predecessor's blocks are still there, may get two blocks
    on one SM and none on another: the scheduler fills what has room. Where one or two blocks an SM are all there are,
    such a pair ends late: 24 us became 26 on an H200 (``blocks_spread_behind_a_predecessor`` in the probes of the
    attention projection). Shared memory that nothing uses keeps a second one off.

    Blocks of one warp without shared memory that wait for no other are left alone: they are to run beside another
    kernel's, whose SM has no such memory to spare.

    Args:
        launch: the kernel's, with the shared memory it needs.
        function: the loaded ``CUfunction``.
        config_of: makes the ``CUlaunchConfig`` of so many bytes, and allows them.

    Raises:
        RuntimeError: the driver does not answer.
    """
    if launch.threads <= 32 and not launch.shared_bytes and not concerned(launch):
        return 0
    room = _shared_memory(launch, function)
    as_it_is = room_on_gpu(launch, function, config_of(launch.shared_bytes)).blocks
    for layers in range(1, MOST_LAYERS + 1):
        size = padded_bytes(layers, room.per_sm, room.per_block, room.reserved, room.static)
        if as_it_is <= layers * room.sms or size <= launch.shared_bytes:  # no more than that many fit anyway
            return launch.shared_bytes
        padded = replace(launch, shared_bytes=size)
        if room_on_gpu(padded, function, config_of(size)).blocks >= launch.blocks:
            return size
    return launch.shared_bytes


def carveout(launch: Launch, function: Any, config: Any) -> int:
    """Percent of an SM's shared memory that the blocks of a loaded kernel take there: what a predecessor should leave.

    An SM divides one memory between L1 and shared memory, by the kernels that run there, and divides it anew only when it
    is empty. A kernel that needs more than the running one's share starts when that has ended, whatever edge lies between
    them: 22.2 us became 24.2 on an H200 (``carveout_of_the_predecessor`` in the probes of the attention projection).

    Args:
        launch: grid and cluster.
        function: the loaded ``CUfunction``.
        config: the ``CUlaunchConfig`` it is launched with.

    Raises:
        RuntimeError: the driver does not answer.
    """
    room, sms = _shared_memory(launch, function), 0
    if launch.cluster_blocks > 1:
        a_sm = _blocks_a_sm(launch, function, config.sharedMemBytes)
        sms = room_on_gpu(launch, function, config).blocks // max(a_sm, 1)
    return percent_taken(
        launch.blocks, sms or room.sms, room.per_sm, config.sharedMemBytes + room.static + room.reserved
    )


def percent_taken(blocks: int, sms: int, per_sm: int, per_block: int) -> int:
    """Percent, rounded up, of an SM's shared memory that its share of the blocks takes, as many of them as fit.

    Args:
        blocks: of the grid.
        sms: of the device; for clusters those that they come to, for some of a GPC's are too few for another.
        per_sm: bytes of shared memory an SM.
        per_block: bytes a block takes of it, with what the system takes beside its own.
    """
    beside = min(-(-blocks // sms), per_sm // per_block)
    return -(-100 * beside * per_block // per_sm)


@dataclass(frozen=True)
class _SharedMemory:
    """Bytes of shared memory on the current device, and static ones of a kernel."""

    per_sm: int
    per_block: int
    reserved: int
    static: int
    sms: int


def _shared_memory(launch: Launch, function: Any) -> _SharedMemory:
    import cuda.bindings.driver as driver

    code, device = driver.cuCtxGetDevice()
    names = driver.CUdevice_attribute
    asked = (
        names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        names.CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
        names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    )
    answers = [driver.cuDeviceGetAttribute(name, device) for name in asked]
    static_code, static = driver.cuFuncGetAttribute(
        driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function
    )
    if any(one != driver.CUresult.CUDA_SUCCESS for one in (code, static_code, *(found for found, _ in answers))):
        raise RuntimeError(f"{launch.kernel}: the driver does not say how much shared memory there is")
    per_sm, per_block, reserved, sms = (value for _, value in answers)
    return _SharedMemory(per_sm, per_block, reserved, static, sms)
