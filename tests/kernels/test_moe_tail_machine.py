"""The tail's kernel as the compiler made it, run on the CPU by :mod:`ptx_machine`: the twin's bits over loopback."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from k3lab.kernels.health import LIMIT, Phase, read
from k3lab.kernels.transports import target_rows
from k3lab.tuning.compare import compare

from .moe_tail_case import FAMILY, FUSED, config, factors_of, judge, problem, twin, whole_numbers
from .ptx_copies import Copies
from .ptx_machine import Memory, Step
from .test_experts_machine import bits

TP, ROWS, LIVE = 4, 3, 2
SMALL = {"hidden": 512, "latent": 256, "blocks": 3}


class Phased:
    """An mbarrier of many phases, one arrival each, and the bytes that are expected."""

    def __init__(self) -> None:
        self.phase, self.arrived, self._bytes = 0, False, 0

    @property
    def bytes(self) -> int:
        return self._bytes

    @bytes.setter
    def bytes(self, count: int) -> None:
        assert count >= 0, "bytes came that nobody expects yet"
        self._bytes = count
        if self.arrived and not count:
            self.phase, self.arrived = self.phase + 1, False


class TailMachine(Copies):
    """With the instructions that this kernel adds, and barriers that are armed again."""

    def do_mbarrier(self, step: Step, who: np.ndarray, place: int) -> None:
        if step.name[1] == "arrive":
            super().do_mbarrier(step, who, place)
            return
        at = self.address(step.args[1 if step.name[1] == "try_wait" else 0], who, "u32")
        if step.name[1] == "init":
            for thread, one in zip(who, at, strict=True):
                self.barriers[int(self.local[thread]), int(one)] = Phased()
            self.pc[who] = place + 1
            return
        parity = self.get(step.args[2], who, "u32")
        ends = np.array([
            self.barriers[int(self.local[thread]), int(one)].phase % 2 != phase
            for thread, one, phase in zip(who, at, parity, strict=True)
        ])  # fmt: skip
        self.put(step.args[0], who[ends], np.ones(int(ends.sum()), dtype=bool))
        self.pc[who[ends]] = place + 1
        self.stopped[who[~ends]] = True

    def do_bar(self, step: Step, who: np.ndarray, place: int) -> None:
        """One barrier at a time: warps of one kind may wait at another one than the rest."""
        if step.name[1] == "warp":
            super().do_bar(step, who, place)
            return
        numbers = self.get(step.args[0], who, "u32")
        for number in np.unique(numbers):
            super().do_bar(step, who[numbers == number], place)

    def do_prmt(self, step: Step, who: np.ndarray) -> None:
        pair = self.get(step.args[2], who, "u32").astype(np.uint64) << np.uint64(32)
        pair |= self.get(step.args[1], who, "u32").astype(np.uint64)
        select, found = self.get(step.args[3], who, "u32"), np.zeros(len(who), dtype=np.uint32)
        assert not (select & np.uint32(0x8888)).any(), "a selector that repeats signs"
        for place in range(4):
            byte = (select >> np.uint32(4 * place) & np.uint32(7)).astype(np.uint64) * np.uint64(8)
            found |= (pair >> byte & np.uint64(255)).astype(np.uint32) << np.uint32(8 * place)
        self.put(step.args[0], who, found)


class Case:
    """The compiled kernel with its tensors in a machine's memory; dead rows of activations are NaN."""

    def __init__(
        self, monkeypatch: Any, rows: int = ROWS, live: int = LIVE, exact: bool = True, one: Any = None, **change: Any
    ) -> None:
        from k3lab.kernels import cute_compile

        self.one, self.live = one or problem(rows, TP, **SMALL), live
        rows, tp = self.one.rows, self.one.tp
        self.config = config(self.one, **{**({} if one else {"split_k": 4, "at_once": 4}), **change})
        self.exchange = str(self.config["exchange"])
        self.factors = factors_of(tp, self.exchange)
        texts: list[str] = []
        count = cute_compile.parameter_count
        with monkeypatch.context() as patch:
            patch.setattr(cute_compile, "parameter_count", lambda ptx: texts.append(ptx) or count(ptx))
            self.compiled = FUSED.compile(self.one, self.config, "sm_90a")
        (self.text,), (self.launch,) = texts, self.compiled.launches
        self.memory, self.at = Memory(1 << (25 if one else 23)), {}
        self.inputs = whole_numbers(self.one, self.exchange, 3) if exact else FAMILY.inputs(self.one, 3)
        axes = FAMILY.row_axes(self.one)
        for name, tensor in self.inputs.items():
            given = tensor.clone()
            if name in axes:
                given.narrow(axes[name], live, rows - live).fill_(float("nan"))
            self.at[name] = self.memory.add(name, bits(given))
        for name, (shape, _) in FAMILY.output_specs(self.one).items():
            self.at[name] = self.memory.add(name, np.full(shape, 0x7FFF, dtype=np.int16))
        for buffer in self.compiled.buffers:
            if not buffer.targets_of:
                self.at[buffer.name] = self.memory.add(buffer.name, np.zeros(buffer.shape, dtype=np.int32))
        for buffer in self.compiled.buffers:
            if buffer.targets_of:
                slot = 4 * math.prod(self.memory.places[buffer.targets_of][2]) // tp
                first = self.at[buffer.targets_of]
                lines = target_rows([first + rank * slot for rank in range(tp)], self.factors)
                self.at[buffer.name] = self.memory.add(buffer.name, np.array(lines, dtype=np.int64))

    def run(self, seed: int = 0, tick: int = 0, live: int | None = None, saved: int | None = None) -> TailMachine:
        integers = {"rows": live or self.live, "blocks": saved or self.one.blocks}
        values = [integers[arg.name] if arg.kind == "int32" else self.at.get(arg.name, 0) for arg in self.launch.args]
        machine = TailMachine(
            self.text, self.memory.data, values, self.launch.threads, self.launch.cluster_blocks, self.launch.shared_bytes,
            seed=seed, tick=tick,
        )  # fmt: skip
        mapped = [arg for arg in self.launch.args if arg.kind == "tensor_map"]
        machine.maps = {self.at[arg.name]: (self.memory.places[arg.name][2], arg.box) for arg in mapped}
        machine.run(0, self.launch.blocks)
        assert self.memory.guards_hold()
        return machine

    def poison(self) -> None:
        for name in FAMILY.outputs:
            at, _, shape = self.memory.places[name]
            self.memory.data[at : at + 2 * math.prod(shape)] = 0xFF

    def got(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(self.memory.get(name)).view(torch.bfloat16) for name in FAMILY.outputs}

    def judge(self, live: int | None = None) -> None:
        wanted = twin(self.one, self.inputs, self.factors, self.exchange)
        judge(self.one, self.inputs, self.got(), wanted, live or self.live)
        assert not self.memory.get("health").any()


