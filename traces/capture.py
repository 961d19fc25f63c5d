"""Making a trace: of a block of Python with ``recording``, of a whole command with ``capture``.

``capture`` uses Nsight Systems where ``nsys`` is on PATH, else torch.profiler. A trace is written beside its place
and moved there whole; nothing of the environment or the arguments of the profiled process is kept in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import recorder
from .errors import TraceError
from .nsys_scrub import scrub
from .readers.nsys_report import export

TIMEOUT_S = 1800.0
_GRACE_S = 20.0
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?w?")
_FLAGS = re.compile(r"-[bBdEIOPqRsSuvx]+")
_WITH_VALUE = ("-W", "-X")
GRAPHS_NOTE = (
    "graph replays are recorded kernel by kernel; names and layer marks inside a graph are there only if the profiler "
    "ran while it was captured, as it did here if the script captures its graphs itself"
)
CHILDREN_NOTE = "processes that the script starts are not recorded; run each rank under a capture of its own"
NO_GPU_NOTE = "CPU only: this Python's torch sees no GPU, so the trace holds no kernels and cannot be judged"
BLACKWELL_NOTE = "on Blackwell, --hardware records kernels with less overhead (nsys --trace=cuda-hw, from 2025.2)"
_BLACKWELL = ("B200", "B300")


@dataclass(frozen=True)
class Captured:
    """What became of a capture. ``tool`` is ``nsys`` or ``torch.profiler``; ``written`` None where there is no trace."""

    tool: str
    written: Path | None
    exit_code: int
    notes: tuple[str, ...]


def check_output(path: str | Path, *, force: bool = False) -> Path:
    """The path, if a trace can be written there.

    Raises:
        TraceError: a folder, a file that is there already (without ``force``), or a folder that cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"cannot write the trace to {path}: it is a folder")
    if path.exists() and not force:
        raise TraceError(f"{path} is there already; name another file, or replace it with --force")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise TraceError(f"cannot write the trace to {path}: {path.parent} is no folder that can be written")
    return path


def recording(path: str | Path, *, force: bool = True) -> AbstractContextManager[bool]:
    """A context that records its block with torch.profiler; what a notebook puts around some steps.

    Warm up before, and leave the capture of a CUDA graph inside the block if marks inside the graph matter; replays
    alone are recorded kernel by kernel. The context yields whether a GPU is recorded; the trace is written when the
    block ends well, whole or not at all.

    Args:
        path: ``.json`` or ``.json.gz``.
        force: whether a file that is there is replaced.

    Raises:
        TraceError: the file cannot be written, told at the call where that can be seen.
    """
    path = check_output(path, force=force)
    if not path.name.endswith((".json", ".json.gz")):
        raise TraceError(f"cannot write the trace to {path}: the name must end in .json or .json.gz")
    return _recording(path)


@contextmanager
def _recording(path: Path) -> Iterator[bool]:
    with _beside(path) as folder:
        partial = folder / ("trace.json.gz" if path.name.endswith(".gz") else "trace.json")
        with recorder.profiled(partial) as gpu:
            yield gpu
        _move(partial, path)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    try:
        folder = tempfile.mkdtemp(dir=path.parent, prefix=".capture-")
    except OSError as error:
        raise TraceError(f"cannot write the trace to {path}: {error.strerror or error}") from None
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(partial: Path, path: Path) -> None:
    try:
        os.replace(partial, path)
    except OSError as error:
        raise TraceError(f"cannot write the trace to {path}: {error.strerror or error}") from None


def capture(
    out: str | Path,
    command: Sequence[str],
    *,
    timeout_s: float = TIMEOUT_S,
    force: bool = False,
    capture_range: str | None = None,
    hardware: bool = False,
    quiet: bool = False,
) -> Captured:
    """Run a command under a profiler and write its trace.

    Args:
        out: ``.sqlite`` is nsys's, ``.json`` and ``.json.gz`` torch.profiler's; for other names it is nsys where it
            is on PATH, else torch.profiler.
        command: for torch.profiler a Python script with its arguments: ``["python", "script.py", "--steps", "25"]``.
        timeout_s: after this the command is stopped and nothing is written.
        force: whether a file that is there is replaced.
        capture_range: nsys only: ``cudaProfilerApi``, or the name of an NVTX range: record from its begin to its end.
        hardware: nsys only: hardware tracing of kernels, on Blackwell.
        quiet: whether the command's standard output goes to standard error.

    Raises:
        TraceError: a wrong call, no profiler for it, the command ran too long, or it left no trace.
    """
    out, command = Path(out), list(command)
    if not command:
        raise TraceError("name the command to profile: k3lab trace capture OUT -- python script.py")
    if not 0 < timeout_s < float("inf"):
        raise TraceError(f"timeout is {timeout_s}, must be above 0 seconds")
    check_output(out, force=force)
    as_json, as_sqlite = out.name.endswith((".json", ".json.gz")), out.suffix == ".sqlite"
    nsys = None if as_json else shutil.which("nsys")
    if as_sqlite and nsys is None:
        raise TraceError(f"{out.name}: nsys is not on PATH; name the trace .json.gz to record it with torch.profiler")
    if nsys is None and (capture_range is not None or hardware):
        raise TraceError(
            "--capture-range and --hardware are nsys's; with torch.profiler put the steps into "
            "k3lab.traces.capture.recording(path)"
        )
    words = None if nsys else python_words(command)
    with _beside(out) as folder:
        if words is not None:
            return _with_torch(out, words, folder, timeout_s, quiet)
        stem = folder / "capture"  # nsys adds its suffix
        code = _wait(nsys_command(str(nsys), stem, command, capture_range, hardware), timeout_s, quiet)
        report = next(folder.glob(f"{stem.name}*"), None)
        if report is None:
            return _nothing(
                "nsys", code, f"nsys wrote no report{'; did the capture range begin?' if capture_range else ''}"
            )
        return _export(str(nsys), report, out, code, hardware)


