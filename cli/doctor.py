"""``k3lab doctor``: what this machine can do, and what to install or set where it cannot."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .doctor_gpu import gpu_items
from .output import Json, emit

if TYPE_CHECKING:
    from rich.console import Console

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
LEAST_DISK_GB = 2.0
PINNED = {"nvidia-cutlass-dsl": "4.8.1"}
"""Packages whose releases change what we write: another version is told."""
PROFILERS = {
    "nsys": "install Nsight Systems; without it `trace capture` uses torch.profiler, and .nsys-rep files cannot be read",
    "ncu": "install Nsight Compute, if you want its counters; `trace kernels` reads its reports elsewhere",
}
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "optuna", "nvtx", "pydantic", "safetensors", "plotly", "jinja2")


def _item(name: str, ok: bool, found: str, cure: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "found": found, "cure": "" if ok else cure}


def _packages() -> list[dict[str, Any]]:
    items = []
    for name in PACKAGES:
        try:
            have, pinned = importlib.metadata.version(name), PINNED.get(name)
            items.append(_item(name, pinned in (None, have), have, f"pip install {name}=={pinned}"))
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


def _profilers() -> list[dict[str, Any]]:
    """Programs beside CUDA that some commands use where they are there."""
    return [
        _item(name, (path := shutil.which(name)) is not None, path or "not found", cure)
        for name, cure in PROFILERS.items()
    ]


def _archs(ptxas: str | None) -> dict[str, Any]:
    """Architectures that the assembler knows: what can be compiled here."""
    told = ""
    for tool in (ptxas, f"{ptxas}-blackwell") if ptxas else ():  # some releases of Triton have one for each generation
        if Path(tool).exists():
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                told += subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=30).stdout
    known = [arch for arch in ARCHS if arch in told]
    missing = [arch for arch in ARCHS if arch not in known]
    found = f"compiles for {', '.join(known) or 'none of ours'}" + (
        f", not for {', '.join(missing)}" if missing else ""
    )
    return _item("architectures", not missing, found, "pip install a newer triton")


def _driver() -> dict[str, Any]:
    """NVIDIA's driver, whether or not torch can use it."""
    from ..kernels.device import driver_version

    found = driver_version()
    here = found != "unknown"
    return _item(
        "driver", here, found if here else "none", "install the NVIDIA driver where a GPU is; else none is needed"
    )


def _unusable(driver: bool) -> str:
    """Why torch sees no GPU, and the cure."""
    import torch

    if not driver:
        return "needs an NVIDIA driver; without one: check on the interpreter, compile, predicted tuning, twins, traces"
    if torch.version.cuda is None:
        return f"a driver is here, but torch {torch.__version__} is built without CUDA: install a CUDA build of it"
    return f"a driver is here: it must be new enough for CUDA {torch.version.cuda}, and CUDA_VISIBLE_DEVICES name a GPU"


def _gpu(driver: bool) -> tuple[dict[str, Any], int]:
    """The GPUs of this machine, and how many."""
    from ..kernels import env

    if env.no_gpu():
        return _item("GPU", False, "K3LAB_NO_GPU is set", "unset K3LAB_NO_GPU to measure"), 0
    try:
        from ..kernels.device import Device, discover

        found: list[Device] = []
        while (device := discover(len(found))) is not None:
            found.append(device)
    except ImportError:
        return _item("GPU", False, "cannot look without torch", "pip install torch"), 0
    if not found:
        return _item("GPU", False, "none that torch can use", _unusable(driver)), 0
    names = ", ".join(f"{device.name} ({device.arch}, {device.sms} SMs)" for device in found)
    return _item("GPU", True, names), len(found)


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
            "disk",
            free >= LEAST_DISK_GB,
            f"{free:.1f} GB free beside the cache",
            "make room, or set K3LAB_CACHE_DIR; caches may be deleted",
        ),
        _item(
            "cache folder",
            os.access(cache, os.W_OK),
            str(cache),
            "set K3LAB_CACHE_DIR to a writable folder",
        ),
        _item("working folder", os.access(Path.cwd(), os.W_OK), str(Path.cwd()), "change to a folder you may write"),
    ]


def diagnose() -> dict[str, Any]:
    """Everything the command prints. Only driver, GPUs, profilers and other packages' families may fail on a healthy machine."""
    python = _item("Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer")
    tools = _tools()
    ptxas = next((item["found"] for item in tools if item["name"] == "ptxas" and item["ok"]), None)
    required = [python, *_packages(), *tools, _archs(ptxas), *_folders()]
    driver = _driver()
    gpu, count = _gpu(driver["ok"])
    items = [*required, *_profilers(), *_plug_ins(), driver, gpu, *(gpu_items(count) if count else [])]
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "healthy": all(item["ok"] for item in required),
        "items": items,
        "can_measure": gpu["ok"],
        "works": works(items),
    }


def works(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What can be done here, and where it cannot which items stand in the way."""
    bad = {item["name"] for item in items if not item["ok"]}
    needs = {
        "twins and the reference decode step": ("torch",),
        "check Triton kernels on the interpreter": ("torch", "triton"),
        "compile for every architecture, predicted tuning": ("triton", "nvidia-cutlass-dsl", "ptxas", "architectures", "optuna"),
        "registers, spills, instructions of a cubin": ("cuobjdump", "nvdisasm"),
        "check on the GPU, time, measured tuning": ("torch", "triton", "nvidia-cutlass-dsl", "GPU"),
        "capture a trace with Nsight Systems": ("nsys", "GPU"),
        "read traces, judge them, the report": ("plotly", "jinja2"),
    }  # fmt: skip
    return [
        {"what": what, "ok": not bad & set(names), "missing": sorted(bad & set(names))} for what, names in needs.items()
    ]


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the table of findings."""
    from rich.table import Table

    table = Table(title=f"k3lab on {data['platform']}, {data['cores']} cores", title_justify="left")
    for column in ("", "what", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for item in data["items"]:
        table.add_row("ok" if item["ok"] else "--", item["name"], item["found"], item["cure"])
    console.print(table)
    for line in data["works"]:
        lacks = f" (see {', '.join(line['missing'])})" if line["missing"] else ""
        console.print(f"{'yes' if line['ok'] else 'no ':<4} {line['what']}{lacks}", markup=False)
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
