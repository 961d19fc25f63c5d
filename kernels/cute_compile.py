"""A CuTe DSL host function to a cubin and its symbol, without a GPU. Imported only when compiling."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from typing import Any

from cutlass import cute
from cutlass.cute.runtime import make_fake_stream

from .contract import Arg, Launch
from .triton_compile import parameter_count

# cute.compile is not thread-safe: concurrent calls abort the process.
_LOCK = threading.Lock()


def compile_cute(
    host: Callable[..., Any],
    host_args: tuple[Any, ...],
    arch: str,
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    args: tuple[Arg, ...],
    cluster: tuple[int, int, int] = (1, 1, 1),
    pdl: bool = False,
) -> Launch:
    """Compile a ``@cute.jit`` host function that launches exactly one kernel.

    Args:
        host: the host function; its last parameter is the stream.
        host_args: fake tensors, integers and Constexpr values, without the stream.
        arch: e.g. ``sm_103a``.
        grid: blocks, as the host function launches them.
        block: threads, likewise.
        shared_bytes: dynamic shared memory that the kernel's allocator takes. The host function computes
            it by itself, but only a launch through it would use that.
        args: what is passed for each kernel parameter, in order. Tensors of static layout are one pointer.
        cluster: blocks a cluster.
        pdl: launched with programmatic stream serialization.
    """
    with _LOCK, tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir={folder}"
        built = cute.compile(host, *host_args, make_fake_stream(), options=options)
        cubin, ptx, names = built.artifacts.CUBIN, built.artifacts.PTX, list(built.kernel_info)
    if not isinstance(cubin, bytes) or len(names) != 1:
        raise RuntimeError(f"{names}: expected one kernel and its cubin in memory")
    declared = parameter_count(ptx if isinstance(ptx, str) else ptx.decode())
    if declared != len(args):
        raise RuntimeError(f"{names[0]}: {declared} parameters in the PTX for {len(args)} arguments")
    return Launch(names[0], cubin, grid, block, shared_bytes, args, cluster, pdl)
