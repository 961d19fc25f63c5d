"""Opens a trace by what the file is, and where that does not tell, by what it is called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ..collector import undisturbed
from ..errors import TraceError
from ..model import Trace
from . import ncu_report, nsys_report
from .csv_tables import HEADER, tables
from .ncu import NcuReport
from .ncu_csv import is_ncu_header, read_ncu_csv
from .nsys_parquet import read_parquet
from .nsys_sqlite import read_nsys
from .nsys_stats_columns import is_stats_header
from .nsys_stats_csv import read_stats
from .packed import encoding_of, head_of, is_tar, unpacked
from .torch_json import read_torch

ACCEPTED = (
    "give a torch.profiler trace (.json, .json.gz), an Nsight Systems export (nsys export --type sqlite or parquetdir) "
    "or a report (.nsys-rep)"
)
SQLITE, TORCH, REPORT, STATS, NCU_CSV, NCU_REPORT, PARQUET, ARCHIVE = (
    "an SQLite file", "a torch.profiler trace", "an Nsight Systems report", "a table of nsys stats",
    "a table of Nsight Compute", "a Nsight Compute report", "a parquetdir export", "an archive",
)  # fmt: skip
_EXPORT_SO = "export as sqlite or parquetdir: nsys export --type sqlite"
_NCU_LINE = (
    "from Nsight Compute, which runs kernels one by one: no layer time; see k3lab trace kernels FILE, and " + ACCEPTED
)


def kind_of(path: Path) -> str:
    """What a file or folder is, one of the kinds named here.

    Raises:
        TraceError: not there, not readable, empty, or of no kind that is read; the line says what to give.
    """
    try:
        return _kind_of(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None


def _kind_of(path: Path) -> str:
    if path.is_dir():
        return _kind_of_folder(path)
    if not path.is_file():
        raise TraceError(f"{path}: no such file; {ACCEPTED}")
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    head = head_of(path)
    if not head:
        raise TraceError(f"{path.name}: the file is empty; capture the trace again")
    if is_tar(head):
        return ARCHIVE
    kind = _binary(path, head) or _text(path, head)
    if kind is None:
        raise TraceError(f"{path.name}: {_refusal(head)}")
    if packed and kind in (SQLITE, REPORT, NCU_REPORT):
        return ARCHIVE  # their readers need a file as it was written
    return kind


def _kind_of_folder(path: Path) -> str:
    names = [item.name for item in path.iterdir()]
    if any(name.endswith(".parquet") for name in names):
        return PARQUET
    if any(name.endswith((".arrow", ".feather")) for name in names):
        raise TraceError(f"{path.name}: an Arrow export of nsys, which is not read; {_EXPORT_SO}")
    raise TraceError(f"{path}: a folder without Parquet tables; {ACCEPTED}")


def _binary(path: Path, head: bytes) -> str | None:
    if head.startswith(b"SQLite format 3\x00"):
        return SQLITE
    suffix = path.name.lower().removesuffix(".gz")
    if head.startswith(nsys_report.MAGIC):
        return REPORT
    if head.startswith(ncu_report.MAGIC):
        return NCU_REPORT
    binary = b"\x00" in head and encoding_of(head) != "utf-16"
    if binary and suffix.endswith(nsys_report.SUFFIXES):
        return REPORT
    if binary and suffix.endswith(ncu_report.SUFFIXES):
        return NCU_REPORT
    return None


def _text(path: Path, head: bytes) -> str | None:
    utf16 = encoding_of(head) == "utf-16"
    text = _decoded(head)
    if text[:1] in ("{", "["):
        if utf16:
            raise TraceError(f"{path.name}: JSON in UTF-16; save it as UTF-8")
        if reason := _other_json(text):
            raise TraceError(f"{path.name}: {reason}")
        return TORCH
    if b"\x00" in head and not utf16:
        return None

    def is_header(cells: list[str]) -> bool:
        return is_stats_header(cells) or is_ncu_header(cells)

    for event in tables(path, is_header):
        if event.kind == HEADER:
            return NCU_CSV if is_ncu_header(event.cells) else STATS
    return None


def _decoded(head: bytes) -> str:
    return head.decode(encoding_of(head), errors="ignore").lstrip("\ufeff \t\r\n")


def _other_json(text: str) -> str | None:
    """What JSON is, where its beginning shows that it is another than the profiler's."""
    if '"ph"' in text or '"traceEvents"' in text:
        return None
    if any(
        mark in text for mark in ('"CUPTI_ACTIVITY_KIND_', '"StringIds"', '"EXPORT_SCHEMA_VERSION"', '"TARGET_INFO_')
    ):
        return f"a JSON export of nsys, which is not read; {_EXPORT_SO}"
    if any(mark in text for mark in ('"Start (', '"Total Time (', '"Time (%)"')):
        return "a table of nsys stats as JSON; make it with --format csv"
    first, _, rest = text.partition("\n")
    with suppress(ValueError, RecursionError):
        if isinstance(json.loads(first), dict) and rest.lstrip().startswith("{"):
            return f"one JSON object a line, as nsys exports jsonlines, which is not read; {_EXPORT_SO}"
    return None


