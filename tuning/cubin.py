"""What a cubin says of its kernel: registers, shared memory, spills, instruction mix. No GPU needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..kernels import Compiled, InputError, Launch, env
from .outcome import SetupError

TOOL_LIMIT_S = 120.0


@dataclass(frozen=True)
class KernelResources:
    """Resources of one launch."""

    kernel: str
    registers: int
    """A thread."""
    static_shared_bytes: int
    """Of the cubin, the system's 1 KB included where the compiler counts it."""
    dynamic_shared_bytes: int
    """Asked for at launch."""
    stack_bytes: int
    """A thread's stack frame."""
    spill_instructions: int
    """Loads and stores of local memory in the machine code: register spills and indexed arrays."""
    threads: int
    blocks: int
    cluster: int
    """Blocks a cluster."""
    instructions: dict[str, int]
    """Machine instructions by base mnemonic, e.g. ``HGMMA``, ``LDG``, ``LDGSTS``."""

    def to_json(self) -> dict[str, Any]:
        """Field name to value."""
        return asdict(self)


def tools(name: str) -> list[str]:
    """Every ``cuobjdump`` or ``nvdisasm`` there is: K3LAB_CUDA_BIN, Triton's wheel, PATH, the toolkit's usual place.

    Raises:
        SetupError: there is none.
    """
    import importlib.util

    folders = [folder for folder in (env.toolkit_dir(),) if folder]
    found = importlib.util.find_spec("triton")
    if found and found.origin:
        folders.append(Path(found.origin).parent / "backends" / "nvidia" / "bin")
    paths = [str(folder / name) for folder in folders if (folder / name).is_file()]
    for other in (shutil.which(name), f"/usr/local/cuda/bin/{name}"):
        if other and Path(other).is_file():
            paths.append(other)
    if not paths:
        raise SetupError(
            f"{name} is neither in Triton's wheel nor on PATH; set K3LAB_CUDA_BIN to the folder that has it"
        )
    return list(dict.fromkeys(paths))


def _run(name: str, *args: str) -> str:
    """Output of the first tool that can read the file: an older one may not know a newer architecture.

    Raises:
        InputError: none of them can.
    """
    complaint = ""
    for path in tools(name):
        done = subprocess.run([path, *args], capture_output=True, text=True, timeout=TOOL_LIMIT_S)
        if done.returncode == 0:
            return done.stdout
        lines = done.stderr.strip().splitlines()
        complaint = f"{path}: {lines[-1] if lines else f'exit {done.returncode}'}"
    raise InputError(
        f"no {name} here can read the kernel ({complaint}); set K3LAB_CUDA_BIN to the folder of a newer one"
    )


_MNEMONIC = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)", re.MULTILINE
)


def sass(cubin: bytes) -> str:
    """Machine code as text."""
    return _disassembled(cubin, tuple(tools("nvdisasm")))


@lru_cache(8)
def _disassembled(cubin: bytes, readers: tuple[str, ...]) -> str:
    """By the first of ``readers`` that can; kept, since who asks for resources asks for the order of the code, too.

    The analysis of the data flow changes nothing in the text and takes a third of the time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _run("nvdisasm", "-c", "-ndf", str(path))


def full_mnemonics(text: str) -> Counter[str]:
    """Instructions of nvdisasm text by full mnemonic, e.g. ``LDG.E.128``."""
    return Counter(base + suffix for base, suffix in _MNEMONIC.findall(text))


def kernel_resources(launch: Launch) -> KernelResources:
    """Resources of one launch, from its cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(launch.cubin)
        usage = _run("cuobjdump", "-res-usage", str(path))
    match = re.search(rf"Function {re.escape(launch.kernel)}:\s*\n\s*(.*)", usage)
    if not match:
        raise RuntimeError(f"cuobjdump names no kernel {launch.kernel}")
    numbers = dict(re.findall(r"(\w+)(?:\[\d\])?:(\d+)", match[1]))
    counts: Counter[str] = Counter()
    for base, _suffix in _MNEMONIC.findall(sass(launch.cubin)):
        counts[base] += 1
    counts.pop("NOP", None)
    return KernelResources(
        kernel=launch.kernel,
        registers=int(numbers["REG"]),
        static_shared_bytes=int(numbers["SHARED"]),
        dynamic_shared_bytes=launch.shared_bytes,
        stack_bytes=int(numbers["STACK"]),
        spill_instructions=counts["LDL"] + counts["STL"],
        threads=launch.threads,
        blocks=launch.grid[0] * launch.grid[1] * launch.grid[2],
        cluster=launch.cluster[0] * launch.cluster[1] * launch.cluster[2],
        instructions=dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
    )


GROUPS: dict[str, str] = {
    "tensor cores": r"(UTC)?[HQIDO]?(MMA|GMMA)|UTC[HQIO]MMA|WARPGROUP",
    "asynchronous copies": r"LDGSTS|UBLKCP|UBLKPF|UTMALDG|UTMASTG|UTMAREDG|UTMAPF|UTCCP|STAS",
    "global memory": r"LDG|STG|ATOMG?|REDG?|CCTL",
    "shared and tensor memory": r"LDS|STS|LDSM|STSM|LDTM|STTM|ATOMS",
    "local memory": r"LDL|STL",
    "barriers and waits": r"BAR|SYNCS|DEPBAR|LDGDEPBAR|MEMBAR|ERRBAR|ACQBULK|PREEXIT|UCGABAR_\w+|WARPSYNC|UTCBAR",
    "floating point": r"F(FMA|ADD|MUL|HFMA|HADD)2?|H(FMA|ADD|MUL)2|MUFU|F2FP?|I2FP?|FSETP|FSEL|FMNMX",
}
"""What a kernel author looks for first, as patterns of base mnemonics; everything else is ``integer and control``."""


def instruction_groups(instructions: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Instructions by :data:`GROUPS`, in that order; groups without any are left out."""
    groups: dict[str, dict[str, int]] = {name: {} for name in (*GROUPS, "integer and control")}
    for mnemonic, count in instructions.items():
        group = next(
            (name for name, pattern in GROUPS.items() if re.fullmatch(pattern, mnemonic)), "integer and control"
        )
        groups[group][mnemonic] = count
    return {name: found for name, found in groups.items() if found}


def resources(compiled: Compiled) -> list[KernelResources]:
    """Resources of every launch of a compiled engine."""
    return [kernel_resources(launch) for launch in compiled.launches]
