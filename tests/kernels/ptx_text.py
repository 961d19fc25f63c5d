"""PTX text as instructions, the types and constants of its operands, and memory for a machine that runs it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

DTYPES: dict[str, Any] = {
    "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64,
    "s64": np.int64, "b64": np.uint64, "f32": np.float32, "s8": np.int8, "u8": np.uint8,
}  # fmt: skip
CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
WIDTHS = {kind: np.dtype(dtype).itemsize for kind, dtype in DTYPES.items()}
SHARED = 1024
"""Where dynamic shared memory begins in a block's window."""


@lru_cache(None)
def constant(name: str, kind: str) -> np.ndarray | None:
    """The value of an operand that is no register, as a type, alone in an array; None if it is one."""
    dtype = DTYPES[kind]
    if name == "__dynamic_shmem__0":
        return np.full(1, SHARED, dtype=dtype)
    if re.match(r"0[fF][0-9A-Fa-f]{8}$", name):
        return np.full(1, int(name[2:], 16), dtype=np.uint32).view(np.float32)
    if re.match(r"-?(0[xX][0-9A-Fa-f]+|\d+)$", name):
        bits = WIDTHS[kind] * 8
        return np.full(1, int(name, 0) & ((1 << bits) - 1), dtype=CARRIERS[bits // 8]).view(dtype)
    return None


@dataclass(frozen=True)
class Step:
    """One instruction."""

    guard: str
    """Predicate, with ``!`` in front where it is negated; empty if there is none."""
    name: tuple[str, ...]
    """Opcode, cut at its dots."""
    args: tuple[str, ...]


@lru_cache(4)
def parse(ptx: str) -> tuple[list[Step], dict[str, int], list[str]]:
    """(instructions, labels, parameters) of the first entry of a PTX text."""
    text = re.sub(r"//[^\n]*", "", ptx)
    entry = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)", text, re.DOTALL)
    assert entry
    parameters = re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", entry[1])
    body = text[text.index("{", entry.end()) + 1 :]
    steps: list[Step] = []
    labels: dict[str, int] = {}
    loops = 0
    for raw in body.split(";"):
        statement = raw.strip()
        while True:
            if label := re.match(r"(\$?\w+):\s+", statement + " "):
                # labels of inline assembly are of its own block, and each block begins with one that is waited at
                loops += label[1] == "LAB_WAIT"
                labels[label[1] if label[1][0] == "$" else f"{label[1]}{loops}"] = len(steps)
                statement = statement[label.end() :]
            elif statement[:1] in ("{", "}"):
                statement = statement[1:].strip()
            else:
                break
        if not statement or statement.startswith((".reg", ".pragma", ".loc", ".file", ".section")):
            continue
        found = re.match(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL)
        assert found, statement
        if found[2].startswith("bra") and found[3][0] != "$":
            steps.append(Step(found[1] or "", ("bra",), (f"{found[3]}{loops}",)))
            continue
        args = tuple(one.strip() for one in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", found[3]) if one.strip())
        steps.append(Step(found[1] or "", tuple(found[2].replace("::", "_").split(".")), args))
    return steps, labels, parameters


@dataclass
class Memory:
    """Tensors side by side in a machine's memory, 256 bytes of guard between them."""

    size: int
    data: np.ndarray = field(init=False)
    used: int = 4096
    places: dict[str, tuple[int, Any, tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = np.full(self.size, 0xFF, dtype=np.uint8)

    def add(self, name: str, array: np.ndarray) -> int:
        """Put an array down; its address."""
        at = self.used
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.data[at : at + len(raw)] = raw
        self.used = at + math.ceil((len(raw) + 256) / 256) * 256
        assert self.used <= self.size
        self.places[name] = (at, array.dtype, array.shape)
        return at

    def get(self, name: str) -> np.ndarray:
        """The array as it is now."""
        at, dtype, shape = self.places[name]
        return self.data[at : at + math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape).copy()

    def touched(self, addresses: set[int]) -> set[str]:
        """The tensors in which some of the addresses lie."""
        found, places = set(), np.array(sorted(addresses))
        for name, (at, dtype, shape) in self.places.items():
            end = at + math.prod(shape) * np.dtype(dtype).itemsize
            if ((places >= at) & (places < end)).any():
                found.add(name)
        return found

    def guards_hold(self) -> bool:
        """Whether nothing was written between the tensors."""
        held = np.zeros(self.used, dtype=bool)
        for at, dtype, shape in self.places.values():
            held[at : at + math.prod(shape) * np.dtype(dtype).itemsize] = True
        return bool((self.data[: self.used][~held] == 0xFF).all())
