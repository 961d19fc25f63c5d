"""AttnRes' CuTe DSL kernel on the PTX machine: problems, a launch, what must come out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from k3lab.kernels import K3, family
from k3lab.kernels.attn_res.family import AttnRes
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.compare import compare

from .lm_head_case import compiled_ptx
from .ptx_machine import Memory, Step
from .test_experts_machine import ExpertsMachine, bits

FAMILY = family("attn_res")
CUTE, TRITON = FAMILY.engine("cute_cluster"), FAMILY.engine("triton")
H200 = gpu_card("H200")


class RowMachine(ExpertsMachine):
    """With the reciprocal root, and what a product leaves when it is rounded to BF16."""

    def do_fma(self, step: Step, who: np.ndarray) -> None:
        if step.name[-1] != "bf16x2":
            super().do_fma(step, who)
            return
        halves = [[half.astype(np.float64) for half in self.bf16(arg, who)] for arg in step.args[1:4]]
        with np.errstate(all="ignore"):
            low, high = (self.rounded((a * b + c).astype(np.float32)) for a, b, c in zip(*halves, strict=True))
        self.put(step.args[0], who, high << np.uint32(16) | low)

    def do_rsqrt(self, step: Step, who: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, np.float32(1) / np.sqrt(self.get(step.args[1], who, "f32")))


def problem(rows: int, kind: str = "blocks", **changes: Any) -> AttnRes:
    made = dataclasses.replace(FAMILY.problem(K3, tp=16, rows=rows, kind=kind), **changes)
    assert isinstance(made, AttnRes)
    return made


def config(one: AttnRes, **changes: Any) -> dict[str, Any]:
    return {**CUTE.space(one, H200).default, **changes}


def spread(one: AttnRes, seed: int) -> dict[str, torch.Tensor]:
    """Sources of every magnitude, and scores far enough apart that each source's weight shows."""
    inputs = FAMILY.inputs(one, seed)
    if "blocks" in inputs:
        scale = 2.0 ** torch.arange(-3, one.blocks - 3).float()
        inputs["blocks"] = (inputs["blocks"].float() * scale[:, None, None]).to(torch.bfloat16)
    return inputs


def with_fewer(one: AttnRes, inputs: dict[str, torch.Tensor], saved: int) -> torch.Tensor:
    """The twin of a step that has saved only so many blocks."""
    fewer = dataclasses.replace(one, blocks=saved)
    return FAMILY.twin(fewer, {**inputs, "blocks": inputs["blocks"][:saved]})["out"]


@dataclasses.dataclass
class Run:
    """A launch on the machine, poisoned output, dead rows of NaN."""

    one: AttnRes
    live: int
    wanted: torch.Tensor
    memory: Memory
    machine: RowMachine

    @property
    def out(self) -> torch.Tensor:
        return torch.from_numpy(self.memory.get("out")).view(torch.bfloat16)

    def check(self) -> None:
        """Live rows are the twin's within the family's bounds, row by row; dead rows were not written."""
        for row in range(self.live):
            result = compare(
                "out", self.out[row : row + 1], self.wanted[row : row + 1], FAMILY.tolerance(self.one, "out")
            )
            assert result.ok, f"row {row}: {result.message}"
        assert bool(self.out[self.live :].isnan().all())


def run(
    one: AttnRes, monkeypatch: Any, live: int | None = None, saved: int | None = None, inputs: dict[str, torch.Tensor] | None = None,
    seed: int = 1, **changes: Any,
) -> Run:  # fmt: skip
    """One launch, cluster after cluster; ``saved``: blocks that this call has, the others NaN."""
    compiled, text = compiled_ptx(CUTE, one, config(one, **changes), monkeypatch)
    (launch,) = compiled.launches
    live, inputs = live or one.rows, inputs or spread(one, seed)
    saved = one.blocks if saved is None else saved
    memory, at = Memory(1 << 22), {}
    for name, tensor in inputs.items():
        given = tensor.clone()
        if name == "prefix":
            given[live:] = float("nan")
        if name == "blocks":
            given[saved:], given[:, live:] = float("nan"), float("nan")
        at[name] = memory.add(name, bits(given))
    at["out"] = memory.add("out", bits(torch.full((one.rows, one.hidden), float("nan"), dtype=torch.bfloat16)))
    numbers = {"rows": live, "blocks": saved}
    values = [numbers[arg.name] if arg.kind == "int32" else at[arg.name] if arg.name else 0 for arg in launch.args]
    cluster = launch.cluster[0]
    machine = RowMachine(text, memory.data, values, launch.threads, cluster, launch.shared_bytes, seed=seed)
    for first in range(0, launch.grid[0], cluster):
        machine.run(first, cluster)
    assert memory.guards_hold()
    wanted = FAMILY.twin(one, inputs)["out"] if saved == one.blocks else with_fewer(one, inputs, saved)
    return Run(one, live, wanted, memory, machine)
