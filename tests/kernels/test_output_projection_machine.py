"""The output projection's kernels as the compiler made them, run on the CPU by :mod:`ptx_machine`: the twin's bits over loopback."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from k3lab.kernels.health import LIMIT, Phase, read
from k3lab.kernels.transports import target_rows

from .output_projection_case import exact_input, twin, whole_numbers, worst
from .ptx_machine import Memory, Step
from .test_experts_machine import ExpertsMachine, bits
from .test_output_projection_engines import FAMILY, FUSED, SPLIT, config, problem

ROWS, LIVE, TP = 2, 1, 4
FACTORS = [-1.0, 2.0, -0.5, 1.0]
AT_ONCE = 32
"""Blocks of the producer that run side by side: they do not wait for each other."""


class ProjectionMachine(ExpertsMachine):
    """With the instructions that these kernels add. A multicast store goes where its address says: one rank's slot."""

    maps: dict[int, tuple[tuple[int, ...], tuple[int, int]]]
    """What a tensor map tells: by address, the tensor's shape and the box of a copy."""
    free: tuple[int, int] = (0, 0)
    """Where packets may be met before it: scalars, by a launch that was told that their readers have ended."""

    def may_meet(self, at: np.ndarray, who: np.ndarray) -> bool:
        return super().may_meet(at, who) or bool(((at >= self.free[0]) & (at < self.free[1])).all())

    def do_rsqrt(self, step: Step, who: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, np.float32(1) / np.sqrt(self.get(step.args[1], who, "f32")))

    def do_bar(self, step: Step, who: np.ndarray, place: int) -> None:
        """Also with threads that arrive and go on."""
        if step.name[1] == "warp":
            super().do_bar(step, who, place)
            return
        size = int(self.get(step.args[1], who[:1], "u32")[0]) if len(step.args) > 1 else self.block
        keys = self.local[who] * 16 + self.get(step.args[0], who, "u32").astype(np.int64)
        for key in np.unique(keys):
            mine, waiting, gone = who[keys == key], self.met[("bar", int(key))], self.met[("arrived", int(key))]
            if "arrive" in step.name:
                gone.update(mine.tolist())
                self.pc[mine] = place + 1
            else:
                waiting.update(mine.tolist())
                self.stopped[mine] = True
            if len(waiting) + len(gone) == size:
                done = np.array(sorted(waiting))
                self.stopped[done] = False
                self.pc[done] += 1
                waiting.clear()
                gone.clear()

    def do_barrier(self, step: Step, who: np.ndarray, place: int) -> None:
        (super().do_barrier if "cluster" in step.name else self.do_bar)(step, who, place)

    def do_multimem(self, step: Step, who: np.ndarray) -> None:
        self.do_st(dataclasses.replace(step, name=step.name[1:]), who)


