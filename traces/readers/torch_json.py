"""Reader of torch.profiler (kineto) Chrome traces: JSON, plain or gzip, as an object or a bare list of events."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..errors import TraceError
from ..model import ApiCall, CopyTime, HostRange, Kernel, RejectedRow, Trace
from .stamps import BadStamp, check_interval, microseconds_to_ns

MAX_BYTES = 8 << 30
"""A trace that unpacks to more is refused: it would not fit in memory as JSON."""

_KERNEL = frozenset({"kernel", "Kernel"})
_COPIES = {"gpu_memcpy": "memcpy", "Memcpy": "memcpy", "gpu_memset": "memset", "Memset": "memset"}
_WAIT = "cuda_sync"
_OVERHEAD = "overhead"
_API = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "Driver", "hip_runtime"})
_HINT = "profile with activities=[CPU, CUDA], while the GPU works"


def _read_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            file.seek(0)
            return file.read()
        file.seek(0)
        parts, total = [], 0
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                while part := unpacked.read(1 << 24):
                    total += len(part)
                    if total > MAX_BYTES:
                        raise TraceError(f"{path.name}: unpacks to over {MAX_BYTES >> 30} GiB; profile fewer steps")
                    parts.append(part)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path.name}: damaged gzip file ({error}); copy or capture it again") from None
    return b"".join(parts)


def _parse(data: bytes, name: str, notes: list[str]) -> Any:
    if data[257:262] == b"ustar":
        raise TraceError(f"{name}: a tar archive; unpack it and give the JSON file inside")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("utf-8-sig", errors="replace")
        notes.append("the file is not valid UTF-8; damaged characters were replaced")
    if not text.strip():
        raise TraceError(f"{name}: the file is empty; capture the trace again")

    def load(strict: bool) -> Any:
        return json.loads(text, parse_float=Decimal, parse_constant=Decimal, strict=strict)

    try:
        try:
            return load(strict=True)
        except json.JSONDecodeError as error:
            if "control character" not in error.msg:
                raise
            notes.append(f"control characters inside strings (first at character {error.pos}) were accepted")
            return load(strict=False)
    except json.JSONDecodeError as error:
        cut = " (the file ends there: it was cut short)" if error.pos >= len(text.rstrip()) - 1024 else ""
        raise TraceError(
            f"{name}: not valid JSON at character {error.pos}: {error.msg}{cut}; copy or capture the trace again"
        ) from None
    except RecursionError:
        raise TraceError(f"{name}: JSON nested too deep for a trace; capture it again") from None
    except (ValueError, ArithmeticError):
        raise TraceError(f"{name}: a number in the JSON is too long to be a time; capture the trace again") from None


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, Decimal) and value.is_finite() and abs(value) < 10**18 and value == int(value):
        return int(value)
    if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) < 20:
        return int(value)
    return None


def _dims(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        return ()
    found = [_integer(item) for item in value]
    return tuple(item for item in found if item is not None) if None not in found else ()


def _interval(event: Mapping[str, Any]) -> tuple[int, int]:
    start = microseconds_to_ns(event.get("ts"), "start")
    end = start + microseconds_to_ns(event.get("dur"), "duration")
    check_interval(start, end)
    return start, end


def _device(event: Mapping[str, Any], args: Mapping[str, Any]) -> int:
    device = _integer(args.get("device"))
    return device if device is not None else (_integer(event.get("pid")) or 0)


def _stream(event: Mapping[str, Any], args: Mapping[str, Any]) -> int:
    stream = _integer(args.get("stream"))
    return stream if stream is not None else (_integer(event.get("tid")) or 0)


def _kernel(event: Mapping[str, Any], name: str, args: Mapping[str, Any]) -> Kernel:
    start, end = _interval(event)
    return Kernel(
        name=name,
        start=start,
        end=end,
        device=_device(event, args),
        stream=_stream(event, args),
        correlation=_integer(args.get("correlation")),
        grid=_dims(args.get("grid")),
        block=_dims(args.get("block")),
        node=_integer(args.get("graph node id")) or None,  # 0 means: not from a graph
    )


def _better(new: ApiCall, old: ApiCall | None) -> bool:
    """Of two calls with one correlation take the graph launch, else the earlier: whatever their order in the file."""
    if old is None:
        return True
    return (not new.is_graph_launch, new.start, new.name) < (not old.is_graph_launch, old.start, old.name)


def read_torch(path: Path) -> Trace:
    """Read a torch.profiler trace.

    Raises:
        TraceError: not JSON, cut short, or no list of trace events in it.
    """
    notes: list[str] = []
    data = _parse(_read_bytes(path), path.name, notes)
    head: Mapping[str, Any] = data if isinstance(data, dict) else {}
    events = head.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise TraceError(f"{path.name}: JSON, but not a profiler trace (no list 'traceEvents')")

    kernels: list[Kernel] = []
    rejected: list[RejectedRow] = []
    apis: dict[tuple[int, int], ApiCall] = {}
    ranges: list[HostRange] = []
    copies: Counter[str] = Counter()
    copy_times: list[CopyTime] = []
    overheads: list[tuple[int, int]] = []
    malformed = 0
    for event in events:
        if not isinstance(event, dict):
            malformed += 1
            continue
        category = event.get("cat")
        if not isinstance(category, str):
            continue
        name = event.get("name")
        name = name if isinstance(name, str) and name else "<unnamed>"
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if category in _KERNEL:
            try:
                kernels.append(_kernel(event, name, args))
            except BadStamp as reason:
                rejected.append(RejectedRow(name, str(reason)))
        elif category in _COPIES or category == _WAIT:
            kind = _COPIES.get(category, "sync")
            copies[kind] += kind != "sync"
            with suppress(BadStamp):
                copy_times.append(CopyTime(kind, *_interval(event), _device(event, args), _stream(event, args)))
        elif category == _OVERHEAD:
            with suppress(BadStamp):
                overheads.append(_interval(event))
        elif category in _API or category == "user_annotation":
            try:
                start, end = _interval(event)
            except BadStamp:
                continue  # a host row without a usable time only means: no launch or mark known
            thread = (_integer(event.get("pid")) or 0, _integer(event.get("tid")) or 0)
            if category == "user_annotation":
                ranges.append(HostRange(name, start, end, thread))
                continue
            correlation = _integer(args.get("correlation"))
            call = ApiCall(name, start, end, thread)
            if correlation is not None and _better(call, apis.get((0, correlation))):
                apis[0, correlation] = call
    if malformed:
        notes.append(f"{malformed} entries of the event list are not events and were skipped")
    kernels.sort(key=lambda kernel: kernel.order)
    rejected.sort(key=lambda row: (row.name, row.reason))
    ranges.sort(key=lambda item: (item.start, -item.end, item.name))
    return Trace(
        path=path.name,
        format="torch profiler JSON",
        kernels=tuple(kernels),
        apis=apis,
        ranges=tuple(ranges),
        copies={kind: count for kind, count in copies.items() if count},
        copy_times=tuple(sorted(copy_times)),
        overheads=tuple(sorted(overheads)),
        rejected=tuple(rejected),
        gpus=_gpus(head),
        synthetic=head.get("k3lab_synthetic") is True,
        tool=_tool(head),
        world_size=_distributed(head, "world_size"),
        rank=_distributed(head, "rank"),
        notes=tuple(notes),
        no_kernels_hint=_HINT,
    )


def _gpus(head: Mapping[str, Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    devices = head.get("deviceProperties")
    for item in devices if isinstance(devices, list) else []:
        if isinstance(item, dict) and isinstance(item.get("name"), str):
            number = _integer(item.get("id"))
            found[number if number is not None else len(found)] = item["name"]
    return found


def _tool(head: Mapping[str, Any]) -> str | None:
    version = _integer(head.get("cupti_version"))
    return f"CUPTI {version}" if version is not None else None


def _distributed(head: Mapping[str, Any], key: str) -> int | None:
    info = head.get("distributedInfo")
    return _integer(info.get(key)) if isinstance(info, dict) else None
