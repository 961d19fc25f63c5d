"""Every environment variable k3lab reads, in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def cache_dir() -> Path | None:
    """``K3LAB_CACHE_DIR``: where compiled objects may be kept (default: the user's cache folder)."""
    value = os.environ.get("K3LAB_CACHE_DIR")
    return Path(value) if value else None


def toolkit_dir() -> Path | None:
    """``K3LAB_CUDA_BIN``: folder with ``cuobjdump`` and ``nvdisasm`` (default: those in Triton's wheel)."""
    value = os.environ.get("K3LAB_CUDA_BIN")
    return Path(value) if value else None


def no_gpu() -> bool:
    """``K3LAB_NO_GPU=1``: behave as on a machine without a GPU."""
    return os.environ.get("K3LAB_NO_GPU", "") not in ("", "0")


def multicast_off() -> bool:
    """``TORCH_SYMM_MEM_DISABLE_MULTICAST=1``, PyTorch's own: NVLink multicast must not be touched on this host."""
    return os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "") not in ("", "0")


@dataclass(frozen=True)
class Place:
    """Of a process among those that torchrun started."""

    rank: int
    size: int
    local_rank: int
    """On its host."""


def torchrun() -> Place | None:
    """``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``, torchrun's own; None in a process that it did not start."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(os.environ.get(name, "").isdigit() for name in names):
        return None
    return Place(*(int(os.environ[name]) for name in names))


def storage() -> str | None:
    """``K3LAB_STORAGE``: the database of shared studies, where ``--storage`` is not given: a password there is in no process list."""
    return os.environ.get("K3LAB_STORAGE") or None


def commit() -> str | None:
    """``K3LAB_COMMIT``: the commit to record where k3lab runs from something other than its checkout."""
    return os.environ.get("K3LAB_COMMIT") or None


COMPILER_SETTINGS = (
    "TRITON_PTXAS",
    "TRITON_INTERPRET",
    "TRITON_DEFAULT_FP_FUSION",
    "DISABLE_PTXAS_OPT",
    "PTXAS_OPTIONS",
)
"""First letters of the variables by which a user changes what the compilers make."""


def compiler_settings() -> dict[str, str]:
    """Variables of the compilers' own that change machine code, part of a compilation's key."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(COMPILER_SETTINGS)}
