"""The experts' CuTe DSL kernel as the compiler made it, run on the CPU by :mod:`ptx_machine`: the twin's bits, launch after launch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from k3lab.kernels.experts import cute_experts, cute_parts
from k3lab.kernels.experts.cute_engine import CuteEngine, plan_of
from k3lab.kernels.health import LIMIT, Phase, read

from .experts_case import FAMILY, exact_inputs, exact_outputs, exact_problem
from .ptx_machine import Machine, Memory, Step

WIDTHS = {"latent": 512, "hidden": 512, "intermediate": 64, "shared_intermediate": 64, "experts": 12, "top_k": 3}
BEFORE = {"ld.global.L1_no_allocate.L2_cache_hint.v4.u32"}
CONFIG = {
    "warps": 4,
    "depth": 2,
    "x_depth": 2,
    "tasks": 2,
    "per_sm": 1,
    "reserved": 0,
    "sms": 2,
    "early": "none",
    "release": "loads",
    "k_order": "free",
}


class ExpertsMachine(Machine):
    """With the instructions that this kernel adds."""

    flushes = False
    """Whether its tensor core takes subnormals for zeros."""
    multiplies = False
    looks = 0
    """At the clock, by a thread."""
    late = 0
    """Instructions of others for which block 0 stands still behind its dependency wait."""
    left = -1
    ahead: frozenset[int] = frozenset()
    """Addresses that some thread touched before its dependency wait."""

    def note(self, step: Step, who: np.ndarray) -> None:
        super().note(step, who)
        if step.name[0] in ("ld", "st"):
            waiting = who[~self.waited[who]]
            self.ahead |= set(self.address(step.args[step.name[0] == "ld"], waiting, "u64").tolist())

    def execute(self, place: int, who: np.ndarray) -> None:
        super().execute(place, who)
        first = self.local == 0
        self.left -= 1
        if self.late and self.waited[first].all() and not self.stopped[first].any():
            self.stopped[first], self.left, self.late = True, self.late, 0
        if self.left == 0:
            self.stopped[first] = False

    def get(self, name: str, who: np.ndarray, kind: str) -> np.ndarray:
        self.looks += len(who) if name == "%globaltimer" else 0
        return super().get(name, who, kind)

    def do_mma(self, step: Step, who: np.ndarray, place: int) -> None:
        self.multiplies = True
        super().do_mma(step, who, place)
        self.multiplies = False

    def bf16(self, name: str, who: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        both = super().bf16(name, who)
        if not (self.flushes and self.multiplies):
            return both
        low, high = (np.where(np.abs(one) < np.float32(2.0**-126), np.float32(0), one) for one in both)
        return low, high

    def do_lop3(self, step: Step, who: np.ndarray) -> None:
        a, b, c = (self.get(arg, who, "u32") for arg in step.args[1:4])
        table, found = int(step.args[4], 0), np.zeros(len(who), dtype=np.uint32)
        for place in range(8):
            if table >> place & 1:
                part = (a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c)
                found |= part
        self.put(step.args[0], who, found)

    def do_shf(self, step: Step, who: np.ndarray) -> None:
        assert step.name[1:3] == ("l", "wrap")
        low, high = (self.get(arg, who, "u32").astype(np.uint64) for arg in step.args[1:3])
        by = self.get(step.args[3], who, "u32").astype(np.uint64) & np.uint64(31)
        whole = (high << np.uint64(32) | low) << by
        self.put(step.args[0], who, (whole >> np.uint64(32)).astype(np.uint32))

    def do_ex2(self, step: Step, who: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, np.exp2(self.get(step.args[1], who, "f32")))

    def do_mul(self, step: Step, who: np.ndarray) -> None:
        if step.name[-1] != "bf16x2":
            super().do_mul(step, who)
            return
        halves = [self.bf16(arg, who) for arg in step.args[1:3]]
        with np.errstate(all="ignore"):
            low, high = (self.rounded(a * b) for a, b in zip(*halves, strict=True))
        self.put(step.args[0], who, high << np.uint32(16) | low)

    def do_red(self, step: Step, who: np.ndarray) -> None:
        if "shared" not in step.name:
            super().do_red(step, who)
            return
        at, value = self.address(step.args[0], who, "u32"), self.get(step.args[1], who, "u32")
        for thread, one, bits in zip(who, at, value, strict=True):
            self.shared[self.local[thread], one : one + 4].view(np.uint32)[0] |= bits

    def do_ld(self, step: Step, who: np.ndarray) -> None:
        if step.name[-1] != "b128":
            super().do_ld(step, who)
            return
        at = self.address(step.args[1], who, "u64")
        assert (at % 16 == 0).all() and self.may_meet(at, who)
        found = np.ascontiguousarray(self.memory[at[:, None] + np.arange(16)]).view(np.uint64)
        for half in range(2):
            self.put(f"{step.args[0]}:{half}", who, found[:, half])

    def may_meet(self, at: np.ndarray, who: np.ndarray) -> bool:
        """Packets are polled and published behind the dependency wait: until then launches before may be at their places."""
        return bool(self.waited[who].all())

    def do_st(self, step: Step, who: np.ndarray) -> None:
        if step.name[-1] != "b128":
            super().do_st(step, who)
            return
        at = self.address(step.args[0], who, "u64")
        assert (at % 16 == 0).all() and self.may_meet(at, who)
        both = np.stack([self.get(f"{step.args[1]}:{half}", who, "u64") for half in range(2)], axis=1)
        self.memory[at[:, None] + np.arange(16)] = np.ascontiguousarray(both).view(np.uint8)

    def do_mov(self, step: Step, who: np.ndarray) -> None:
        if step.name[-1] != "b128":
            super().do_mov(step, who)
            return
        targets, sources = self.words(step.args[0]), self.words(step.args[1])
        targets = targets if len(targets) == 2 else [f"{targets[0]}:{half}" for half in range(2)]
        sources = sources if len(sources) == 2 else [f"{sources[0]}:{half}" for half in range(2)]
        for target, source in zip(targets, sources, strict=True):
            self.put(target, who, self.get(source, who, "u64"))


def compiled_ptx(problem: Any, config: dict[str, Any], monkeypatch: Any) -> tuple[Any, str]:
    """(compiled, PTX text of its kernel)."""
    import k3lab.kernels.cute_compile as compiler
    from cutlass import cute

    texts = []

    def compile_(*args: Any, **options: Any) -> Any:
        made = cute.compile(*args, **options)
        text = made.artifacts.PTX
        texts.append(text if isinstance(text, str) else text.decode())
        return made

    fake = type("cute", (), {"compile": staticmethod(compile_)})
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "cute", fake)
        compiled = CuteEngine().compile(problem, config, "sm_90a")
    return compiled, texts[-1]


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()


CASES = {
    "both experts, fewer rows than compiled for": ({"rows": 5, "kind": "bf16"}, {}, 3),
    "the shared expert first, fewer rows than compiled for": ({"rows": 5, "kind": "bf16"}, {"early": "shared"}, 3),
    "a block for the shared expert alone": (
        {"rows": 2, "kind": "bf16", "intermediate": 32},
        {"tasks": 4, "sms": 3, "reserved": 1},
        2,
    ),
    "one row": ({"rows": 1, "kind": "bf16"}, {}, 1),
    "one row, the shared expert first": ({"rows": 1, "kind": "bf16"}, {"early": "shared", "depth": 4, "x_depth": 4}, 1),
    "one row, second products where first ones are fewer": (
        {"rows": 1, "intermediate": 32},
        {"warps": 8, "tasks": 1, "sms": 5},
        1,
    ),
    "one row, units dealt by what is left": (
        {"rows": 1, "kind": "bf16", "intermediate": 32, "shared_intermediate": 32},
        {"tasks": 4, "sms": 10},
        1,
    ),
    "one row, units dealt by what is left, the shared expert first": (
        {"rows": 1, "kind": "bf16", "intermediate": 32, "shared_intermediate": 32},
        {"tasks": 4, "sms": 10, "early": "shared"},
        1,
    ),
    "more rows of an expert than an item has": (
        {"rows": 11, "top_k": 1, "experts": 2, "intermediate": 32},
        {"tasks": 1, "depth": 4},
        11,
    ),
    "more than 32 rows": ({"rows": 34, "top_k": 1, "intermediate": 32}, {"tasks": 4, "x_depth": 4}, 34),
}


@dataclasses.dataclass
class Launched:
    """A compiled problem with its tensors in a machine's memory."""

    problem: Any
    live: int
    inputs: dict[str, torch.Tensor]
    compiled: Any
    text: str
    memory: Memory
    at: dict[str, int]

    def run(self, seed: int, tick: int = 0, flushes: bool = False, late: int = 0, early: int = 0) -> ExpertsMachine:
        (launch,) = self.compiled.launches
        for one, (shape, _) in FAMILY.output_specs(self.problem).items():
            self.memory.data[self.at[one] : self.at[one] + 2 * math.prod(shape)] = 0xFF
        given = {**self.at, "rows": self.live, "early": early}
        values = [given.get(arg.name, 0) for arg in launch.args]
        machine = ExpertsMachine(self.text, self.memory.data, values, launch.threads, 1, launch.shared_bytes, seed=seed)
        machine.tick, machine.flushes, machine.late = tick, flushes, late
        machine.run(0, launch.grid[0])
        assert self.memory.guards_hold()
        return machine


