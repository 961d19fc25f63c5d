"""``k3lab doctor``: what this machine can do, and what to install or set where it cannot."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .output import Json, emit

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "optuna", "nvtx", "pydantic", "safetensors", "plotly", "jinja2")


def _item(name: str, ok: bool, found: str, cure: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "found": found, "cure": "" if ok else cure}


def _packages() -> list[dict[str, Any]]:
    items = []
    for name in PACKAGES:
        try:
            items.append(_item(name, True, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            items.append(_item(name, False, "not installed", f"pip install {name}"))
    return items


def _triton_tool(name: str) -> Path | None:
    """A CUDA tool inside Triton's wheel, found without importing Triton."""
    try:
        files = importlib.metadata.files("triton") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == name and "bin" in file.parts:
            return Path(str(file.locate()))
    return None


def _tools() -> list[dict[str, Any]]:
    from ..kernels import env

    items = []
    for name in ("ptxas", "cuobjdump", "nvdisasm"):
        folder = env.toolkit_dir()
        path = folder / name if folder and (folder / name).exists() else _triton_tool(name) or shutil.which(name)
        items.append(
            _item(name, path is not None, str(path or "not found"), "pip install triton, or set K3LAB_CUDA_BIN")
        )
    return items


def _gpu() -> dict[str, Any]:
    """The GPUs of this machine."""
    from ..kernels import env

    needs = "needs an NVIDIA driver; without one: check on the interpreter, compile, predicted tuning, twins, traces"
    if env.no_gpu():
        return _item("GPU", False, "K3LAB_NO_GPU is set", "unset K3LAB_NO_GPU to measure")
    try:
        from ..kernels.device import Device, discover

        found: list[Device] = []
        while (device := discover(len(found))) is not None:
            found.append(device)
    except ImportError:
        return _item("GPU", False, "cannot look without torch", "pip install torch")
    if not found:
        return _item("GPU", False, "none that torch can use", needs)
    names = ", ".join(f"{device.name} ({device.arch}, {device.sms} SMs)" for device in found)
    return _item("GPU", True, f"{names}; driver {found[0].driver}")


def _plug_ins() -> list[dict[str, Any]]:
    """Families that other packages bring; a broken one harms no other, so none is required."""
    from ..kernels import InputError, family

    items = []
    for point in importlib.metadata.entry_points(group="k3lab.families"):
        package = point.dist.name if point.dist else "a package without a name"
        try:
            items.append(_item(f"plug-in {point.name}", True, f"{family(point.name).title} ({package})"))
        except InputError as error:
            reason = " ".join(str(error).split())
            items.append(_item(f"plug-in {point.name}", False, reason, f"repair or uninstall {package}"))
    return items


def _folders() -> list[dict[str, Any]]:
    from ..kernels import paths

    cache = paths.cache_root()
    free = shutil.disk_usage(cache).free / 1e9
    return [
        _item(
            "cache folder",
            os.access(cache, os.W_OK),
            f"{cache} ({free:.0f} GB free)",
            "set K3LAB_CACHE_DIR to a writable folder",
        ),
        _item("working folder", os.access(Path.cwd(), os.W_OK), str(Path.cwd()), "change to a folder you may write"),
    ]


def diagnose() -> dict[str, Any]:
    """Everything the command prints. Only the GPU and other packages' families may fail on a healthy machine."""
    python = _item("Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer")
    required = [python, *_packages(), *_tools(), *_folders()]
    gpu = _gpu()
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "healthy": all(item["ok"] for item in required),
        "items": [*required, *_plug_ins(), gpu],
        "can_measure": gpu["ok"],
    }


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the table of findings."""
    from rich.table import Table

    table = Table(title=f"k3lab on {data['platform']}, {data['cores']} cores", title_justify="left")
    for column in ("", "what", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for item in data["items"]:
        table.add_row("ok" if item["ok"] else "--", item["name"], item["found"], item["cure"])
    console.print(table)
    verdict = "This machine can measure." if data["can_measure"] else "No GPU here: everything but measuring works."
    console.print(verdict if data["healthy"] else "Something is missing: see the right column.")


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("doctor")
    def doctor(as_json: Json = False) -> None:
        """Say what this machine can do and what is missing; exits 1 where a required part is."""
        data = diagnose()
        emit(data, as_json, render)
        if not data["healthy"]:
            raise typer.Exit(1)
