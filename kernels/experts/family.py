"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract import Engine, Problem, Tensors, Tolerance, Traffic
from ..model_card import ModelCard
from ..mxfp4 import GROUP, ROUNDINGS
from ..twin_family import ITEM_BYTES, Draw, TwinFamily, in_fp32, rounding_tolerance
from .layout import BLOCK_BYTES, LOADED, SCALE_BYTES, SHARED

if TYPE_CHECKING:
    import torch


ROUTED, UNIFORM = "routed", "uniform"
CANDIDATES = 64
"""Choices drawn for a step; the one whose distinct experts are nearest to the profile's is taken."""


@dataclass(frozen=True)
class Experts(Problem):
    """Routed MXFP4 experts and the shared expert, on one rank's slice of the intermediate width."""

    kind: str
    """Both experts in an activation mode, see :data:`k3lab.kernels.mxfp4.ROUNDINGS`, under uniform routing; or ``routed``: weight-only
    and the routed experts alone, under that routing or under a named one (``routed_zipf``)."""
    hidden: int
    latent: int
    experts: int
    top_k: int
    intermediate: int
    """Of a routed expert on one rank."""
    shared_intermediate: int
    """Of the shared expert on one rank."""
    beta: float
    linear_beta: float

    @property
    def label(self) -> str:
        """E.g. ``bf16-tp16-rows8``."""
        return f"{self.kind}-tp{self.tp}-rows{self.rows}"

    @property
    def activations(self) -> str:
        """Mode of the routed experts' activations."""
        return self.kind if self.kind in ROUNDINGS else "bf16"

    @property
    def profile(self) -> str:
        """Routing profile, see :data:`k3lab.kernels.router.profiles.PROFILES`."""
        return self.kind.removeprefix(ROUTED).removeprefix("_") or UNIFORM if self.kind.startswith(ROUTED) else UNIFORM

    @property
    def has_shared(self) -> bool:
        """Whether the shared expert is part of the call."""
        return not self.kind.startswith(ROUTED)

    @property
    def distinct(self) -> float:
        """Experts hit in the mean under the profile."""
        from ..router.profiles import expected_distinct

        return expected_distinct(self.profile, self.experts, self.rows, self.top_k)


