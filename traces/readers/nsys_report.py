"""Reports of Nsight Systems themselves (.nsys-rep, .qdrep, .qdstrm): exported by the user's own ``nsys``, then read."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from ..errors import TraceError
from ..model import Trace
from .nsys_sqlite import read_nsys

MAGIC = b"NVIDIA Tegra P"
SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm")
EXPORT_SECONDS = 600.0
"""How long an export may take before it is stopped."""


def _run(command: list[str], seconds: float) -> int | None:
    """The exit code, or None where the time was up; what the process started ends with it.

    Its output may show the environment of the profiled process and goes nowhere.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them are gone
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands; not worth a wait
            process.wait(timeout=30)


def export(nsys: str, report: Path, out: Path, seconds: float = EXPORT_SECONDS) -> str | None:
    """Export a report as SQLite; returns why that failed, or None where the file is there.

    Args:
        nsys: the program.
        report: what to export.
        out: the file to write.
        seconds: how long it may take.
    """
    command = [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "-o", str(out), str(report)]
    try:
        code = _run(command, seconds)
    except OSError as error:
        return f"nsys cannot be run ({error.strerror or error})"
    if code is None:
        return f"nsys export took over {seconds:g} s and was stopped"
    if code != 0:
        return (
            f"nsys export failed (exit code {code}); it takes an nsys at least as new as the one that wrote the report"
        )
    return None if out.is_file() else "nsys export wrote no file"


def read_report(path: Path, seconds: float = EXPORT_SECONDS) -> Trace:
    """Export a report to a temporary folder and read it; an export that lies beside it may be of another run.

    Args:
        path: the report.
        seconds: how long the export may take.

    Raises:
        TraceError: no nsys on PATH, the export fails or takes too long, or what it wrote is no export.
    """
    by_hand = f"nsys export --type sqlite -o trace.sqlite {path.name}"
    nsys = shutil.which("nsys")
    if nsys is None:
        raise TraceError(f"{path.name}: an Nsight Systems report, and there is no nsys on PATH; run {by_hand}")
    with tempfile.TemporaryDirectory(prefix="k3lab-nsys-") as folder:
        out = Path(folder) / f"{path.stem}.sqlite"
        if reason := export(nsys, path.resolve(), out, seconds):
            raise TraceError(f"{path.name}: {reason}; run {by_hand}")
        return replace(read_nsys(out), path=path.name, format="Nsight Systems report")