def nsys_command(
    nsys: str, report: Path, command: Sequence[str], capture_range: str | None, hardware: bool
) -> list[str]:
    """The call of ``nsys profile``: kernels of graphs one by one, NVTX, no CPU sampling, forked processes too."""
    words = [
        nsys, "profile", "-o", str(report), "--force-overwrite=true",
        "-t", f"{'cuda-hw' if hardware else 'cuda'},nvtx", "--cuda-graph-trace=node",
        "--sample=none", "--cpuctxsw=none", "--trace-fork-before-exec=true",
    ]  # fmt: skip
    if capture_range == "cudaProfilerApi":
        words += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    elif capture_range is not None:
        # without this variable only registered strings begin a range, and plain ones leave no report
        words += ["--capture-range=nvtx", f"--nvtx-capture={capture_range}", "--capture-range-end=stop",
                  "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"]  # fmt: skip
    return [*words, *command]


def _export(nsys: str, report: Path, out: Path, code: int, hardware: bool) -> Captured:
    made = report.with_name("export.sqlite")
    if reason := export(nsys, report, made):
        raise TraceError(f"{reason}; nothing was written")
    gpus = scrub(made)
    _move(made, out)
    blackwell = not hardware and any(word in gpu for gpu in gpus for word in _BLACKWELL)
    notes = [_ended(code), BLACKWELL_NOTE if blackwell else ""]
    return Captured("nsys", out, code, tuple(note for note in notes if note))


def _with_torch(
    out: Path, parts: tuple[list[str], list[str], list[str]], folder: Path, timeout_s: float, quiet: bool
) -> Captured:
    interpreter, flags, words = parts
    partial = folder / ("trace.json.gz" if out.name.endswith(".gz") else "trace.json")
    status = folder / "status.json"
    code = _wait([*interpreter, *flags, recorder.__file__, str(partial), str(status), *words], timeout_s, quiet)
    said = _said(status)
    if said.get("error") == recorder.NO_TORCH:
        raise TraceError(f"nsys is not on PATH, and {interpreter[0]} has no torch: install either")
    if not said or not partial.is_file():
        return _nothing("torch.profiler", code, "the script ended before its trace could be written")
    _move(partial, out)
    notes = [_ended(code), GRAPHS_NOTE if said["gpu"] else NO_GPU_NOTE, CHILDREN_NOTE]
    return Captured("torch.profiler", out, code, tuple(note for note in notes if note))


def _said(status: Path) -> dict[str, Any]:
    """What the recorder wrote last; empty where it did not come to that."""
    try:
        return dict(json.loads(status.read_text()))
    except (OSError, ValueError):
        return {}


def _nothing(tool: str, code: int, why: str) -> Captured:
    if code == 0:
        raise TraceError(f"{why}; nothing was written")
    return Captured(tool, None, code, (f"{why}; it ended with exit code {code}; nothing was written",))


def _ended(code: int) -> str:
    return f"the command ended with exit code {code}; the trace is whole, what it shows may not be" if code else ""


def python_words(command: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """A Python command line apart: the interpreter, its own flags, and the script (or ``-m``, ``-c``) with arguments.

    Raises:
        TraceError: torch.profiler cannot run it: no Python script.
    """
    first, rest = command[0], list(command[1:])
    if first.endswith(".py"):
        return [sys.executable], [], [first, *rest]
    wrong = f"without nsys only a Python script can be profiled (python script.py ...), not {first!r:.60}"
    if not _PYTHON.fullmatch(Path(first).name):
        raise TraceError(wrong)
    flags = []
    while rest and (_FLAGS.fullmatch(rest[0]) or rest[0] in _WITH_VALUE):
        flags.append(rest.pop(0))
        if flags[-1] in _WITH_VALUE and rest:
            flags.append(rest.pop(0))
    if (
        not rest
        or (rest[0] in ("-m", "-c") and len(rest) < 2)
        or (rest[0].startswith("-") and rest[0] not in ("-m", "-c"))
    ):
        raise TraceError(wrong)
    if not rest[0].startswith("-") and not Path(rest[0]).is_file():
        raise TraceError(f"no script {rest[0]}")
    return [first], flags, rest


def _wait(words: Sequence[str], timeout_s: float, quiet: bool) -> int:
    """Run a process and its children to the end or the limit; a signal counts as 128 + its number, as in a shell."""
    try:
        process = subprocess.Popen(words, start_new_session=True, stdout=2 if quiet else None)
    except OSError as error:
        raise TraceError(f"cannot run {words[0]}: {error.strerror or error}") from None
    try:
        code = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _stop(process)
        raise TraceError(f"the command ran longer than {timeout_s:g} s (--timeout) and was stopped; nothing was written"
                         ) from None  # fmt: skip
    except BaseException:
        _stop(process)
        raise
    return 128 - code if code < 0 else code


def _stop(process: subprocess.Popen[Any]) -> None:
    """End the process and all it started: asked first, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=_GRACE_S)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