class Case:
    """A compiled pair of launches with its tensors in a machine's memory; dead rows of activations are NaN."""

    kind = ProjectionMachine

    def __init__(self, monkeypatch: Any, engine: Any = SPLIT, rows: int = ROWS, width: int = 0, **change: Any) -> None:
        from k3lab.kernels import cute_compile

        self.one = problem(rows, TP, width=width or (256 if engine is SPLIT else 192), blocks=2)
        shape = {"warps_k": 8, "mixers": 16} if engine is SPLIT else {}
        self.config = config(self.one, engine, **{"depth": 1, **shape, **change})
        self.texts: list[str] = []
        count = cute_compile.parameter_count
        with monkeypatch.context() as patch:
            patch.setattr(cute_compile, "parameter_count", lambda ptx: self.texts.append(ptx) or count(ptx))
            self.compiled = engine.compile(self.one, self.config, "sm_90a")
        self.memory, self.at = Memory(1 << 24), {}
        self.inputs = whole_numbers(self.one, 3)
        axes = FAMILY.row_axes(self.one)
        for name, tensor in self.inputs.items():
            given = tensor.clone()
            if name in axes:
                given.narrow(axes[name], LIVE, rows - LIVE).fill_(float("nan"))
            self.at[name] = self.memory.add(name, bits(given))
        for name, (shape, _) in FAMILY.output_specs(self.one).items():
            self.at[name] = self.memory.add(name, np.full(shape, 0x7FFF, dtype=np.int16))
        for buffer in self.compiled.buffers:
            if not buffer.targets_of:
                self.at[buffer.name] = self.memory.add(buffer.name, np.zeros(buffer.shape, dtype=np.int32))
        for buffer in self.compiled.buffers:
            if buffer.targets_of:
                slot = 4 * math.prod(self.memory.places[buffer.targets_of][2]) // TP
                first = self.at[buffer.targets_of]
                lines = np.array(target_rows([first + rank * slot for rank in range(TP)], FACTORS), dtype=np.int64)
                self.at[buffer.name] = self.memory.add(buffer.name, lines)

    def run(
        self, place: int, blocks: int, seed: int = 0, tick: int = 0, saved: int | None = None, early: int = 0
    ) -> list[ProjectionMachine]:
        """One of the launches, so many blocks side by side; of the saved blocks all count, or the first ``saved``."""
        launch, ran = self.compiled.launches[place], []
        integers = {"rows": LIVE, "blocks": saved or self.one.blocks, "early": early}
        values = [integers[arg.name] if arg.kind == "int32" else self.at.get(arg.name, 0) for arg in launch.args]
        for first in range(0, launch.blocks, blocks):
            machine = self.kind(
                self.texts[place], self.memory.data, values, launch.threads, launch.cluster_blocks, launch.shared_bytes,
                seed=seed, tick=tick,
            )  # fmt: skip
            mapped = [arg for arg in launch.args if arg.kind == "tensor_map"]
            machine.maps = {self.at[arg.name]: (self.memory.places[arg.name][2], arg.box) for arg in mapped}
            if early:
                at, _, shape = self.memory.places["scalars"]
                machine.free = (at, at + 4 * math.prod(shape))
            machine.run(first, blocks)
            ran.append(machine)
        assert self.memory.guards_hold()
        return ran

    def judge(self) -> None:
        wanted = twin(self.one, self.inputs, FACTORS, self.config.get("exchange"))
        value, bound = exact_input(self.inputs, wanted["prefix_out"], self.one.eps)
        got = {name: torch.from_numpy(self.memory.get(name)).view(torch.bfloat16) for name in FAMILY.outputs}
        assert torch.equal(got["prefix_out"][:LIVE].view(torch.int16), wanted["prefix_out"][:LIVE].view(torch.int16))
        reason = worst(got["mlp_input"][:LIVE], value[:LIVE], bound[:LIVE])
        assert reason is None, reason
        assert all(tensor[LIVE:].isnan().all() for tensor in got.values())


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"packet": "b32e32"},
        {"packet": "b32e32", "exchange": "two_shot"},
        pytest.param({"exchange": "two_shot"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_both_launches_have_the_twins_bits(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    case = Case(monkeypatch, **change)
    for turn in range(2 if not change else 1):
        for name in FAMILY.outputs:
            at, _, shape = case.memory.places[name]
            case.memory.data[at : at + 2 * math.prod(shape)] = 0xFF
        for machine in case.run(0, AT_ONCE, turn):
            assert set(machine.before_wait) <= {"ld.global.L1_no_allocate.L2_cache_hint.v4.u32"}
        case.run(1, case.compiled.launches[1].blocks, turn)
        case.judge()
        assert (case.memory.get("epochs") == turn + 1).all() and not case.memory.get("health").any()


# early or not
@pytest.mark.parametrize(("rehearse", "early"), [(0, 0), (1, 1)])
def test_one_launch_of_128_blocks_that_wait_for_each_other_has_the_twins_bits(
    monkeypatch: pytest.MonkeyPatch, rehearse: int, early: int
) -> None:
    """``early``: what mixers read before the dependency wait is older than the launch before, and nothing of it is x."""
    case = Case(monkeypatch, FUSED, rows=1, packet="b32e32", rehearse=rehearse)
    (machine,) = case.run(0, case.compiled.launches[0].blocks, early=early)
    case.judge()
    weights = {"w_o", "res_norm", "res_proj", "norm_w"}
    older = {"prefix", "blocks", "epochs"} if early else set()
    assert case.memory.touched(machine.ahead) == weights | older
    assert (case.memory.get("epochs") == 1).all() and not case.memory.get("health").any()


@pytest.mark.parametrize(("form", "saved"), [("bf16x7e16", 2), ("b32e32", 1)])
def test_a_consumer_alone_finds_its_inputs_ready(monkeypatch: pytest.MonkeyPatch, form: str, saved: int) -> None:
    """With fewer saved blocks than it was compiled for, too: nobody reads what is not saved yet."""
    from k3lab.kernels.output_projection.ready import make_ready

    case = Case(monkeypatch, packet=form)
    buffers = {}
    for name in ("mailbox", "epochs"):
        at, dtype, shape = case.memory.places[name]
        held = case.memory.data[at : at + 4 * math.prod(shape)].view(dtype)
        held[:] = 4 if name == "epochs" else 0
        buffers[name] = torch.from_numpy(held).view(shape)
    partial = (case.inputs["x"].float() @ case.inputs["w_o"].float().T).bfloat16()
    transport = SimpleNamespace(name="loopback", rank=0)
    runner = SimpleNamespace(compiled=case.compiled, buffers=buffers, transport=transport)
    make_ready(runner, torch.stack([partial * factor for factor in FACTORS]))
    at, _, (blocks, *_rest) = case.memory.places["blocks"]
    case.memory.data[at + saved * 2 * ROWS * 7168 : at + blocks * 2 * ROWS * 7168] = 0xFF
    case.run(1, case.compiled.launches[1].blocks, saved=saved)
    case.inputs["blocks"] = case.inputs["blocks"][:saved]
    case.judge()


def test_a_multicast_store_puts_the_partial_into_this_ranks_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through line 0 of the table; the other lines are null, and nothing is written there."""
    from k3lab.kernels.output_projection import common
    from k3lab.kernels.output_projection.ready import packed

    case = Case(monkeypatch, packet="b32e32", stores="multicast")
    at = case.at["mailbox_targets"]
    table = case.memory.data[at : at + 16 * TP].view(np.int64).reshape(TP, 2)
    table[0, 1], table[1:] = 0x3F803F80, 0
    case.run(0, AT_ONCE)
    partial = (case.inputs["x"][:LIVE].float() @ case.inputs["w_o"].float().T).bfloat16()
    box = common.mail(case.one, case.config)[0]
    slots = torch.from_numpy(case.memory.get("mailbox")).view(torch.int16).view(TP, 2, ROWS, box.packets, 4)
    assert torch.equal(slots[0, 1], packed(partial.expand(ROWS, -1).contiguous(), common.form(case.config), 1))
    assert not slots[0, 0].any() and not slots[1:].any()


def names_who_did_not_publish(case: Case) -> None:
    """One rank's packets go elsewhere."""
    limit = case.at["health"] + 4 * LIMIT
    case.memory.data[limit : limit + 4].view(np.int32)[0] = 1_000_000
    elsewhere = case.memory.add("elsewhere", np.zeros(case.memory.places["mailbox"][2], dtype=np.int32))
    at = case.at["mailbox_targets"]
    case.memory.data[at : at + 16 * TP].view(np.int64).reshape(TP, 2)[2, 0] = elsewhere
    case.run(0, AT_ONCE)
    case.run(1, case.compiled.launches[1].blocks, tick=5000)
    report = read(case.memory.get("health").tolist())
    assert report is not None and report.epoch == 1 and report.missed[Phase.PARTIAL] == (2,)
    assert "rank 2 did not publish its partial sums within 0.001 s" in report.message()


@pytest.mark.slow
@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_did_not_publish_is_named_and_the_launch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    names_who_did_not_publish(Case(monkeypatch))
