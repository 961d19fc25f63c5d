"""Inputs of the experts whose every sum is exact in FP32, so that a correct kernel has the twin's bits; and a launch of an engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from k3lab.kernels import K3, family
from k3lab.kernels.experts.family import Experts
from k3lab.kernels.experts.layout import LOADED, places, unload, unload_shared
from k3lab.kernels.experts.twin import routed, shared

FAMILY = family("experts")
LARGE = 2.0**20
"""Betas with which SiTU is gate times up, where the gate is large."""
NONZERO = 8
"""Activations of a row that are not zero."""


def exact_problem(rows: int, kind: str = "routed", tp: int = 16, **change: Any) -> Experts:
    one = FAMILY.problem(K3, tp=tp, rows=rows, kind=kind)
    assert isinstance(one, Experts)
    return dataclasses.replace(one, beta=LARGE, linear_beta=LARGE, **change)


def gate_masks() -> tuple[torch.Tensor, torch.Tensor]:
    """(and, or) for 16 bytes of a lane: codes of tile 0 become 4 or 6, both positive."""
    keep, put = [0xFF] * 16, [0] * 16
    for code in range(16):  # the two halves of the eight operands of tile 0
        sign, high, low = (places()[4 * code + bit] for bit in (3, 2, 1))
        keep[sign // 8] &= ~(1 << sign % 8) & 0xFF
        for bit in (high, low):
            put[bit // 8] |= 1 << bit % 8
    return torch.tensor(keep, dtype=torch.uint8), torch.tensor(put, dtype=torch.uint8)


def sparse(rows: int, width: int, generator: torch.Generator, most: int) -> torch.Tensor:
    found = torch.zeros(rows, width)
    for row in found:
        row[torch.randperm(width, generator=generator)[:NONZERO]] = 1.0
    if most > 1:
        found *= torch.randint(1, most + 1, found.shape, generator=generator)
    return found.bfloat16()


def exact_inputs(problem: Experts, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Gates of 32 to 48, ups that are multiples of a half, hidden values that are whole; weights powers of two."""
    generator = torch.Generator().manual_seed(seed)
    inputs = FAMILY.inputs(problem, seed, device)
    keep, put = (one.to(device).repeat(32) for one in gate_masks())
    inputs["w13"] &= keep
    inputs["w13"] |= put
    inputs["w13_scale"].fill_(127)
    inputs["w2_scale"] = inputs["w2_scale"] % 3 + 126
    inputs["latent"] = sparse(problem.rows, problem.latent, generator, 1).to(device)
    exponents = torch.randint(-2, 1, inputs["weights"].shape, generator=generator)
    inputs["weights"] = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents).to(device)
    if problem.has_shared:
        inputs["x"] = sparse(problem.rows, problem.hidden, generator, 2).to(device)
        whole = torch.Generator(device).manual_seed(seed)
        gate_up = inputs["gate_up"].unflatten(-1, (2, 128))
        gate_up[..., 0, :] = torch.randint(3, 5, gate_up[..., 0, :].shape, generator=whole, device=device).bfloat16()
        gate_up[..., 1, :] = torch.randint(-3, 4, gate_up[..., 1, :].shape, generator=whole, device=device).bfloat16()
        down = torch.randint(-3, 4, inputs["down"].shape, generator=whole, device=device)
        inputs["down"] = (down / 64).bfloat16()
    return inputs


def exact_outputs(problem: Experts, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The twin's, with its roundings."""
    chosen, ids = torch.unique(inputs["ids"], return_inverse=True)
    experts = unload({name: inputs[name][chosen] for name in LOADED})
    betas = {"beta": problem.beta, "linear_beta": problem.linear_beta}
    asked = {**betas, "activations": problem.activations}
    found = {"latent_partial": routed(inputs["latent"], ids, inputs["weights"], experts, **asked)}
    if problem.has_shared:
        found["shared_partial"] = shared(inputs["x"], *unload_shared(inputs["gate_up"], inputs["down"]), **betas)
    return found


class Case:
    """An engine compiled for a problem, its runner, exact inputs and what they should become."""

    def __init__(self, device: Any, problem: Experts, engine: Any, seed: int = 0, **change: Any) -> None:
        from k3lab.kernels.health import NAME, set_limit
        from k3lab.kernels.launch import Runner

        space = engine.space(problem, device.need_card())
        self.config = {**space.default, **change}
        assert space.illegal(self.config) is None, space.illegal(self.config)
        self.problem = problem
        self.runner = Runner(engine.compile(problem, self.config, device.arch))
        if NAME in self.runner.buffers:
            set_limit(self.runner.buffers, 2.0)
        self.outputs = {
            name: torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for name, (shape, _) in FAMILY.output_specs(problem).items()
        }
        self.give(seed)

    def give(self, seed: int, ids: torch.Tensor | None = None) -> None:
        """Other inputs."""
        self.inputs = exact_inputs(self.problem, seed, "cuda")
        if ids is not None:
            self.inputs["ids"] = ids.to("cuda", torch.int32)
        self.wanted = {name: value.cpu() for name, value in exact_outputs(self.problem, self.inputs).items()}

    def run(self, rows: int | None = None, pdl: bool | None = None) -> None:
        from k3lab.kernels.health import check_health

        for tensor in self.outputs.values():
            tensor.fill_(float("nan"))
        self.runner.bind({**self.inputs, **self.outputs}, rows=rows, pdl=pdl)()
        torch.cuda.synchronize()
        check_health(self.runner.buffers)

    def judge(self, rows: int | None = None) -> None:
        """To the bit; rows beyond the live ones are not written."""
        rows = rows or self.problem.rows
        for name, wanted in self.wanted.items():
            got = self.outputs[name].cpu()
            wrong = (got[:rows].view(torch.int16) != wanted[:rows].view(torch.int16)).nonzero()
            assert not len(wrong), (
                f"{name}: {len(wrong)} of {wanted[:rows].numel()} wrong, first at {wrong[0].tolist()}: "
                f"{got[tuple(wrong[0])].item()}, not {wanted[tuple(wrong[0])].item()}"
            )
            assert got[rows:].isnan().all(), f"{name} was written beyond its {rows} rows"