def _refusal(head: bytes) -> str:
    text = _decoded(head)
    if head.startswith(b"PAR1"):
        return "one Parquet table; give the folder of nsys export --type parquetdir"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return f"an Arrow export of nsys, which is not read; {_EXPORT_SO}"
    if head.startswith(b"\x89HDF"):
        return f"an HDF export of nsys, which is not read; {_EXPORT_SO}"
    if head.startswith(b"PK"):
        return "a zip archive; unpack it and give the trace inside"
    if text[:1] == "<":
        return "a web page, not a trace; " + ACCEPTED
    if text.startswith("version https://git-lfs"):
        return "a pointer of Git LFS in place of the file; fetch it with git lfs pull"
    if "SKIPPED:" in text:
        return "nsys stats found nothing to report (SKIPPED): no kernels were traced; capture again with -t cuda,nvtx"
    if "Start (ns)" in text or "Total Time (ns)" in text or "Time (%)" in text:
        return "a text table of nsys stats; make it with --format csv"
    if "==PROF==" in text or "Metric Name" in text:
        return "a text of Nsight Compute; make it with --csv"
    return "not a trace; " + ACCEPTED


@undisturbed()
def read_trace(path: str | Path) -> Trace:
    """Read a trace of any kind: torch.profiler JSON, an export, report or gpu trace of Nsight Systems; also packed.

    Raises:
        TraceError: no such file, empty, not a trace, of a kind that shows no layers, or damaged.
    """
    with opened(path) as (inside, kind):
        if kind in (NCU_CSV, NCU_REPORT):
            raise TraceError(f"{inside.name}: {_NCU_LINE}")
        readers = {SQLITE: read_nsys, TORCH: read_torch, REPORT: nsys_report.read_report, STATS: read_stats,
                   PARQUET: read_parquet}  # fmt: skip
        trace = readers[kind](inside)
        return trace if inside == Path(path) else replace(trace, path=Path(path).name)


def read_ncu(path: str | Path) -> NcuReport:
    """Read what Nsight Compute measured of each launch: ``ncu --csv`` or .ncu-rep, also packed.

    Raises:
        TraceError: no such file, damaged, or of another tool.
    """
    with opened(path) as (inside, kind):
        if kind == NCU_CSV:
            return replace(read_ncu_csv(inside), path=Path(path).name)
        if kind == NCU_REPORT:
            return replace(ncu_report.read_ncu_report(inside), path=Path(path).name)
        raise TraceError(f"{inside.name}: {kind}, not of Nsight Compute; see k3lab trace show FILE")


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[Path, str]]:
    """The file to read and its kind; that of an archive lies in a temporary folder as long as the context lasts.

    Raises:
        TraceError: as ``kind_of``, or an archive that does not hold exactly one trace.
    """
    path = Path(path)
    kind = kind_of(path)
    try:
        if kind != ARCHIVE:
            yield path, kind
            return
        with unpacked(path) as inside:
            kind = kind_of(inside)
            if kind == ARCHIVE:
                raise TraceError(f"{path.name}: an archive inside an archive; unpack it and give the trace")
            yield inside, kind
    except MemoryError:
        raise TraceError(f"{path}: not enough memory to read it; profile fewer steps, or read it elsewhere") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
