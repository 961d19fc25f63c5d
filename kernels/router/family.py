"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract import Engine, Problem, Tensors, Tolerance, Traffic
from ..model_card import ModelCard
from ..twin_family import ITEM_BYTES, Draw, TwinFamily, in_fp32, rounding_tolerance
from .profiles import PROFILES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Router(Problem):
    """One rank's rows of the router and of the latent down-projection, on the same input; and the expert choice."""

    kind: str
    """``uniform``, ``zipf`` or ``hot``: the whole step under that routing profile. ``front``: only this rank's shard, made and
    published. ``choice``: only the choice, from the logits of all experts."""
    hidden: int
    experts: int
    """Router rows of one rank, E/T."""
    latent: int
    """Latent columns of one rank, L/T."""
    top_k: int
    scaling: float
    """Factor on the normalised weights."""

    @property
    def label(self) -> str:
        """E.g. ``uniform-tp16-rows8``."""
        return f"{self.kind}-tp{self.tp}-rows{self.rows}"

    @property
    def all_experts(self) -> int:
        """Of all ranks."""
        return self.tp * self.experts


class RouterFamily(TwinFamily):
    """See :class:`Router`.

    One GPU is one rank: over the loopback transport the other ranks' words come from the table ``peers``, int32
    [ranks, rows, words], drawn to realise the profile; the slot with factor one is this rank's own.
    """

    name = "router"
    title = "router and latent down-projection, sharded by rows, and the expert choice"
    outputs = ("logits", "latent", "ids", "weights")
    rotated = ("w_router", "w_down")
    constant = ("bias", "peers")
    problem_type = Router
    default_engine = "cute_fused"

    @property
    def engines(self) -> tuple[Engine, ...]:  # type: ignore[override]
        """Built on first use: engine modules are light, their kernels are not."""
        from .engines import ENGINES

        return ENGINES

    @property
    def kinds(self) -> tuple[str, ...]:
        """Routing profiles of the whole step, and its two halves."""
        return (*PROFILES, "front", "choice")

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> Router:
        """See :meth:`Family.problem`; ``kind`` defaults to ``uniform``."""
        kind = kind or "uniform"
        self.check(card, tp, rows, kind)
        return Router(
            tp, rows, kind, card.hidden_size, card.num_experts // tp, card.routed_expert_hidden_size // tp,
            card.num_experts_per_token, card.routed_scaling_factor,
        )  # fmt: skip

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """A normalised input; weights that give logits and latent of magnitude one; a small correction bias."""
        assert isinstance(problem, Router)
        std = problem.hidden**-0.5
        front = {
            "x": Draw((problem.rows, problem.hidden)),
            "w_router": Draw((problem.experts, problem.hidden), std=std),
            "w_down": Draw((problem.latent, problem.hidden), std=std),
        }
        bias = {"bias": Draw((problem.all_experts,), std=0.01, dtype="float32")}
        if problem.kind == "choice":
            return {"all_logits": Draw((problem.rows, problem.all_experts), dtype="float32"), **bias}
        return front if problem.kind == "front" else {**front, **bias}

    def inputs(self, problem: Problem, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """As drawn, and the table of the other ranks' words; no choice is a near tie, so that all engines agree on it."""
        import torch

        from .profiles import frequencies, peer_logits, words_of

        assert isinstance(problem, Router)
        inputs = super().inputs(problem, seed, device)
        rows, ranks, k = problem.rows, problem.tp, problem.top_k
        kind = "uniform" if problem.kind in ("front", "choice") else problem.kind
        share = frequencies(kind, problem.all_experts)
        if problem.kind == "choice":
            own = torch.randn((rows, problem.experts), generator=torch.Generator().manual_seed(seed))
        else:
            own = inputs["x"].float().cpu() @ inputs["w_router"].float().cpu().T
        bias = inputs["bias"].cpu() if "bias" in inputs else torch.zeros(problem.all_experts)
        logits = peer_logits(own, bias, ranks, k, share, seed)
        if problem.kind == "choice":
            return {**inputs, "all_logits": logits.transpose(0, 1).reshape(rows, -1).contiguous().to(device)}
        shape = (ranks, rows, problem.latent)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        return {**inputs, "peers": words_of(logits, latents).to(device)}

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``logits`` FP32 and ``latent`` BF16, all ranks' or in a front this rank's shard; ``ids`` int32 and ``weights`` FP32
        [rows, top_k].
        """
        assert isinstance(problem, Router)
        rows = problem.rows
        ranks = 1 if problem.kind == "front" else problem.tp
        shards: dict[str, tuple[tuple[int, ...], str]] = {
            "logits": ((rows, ranks * problem.experts), "float32"),
            "latent": ((rows, ranks * problem.latent), "bfloat16"),
        }
        shape = (rows, problem.top_k)
        choice: dict[str, tuple[tuple[int, ...], str]] = {"ids": (shape, "int32"), "weights": (shape, "float32")}
        if problem.kind == "front":
            return shards
        return choice if problem.kind == "choice" else {**shards, **choice}

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, not rounded; the other ranks' words as in the table."""
        import torch

        from ..collectives import SingleRank
        from .profiles import from_words, own_slot
        from .twin import front, route

        assert isinstance(problem, Router)
        t = in_fp32(inputs)
        found: dict[str, torch.Tensor] = {}
        if problem.kind == "choice":
            logits = t["all_logits"]
        else:
            logits, latent = front(t["x"], t["w_router"], t["w_down"], SingleRank())
            found = {"logits": logits, "latent": latent}
        if problem.kind not in ("front", "choice"):
            slot = own_slot(problem.tp)
            theirs, words = from_words(t["peers"], problem.experts)
            others = words.to(latent.dtype)
            theirs[:, slot * problem.experts : (slot + 1) * problem.experts] = logits
            others[:, slot * problem.latent : (slot + 1) * problem.latent] = latent
            logits, found = theirs, {"logits": theirs, "latent": others}
        if problem.kind != "front":
            ids, weights = route(logits, t["bias"], problem.top_k, problem.scaling)
            found |= {"ids": ids.to(torch.int32), "weights": weights}
        return found

    def measurement_fault(self, problem: Problem, tensors: Tensors) -> str | None:
        """A step whose distinct experts, counted among its ids on the device, are not those of its profile."""
        from .profiles import distinct_fault, expected_distinct

        assert isinstance(problem, Router)
        if problem.kind not in PROFILES:
            return None
        expected = expected_distinct(problem.kind, problem.all_experts, problem.rows, problem.top_k)
        return distinct_fault(float(tensors["ids"].unique().numel()), expected)

    def alternative(self, problem: Problem, tensors: Tensors) -> Callable[[], None]:
        """PyTorch operators."""
        from .chain import chain_call

        assert isinstance(problem, Router)
        return chain_call(problem, tensors)

    def operators(self, problem: Problem) -> Callable[[Tensors], Tensors]:
        """The same as a function."""
        from .chain import chain

        assert isinstance(problem, Router)
        return chain(problem)

    def flops(self, problem: Problem) -> int:
        """Both projections."""
        assert isinstance(problem, Router)
        if problem.kind == "choice":
            return 0
        return 2 * problem.rows * problem.hidden * (problem.experts + problem.latent)

    def traffic(self, problem: Problem) -> Traffic:
        """Weights, input and bias once, outputs once; the table of the other ranks is no part of a step."""
        draws = self.draws(problem)
        weights = sum(draw.bytes for name, draw in draws.items() if name in self.rotated)
        read = sum(draw.bytes for name, draw in draws.items() if name not in self.rotated)
        written = sum(math.prod(shape) * ITEM_BYTES[dtype] for shape, dtype in self.output_specs(problem).values())
        return Traffic(weights, read + written, self.flops(problem))

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """Logits are not rounded; what is a whole number must be right."""
        assert isinstance(problem, Router)
        accumulate = 2**-24 * problem.hidden**0.5
        if output == "ids":
            return Tolerance(0.0, 0.0, "whole numbers, and no near tie among the inputs")
        if output == "weights":
            return Tolerance(4 * accumulate, 32 * accumulate, "FP32 scores of logits that are FP32 sums")
        if output == "logits":
            return Tolerance(4 * accumulate, 32 * accumulate, f"FP32 sum of {problem.hidden} products, unrounded")
        return rounding_tolerance(1, problem.hidden, "the result")


FAMILY = RouterFamily()
