"""The kernel of cute_mma itself, run on the CPU: one Python thread a GPU thread, what the hardware does is played here."""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from k3lab.kernels.attention_projection.cute_mma_engine import shared as shared_bytes

RELEASE = "loads"


class Number(float):
    """An FP32 value in a register: every addition rounds."""

    def __add__(self, other: float) -> Number:
        return Number(np.float32(float(self) + other))

    def to(self, _dtype: object) -> float:
        return float(self)


class Pointer:
    """Into a flat array: shared memory of a block, or a matrix."""

    def __init__(self, array: np.ndarray, at: int = 0, matrix: str = "") -> None:
        self.array, self.at, self.matrix = array, at, matrix

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.array, self.at + offset, self.matrix)


class Matrix:
    """A tensor of the kernel; as the output it takes each element once."""

    def __init__(self, values: np.ndarray, name: str) -> None:
        self.values, self.iterator = values, Pointer(values.reshape(-1), 0, name)
        self.stored = np.zeros(values.shape, dtype=int)

    def __setitem__(self, place: tuple[int, int], value: float) -> None:
        self.values[place] = value
        self.stored[place] += 1


class Shared:
    """Shared memory of a block: NaN until it is written."""

    def __init__(self, size: int) -> None:
        self.array = np.full(size, np.nan)
        self.iterator = Pointer(self.array)

    def __getitem__(self, at: int) -> Number:
        return Number(self.array[at])

    def __setitem__(self, at: int, value: float) -> None:
        assert 0 <= at < len(self.array), "beyond the shared memory of the block"
        self.array[at] = value


