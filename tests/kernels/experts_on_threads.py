"""The experts' kernel run on the CPU: one Python thread a GPU thread, what the hardware does is played here.

The functions are those of the kernel's modules, taken from their source without the decorators of the DSL, in one namespace.
"""

from __future__ import annotations

import ast
import math
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import k3lab.kernels as kernels
import numpy as np
import torch
from k3lab.kernels.experts import layout, plan

HERE = Path(kernels.__file__).parent
SOURCES = [
    HERE / "cute_numbers.py",
    HERE / "cute_streaming.py",
    HERE / "cute_waits.py",
    *(HERE / "experts" / f"cute_{name}.py" for name in ("parts", "mxfp8", "ring", "group", "shared", "experts")),
]
SPACE = 1 << 40
"""Bytes between the tensors of the one address space."""
PATIENCE_S = 60.0
"""A launch that takes longer has a wait that never ends."""


class Word(int):
    """An unsigned register."""

    def __new__(cls, value: int) -> Word:
        return super().__new__(cls, int(value) & 0xFFFFFFFF)

    def __lshift__(self, by: int) -> Word:
        return Word(int(self) << by)

    def __rshift__(self, by: int) -> Word:
        return Word(int(self) >> by)

    def __and__(self, other: int) -> Word:
        return Word(int(self) & int(other))

    def __or__(self, other: int) -> Word:
        return Word(int(self) | int(other))

    def __xor__(self, other: int) -> Word:
        return Word(int(self) ^ int(other))

    def __add__(self, other: int) -> Word:
        return Word(int(self) + int(other))