def launched(monkeypatch, change: dict[str, Any], chosen: dict[str, Any], live: int) -> Launched:
    change = {**WIDTHS, **change}
    problem = exact_problem(change.pop("rows"), change.pop("kind", "routed"), **change)
    config = {**CONFIG, **chosen}
    assert CuteEngine().refuses(problem, "sm_90a") is None and plan_of(problem, config).refusal() is None
    compiled, text = compiled_ptx(problem, config, monkeypatch)
    memory, at = Memory(1 << 23), {}
    inputs = exact_inputs(problem, 3)
    for one, tensor in inputs.items():
        given = tensor.clone()
        if one in ("latent", "x"):
            given[live:] = float("nan")
        at[one] = memory.add(one, bits(given))
    for one, (shape, _) in FAMILY.output_specs(problem).items():
        at[one] = memory.add(one, np.full(shape, 0x7FFF, dtype=np.int16))
    for buffer in compiled.buffers:
        kind = np.int16 if buffer.dtype == "bfloat16" else np.int32
        at[buffer.name] = memory.add(buffer.name, np.full(buffer.shape, 0 if buffer.persistent else 0x7FFF, dtype=kind))
    return Launched(problem, live, inputs, compiled, text, memory, at)


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel_has_the_twins_bits(monkeypatch, name):
    made = launched(monkeypatch, *CASES[name])
    problem, live = made.problem, made.live
    for turn in range(2 if problem.has_shared else 1):
        early = turn if made.compiled.config["early"] == "shared" else 0
        machine = made.run(turn, early=early)
        if early:  # x is older than the launch before; what its first products leave is read by later launches alone
            assert made.memory.touched(machine.ahead) == {"gate_up", "x", "epochs", "wide", "done"}
        else:
            assert set(machine.before_wait) == (BEFORE if problem.has_shared else set())
        assert (made.memory.get("epochs") == turn + 1).all() and not made.memory.get("health").any()
        for one, wanted in exact_outputs(problem, made.inputs).items():
            got = torch.from_numpy(made.memory.get(one)).view(torch.bfloat16)
            assert torch.equal(got[:live].view(torch.int16), wanted[:live].view(torch.int16)), one
            assert got[live:].isnan().all(), f"{one} was written beyond its rows"