@pytest.mark.parametrize("exchange", ["one_shot", "two_shot"])
def test_the_kernel_has_the_twins_bits(monkeypatch: pytest.MonkeyPatch, exchange: str) -> None:
    case = Case(monkeypatch, exchange=exchange)
    for turn in range(2):
        case.poison()
        machine = case.run(turn)
        weights = {"latent_norm", "w_up", "res_norm", "res_proj", "norm_w"}
        assert case.memory.touched(machine.ahead) == weights
        case.judge()
        assert (case.memory.get("epochs") == turn + 1).all()


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "rows", "exchange"), [(16, 1, "one_shot"), (16, 3, "two_shot"), (4, 1, "two_shot")])
def test_the_models_own_sizes(monkeypatch: pytest.MonkeyPatch, tp: int, rows: int, exchange: str) -> None:
    case = Case(monkeypatch, one=problem(rows, tp), live=rows, exchange=exchange)
    case.run()
    case.judge()


@pytest.mark.parametrize("change", [{"exchange": "one_shot"}, {"exchange": "two_shot", "split_k": 8}], ids=str)
def test_any_numbers_lie_within_the_familys_tolerance(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """Random inputs, factors that tell the slots apart: against the twin over the same loopback, unrounded."""
    case = Case(monkeypatch, exact=False, live=ROWS, **change)
    factors = (0.5, -2.0, 1.0, 4.0)
    for name in ("latents", "shares", "totals", "deltas"):
        if f"{name}_targets" in case.at:
            at = case.at[f"{name}_targets"]
            lines = target_rows([0] * TP, factors)
            case.memory.data[at : at + 16 * TP].view(np.int64).reshape(TP, 2)[:, 1] = np.array(lines)[:, 1]
    case.run(1)
    wanted, got = FAMILY.expected(case.one, case.config, case.inputs, factors), case.got()
    for name in FAMILY.outputs:
        result = compare(name, got[name], wanted[name], FAMILY.tolerance(case.one, name))
        assert result.ok, result.message


def test_fewer_saved_blocks_than_compiled_for_and_rows_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads a block that is not saved yet; rows come and go, epochs go on."""
    case = Case(monkeypatch, exchange="two_shot", live=ROWS)
    at, _, (blocks, *_rest) = case.memory.places["blocks"]
    case.memory.data[at + 2 * ROWS * 512 : at + blocks * 2 * ROWS * 512] = 0xFF
    case.inputs["blocks"] = case.inputs["blocks"][:1]
    for turn, live in enumerate((1, ROWS, 2)):
        case.poison()
        case.run(turn, live=live, saved=1)
        case.judge(live)
    assert (case.memory.get("epochs") == 3).all()


def test_rows_of_many_passes_and_blocks_that_finish_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth pass waits for the second phase of a barrier."""
    case = Case(monkeypatch, rows=50, live=49, exchange="two_shot", rows_each=8)
    assert case.launch.blocks == 16
    for live in (49, 3):
        case.poison()
        case.run(live=live)
        case.judge(live)


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(
    ("change", "table", "phase", "says"),
    [
        pytest.param({"exchange": "one_shot"}, "latents", Phase.PARTIAL, "rank 2 did not publish its partial sums", marks=pytest.mark.slow),
        pytest.param({"exchange": "two_shot"}, "shares", Phase.PARTIAL, "rank 2 did not publish its partial sums", marks=pytest.mark.slow),
        ({"exchange": "two_shot"}, "totals", Phase.TOTAL, "rank 2 did not publish the sums of its columns"),
        pytest.param({"exchange": "one_shot"}, "deltas", Phase.COLUMNS, "rank 2 did not publish its columns", marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_a_rank_that_did_not_publish_is_named_and_the_launch_ends(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], table: str, phase: Phase, says: str
) -> None:
    """What goes to slot 2 goes elsewhere; nobody sends garbage on, and the next launch publishes nothing."""
    case = Case(monkeypatch, **change)
    limit = case.at["health"] + 4 * LIMIT
    case.memory.data[limit : limit + 4].view(np.int32)[0] = 1_000_000
    elsewhere = case.memory.add("elsewhere", np.zeros(case.memory.places[table][2], dtype=np.int32))
    at = case.at[f"{table}_targets"]
    case.memory.data[at : at + 16 * TP].view(np.int64).reshape(TP, 2)[2, 0] = elsewhere
    case.run(tick=5000)
    report = read(case.memory.get("health").tolist())
    assert report is not None and report.epoch == 1 and report.missed[phase] == (2,)
    assert says in report.message()
    if table != "deltas":
        assert not case.memory.get("deltas").any(), "columns were published that came of a wait that gave up"
    held = {name: case.memory.get(name) for name in ("latents", "shares", "deltas")}
    case.run(tick=5000)
    assert all((case.memory.get(name) == before).all() for name, before in held.items())
