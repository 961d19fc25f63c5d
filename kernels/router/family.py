"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract import Problem, Tensors, Tolerance
from ..model_card import ModelCard
from ..twin_family import Draw, TwinFamily, in_fp32, rounding_tolerance

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Router(Problem):
    """One rank's rows of the router and of the latent down-projection, on the same input."""

    hidden: int
    experts: int
    """Router rows of one rank, E/T."""
    latent: int
    """Latent columns of one rank, L/T."""


class RouterFamily(TwinFamily):
    """See :class:`Router`. Outputs are this rank's shards, before the gather."""

    name = "router"
    title = "router and latent down-projection, sharded by rows"
    outputs = ("logits", "latent")
    rotated = ("w_router", "w_down")
    problem_type = Router

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> Router:
        """See :meth:`Family.problem`."""
        self.check(card, tp, rows, kind)
        return Router(tp, rows, card.hidden_size, card.num_experts // tp, card.routed_expert_hidden_size // tp)

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """A normalised input; weights that give logits and latent of magnitude one."""
        assert isinstance(problem, Router)
        std = problem.hidden**-0.5
        return {
            "x": Draw((problem.rows, problem.hidden)),
            "w_router": Draw((problem.experts, problem.hidden), std=std),
            "w_down": Draw((problem.latent, problem.hidden), std=std),
        }

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``logits`` [rows, E/T] FP32, ``latent`` [rows, L/T] BF16."""
        assert isinstance(problem, Router)
        rows = problem.rows
        return {"logits": ((rows, problem.experts), "float32"), "latent": ((rows, problem.latent), "bfloat16")}

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, not rounded."""
        from ..collectives import SingleRank
        from .twin import front

        t = in_fp32(inputs)
        logits, latent = front(t["x"], t["w_router"], t["w_down"], SingleRank())
        return {"logits": logits, "latent": latent}

    def flops(self, problem: Problem) -> int:
        """Both projections."""
        assert isinstance(problem, Router)
        return 2 * problem.rows * problem.hidden * (problem.experts + problem.latent)

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """Logits are not rounded."""
        assert isinstance(problem, Router)
        if output == "logits":
            accumulate = 2**-24 * problem.hidden**0.5
            return Tolerance(4 * accumulate, 32 * accumulate, f"FP32 sum of {problem.hidden} products, unrounded")
        return rounding_tolerance(1, problem.hidden, "the result")


FAMILY = RouterFamily()
