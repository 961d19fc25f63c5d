"""GPU cards: the numbers of a GPU that floors, spaces and launch checks use, each with its source.

Capacities of memory and bandwidths are decimal (1 TB/s = 1e12 bytes/s), on-chip sizes are binary
(1 KB = 1024 bytes), as the vendor's documents count them. A number that rests on no document of the
part itself says ``assumed`` in its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InputError

KB = 1024
MB = 1024 * 1024


@dataclass(frozen=True)
class GpuCard:
    """One GPU model."""

    name: str
    arch: str
    """Compilation target, e.g. ``sm_103a``."""
    sms: int
    memory_gb: int
    """Device memory in decimal gigabytes."""
    memory_bandwidth: float
    """Nominal device memory bandwidth in bytes/s."""
    measured_read_bandwidth: float | None
    """Best plain read of gigabytes seen on this part in bytes/s; None where nobody here measured it."""
    tensor_flops: float
    """Nominal dense BF16 operations a second of the tensor cores: the flat part of a roofline."""
    l2_bytes: int
    shared_per_sm: int
    """Shared memory of one SM in bytes; every resident block takes 1 KB of it for the system."""
    shared_per_block: int
    """Most shared memory one block can ask for, in bytes."""
    registers_per_sm: int
    """32-bit registers of one SM."""
    tmem_per_sm: int
    """Tensor memory of one SM in bytes; 0 where the architecture has none."""
    nvlink_bandwidth: float
    """Bytes/s of all links together, one direction."""
    max_threads_per_sm: int
    gpc_sms: tuple[int, ...]
    """SMs of each GPC: the blocks of a cluster lie in one. Parts of one model differ in which SMs are off."""
    sources: Mapping[str, str]
    """Field name to where its number comes from."""

    @property
    def read_bandwidth(self) -> float:
        """Bytes/s a floor divides by: measured where it was measured, nominal elsewhere."""
        return self.measured_read_bandwidth or self.memory_bandwidth

    @property
    def read_bandwidth_source(self) -> str:
        """``measured`` or ``nominal``: a floor is printed with it."""
        return "measured" if self.measured_read_bandwidth else "nominal"


_TUNING = "NVIDIA Blackwell Tuning Guide (compute capability 10.0)"
_ULTRA = "NVIDIA technical blog 'Inside NVIDIA Blackwell Ultra'"
_HOPPER = "NVIDIA Hopper Tuning Guide (compute capability 9.0)"
_AO = "a device query quoted in pytorch/ao pull request 4002"
_NOT_MEASURED = "not measured: no such GPU was at hand"
_BLACKWELL_SOURCES = {
    "shared_per_sm": f"{_TUNING}: 228 KB",
    "shared_per_block": f"{_TUNING}: 227 KB, 1 KB of every block is the system's",
    "registers_per_sm": f"{_TUNING}: 64K 32-bit registers",
    "tmem_per_sm": f"{_ULTRA}: 256 KB per SM",
    "nvlink_bandwidth": "NVIDIA Blackwell datasheet: NVLink 5, 1.8 TB/s both directions, half of it each way",
    "max_threads_per_sm": f"{_TUNING}: 64 warps",
    "measured_read_bandwidth": _NOT_MEASURED,
    "gpc_sms": "assumed: 8 GPCs of at most 20 SMs, as unevenly cut as the SM count suggests; no document states the sizes",
}
_ULTRA_L2 = f"assumed equal to B200's, for which the {_TUNING} states 126 MB; no document of this part states it"
_HOPPER_SOURCES = {
    "shared_per_sm": f"{_HOPPER}: 228 KB",
    "shared_per_block": f"{_HOPPER}: 227 KB, 1 KB of every block is the system's",
    "registers_per_sm": f"{_HOPPER}: 64K 32-bit registers",
    "tmem_per_sm": "the architecture has no tensor memory",
    "nvlink_bandwidth": "NVIDIA H100 and H200 datasheets: NVLink 4, 900 GB/s both directions, half of it each way",
    "max_threads_per_sm": f"{_HOPPER}: 64 warps",
    "gpc_sms": "assumed: the sizes that explain the driver's counts of clusters on one H200 (30 of 4 blocks, 22 of 5, 15 of 8, 7 of 16)",
}

GB300 = GpuCard(
    name="GB300",
    arch="sm_103a",
    sms=152,
    memory_gb=288,
    memory_bandwidth=8.0e12,
    measured_read_bandwidth=None,
    tensor_flops=2.5e15,
    l2_bytes=126 * MB,
    shared_per_sm=228 * KB,
    shared_per_block=227 * KB,
    registers_per_sm=65536,
    tmem_per_sm=256 * KB,
    nvlink_bandwidth=0.9e12,
    max_threads_per_sm=2048,
    gpc_sms=(20, 20, 20, 20, 18, 18, 18, 18),
    sources={
        **_BLACKWELL_SOURCES,
        "arch": "compute capability 10.3",
        "sms": "public kernels for this part pin their grids to 152 SMs; the full die has 160 (" + _ULTRA + ")",
        "memory_gb": f"{_ULTRA}: 288 GB HBM3E (279 GB are free to use)",
        "memory_bandwidth": f"{_ULTRA}: 8 TB/s, nominal",
        "tensor_flops": "NVIDIA GB300 NVL72 datasheet: 360 PFLOPS BF16 with sparsity over 72 GPUs, half of it dense",
        "l2_bytes": _ULTRA_L2,
    },
)
B300 = GpuCard(
    name="B300",
    arch="sm_103a",
    sms=148,
    memory_gb=288,
    memory_bandwidth=8.0e12,
    measured_read_bandwidth=None,
    tensor_flops=2.25e15,
    l2_bytes=126 * MB,
    shared_per_sm=228 * KB,
    shared_per_block=227 * KB,
    registers_per_sm=65536,
    tmem_per_sm=256 * KB,
    nvlink_bandwidth=0.9e12,
    max_threads_per_sm=2048,
    gpc_sms=(20, 20, 20, 18, 18, 18, 18, 16),
    sources={
        **_BLACKWELL_SOURCES,
        "arch": "compute capability 10.3",
        "sms": "public kernels for this part pin their grids to 148 SMs; no datasheet states the number",
        "memory_gb": f"{_ULTRA}: 288 GB HBM3E (about 270 GB are free to use)",
        "memory_bandwidth": f"{_ULTRA}: 8 TB/s, nominal; hosting providers state 7.7 TB/s for the air-cooled part",
        "tensor_flops": "NVIDIA HGX B300 datasheet: 36 PFLOPS BF16 with sparsity over 8 GPUs, half of it dense",
        "l2_bytes": _ULTRA_L2,
    },
)
B200 = GpuCard(
    name="B200",
    arch="sm_100a",
    sms=148,
    memory_gb=180,
    memory_bandwidth=8.0e12,
    measured_read_bandwidth=None,
    tensor_flops=2.25e15,
    l2_bytes=126 * MB,
    shared_per_sm=228 * KB,
    shared_per_block=227 * KB,
    registers_per_sm=65536,
    tmem_per_sm=256 * KB,
    nvlink_bandwidth=0.9e12,
    max_threads_per_sm=2048,
    gpc_sms=(20, 20, 20, 18, 18, 18, 18, 16),
    sources={
        **_BLACKWELL_SOURCES,
        "arch": "compute capability 10.0",
        "sms": f"148: {_AO}",
        "memory_gb": "NVIDIA DGX B200 datasheet: 1,440 GB over 8 GPUs",
        "memory_bandwidth": f"NVIDIA DGX B200 datasheet: 64 TB/s over 8 GPUs, nominal; bus width and clock give 7.67 TB/s ({_AO})",
        "tensor_flops": "NVIDIA HGX B200 datasheet: 36 PFLOPS BF16 with sparsity over 8 GPUs, half of it dense",
        "l2_bytes": f"{_TUNING}: 126 MB; 126.5 MB by {_AO}",
    },
)
H200 = GpuCard(
    name="H200",
    arch="sm_90a",
    sms=132,
    memory_gb=141,
    memory_bandwidth=4.8e12,
    measured_read_bandwidth=4.67e12,
    tensor_flops=0.989e15,
    l2_bytes=60 * MB,
    shared_per_sm=228 * KB,
    shared_per_block=227 * KB,
    registers_per_sm=65536,
    tmem_per_sm=0,
    nvlink_bandwidth=0.45e12,
    max_threads_per_sm=2048,
    gpc_sms=(18, 18, 18, 18, 18, 18, 16, 8),
    sources={
        **_HOPPER_SOURCES,
        "arch": "compute capability 9.0",
        "sms": "NVIDIA H100 whitepaper (the H200 has the same GPU), and seen on one",
        "memory_gb": "NVIDIA H200 datasheet: 141 GB HBM3e",
        "memory_bandwidth": "NVIDIA H200 datasheet: 4.8 TB/s, nominal",
        "measured_read_bandwidth": "best of a probe on one H200, plain reads of 4 GB (torch 2.11, driver 580.159.04), samples not kept; "
        "the processes recorded in results/h200 reached 4.45 and 4.54 TB/s: this is the stricter figure",
        "tensor_flops": "NVIDIA H200 datasheet, SXM: 1,979 TFLOPS BF16 with sparsity, half of it dense",
        "l2_bytes": "reported by torch.cuda.get_device_properties on one",
    },
)
H100 = GpuCard(
    name="H100",
    arch="sm_90a",
    sms=132,
    memory_gb=80,
    memory_bandwidth=3.35e12,
    measured_read_bandwidth=None,
    tensor_flops=0.989e15,
    l2_bytes=50 * MB,
    shared_per_sm=228 * KB,
    shared_per_block=227 * KB,
    registers_per_sm=65536,
    tmem_per_sm=0,
    nvlink_bandwidth=0.45e12,
    max_threads_per_sm=2048,
    gpc_sms=(18, 18, 18, 18, 18, 18, 16, 8),
    sources={
        **_HOPPER_SOURCES,
        "arch": "compute capability 9.0",
        "sms": "NVIDIA H100 whitepaper, SXM5",
        "memory_gb": "NVIDIA H100 datasheet, SXM: 80 GB HBM3",
        "memory_bandwidth": "NVIDIA H100 datasheet, SXM: 3.35 TB/s, nominal",
        "measured_read_bandwidth": _NOT_MEASURED,
        "tensor_flops": "NVIDIA H100 datasheet, SXM: 1,979 TFLOPS BF16 with sparsity, half of it dense",
        "l2_bytes": "NVIDIA H100 whitepaper, SXM5: 50 MB",
    },
)

GPU_CARDS: dict[str, GpuCard] = {card.name: card for card in (GB300, B300, B200, H200, H100)}
"""Every card by its name, the target first."""


def gpu_card(name: str) -> GpuCard:
    """The card of that name, in any case.

    Raises:
        InputError: no such card; the message lists those there are.
    """
    card = GPU_CARDS.get(name.upper())
    if card is None:
        raise InputError(f"unknown GPU {name!r}; GPUs with a card: {', '.join(GPU_CARDS)}")
    return card
