"""The next kernels' weights into the L2 while the experts stream past it: what is brought, in which order, how much.

Behind the defaults: an H200's L2 keeps about 32 MB beside a stream that is evicted first, and gives back a third
of their reading time. A plan is tuned in the chain, for each rows value; where it loses, the cap is zero and nothing is launched.
Bits do not depend on it: it changes no memory. torch is imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Arg, Compiled, Problem
from ..errors import InputError
from ..space import Config, Constraint, Param, Space

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Bytes: addresses and sizes of a bulk prefetch are multiples."""
MOST_RANGES = 64
SOURCE = Path(__file__).with_name("cute_prefetch.py")


@dataclass(frozen=True)
class Prefetch(Problem):
    """A walk over so many byte ranges."""

    count: int
    """Ranges."""


OFF: Config = {
    "cap_mb": 0, "reach": 2, "order": "use", "fork": "beside", "priority": "normal", "chunk_kb": 16, "blocks": 8, "kept": True,
}  # fmt: skip
"""No prefetch: nothing is launched."""


def space() -> Space:
    """What is tuned: which bytes in which order, where it leaves the line of launches, and what the kernel asks for at once."""
    return Space(
        params=(
            Param("cap_mb", (0, 4, 8, 12, 16, 24, 32, 48, 64, 96), "MB (1e6 bytes) at most; 0 is off"),
            Param("reach", (1, 2), "kernels behind the experts whose weights are brought: attention projection, output projection"),
            Param("order", ("use", "reverse"), "of those kernels: the cap cuts off the last ones"),
            Param("fork", ("ahead", "beside", "before", "behind"), "a stream of its own that leaves ahead of the experts' predecessor "
                  "or beside the experts; or in line, before or behind them"),
            Param("priority", ("normal", "high"), "of the stream of its own"),
            Param("chunk_kb", (1, 2, 4, 8, 16, 32), "KB that one instruction asks for"),
            Param("blocks", (1, 2, 4, 8, 16, 32, 64), "blocks of one warp"),
            Param("kept", (False, True), "asked to be evicted last"),
        ),
        constraints=(
            Constraint(lambda c: bool(c["cap_mb"]) or all(c[name] == value for name, value in OFF.items()), "off is one config"),
            Constraint(lambda c: c["priority"] == "normal" or c["fork"] in ("ahead", "beside"), "a launch in line has no priority of its own"),
            Constraint(lambda c: c["reach"] != 1 or c["order"] == "use", "one kernel has no order"),
        ),
        default={**OFF, "cap_mb": 32},
    )  # fmt: skip


def in_order(kernels: Sequence[Sequence[torch.Tensor]], config: Config) -> list[torch.Tensor]:
    """Weights as they are brought; ``kernels``: those of each kernel behind the experts, in the order of use."""
    chosen = list(kernels[: int(config["reach"])])
    return [one for weights in (chosen if config["order"] == "use" else chosen[::-1]) for one in weights]


def capped(ranges: Sequence[tuple[int, int]], cap: int) -> list[tuple[int, int]]:
    """The first ``cap`` bytes of the ranges (address, bytes), in their order; whole multiples of 16, inside each range.

    Raises:
        InputError: too many ranges, or one of negative size.
    """
    if len(ranges) > MOST_RANGES:
        raise InputError(f"{len(ranges)} ranges to prefetch; at most {MOST_RANGES}")
    found, left = [], cap // ALIGNMENT * ALIGNMENT
    for address, size in ranges:
        if size < 0 or size >= 1 << 31:
            raise InputError(f"a range of {size} bytes to prefetch; 0 to 2 GB are possible")
        first = -(-address // ALIGNMENT) * ALIGNMENT
        length = min((address + size - first) // ALIGNMENT * ALIGNMENT, left)
        if length > 0:
            found.append((first, length))
            left -= length
    return found


def table(tensors: Sequence[torch.Tensor], config: Config) -> torch.Tensor:
    """What the kernel reads: int64 [ranges, 2] on the tensors' device, weights in the order in which they will be used.

    The tensors must live as long as the table is used.

    Raises:
        InputError: nothing is left to prefetch (a cap of 0, or no tensors), too many, or one is not contiguous.
    """
    import torch

    if any(not tensor.is_contiguous() for tensor in tensors):
        raise InputError("tensors to prefetch must be contiguous")
    whole = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
    ranges = capped(whole, int(config["cap_mb"]) * 1_000_000)
    if not ranges:
        raise InputError("nothing to prefetch: a cap of 0 MB means that the kernel is not launched")
    return torch.tensor(ranges, dtype=torch.int64, device=tensors[0].device)


def compile_prefetch(count: int, config: Config, arch: str) -> Compiled:
    """The kernel for so many ranges, for a :class:`~k3lab.kernels.launch.Runner`; its one tensor is ``ranges``."""
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_tensor

    from ..cute_compile import compile_cute
    from .cute_prefetch import launch

    space().check(config)
    blocks = int(config["blocks"])
    built = compile_cute(
        launch,
        (
            make_fake_tensor(Int64, (count, 2), stride=(2, 1), assumed_align=16), Int32(1), 1024 * int(config["chunk_kb"]),
            blocks, bool(config["kept"]),
        ),
        arch,
        grid=(blocks, 1, 1),
        block=(32, 1, 1),
        shared_bytes=0,
        args=(Arg("tensor", "ranges"), Arg("int32", "count")),
        pdl=True,
    )  # fmt: skip
    return Compiled("experts", "prefetch", Prefetch(1, 1, count), config, arch, (built,))
