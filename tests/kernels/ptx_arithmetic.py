"""Arithmetic of a machine for PTX: integers that wrap, FP32 that rounds once, predicates, conversions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np

from .ptx_text import CARRIERS, DTYPES, Step

COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
SIMPLE = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "min": np.minimum, "max": np.fmax,
}  # fmt: skip


def canonical(result: np.ndarray) -> np.ndarray:
    """FP32 results as the hardware has them: every NaN that arithmetic gives is this one, whatever went in."""
    if result.dtype == np.float32:
        result = np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32)).view(np.float32)
    return result


class Operands(ABC):
    """Where a machine's operands are: see :class:`.ptx_machine.Machine`."""

    @abstractmethod
    def get(self, name: str, who: np.ndarray, kind: str) -> np.ndarray:
        """Values of an operand, as a type."""

    @abstractmethod
    def put(self, name: str, who: np.ndarray, value: np.ndarray) -> None:
        """Write a register."""

    @abstractmethod
    def flag(self, name: str, who: np.ndarray) -> np.ndarray:
        """A predicate."""

    @staticmethod
    @lru_cache(None)
    def words(arg: str) -> tuple[str, ...]:
        """Names in a braced list, or the one name."""
        return tuple(one.strip() for one in arg.strip("{}").split(","))


class Arithmetic(Operands):
    """Instructions that read and write registers only."""

    def do_mov(self, step: Step, who: np.ndarray) -> None:
        kind, target, source = step.name[-1], self.words(step.args[0]), self.words(step.args[1])
        if kind == "pred":
            self.put(target[0], who, self.flag(source[0], who))
        elif len(source) == 2:
            low, high = (self.get(name, who, "u32").astype(np.uint64) for name in source)
            self.put(target[0], who, low | high << np.uint64(32))
        elif len(target) == 2:
            whole = self.get(source[0], who, "u64")
            self.put(target[0], who, whole.astype(np.uint32))
            self.put(target[1], who, (whole >> np.uint64(32)).astype(np.uint32))
        else:
            self.put(target[0], who, self.get(source[0], who, kind))

    def binary(self, step: Step, who: np.ndarray) -> None:
        kind = step.name[-1]
        with np.errstate(all="ignore"):
            if kind == "pred":
                result = SIMPLE[step.name[0]](self.flag(step.args[1], who), self.flag(step.args[2], who))
            else:
                result = SIMPLE[step.name[0]](*(self.get(arg, who, kind) for arg in step.args[1:3]))
        self.put(step.args[0], who, canonical(result))

    do_add = do_sub = do_and = do_or = do_xor = do_min = do_max = binary

    def do_not(self, step: Step, who: np.ndarray) -> None:
        value = self.flag(step.args[1], who) if step.name[-1] == "pred" else self.get(step.args[1], who, step.name[-1])
        self.put(step.args[0], who, ~value)

    def do_neg(self, step: Step, who: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, -self.get(step.args[1], who, step.name[-1]))

    def do_shl(self, step: Step, who: np.ndarray) -> None:
        kind = step.name[-1].replace("b", "u")
        by = self.get(step.args[2], who, "u32").astype(DTYPES[kind])
        bits = np.dtype(DTYPES[kind]).itemsize * 8
        value = self.get(step.args[1], who, kind)
        self.put(
            step.args[0],
            who,
            np.where(by < bits, value << np.minimum(by, bits - 1).astype(value.dtype), 0).astype(value.dtype),
        )

    def do_shr(self, step: Step, who: np.ndarray) -> None:
        kind = step.name[-1]
        bits = np.dtype(DTYPES[kind]).itemsize * 8
        by = np.minimum(self.get(step.args[2], who, "u32"), bits - 1 if kind[0] == "s" else bits)
        value = self.get(step.args[1], who, kind)
        shifted = value >> np.minimum(by, bits - 1).astype(value.dtype)
        self.put(step.args[0], who, np.where(by < bits, shifted, 0).astype(value.dtype))

    def do_popc(self, step: Step, who: np.ndarray) -> None:
        value = self.get(step.args[1], who, "u32")
        self.put(step.args[0], who, np.array([int(one).bit_count() for one in value], dtype=np.uint32))

    def do_mul(self, step: Step, who: np.ndarray) -> None:
        kind = step.name[-1]
        first, second = (self.get(arg, who, kind) for arg in step.args[1:3])
        if kind == "f32":
            with np.errstate(all="ignore"):
                self.put(step.args[0], who, canonical(first * second))
            return
        if step.name[1] == "lo":
            self.put(step.args[0], who, first * second)
            return
        if kind in ("s32", "u32"):
            long = np.int64 if kind == "s32" else np.uint64
            product = first.astype(long) * second.astype(long)
            self.put(
                step.args[0], who, product if step.name[1] == "wide" else (product >> long(32)).astype(first.dtype)
            )
            return
        bits = np.dtype(DTYPES[kind]).itemsize * 8
        wide = [int(a) * int(b) for a, b in zip(first, second, strict=True)]
        if step.name[1] == "wide":
            bits *= 2
        elif step.name[1] == "hi":
            wide = [one >> bits for one in wide]
        self.put(
            step.args[0],
            who,
            np.array([one & ((1 << bits) - 1) for one in wide], dtype=np.uint64).astype(CARRIERS[bits // 8]),
        )

    def do_mad(self, step: Step, who: np.ndarray) -> None:
        assert step.name[1] == "lo"
        kind = step.name[-1]
        first, second, third = (self.get(arg, who, kind) for arg in step.args[1:4])
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, canonical(first * second + third))

    def do_fma(self, step: Step, who: np.ndarray) -> None:
        a, b, c = (self.get(arg, who, "f32").astype(np.longdouble) for arg in step.args[1:4])
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, canonical((a * b + c).astype(np.float32)))

    def do_div(self, step: Step, who: np.ndarray) -> None:
        assert step.name[1:] == ("rn", "f32")
        with np.errstate(all="ignore"):
            result = self.get(step.args[1], who, "f32") / self.get(step.args[2], who, "f32")
        self.put(step.args[0], who, canonical(result))

    def do_rcp(self, step: Step, who: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, canonical(np.float32(1) / self.get(step.args[1], who, "f32")))

    def do_setp(self, step: Step, who: np.ndarray) -> None:
        first, second = (self.get(arg, who, step.name[-1]) for arg in step.args[1:3])
        result = np.isnan(first) | np.isnan(second) if step.name[1] == "nan" else COMPARE[step.name[1]](first, second)
        self.put(step.args[0], who, result)

    def do_selp(self, step: Step, who: np.ndarray) -> None:
        first, second = (self.get(arg, who, step.name[-1]) for arg in step.args[1:3])
        self.put(step.args[0], who, np.where(self.flag(step.args[3], who), first, second))

    def do_cvt(self, step: Step, who: np.ndarray) -> None:
        if "bf16x2" in step.name:
            high, low = (self.rounded(self.get(arg, who, "f32")) for arg in step.args[1:3])
            self.put(step.args[0], who, high << np.uint32(16) | low)
            return
        value = self.get(step.args[1], who, step.name[-1])
        made = value.astype(DTYPES[step.name[-2]])
        if made.itemsize == 1:  # a register of 16 bits holds it extended
            made = made.astype(np.int16 if step.name[-2] == "s8" else np.uint16)
        self.put(step.args[0], who, made)

    @staticmethod
    def rounded(value: np.ndarray) -> np.ndarray:
        """BF16 bits of FP32 values, to nearest even."""
        bits = value.view(np.uint32)
        near = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(value), np.uint32(0x7FFF), near).astype(np.uint32)