class ExpertsFamily(TwinFamily):
    """See :class:`Experts`. Both outputs are this rank's partial sums."""

    name = "experts"
    title = "routed MXFP4 experts and the shared expert"
    outputs = ("latent_partial", "shared_partial")
    rotated = (*LOADED, *SHARED)
    older = ("x",)
    problem_type = Experts
    default_engine = "cute"

    @property
    def engines(self) -> tuple[Engine, ...]:  # type: ignore[override]
        """Built on first use: engine modules are light, their kernels are not."""
        from .engines import ENGINES

        return ENGINES

    @property
    def kinds(self) -> tuple[str, ...]:
        """Activation modes of both experts; the routed ones alone, by routing profile."""
        return (*ROUNDINGS, ROUTED, f"{ROUTED}_zipf", f"{ROUTED}_hot")

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> Experts:
        """See :meth:`Family.problem`; ``kind`` defaults to ``bf16``, what the checkpoint asks for."""
        kind = kind or "bf16"
        self.check(card, tp, rows, kind)
        return Experts(
            tp, rows, kind, card.hidden_size, card.routed_expert_hidden_size, card.num_experts,
            card.num_experts_per_token, card.moe_intermediate_size // tp, card.shared_intermediate_size // tp,
            card.situ_beta, card.situ_linear_beta,
        )  # fmt: skip

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """Random codes under scales that keep the magnitude of what the experts multiply."""
        assert isinstance(problem, Experts)
        rows, hidden, latent, inner = problem.rows, problem.hidden, problem.latent, problem.intermediate
        wide = problem.shared_intermediate

        def codes(*blocks: int) -> Draw:
            return Draw((problem.experts, *blocks, BLOCK_BYTES), dtype="uint8")

        def scale(*blocks: int, width: int) -> Draw:
            # codes have a root mean square of 2.9, near 2^1.5
            exponent = 127 - round(0.5 * math.log2(width) + 1.5)
            shape = (problem.experts, *blocks, SCALE_BYTES)
            return Draw(shape, dtype="uint8", low=exponent, high=exponent + 2)

        first, second = (inner // 16, latent // GROUP), (latent // GROUP, inner // GROUP)

        routed = {
            "latent": Draw((rows, latent)),
            "ids": Draw((rows, problem.top_k), dtype="int32", high=problem.experts),
            "weights": Draw((rows, problem.top_k), dtype="float32", std=0.1 / problem.top_k, mean=1 / problem.top_k),
            "w13": codes(*first),
            "w13_scale": scale(*first, width=latent),
            "w2": codes(*second),
            "w2_scale": scale(*second, width=inner * problem.tp),
        }
        shared = {
            "x": Draw((rows, hidden)),
            "gate_up": Draw((wide // 4, hidden // 32, 256), std=hidden**-0.5),
            "down": Draw((hidden // 8, wide // 32, 256), std=(wide * problem.tp) ** -0.5),
        }
        return {**routed, **shared} if problem.has_shared else routed

    def inputs(self, problem: Problem, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """As drawn, but every token's experts are distinct, and follow the profile: so do the distinct ones of all tokens."""
        from ..router.profiles import draw, frequencies

        assert isinstance(problem, Experts)
        inputs = super().inputs(problem, seed, device)
        share = frequencies(problem.profile, problem.experts)
        best, distance = inputs["ids"], float("inf")
        for turn in range(seed * CANDIDATES, (seed + 1) * CANDIDATES):
            ids = draw(share, problem.rows, problem.top_k, turn)
            away = abs(len(ids.unique()) - problem.distinct)
            if away < distance:
                best, distance = ids, away
            if distance <= 0.5:
                break
        return {**inputs, "ids": best.to(device, inputs["ids"].dtype)}

    def cold_copies(self, problem: Problem, tensors: Tensors, rotate_bytes: int) -> list[dict[str, torch.Tensor]]:
        """Calls that choose other experts each, all of them once before the first ones come again; the shared expert is copied."""
        import torch

        assert isinstance(problem, Experts)
        traffic = self.traffic(problem).weight_bytes
        ids = tensors["ids"]
        chosen = torch.unique(ids).long()
        left = torch.ones(problem.experts, dtype=torch.bool, device=ids.device)
        left[chosen] = False
        ordered = torch.cat([chosen, left.nonzero().flatten()])
        place = torch.empty_like(ordered)
        place[ordered] = torch.arange(problem.experts, device=ids.device)
        copies = []
        for number in range(-(-rotate_bytes // traffic) + 1):
            other = {"ids": ordered[(place[ids.long()] + number * len(chosen)) % problem.experts].to(ids.dtype)}
            own = {name: tensors[name].clone() for name in SHARED if name in tensors and number}
            copies.append({**tensors, **other, **own})
        return copies

    def alternative(self, problem: Problem, tensors: Tensors) -> Callable[[], None] | None:
        """Batched products on weights dequantised and rows grouped beforehand; none for MXFP8 activations."""
        from .chain import alternative

        assert isinstance(problem, Experts)
        return alternative(problem, tensors) if problem.activations == "bf16" else None

    def measurement_fault(self, problem: Problem, tensors: Tensors) -> str | None:
        """A step whose distinct experts are not those of its profile."""
        from ..router.profiles import distinct_fault

        assert isinstance(problem, Experts)
        return distinct_fault(float(len(tensors["ids"].unique())), problem.distinct)

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``latent_partial`` [rows, latent], and of both experts ``shared_partial`` [rows, hidden]."""
        assert isinstance(problem, Experts)
        specs: dict[str, tuple[tuple[int, ...], str]] = {"latent_partial": ((problem.rows, problem.latent), "bfloat16")}
        if problem.has_shared:
            specs["shared_partial"] = ((problem.rows, problem.hidden), "bfloat16")
        return specs

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, rounded only to MXFP8 where the kind asks for it."""
        import torch

        from .layout import unload, unload_shared
        from .twin import routed, shared

        assert isinstance(problem, Experts)
        t = in_fp32(inputs)
        beta, linear_beta = problem.beta, problem.linear_beta
        chosen, places = torch.unique(t["ids"], return_inverse=True)
        experts = unload({name: t[name][chosen] for name in LOADED})
        found = {
            "latent_partial": routed(
                t["latent"], places, t["weights"], experts,
                beta=beta, linear_beta=linear_beta, activations=problem.activations,
            ),
        }  # fmt: skip
        if problem.has_shared:
            wide = unload_shared(t["gate_up"], t["down"])
            found["shared_partial"] = shared(t["x"], *wide, beta=beta, linear_beta=linear_beta)
        return found

    def flops(self, problem: Problem) -> int:
        """Three projections of each routed pair, and of the shared expert."""
        assert isinstance(problem, Experts)
        wide = problem.shared_intermediate if problem.has_shared else 0
        per_row = problem.top_k * problem.latent * problem.intermediate + problem.hidden * wide
        return 6 * problem.rows * per_row

    def traffic(self, problem: Problem) -> Traffic:
        """Only the distinct experts that the routing profile hits are read."""
        assert isinstance(problem, Experts)
        draws = self.draws(problem)
        weights = sum(draw.bytes for name, draw in draws.items() if name in self.rotated)
        read = sum(draw.bytes for name, draw in draws.items() if name not in self.rotated)
        written = sum(math.prod(shape) * ITEM_BYTES[dtype] for shape, dtype in self.output_specs(problem).values())
        one = sum(draws[name].bytes for name in LOADED) / problem.experts
        weights -= round((problem.experts - problem.distinct) * one)
        return Traffic(weights, read + written, self.flops(problem))

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """Hidden, expert output and sum are rounded; gate and up too in the shared expert."""
        assert isinstance(problem, Experts)
        if output == "shared_partial":
            length = problem.hidden + problem.shared_intermediate
            return rounding_tolerance(4, length, "gate, up, hidden, partial sum")
        length = problem.latent + problem.intermediate
        return rounding_tolerance(3, length, "hidden value or its MXFP8 code at a tie, expert output, weighted sum")


FAMILY = ExpertsFamily()