@pytest.mark.parametrize("how", ["a row names an expert twice", "all rows name one expert alone"])
def test_routings_that_no_router_makes(monkeypatch, how):
    made = launched(monkeypatch, {"rows": 9, "kind": "routed", "intermediate": 32}, {"tasks": 4}, 9)
    ids = made.inputs["ids"]
    if how == "a row names an expert twice":
        ids[:, 1], ids[3, 2] = ids[:, 0], ids[3, 0]
    else:
        ids[:] = 5
    made.memory.data[made.at["ids"] :][: 4 * ids.numel()] = ids.contiguous().view(torch.uint8).numpy().reshape(-1)
    made.run(0)
    (wanted,) = exact_outputs(made.problem, made.inputs).values()
    assert np.array_equal(made.memory.get("latent_partial").view(np.int16), bits(wanted))


def test_blocks_that_wait_for_one_that_never_publishes_give_up_and_say_so(monkeypatch):
    made = launched(monkeypatch, {"rows": 1, "kind": "routed", "intermediate": 32}, {"tasks": 4}, 1)
    limit = made.at["health"] + 4 * LIMIT
    made.memory.data[limit : limit + 4].view(np.int32)[0] = 1_000_000
    first = made.at["epochs"]
    made.memory.data[first : first + 4].view(np.int32)[0] = 40  # block 0 publishes under another epoch than block 1
    made.run(0, tick=200)
    report = read(made.memory.get("health").tolist())
    assert report is not None and report.phase is Phase.ROW and report.epoch in (1, 41)
    assert "a block of this GPU did not publish" in report.message()


