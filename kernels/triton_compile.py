"""Triton source to a cubin and its launch facts, without a GPU. Imported only when compiling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .contract import Arg, Launch


@dataclass(frozen=True)
class TritonKernel:
    """A ``@triton.jit`` function with everything but the grid fixed."""

    function: Any
    """The ``triton.jit`` function; its name is the symbol in every trace."""
    args: Mapping[str, tuple[str, Arg]]
    """Run-time parameter name to (Triton type such as ``*bf16`` or ``i32``, what is passed)."""
    constants: Mapping[str, Any]
    """``tl.constexpr`` parameters."""
    num_warps: int
    num_stages: int


def arch_number(arch: str) -> int:
    """``sm_103a`` to 103."""
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if not match:
        raise ValueError(f"not an architecture name: {arch!r}")
    return int(match[1])


@contextmanager
def _without_line_info() -> Iterator[None]:
    """Cubins that ship hold no source paths, and the same source gives the same bytes anywhere."""
    before = triton.knobs.compilation.disable_line_info
    triton.knobs.compilation.disable_line_info = True
    try:
        yield
    finally:
        triton.knobs.compilation.disable_line_info = before


def compile_triton(kernel: TritonKernel, grid: tuple[int, int, int], arch: str) -> Launch:
    """Compile for an architecture; pointers are taken as 16-byte aligned."""
    signature = {name: triton_type for name, (triton_type, _) in kernel.args.items()}
    signature.update(dict.fromkeys(kernel.constants, "constexpr"))
    order = list(kernel.function.arg_names)
    if set(order) != set(signature):
        raise ValueError(f"{kernel.function.__name__}: parameters {order} against {sorted(signature)}")
    aligned = {
        (order.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")
    }
    source = ASTSource(
        kernel.function,
        {name: signature[name] for name in order},
        {(order.index(name),): value for name, value in kernel.constants.items()},
        aligned,
    )
    target = GPUTarget("cuda", arch_number(arch), 32)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    with _without_line_info():
        built = triton.compile(source, target=target, options=options)
    declared = parameter_count(built.asm["ptx"])
    args = [kernel.args[name][1] for name in order if name in kernel.args]
    if declared < len(args):
        raise ValueError(f"{built.metadata.name}: {declared} parameters in the PTX for {len(args)} arguments")
    # Triton appends pointers to scratch memory that these kernels do not use (one or two, by version).
    args += [Arg("null")] * (declared - len(args))
    scratch = [getattr(built.metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size")]
    if any(scratch):
        raise ValueError(f"{built.metadata.name}: wants scratch memory, which the launcher does not provide")
    return Launch(
        kernel=built.metadata.name,
        cubin=built.asm["cubin"],
        grid=grid,
        block=(32 * kernel.num_warps, 1, 1),
        shared_bytes=built.metadata.shared,
        args=tuple(args),
    )


def parameter_count(ptx: str) -> int:
    """Parameters of the first ``.entry`` in PTX text."""
    entry = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)\s*(?:\.\w|\{)", ptx, re.DOTALL)
    return len(re.findall(r"\.param\b", entry[1])) if entry else 0
