"""What a measurement must carry to be believed: GPU, driver, versions, commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..kernels import env
from ..kernels.device import Device

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "optuna", "k3lab")


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter; ``unknown`` for one that was unpacked rather than installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def source_commit() -> str:
    """Commit of the k3lab checkout (``-dirty`` with local changes), ``K3LAB_COMMIT``, or ``not a checkout``."""
    if named := env.commit():
        return named
    here = Path(__file__).resolve().parent
    try:
        ask = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--match=NeverATag"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "not a checkout"


def environment(device: Device | None) -> dict[str, Any]:
    """JSON-able description of where something ran."""
    return {
        "gpu": device.to_json() if device else None,
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "packages": package_versions(),
        "commit": source_commit(),
    }
