"""Reader of torch.profiler (kineto) Chrome traces: JSON, plain or gzip, as an object or a bare list of events."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from ..errors import TraceError
from ..model import ApiCall, CopyTime, HostRange, Kernel, RejectedRow, Trace, in_order
from .json_events import Events
from .lost import told
from .stamps import BadStamp, check_interval, microseconds_to_ns

MAX_BYTES = 8 << 30
"""A trace that unpacks to more is refused: it would not fit in memory as JSON."""

_KERNEL = frozenset({"kernel", "Kernel"})
_COPIES = {"gpu_memcpy": "memcpy", "Memcpy": "memcpy", "gpu_memset": "memset", "Memset": "memset"}
_WAIT = "cuda_sync"
_OVERHEAD = "overhead"
_API = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "Driver", "hip_runtime"})
_GRAPH_CURE = "let the profiler run already when the graphs are captured, or trace with nsys --cuda-graph-trace=node"
_GRAPH_TIMES_RIGHT = 130101  # CUPTI of CUDA 13.1 Update 1; versions before CUDA 13 count from 1 to some tens
_MOST_RANKS = 1 << 20  # what is below 0 or above this is damage
_HINT = "profile with activities=[CPU, CUDA], while the GPU works"


def _read_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            file.seek(0)
            if path.stat().st_size > MAX_BYTES:
                raise TraceError(f"{path.name}: over {MAX_BYTES >> 30} GiB; profile fewer steps")
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


def _events(data: bytes, name: str) -> Events:
    if data[257:262] == b"ustar":
        raise TraceError(f"{name}: a tar archive; unpack it and give the JSON file inside")
    bom = 3 if data.startswith(b"\xef\xbb\xbf") else 0
    damaged = None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("utf-8-sig", errors="replace")
        damaged = "the file is not valid UTF-8; damaged characters were replaced"
    if not text or text.isspace():
        raise TraceError(f"{name}: the file is empty; capture the trace again")
    events = Events(text, name, bom)
    events.notes.extend([damaged] if damaged else [])
    return events


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        number = Decimal(value)
    except InvalidOperation:
        return None
    # copy_abs, as abs() rounds and overflows
    return int(number) if number.is_finite() and number.copy_abs() < 10**18 and number == int(number) else None


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
        # 0 means: not from a graph; from CUDA 13 on the captured node is told beside its clone
        node=_integer(args.get("source graph node id", args.get("source_graph_node_id")))
        or _integer(args.get("graph node id"))
        or None,
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
    events = _events(_read_bytes(path), path.name)
    kernels: list[Kernel] = []
    rejected: list[RejectedRow] = []
    apis: dict[tuple[int, int], ApiCall] = {}
    ranges: list[HostRange] = []
    copies: Counter[str] = Counter()
    copy_times: list[CopyTime] = []
    copied: set[int | None] = set()  # launches of copies: a graph may hold nothing else
    overheads: list[tuple[int, int]] = []
    unknown: Counter[str] = Counter()
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
            if kind != "sync":
                copies[kind] += 1
                copied.add(_integer(args.get("correlation")))
            with suppress(BadStamp):
                stream = _stream(event, args)  # below 0: all
                copy_times.append(
                    CopyTime(kind, *_interval(event), _device(event, args), stream if stream >= 0 else None)
                )
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
        elif "grid" in args and "dur" in event:
            unknown[category] += 1  # nothing but a kernel has a grid
    if not events.found:
        raise TraceError(f"{path.name}: JSON, but not a profiler trace (no list 'traceEvents')")
    head, notes = events.head, events.notes
    if events.not_finite:
        notes.append(f"{events.not_finite} numbers are NaN or infinite and were read as missing")
    if malformed:
        notes.append(f"{malformed} entries of the event list are not events and were skipped")
    in_order(kernels)
    notes.extend(_versions(head, kernels, apis.values()))
    incomplete, cut = _incomplete(kernels, copied, apis)
    notes.extend(cut)
    for category, count in sorted(unknown.items()):
        incomplete.append(f"{count} rows of the unknown category {category!r:.60} look like kernels and were not read")
    for key, least in (("world_size", 1), ("rank", 0)):
        if (said := _distributed(head, key)) is not None and _usable(said, least) is None:
            incomplete.append(f"distributedInfo is damaged: its {key} is {said}")
    rejected.sort(key=lambda row: (row.name, row.reason))
    ranges.sort(key=lambda item: (item.start, -item.end, item.name))
    return Trace(
        path=path.name,
        format="torch profiler JSON",
        kernels=tuple(kernels),
        apis=apis,
        ranges=tuple(ranges),
        copies={kind: count for kind, count in copies.items() if count},
        copy_times=tuple(sorted(copy_times, key=lambda item: (item.start, item.end, item.kind, str(item)))),
        overheads=tuple(sorted(overheads)),
        rejected=tuple(rejected),
        gpus=_gpus(head),
        synthetic=head.get("k3lab_synthetic") is True,
        tool=_tool(head),
        world_size=_usable(_distributed(head, "world_size"), 1),
        rank=_usable(_distributed(head, "rank"), 0),
        notes=tuple(notes),
        incomplete=tuple(incomplete),
        no_kernels_hint=incomplete[0] if incomplete else _HINT,
    )


def _gpus(head: Mapping[str, Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    devices = head.get("deviceProperties")
    for item in devices if isinstance(devices, list) else []:
        if isinstance(item, dict) and isinstance(item.get("name"), str):
            number = _integer(item.get("id"))
            found[number if number is not None else len(found)] = item["name"]
    return found


def _incomplete(
    kernels: Sequence[Kernel], copied: set[int | None], apis: Mapping[tuple[int, int], ApiCall]
) -> tuple[list[str], list[str]]:
    """Plain lines on what the file lacks: those that forbid a pass, and notes."""
    owned = copied | {kernel.correlation for kernel in kernels}
    graphs = [(call.start, correlation in owned) for (_, correlation), call in apis.items() if call.is_graph_launch]
    found, notes = told(graphs, _GRAPH_CURE)
    if any("GraphConditionalHandle" in call.name for call in apis.values()):
        found.append("graphs with conditional nodes: only their first round is recorded, so counts are a lower bound")
    return found, notes


def _versions(head: Mapping[str, Any], kernels: Sequence[Kernel], calls: Iterable[ApiCall]) -> list[str]:
    """What to say of the CUDA versions of the capture, with a warning where times of graph kernels may be wrong."""
    cupti, runtime, driver = (
        _integer(head.get(f"{part}_version")) for part in ("cupti", "cuda_runtime", "cuda_driver")
    )
    told = [
        f"{name} {value}"
        for name, value in (("CUPTI", cupti), ("CUDA runtime", runtime), ("CUDA driver", driver))
        if value is not None
    ]
    if not told:
        return []
    notes = [f"recorded with {', '.join(told)}"]
    replayed = any(kernel.node is not None for kernel in kernels) or any(call.is_graph_launch for call in calls)
    if replayed and cupti is not None and cupti < _GRAPH_TIMES_RIGHT:
        notes.append(
            "CUPTI before CUDA 13.1 Update 1 is reported to time kernels of graphs wrongly (kineto issue 1165)"
        )
    return notes


def _tool(head: Mapping[str, Any]) -> str | None:
    version = _integer(head.get("cupti_version"))
    return f"CUPTI {version}" if version is not None else None


def _distributed(head: Mapping[str, Any], key: str) -> int | None:
    info = head.get("distributedInfo")
    return _integer(info.get(key)) if isinstance(info, dict) else None


def _usable(found: int | None, least: int) -> int | None:
    return found if found is not None and least <= found <= _MOST_RANKS else None
