"""The read ceiling of the GPU at hand: the best of several plain streaming reads of gigabytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from ..kernels import Arg, Compiled, Launch, Problem

READ_BYTES = 4 << 30
LAUNCHES = 4
"""Reads between two events, one after the other: what starting the first costs stays below 0.3 %."""
SAMPLES = 7
KB = 1024


@dataclass(frozen=True)
class Reader:
    """One kernel that reads an array once, and its shape."""

    kind: Literal["tiles", "bulk"]
    """``tiles``: many short blocks; ``bulk``: rings of bulk copies in resident ones."""
    words: int
    """32-bit words a load of the whole block, or a copy."""
    depth: int
    """Loads (as far as the compiler's registers allow) or copies that a block has in flight."""
    warps: int = 1
    """Of a block; a ring needs one."""
    a_sm: int = 0
    """Resident blocks an SM; the short blocks come as they fit."""

    @property
    def label(self) -> str:
        """Short text for lists."""
        resident = f", {self.a_sm} blocks a SM" if self.a_sm else ""
        return f"{self.kind} {self.depth} x {self.words * 4 // KB} KB, {self.warps} warps{resident}"


READERS = (
    Reader("tiles", 8192, 2, 16), Reader("tiles", 8192, 1, 16), Reader("tiles", 2048, 4, 8),
    Reader("bulk", 8192, 6, 1, 1), Reader("bulk", 8192, 3, 1, 2),
)  # fmt: skip
"""Two ways to read, in several shapes; which is fastest depends on the GPU, and every process finds it anew."""


@dataclass(frozen=True)
class Reading(Problem):
    """What a reader is told beside its tensors."""

    turns: int
    """Chunks of the array (``bulk``)."""


X, OUT, TURNS = Arg("tensor", "x"), Arg("tensor", "out"), Arg("int32", "turns")


def compile_reader(reader: Reader, words: int, arch: str, sms: int) -> tuple[Compiled, int]:
    """The reader for an array of so many words, and the bytes that one launch of it reads (all, up to a last part)."""
    blocks = reader.a_sm * sms
    share = reader.words * (1 if reader.kind == "bulk" else reader.depth)
    turns = words // share
    launch = _bulk(reader, words, blocks, arch) if reader.kind == "bulk" else _triton(reader, turns, arch)
    return Compiled("read", reader.kind, Reading(1, 1, turns), {}, arch, (launch,)), turns * share * 4


def _triton(reader: Reader, turns: int, arch: str) -> Launch:
    from ..kernels.triton_compile import TritonKernel, compile_triton
    from .read_tiles import k3lab_read_tiles

    args: dict[str, Any] = {"x_ptr": ("*i32", X), "out_ptr": ("*i32", OUT)}
    constants = {"BLOCK": reader.words, "TILES": reader.depth}
    return compile_triton(TritonKernel(k3lab_read_tiles, args, constants, reader.warps, 1), (turns, 1, 1), arch)


def _bulk(reader: Reader, words: int, blocks: int, arch: str) -> Launch:
    from cutlass import Int32
    from cutlass.cute.runtime import make_fake_tensor

    from ..kernels.cute_compile import compile_cute
    from .read_bulk import launch

    tensors = [make_fake_tensor(Int32, (size,), stride=(1,), assumed_align=16) for size in (words, blocks)]
    return compile_cute(
        launch,
        (*tensors, Int32(1), blocks, reader.words, reader.depth),
        arch,
        grid=(blocks, 1, 1),
        block=(32, 1, 1),
        shared_bytes=reader.depth * (reader.words * 4 + 8),
        args=(X, OUT, TURNS),
    )


def time_read(call: Callable[[], None], read: int) -> float:
    """Bytes/s of calls that read so many bytes each, median of :data:`SAMPLES` after two."""
    import torch

    times = []
    for _ in range(SAMPLES + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(LAUNCHES):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / LAUNCHES)
    return read / sorted(times[2:])[SAMPLES // 2]


def time_readers(readers: Sequence[Reader] = READERS, read_bytes: int = READ_BYTES) -> dict[str, float]:
    """Bytes/s of each reader by its label, on the current GPU."""
    import torch

    from ..kernels.device import require
    from ..kernels.launch import Runner

    device = require("the read ceiling")
    words = read_bytes // 4
    x = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
    out = torch.empty(words // 2048, dtype=torch.int32, device="cuda")

    def bound(reader: Reader) -> tuple[Callable[[], None], int]:
        compiled, read = compile_reader(reader, words, device.arch, device.sms)
        return Runner(compiled).bind({"x": x, "out": out}), read

    ready = {reader.label: bound(reader) for reader in readers}  # compiled first: no pause between measurements
    for _ in range(5):  # up to the clocks that a measurement runs at
        time_read(*ready[readers[0].label])
    return {label: time_read(call, read) for label, (call, read) in ready.items()}


@cache
def read_ceiling(read_bytes: int = READ_BYTES) -> float:
    """Bytes/s of the best reader."""
    import torch

    best = max(time_readers(read_bytes=read_bytes).values())
    torch.cuda.empty_cache()
    return best