def test_waits_that_look_at_the_clock_before_their_limit_go_on(monkeypatch):
    """At every poll in place of every thousandth, for a block that is late."""
    monkeypatch.setattr(cute_parts, "POLLS_A_LOOK", 1)
    made = launched(monkeypatch, *CASES["both experts, fewer rows than compiled for"])
    machine = made.run(0, tick=1, late=12_000)
    assert machine.looks > 0 and not made.memory.get("health").any()
    for one, wanted in exact_outputs(made.problem, made.inputs).items():
        got = torch.from_numpy(made.memory.get(one)).view(torch.bfloat16)[: made.live]
        assert torch.equal(got.view(torch.int16), wanted[: made.live].view(torch.int16)), one


@pytest.mark.parametrize("lifted", [0, 126])
def test_a_tensor_core_that_flushes_subnormals_needs_lifted_operands(monkeypatch, lifted):
    """The switch of :data:`k3lab.kernels.experts.layout.LIFTED`; on tensor cores that take subnormals, both are the twin's bits."""
    weight, activation = lifted - 126, 0 if lifted else 100
    monkeypatch.setattr(cute_parts, "LIFTED", lifted)
    monkeypatch.setattr(cute_parts, "LIFTED_WORD", (lifted + 127) * 0x00800080)
    monkeypatch.setattr(cute_parts, "ACTIVATION_EXPONENT", activation)
    monkeypatch.setattr(cute_parts, "ACTIVATION_WORD", (activation + 127) * 0x00800080)
    monkeypatch.setattr(cute_experts, "UNSCALE", 2.0 ** -(weight + activation))
    monkeypatch.setattr(cute_experts, "ACTIVATION", 2.0**activation)
    change = {"rows": 2, "kind": "routed", "intermediate": 32}
    made = launched(monkeypatch, change, {"tasks": 4}, 2)
    (wanted,) = exact_outputs(made.problem, made.inputs).values()
    for flushes in (False, True):
        made.run(0, flushes=flushes)
        got = torch.from_numpy(made.memory.get("latent_partial")).view(torch.bfloat16)
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16)) == (bool(lifted) or not flushes)
