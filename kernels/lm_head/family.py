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
class LmHead(Problem):
    """Logits of one rank's vocabulary rows."""

    hidden: int
    vocab: int
    """Vocabulary rows of one rank, V/T."""


class LmHeadFamily(TwinFamily):
    """See :class:`LmHead`. The output is this rank's shard, before the gather."""

    name = "lm_head"
    title = "language model head, sharded by vocabulary"
    outputs = ("logits",)
    rotated = ("w",)
    problem_type = LmHead

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> LmHead:
        """See :meth:`Family.problem`."""
        self.check(card, tp, rows, kind)
        return LmHead(tp, rows, card.hidden_size, card.vocab_size // tp)

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """A normalised input and logits of magnitude one."""
        assert isinstance(problem, LmHead)
        return {
            "h": Draw((problem.rows, problem.hidden)),
            "w": Draw((problem.vocab, problem.hidden), std=problem.hidden**-0.5),
        }

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``logits`` [rows, V/T]."""
        assert isinstance(problem, LmHead)
        return {"logits": ((problem.rows, problem.vocab), "bfloat16")}

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, not rounded."""
        from ..collectives import SingleRank
        from .twin import lm_head

        t = in_fp32(inputs)
        return {"logits": lm_head(t["h"], t["w"], SingleRank())}

    def flops(self, problem: Problem) -> int:
        """The projection."""
        assert isinstance(problem, LmHead)
        return 2 * problem.rows * problem.hidden * problem.vocab

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """One rounding."""
        assert isinstance(problem, LmHead)
        return rounding_tolerance(1, problem.hidden, "the result")


FAMILY = LmHeadFamily()
