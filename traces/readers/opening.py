"""Opens a trace by what the file is, not by what it is called."""

from __future__ import annotations

from pathlib import Path

from ..errors import TraceError
from ..model import Trace
from .nsys_sqlite import read_nsys
from .torch_json import read_torch

_ACCEPTED = "give a torch.profiler trace (.json, .json.gz) or an Nsight Systems export (nsys export --type sqlite)"


def _refusal(head: bytes, suffix: str) -> str:
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if head.startswith(b"NVIDIA Tegra P") or suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        return "an Nsight Systems report; export it first: nsys export --type sqlite -o trace.sqlite FILE"
    if suffix == ".ncu-rep" or "gpu__time_duration" in text or '"Metric Name"' in text or "Metric Name" in text[:2000]:
        return "from Nsight Compute, which runs kernels one by one: not layer time; " + _ACCEPTED
    if "Total Time (ns)" in text or "Start (ns)" in text or "Time (%)" in text:
        return "a table of nsys stats, which this version does not read; give the SQLite export it was made from"
    if text[:1] == "<":
        return "a web page, not a trace; " + _ACCEPTED
    if head.startswith(b"PAR1"):
        return "a Parquet file, which this version does not read; export with nsys export --type sqlite"
    if head.startswith(b"PK"):
        return "a zip archive; unpack it and give the trace inside"
    return "not a trace; " + _ACCEPTED


def read_trace(path: str | Path) -> Trace:
    """Read a torch.profiler JSON (plain or gzip) or an Nsight Systems SQLite export.

    Raises:
        TraceError: no such file, empty, not a trace, or damaged.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise TraceError(f"{path}: no such file; {_ACCEPTED}")
        with path.open("rb") as file:
            head = file.read(4096)
        if not head:
            raise TraceError(f"{path.name}: the file is empty; capture the trace again")
        if head.startswith(b"SQLite format 3\x00"):
            return read_nsys(path)
        if head.startswith(b"\x1f\x8b") or head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
            return read_torch(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    raise TraceError(f"{path.name}: {_refusal(head, path.suffix.lower())}")
