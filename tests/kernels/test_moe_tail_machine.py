"""The tail's kernel as the compiler made it, run on the CPU by :mod:`ptx_machine`: the twin's bits over loopback."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from k3lab.kernels.transports import target_rows

from .moe_tail_case import FAMILY, FUSED, config, factors_of, judge, problem, twin, whole_numbers
from .ptx_machine import Memory, Step
from .test_experts_machine import bits
from .test_output_projection_machine import ProjectionMachine

TP, ROWS, LIVE = 4, 3, 2
SMALL = {"hidden": 512, "latent": 256, "blocks": 3}


class TailMachine(ProjectionMachine):
    """With the instructions that this kernel adds."""

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

    def __init__(self, monkeypatch: Any, rows: int = ROWS, live: int = LIVE, exact: bool = True, **change: Any) -> None:
        from k3lab.kernels import cute_compile

        self.one, self.live = problem(rows, TP, **SMALL), live
        self.config = config(self.one, **{"split_k": 4, "at_once": 4, **change})
        self.exchange = str(self.config["exchange"])
        self.factors = factors_of(TP, self.exchange)
        texts: list[str] = []
        count = cute_compile.parameter_count
        with monkeypatch.context() as patch:
            patch.setattr(cute_compile, "parameter_count", lambda ptx: texts.append(ptx) or count(ptx))
            self.compiled = FUSED.compile(self.one, self.config, "sm_90a")
        (self.text,), (self.launch,) = texts, self.compiled.launches
        self.memory, self.at = Memory(1 << 23), {}
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
                slot = 4 * math.prod(self.memory.places[buffer.targets_of][2]) // TP
                first = self.at[buffer.targets_of]
                lines = target_rows([first + rank * slot for rank in range(TP)], self.factors)
                self.at[buffer.name] = self.memory.add(buffer.name, np.array(lines, dtype=np.int64))

    def run(self, seed: int = 0, tick: int = 0, live: int | None = None, saved: int | None = None) -> TailMachine:
        integers = {"rows": live or self.live, "blocks": saved or self.one.blocks}
        values = [integers[arg.name] if arg.kind == "int32" else self.at.get(arg.name, 0) for arg in self.launch.args]
        machine = TailMachine(
            self.text, self.memory.data, values, self.launch.threads, self.launch.cluster_blocks, self.launch.shared_bytes,
            seed=seed, tick=tick,
        )  # fmt: skip
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
        assert {one for one in machine.before_wait if not one.startswith("ld.global.L1_no_allocate")} == set()
        case.judge()
        assert (case.memory.get("epochs") == turn + 1).all()