class Warp:
    """32 lanes that meet at each MMA m16n8k16."""

    def __init__(self) -> None:
        self.operands: list[list] = [[]] * 32
        self.product = np.zeros((16, 8))
        self.barrier = threading.Barrier(32, action=self._multiply)

    def _multiply(self) -> None:
        a, b = np.zeros((16, 16)), np.zeros((16, 8))
        for lane, (a0, a1, a2, a3, b0, b1, *_sums) in enumerate(self.operands):
            group, k = lane // 4, lane % 4 * 2
            for row, column, word in ((0, 0, a0), (8, 0, a1), (0, 8, a2), (8, 8, a3)):
                a[group + row, k + column : k + column + 2] = word
            b[k : k + 2, group], b[k + 8 : k + 10, group] = b0, b1
        self.product = a @ b

    def multiply(self, lane: int, operands: list) -> list[Number]:
        self.operands[lane] = operands
        self.barrier.wait()
        group, column = lane // 4, lane % 4 * 2
        sums = [operands[6 + i] + self.product[group + i // 2 * 8, column + i % 2] for i in range(4)]
        self.barrier.wait()  # nobody takes part in the next one before all have taken this one's
        return sums


class Cluster:
    """The blocks of one tile: runs the kernel's function in all their threads."""

    def __init__(self, module: SimpleNamespace, split: int, threads: int) -> None:
        self.module, self.split, self.threads = module, split, threads
        self.shared: list[Shared | None] = [None] * split
        self.lock = threading.Lock()
        self.blocks = [threading.Barrier(threads) for _ in range(split)]
        self.whole = threading.Barrier(threads * split)
        self.warps = [[Warp() for _ in range(threads // 32)] for _ in range(split)]
        self.faults: list[BaseException] = []

    def allocate(self, rank: int, size: int) -> Shared:
        with self.lock:
            self.shared[rank] = self.shared[rank] or Shared(size)
        return self.shared[rank]

    def run(self, me: threading.local, first_block: int, kernel: Callable[[], None]) -> None:
        def thread(rank: int, t: int) -> None:
            me.cluster, me.rank, me.block, me.thread, me.waited = self, rank, first_block + rank, t, False
            try:
                kernel()
                assert me.waited, "a thread ends without the dependency wait"
            except BaseException as fault:
                self.faults.append(fault)
                for barrier in (*self.blocks, self.whole, *(w.barrier for block in self.warps for w in block)):
                    barrier.abort()

        made = [threading.Thread(target=thread, args=(r, t)) for r in range(self.split) for t in range(self.threads)]
        for one in made:
            one.start()
        for one in made:
            one.join()
        real = [fault for fault in self.faults if not isinstance(fault, threading.BrokenBarrierError)]
        if self.faults:
            raise (real or self.faults)[0]


def fakes(module: SimpleNamespace, streaming: SimpleNamespace, me: threading.local) -> dict[str, object]:
    """What the kernel's function, and the one it shares with other kernels, find in place of the DSL."""

    def load(text: str, pointers: list[Pointer], offset: int, _policy: list) -> list[tuple[float, float]]:
        words = []
        for pointer in pointers:
            assert (pointer.matrix == "w") == (text == module.LOAD_W)
            assert me.waited or pointer.matrix == "w", "activations before the dependency wait"
            at = pointer.at + offset
            assert at % 8 == 0 and 0 <= at <= len(pointer.array) - 8, "a load outside its matrix"
            words += [tuple(pointer.array[at + 2 * i : at + 2 * i + 2]) for i in range(4)]
        return words

    def inline_ptx(text: str, write_only_types: list, read_only_args: list) -> object:
        if text == module.LOAD_PEER:
            (peer,) = read_only_args
            return Number(peer.array[peer.at])
        assert text == streaming.MMA
        return me.cluster.warps[me.rank][me.thread // 32].multiply(me.thread % 32, read_only_args)

    def allocate(_dtype: object, layout: int, byte_alignment: int) -> Shared:
        return me.cluster.allocate(me.rank, layout)

    def wait() -> None:
        me.waited = True

    return {
        "load": load, "multiply": streaming.multiply.__wrapped__, "Float32": Number, "Int64": int, "BFloat16": None,
        "Uint32": lambda value: (float(value),) * 2,
        "cute": SimpleNamespace(size=lambda matrix, mode: matrix.values.shape[mode[0]], make_layout=lambda size: size),
        "cutlass": SimpleNamespace(
            range_constexpr=range, const_expr=bool, min=min, range=lambda *bounds, unroll: range(*bounds)
        ),
        "SmemAllocator": lambda: SimpleNamespace(allocate_tensor=allocate),
        "arch": SimpleNamespace(
            thread_idx=lambda: (me.thread, 0, 0), block_idx=lambda: (me.block, 0, 0), lane_idx=lambda: me.thread % 32,
            warp_idx=lambda: me.thread // 32, make_warp_uniform=lambda value: value,
            griddepcontrol_wait=wait, griddepcontrol_launch_dependents=lambda: None, inline_ptx=inline_ptx,
            sync_threads=lambda: me.cluster.blocks[me.rank].wait(), cluster_arrive=lambda: None,
            cluster_arrive_relaxed=lambda: None, cluster_wait=lambda: me.cluster.whole.wait(),
            map_dsmem_ptr=lambda pointer, rank: Pointer(me.cluster.shared[rank].array, pointer.at),
        ),
    }  # fmt: skip


def own(name: str) -> SimpleNamespace:
    """A module of ``kernels`` for this test alone: tracing rewrites what it has traced."""
    spec = importlib.util.find_spec(f"k3lab.kernels.{name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(monkeypatch, case: dict, x: np.ndarray, w: np.ndarray) -> Matrix:
    """The output of a case; ``x`` [live rows, hidden], no more rows than these are there; ``w`` [outputs, hidden]."""
    case = {"warps_n": 1, "warps_k": 2, "split": 1, **case}
    rows, tile, split, chunks = (case[key] for key in ("rows", "tile", "split", "chunks"))
    live, outputs = len(x), len(w)
    module, streaming = own("attention_projection.cute_mma"), own("cute_streaming")
    me = threading.local()
    for fake, value in fakes(module, streaming, me).items():
        places = [place for place in (module, streaming) if hasattr(place, fake)]
        assert places, f"{fake} is in neither module"
        for place in places:
            monkeypatch.setattr(place, fake, value)
    out = Matrix(np.full((rows, outputs), math.nan), "out")
    arguments = (
        Matrix(x, "x"), Matrix(w, "w"), out, live, rows, tile, split, chunks, case["depth"], case["warps_n"],
        case["warps_k"], RELEASE,
    )  # fmt: skip
    kernel = module.k3_attention_projection_cute_mma_stream.__wrapped__
    for first in range(0, -(-outputs // tile) * split, split):
        cluster = Cluster(module, split, 32 * case["warps_n"] * case["warps_k"])
        cluster.run(me, first, lambda: kernel(*arguments))
        assert all(shared is not None for shared in cluster.shared)
        config = {"warps_k": case["warps_k"], "chunks": chunks, "tile_n": tile}
        assert {4 * len(shared.array) for shared in cluster.shared} == {shared_bytes(rows, config)}
    assert (out.stored[:live] == 1).all() and not out.stored[live:].any()
    return out


CASES = {
    "one row, eight chunks": {"rows": 1, "chunks": 8, "tile": 3, "steps": 3, "depth": 2, "warps_k": 2},
    "fewer rows than compiled for": {"rows": 5, "live": 3, "chunks": 2, "tile": 6, "steps": 3, "depth": 2, "split": 2},
    "two warps share the rows of a tile": {"rows": 2, "chunks": 4, "tile": 7, "steps": 2, "depth": 1, "warps_n": 2},
    "more rows than one MMA has": {"rows": 18, "live": 17, "chunks": 1, "tile": 9, "steps": 2, "depth": 2},
    "a tile of several MMAs, four blocks": {"rows": 3, "chunks": 1, "tile": 17, "steps": 1, "depth": 1, "split": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_the_product(monkeypatch, name):
    """Every live output once, none beyond; nothing unwritten reaches one; the last tile is a short one."""
    case = {"warps_k": 2, "split": 1, **CASES[name]}
    outputs = case["tile"] + max(1, case["tile"] // 2)
    hidden = 32 * case["chunks"] * case["split"] * case["warps_k"] * case["steps"]
    pick = np.random.default_rng(len(name))
    x, w = (
        pick.integers(-3, 4, (height, hidden)).astype(float) for height in (case.get("live", case["rows"]), outputs)
    )
    out = run(monkeypatch, case, x, w)
    assert np.array_equal(out.values[: len(x)], x @ w.T)  # small integers: exact in any order


def in_order(x: np.ndarray, w: np.ndarray, warps_k: int, chunks: int, split: int) -> float:
    """The sum in FP32 as ``summation_order`` states it; an MMA adds 16 products exactly and rounds once."""
    total: Number | None = None
    share, block = len(x) // split, 32 * chunks
    for rank in range(split):
        part: Number | None = None
        for wk in range(warps_k):
            for chunk in range(chunks):
                acc = Number(0.0)
                for start in range(rank * share + wk * block, (rank + 1) * share, warps_k * block):
                    columns = start + 32 * chunk + np.arange(32)
                    for half in (columns % 8 < 4, columns % 8 >= 4):
                        acc += float(x[columns[half]] @ w[columns[half]])
                part = acc if part is None else part + acc
        total = part if total is None else total + part
    return float(total)


@pytest.mark.parametrize(
    ("chunks", "split", "others"),
    [
        (1, 1, [{"rows": 1, "tile": 8}, {"rows": 5, "tile": 9, "warps_n": 2}, {"rows": 18, "tile": 3, "depth": 1}]),
        (2, 2, [{"rows": 3, "tile": 4}]),
        (1, 4, [{"rows": 2, "tile": 10}]),
    ],
)
def test_the_sum_is_in_the_order_that_is_stated(monkeypatch, chunks, split, others):
    """Bit for bit, and so the same for any rows, tile, depth and share of the rows: what the invariant choice rests on."""
    pick = np.random.default_rng(3)
    hidden = 32 * chunks * split * 2 * 3
    x, w = (pick.integers(-99, 99, (n, hidden)) * 2.0 ** pick.integers(0, 9, (n, hidden)) for n in (18, 10))
    wanted = [[in_order(row, column, 2, chunks, split) for column in w] for row in x]
    assert wanted != (x @ w.T).tolist(), "in these numbers the order shows"
    for other in others:
        case = {"chunks": chunks, "split": split, "depth": 2, **other}
        out = run(monkeypatch, case, x[: case["rows"]], w)
        assert out.values.tolist() == wanted[: case["rows"]]
