"""Device discovery: the only place that asks which GPU is there."""

from __future__ import annotations

import re
import socket
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from . import env
from .errors import InputError
from .gpu_cards import GPU_CARDS, GpuCard


@dataclass(frozen=True)
class Device:
    """A GPU that is here."""

    index: int
    name: str
    """As the driver names it, e.g. ``NVIDIA H200``."""
    arch: str
    """Compilation target, e.g. ``sm_90a``."""
    sms: int
    l2_bytes: int
    memory_bytes: int
    driver: str
    card: GpuCard | None
    """Its card, or None for a GPU k3lab has no card of."""

    def to_json(self) -> dict[str, Any]:
        """For the environment part of a record."""
        return {**asdict(self), "card": self.card.name if self.card else None}

    def need_card(self) -> GpuCard:
        """The card.

        Raises:
            InputError: there is none for this GPU.
        """
        if self.card is None:
            raise InputError(f"no GPU card for {self.name!r}; GPUs with a card: {', '.join(GPU_CARDS)}")
        return self.card


def card_for(driver_name: str, sms: int) -> GpuCard | None:
    """The card of a GPU as the driver names it; the SM count tells form factors of one name apart."""
    words = re.split(r"[\s-]+", driver_name.upper())
    for card in GPU_CARDS.values():
        if card.name in words and card.sms == sms:
            return card
    return None


def gpu_count() -> int:
    """GPUs that this process sees."""
    import torch

    return int(torch.cuda.device_count())


def driver_version() -> str:
    """Version of the NVIDIA driver, or ``unknown``."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no driver, no library: each has its own exception type
        pass
    try:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def nvlink_domain(index: int = 0) -> str:
    """Name of the NVLink domain of a GPU: its fabric's partition where it is in one (racks), else its host.

    GPUs of one name reach each other's memory, as far as the driver says; those of two names do not.
    """
    try:
        import ctypes

        import pynvml
        import torch

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        info = pynvml.c_nvmlGpuFabricInfo_t()
        pynvml.nvmlDeviceGetGpuFabricInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid), ctypes.byref(info))
        if info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(info.clusterUuid):
            return f"fabric {bytes(info.clusterUuid).hex()} clique {info.cliqueId}"
    except Exception:  # no driver, no library, one without fabrics: each has its own exception type
        pass
    return f"host {socket.gethostname()}"


def discover(index: int = 0) -> Device | None:
    """The GPU of that index, or None where there is none (or ``K3LAB_NO_GPU=1``)."""
    if env.no_gpu():
        return None
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_properties(index)
    return Device(
        index=index,
        name=found.name,
        arch=f"sm_{found.major}{found.minor}a",
        sms=found.multi_processor_count,
        l2_bytes=found.L2_cache_size,
        memory_bytes=found.total_memory,
        driver=driver_version(),
        card=card_for(found.name, found.multi_processor_count),
    )


def identities() -> list[tuple[int, str, str]]:
    """Index, UUID (as ``CUDA_VISIBLE_DEVICES`` takes it) and name of every GPU here; none with ``K3LAB_NO_GPU=1``."""
    if env.no_gpu():
        return []
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append((index, f"GPU-{properties.uuid}", properties.name))
    return found


def require(purpose: str) -> Device:
    """The GPU here.

    Raises:
        InputError: there is none; the message says what needs it.
    """
    device = discover()
    if device is None:
        raise InputError(f"{purpose} needs an NVIDIA GPU, and none is visible here")
    return device
