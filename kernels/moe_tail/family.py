"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract import Problem, Tensors, Tolerance
from ..model_card import ModelCard
from ..twin_family import Draw, TwinFamily, attn_res_draws, in_fp32, norm_weight, rounding_tolerance

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MoeTail(Problem):
    """From the experts' partial sums to the running residual and the next layer's input."""

    hidden: int
    latent: int
    blocks: int
    """Saved blocks: the most a step has."""
    eps: float


class MoeTailFamily(TwinFamily):
    """See :class:`MoeTail`. Inputs and twin are one rank's alone: its columns stand in for its peers'."""

    name = "moe_tail"
    title = "latent all-reduce and norm, up-projection, shared expert, residual, next AttnRes"
    outputs = ("prefix", "next_input")
    rotated = ("latent_norm", "w_up", "res_norm", "res_proj", "norm_w")
    problem_type = MoeTail

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> MoeTail:
        """See :meth:`Family.problem`."""
        self.check(card, tp, rows, kind)
        latent = card.routed_expert_hidden_size
        return MoeTail(tp, rows, card.hidden_size, latent, card.num_attn_res_blocks, card.rms_norm_eps)

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """Partial sums that add up to magnitude one over the ranks."""
        assert isinstance(problem, MoeTail)
        rows, hidden, latent = problem.rows, problem.hidden, problem.latent
        return {
            "latent_partial": Draw((rows, latent), std=problem.tp**-0.5),
            "shared_partial": Draw((rows, hidden), std=problem.tp**-0.5),
            "latent_norm": norm_weight(latent),
            "w_up": Draw((hidden // problem.tp, latent), std=latent**-0.5),
            **attn_res_draws(rows, hidden, problem.blocks),
        }

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """Both [rows, hidden]."""
        assert isinstance(problem, MoeTail)
        return dict.fromkeys(self.outputs, ((problem.rows, problem.hidden), "bfloat16"))

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, not rounded; this rank alone."""
        from ..collectives import StandIn
        from .twin import moe_tail

        assert isinstance(problem, MoeTail)
        t = in_fp32(inputs)
        prefix, next_input = moe_tail(
            t["latent_partial"], t["shared_partial"], t["latent_norm"], t["w_up"], t["prefix"], list(t["blocks"]),
            t["res_norm"], t["res_proj"], t["norm_w"], eps=problem.eps, comm=StandIn(0, problem.tp),
        )  # fmt: skip
        return {"prefix": prefix, "next_input": next_input}

    def flops(self, problem: Problem) -> int:
        """This rank's rows of the up-projection, and six per AttnRes source element."""
        assert isinstance(problem, MoeTail)
        projection = problem.latent * problem.hidden // problem.tp
        return 2 * problem.rows * (projection + 3 * problem.hidden * (problem.blocks + 1))

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """Latent norm, up-projection, sum with the shared expert, residual; one more for the norm."""
        assert isinstance(problem, MoeTail)
        length = problem.latent + problem.hidden
        if output == "prefix":
            return rounding_tolerance(4, length, "latent norm, up-projection, shared sum, residual")
        return rounding_tolerance(5, length, "latent norm, up-projection, shared sum, residual, norm")


FAMILY = MoeTailFamily()
