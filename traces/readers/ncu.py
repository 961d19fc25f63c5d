"""What Nsight Compute measured of each kernel launch: from ``ncu --csv`` or a .ncu-rep.

It runs the kernels one by one, often several times each, with fixed clocks and flushed caches: its durations compare
kernels, and are no time of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

_TIME = {"ns": 1, "nsecond": 1, "us": 10**3, "usecond": 10**3, "ms": 10**6, "msecond": 10**6, "s": 10**9,
         "second": 10**9}  # fmt: skip
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES = {f"{prefix}{word}": size for prefix, size in _PREFIX.items() for word in ("byte", "bytes", "b")}
_RATE = {f"{unit}/{per}": size for unit, size in _BYTES.items() for per in ("s", "second")}
_COUNT = {"": 1, "register": 1, "registers": 1, "register/thread": 1}

_DURATION = ("gpu__time_duration.sum", "gpu__time_duration.avg", "gpu__time_duration.max", "Duration")
_READ = ("dram__bytes_read.sum", "dram__bytes_op_read.sum")
_WRITTEN = ("dram__bytes_write.sum", "dram__bytes_op_write.sum")
_ALL_BYTES = ("dram__bytes.sum",)
_BANDWIDTH = ("dram__bytes.sum.per_second", "Memory Throughput")
_SHARE = (
    "dram__throughput.avg.pct_of_peak_sustained_elapsed", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM Throughput",
)  # fmt: skip
_REGISTERS = ("launch__registers_per_thread", "Registers Per Thread")
_STATIC = ("launch__shared_mem_per_block_static", "Static Shared Memory Per Block")
_DYNAMIC = ("launch__shared_mem_per_block_dynamic", "Dynamic Shared Memory Per Block")
WANTED = frozenset((*_DURATION, *_READ, *_WRITTEN, *_ALL_BYTES, *_BANDWIDTH, *_SHARE, *_REGISTERS, *_STATIC, *_DYNAMIC))
"""Names of the metrics that are read, as the tool's pages and its raw metrics call them."""

Value = tuple[str, Decimal]
"""A unit as written, and the number."""


@dataclass(frozen=True)
class NcuLaunch:
    """One profiled launch. None means not measured, which is not 0. Times in ns, memory in bytes, shares in percent."""

    launch: str
    name: str
    grid: str = ""
    block: str = ""
    duration_ns: int | None = None
    dram_read_bytes: int | None = None
    dram_written_bytes: int | None = None
    dram_bytes: int | None = None
    dram_bytes_per_s: int | None = None
    dram_percent: float | None = None
    registers: int | None = None
    shared_static_bytes: int | None = None
    shared_dynamic_bytes: int | None = None


@dataclass(frozen=True)
class NcuReport:
    """The launches of a file in its order; ``notes`` are plain lines on what could not be used."""

    path: str
    format: str
    launches: tuple[NcuLaunch, ...]
    gpus: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def _scaled(values: Mapping[str, list[Value]], names: tuple[str, ...], units: Mapping[str, int]) -> Decimal | None:
    """The first of the metrics that was measured in one of the units."""
    for name in names:
        for unit, value in values.get(name, ()):
            unit = unit.lower().removesuffix("/block")
            if unit in units and value >= 0:
                return value * units[unit]
    return None


def _whole(value: Decimal | None) -> int | None:
    return None if value is None else int(value.to_integral_value())


def unknown_units(values: Mapping[str, list[Value]]) -> list[str]:
    """Metrics whose unit is none that is known, each as ``NAME in UNIT``."""
    known = ((_DURATION, _TIME), ((*_READ, *_WRITTEN, *_ALL_BYTES, *_STATIC, *_DYNAMIC), _BYTES), (_REGISTERS, _COUNT))
    return [
        f"{name} in {unit or 'no unit'}"
        for names, units in known
        for name in names
        for unit, _ in values.get(name, ())
        if unit.lower().removesuffix("/block") not in units
    ]


def launch_of(launch: str, name: str, grid: str, block: str, values: Mapping[str, list[Value]]) -> NcuLaunch:
    """A launch from its metrics; several values of one metric name come from several sections of the report."""
    read, written = _whole(_scaled(values, _READ, _BYTES)), _whole(_scaled(values, _WRITTEN, _BYTES))
    total = _whole(_scaled(values, _ALL_BYTES, _BYTES))
    share = _scaled(values, _SHARE, {"%": 1})
    return NcuLaunch(
        launch=launch,
        name=" ".join(name.split()) or "<unnamed>",
        grid=grid,
        block=block,
        duration_ns=_whole(_scaled(values, _DURATION, _TIME)),
        dram_read_bytes=read,
        dram_written_bytes=written,
        dram_bytes=total if total is not None or read is None or written is None else read + written,
        dram_bytes_per_s=_whole(_scaled(values, _BANDWIDTH, _RATE)),
        dram_percent=None if share is None else float(share),
        registers=_whole(_scaled(values, _REGISTERS, _COUNT)),
        shared_static_bytes=_whole(_scaled(values, _STATIC, _BYTES)),
        shared_dynamic_bytes=_whole(_scaled(values, _DYNAMIC, _BYTES)),
    )