def to_float(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", int(word)))[0]


def to_word(value: float) -> Word:
    if math.isnan(value):
        return Word(0x7FFFFFFF)  # what FP32 instructions make of every NaN
    return Word(struct.unpack("<I", struct.pack("<f", value))[0])


def e4m3(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def pair(word: int) -> tuple[float, float]:
    """Two BF16 numbers; subnormals count, as they do in a tensor core."""
    return to_float((word & 0xFFFF) << 16), to_float(word & 0xFFFF0000)


def bf16(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float64).to(torch.float32).to(torch.bfloat16).view(torch.int16)) & 0xFFFF


class Memory:
    """Tensors at addresses; every access must lie inside one."""

    def __init__(self) -> None:
        self.held: dict[int, np.ndarray] = {}
        self.names: dict[str, int] = {}
        self.reads: dict[str, np.ndarray] = {}

    def add(self, name: str, data: np.ndarray) -> None:
        number = len(self.held) + 1
        self.held[number] = data.reshape(-1).view(np.uint8)
        self.names[name] = number * SPACE
        self.reads[name] = np.zeros(len(self.held[number]) // 16 + 1, dtype=int)

    def find(self, address: int, size: int) -> tuple[str, np.ndarray, int]:
        number, at = divmod(address, SPACE)
        data = self.held[number]
        assert 0 <= at <= len(data) - size and at % size == 0, "an access outside its tensor, or not aligned"
        return next(name for name, base in self.names.items() if base == number * SPACE), data, at

    def read(self, address: int, words: int) -> list[Word]:
        name, data, at = self.find(address, 4 * words)
        self.reads[name][at // 16] += 1
        return [Word(one) for one in struct.unpack(f"<{words}I", data[at : at + 4 * words].tobytes())]

    def write(self, address: int, words: list[int]) -> None:
        _, data, at = self.find(address, 4 * len(words))
        data[at : at + 4 * len(words)] = np.frombuffer(struct.pack(f"<{len(words)}I", *map(int, words)), np.uint8)


class Warp:
    """32 lanes that meet."""

    def __init__(self) -> None:
        self.given: list[Any] = [None] * 32
        self.result: Any = None
        self.job: Any = None
        self.barrier = threading.Barrier(32, action=self._act)

    def _act(self) -> None:
        if self.job is not None:
            self.result, self.job = self.job(list(self.given)), None

    def meet(self, lane: int, value: Any, job: Any) -> Any:
        self.given[lane], self.job = value, job
        self.barrier.wait(60)
        result = self.result
        self.barrier.wait(60)  # nobody gives the next value before all have taken this one's
        return result


def product(operands: list[list[Word]]) -> np.ndarray:
    """MMA m16n8k16 of 32 lanes' operands."""
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    for lane, words in enumerate(operands):
        group, k = lane // 4, lane % 4 * 2
        for row, column, word in ((0, 0, words[0]), (8, 0, words[1]), (0, 8, words[2]), (8, 8, words[3])):
            a[group + row, k + column : k + column + 2] = pair(word)
        b[k : k + 2, group], b[k + 8 : k + 10, group] = pair(words[4]), pair(words[5])
    with np.errstate(invalid="ignore", over="ignore"):
        return a @ b


class Block:
    """Shared memory and barrier of a block."""

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads)
        self.warps = [Warp() for _ in range(threads // 32)]
        self.shared: list[dict[int, Any]] = [{}, {}]
        self.lock = threading.Lock()


class Shared:
    """A tensor in shared memory: reading what nobody wrote fails."""

    def __init__(self, values: dict[int, Any], size: int) -> None:
        self.values, self.size = values, size
        self.iterator = SharedPointer(values, 0)

    def __getitem__(self, at: int) -> Any:
        assert 0 <= at < self.size
        return self.values[int(at)]

    def __setitem__(self, at: int, value: Any) -> None:
        assert 0 <= at < self.size, "beyond the shared memory of the block"
        self.values[int(at)] = value


class SharedPointer:
    def __init__(self, values: dict[int, Any], at: int) -> None:
        self.values, self.at = values, at

    def __add__(self, offset: int) -> SharedPointer:
        return SharedPointer(self.values, self.at + int(offset))

    def toint(self) -> SharedPointer:
        return self


def functions(names: dict[str, Any]) -> dict[str, Any]:
    """Constants and functions of the kernel's modules over the given names."""
    space = dict(names)
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        body = []
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                if node.name in ("read", "read_if", "as_float", "as_word", "launch"):
                    continue
                node.decorator_list, node.returns = [], None
                for one in node.args.args:
                    one.annotation = None
                body.append(node)
            elif isinstance(node, ast.Assign):
                body.append(node)
        exec(compile(ast.Module(body, []), str(path), "exec"), space)
    return space


class Machine:
    """A launch: all blocks at once."""

    def __init__(self, sizes: plan.Plan, memory: Memory, rows: int) -> None:
        self.plan, self.memory, self.rows = sizes, memory, rows
        self.me = threading.local()
        self.blocks = [Block(sizes.threads) for _ in range(sizes.blocks)]
        self.faults: list[BaseException] = []
        self.lock = threading.Lock()
        self.deadline = time.monotonic() + PATIENCE_S
        self.space = functions(self._names())
        self.space["POLLS_A_LOOK"] = 1 << 40  # the machine has its own patience

    def _names(self) -> dict[str, Any]:
        me, memory = self.me, self.memory

        def read(text: str, address: int, words: int, more: list) -> list[Word]:
            name = memory.find(address, 4 * words)[0]
            assert me.waited or name in ("gate_up", "down"), f"{name} is read before the dependency wait"
            if "relaxed" in text:
                assert time.monotonic() < self.deadline, "somebody never published"
                time.sleep(2e-4)
            with self.lock:
                return memory.read(address, words)

        def read_if(text: str, step: int, address: int, words: int, more: list, steps: int) -> list[Word]:
            if steps > step:
                return read(text, address, words, more)
            return [Word(0x7FC17FC1)] * words  # whoever takes these gets NaN

        def inline_ptx(text: str, write_only_types: Any = None, read_only_args: Any = ()) -> Any:
            return self._ptx(text, list(read_only_args))

        def wait() -> None:
            me.waited = True

        def allocate(_kind: Any, size: int, byte_alignment: int) -> Shared:
            place, me.allocated = me.allocated, me.allocated + 1
            return Shared(self.blocks[me.block].shared[place], size)

        def shuffle(value: Any, lane: int) -> Any:
            return self._warp().meet(me.thread % 32, value, list)[lane]

        def shuffle_bfly(value: Any, by: int) -> Any:
            lane = me.thread % 32
            return self._warp().meet(lane, value, list)[lane ^ by]

        def shuffle_up(value: Any, by: int, mask_and_clamp: int) -> Any:
            lane = me.thread % 32
            got = self._warp().meet(lane, value, list)
            return got[lane - by] if lane >= by else value

        return {
            "read": read, "read_if": read_if, "as_float": to_float, "as_word": to_word, "Float32": float, "Int32": int, "Int64": int, "Uint32": Word,
            "operands": layout.operands, **{name: getattr(layout, name) for name in dir(layout) if name.isupper()},
            "stage": lambda *_: None, "TOKENS": plan.TOKENS, "T": None, "llvm": None, "cute": SimpleNamespace(make_layout=lambda size: size),
            "cutlass": SimpleNamespace(
                range_constexpr=range, const_expr=bool, min=min, max=max, range=lambda *bounds, unroll: range(*bounds)
            ),
            "SmemAllocator": lambda: SimpleNamespace(allocate_tensor=allocate),
            "arch": SimpleNamespace(
                thread_idx=lambda: (me.thread, 0, 0), block_idx=lambda: (me.block, 0, 0),
                warp_idx=lambda: me.thread // 32, make_warp_uniform=lambda value: value,                 griddepcontrol_wait=wait, griddepcontrol_launch_dependents=lambda: None, inline_ptx=inline_ptx,
                sync_threads=lambda: self.blocks[me.block].barrier.wait(60), shuffle_sync=shuffle,
                vote_any_sync=lambda value: self._warp().meet(me.thread % 32, bool(value), any),
                sync_warp=lambda: self._warp().meet(me.thread % 32, None, list),
                shuffle_sync_up=shuffle_up, shuffle_sync_bfly=shuffle_bfly,
            ),
        }  # fmt: skip

    def _warp(self) -> Warp:
        return self.blocks[self.me.block].warps[self.me.thread // 32]

    def _ptx(self, text: str, args: list) -> Any:
        if "mma.sync" in text:
            lane = self.me.thread % 32
            made = self._warp().meet(lane, args[:6], product)
            group, column = lane // 4, lane % 4 * 2
            return [args[6 + i] + made[group + i // 2 * 8, column + i % 2] for i in range(4)]
        if "popc" in text:
            return (int(args[0]) & 0xFFFFFFFF).bit_count()
        if "lop3" in text:
            assert str(layout.LEFT) in text and "0xE4" in text
            return Word(layout.joined(int(args[0]), int(args[1])))
        if "mul.rn.bf16x2" in text:
            low, high = (a * b for a, b in zip(pair(args[0]), pair(args[1]), strict=True))
            return Word(bf16(low) | bf16(high) << 16)
        if "cvt.rn.bf16x2" in text:
            return Word(bf16(args[1]) | bf16(args[0]) << 16)
        if "ex2" in text:
            return 2.0 ** min(args[0], 1000.0)
        if "rcp" in text:
            return 1 / args[0] if args[0] else math.inf
        if "max.NaN" in text:
            return math.nan if math.isnan(args[0]) or math.isnan(args[1]) else max(args)
        if "e4m3x2" in text:
            return [e4m3(one) for one in args]
        if text == "fence.acq_rel.gpu;":
            return None
        with self.lock:
            if "red.shared.or" in text:
                pointer, bits = args
                pointer.values[pointer.at] = int(pointer.values[pointer.at]) | int(bits)
            else:
                assert "st." in text, text
                assert self.me.waited, "a store before the dependency wait"
                self.memory.write(args[0], args[1:])
        return None

    def run(self, tensors: list[str], beta: float, linear: float) -> None:
        """The kernel's function in all threads."""
        kernel = self.space["k3_experts_cute_stream"]
        arguments = [
            SimpleNamespace(iterator=SimpleNamespace(toint=lambda base=self.memory.names[name]: base))
            for name in tensors
        ]

        def thread(block: int, t: int) -> None:
            me = self.me
            me.block, me.thread, me.waited, me.allocated = block, t, False, 0
            try:
                kernel(*arguments, self.rows, 0, self.plan, beta, linear, False, "loads", 0)
                assert me.waited, "a thread ends without the dependency wait"
            except BaseException as fault:
                self.faults.append(fault)
                for one in self.blocks:
                    for barrier in (one.barrier, *(warp.barrier for warp in one.warps)):
                        barrier.abort()

        made = [
            threading.Thread(target=thread, args=(b, t))
            for b in range(self.plan.blocks)
            for t in range(self.plan.threads)
        ]
        for one in made:
            one.start()
        for one in made:
            one.join(120)
        real = [fault for fault in self.faults if not isinstance(fault, threading.BrokenBarrierError)]
        if self.faults:
            raise (real or self.faults)[0]
