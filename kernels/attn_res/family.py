"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract import Problem, Tensors, Tolerance
from ..model_card import ModelCard
from ..twin_family import Draw, TwinFamily, attn_res_draws, in_fp32, rounding_tolerance

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttnRes(Problem):
    """Mix of the saved blocks and the running residual, and the norm after it; the same on every rank."""

    hidden: int
    blocks: int
    """Saved blocks: the most a step has."""
    eps: float


class AttnResFamily(TwinFamily):
    """See :class:`AttnRes`."""

    name = "attn_res"
    title = "attention residuals: softmax mix of saved blocks, and the norm after it"
    outputs = ("out",)
    rotated = ("res_norm", "res_proj", "norm_w")
    problem_type = AttnRes

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> AttnRes:
        """See :meth:`Family.problem`."""
        self.check(card, tp, rows, kind)
        return AttnRes(tp, rows, card.hidden_size, card.num_attn_res_blocks, card.rms_norm_eps)

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """Sources N(0, 1)."""
        assert isinstance(problem, AttnRes)
        return attn_res_draws(problem.rows, problem.hidden, problem.blocks)

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``out``: [rows, hidden]."""
        assert isinstance(problem, AttnRes)
        return {"out": ((problem.rows, problem.hidden), "bfloat16")}

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, not rounded."""
        from .twin import attn_res_norm

        assert isinstance(problem, AttnRes)
        t = in_fp32(inputs)
        out = attn_res_norm(list(t["blocks"]), t["prefix"], t["res_norm"], t["res_proj"], t["norm_w"], problem.eps)
        return {"out": out}

    def flops(self, problem: Problem) -> int:
        """Score, square and mix of each source element."""
        assert isinstance(problem, AttnRes)
        return 6 * problem.rows * problem.hidden * (problem.blocks + 1)

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """One rounding."""
        assert isinstance(problem, AttnRes)
        return rounding_tolerance(1, problem.hidden, "the result")


FAMILY = AttnResFamily()
