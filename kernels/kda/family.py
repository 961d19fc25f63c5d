"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..contract import Problem, Tensors, Tolerance
from ..errors import InputError
from ..model_card import ModelCard
from ..twin_family import Draw, TwinFamily, in_fp32, rounding_tolerance

if TYPE_CHECKING:
    import torch

WEIGHTS = ("f_b", "conv_q", "conv_k", "conv_v", "a_log", "dt_bias", "o_norm")
VERIFY = {"plain": 1, **{f"verify{tokens}": tokens for tokens in range(2, 9)}}
"""Kind to new tokens a request."""


@dataclass(frozen=True)
class Kda(Problem):
    """One step of the KDA core on one rank's heads: conv, gates, delta rule, gated norm."""

    kind: str
    """``plain`` (one token a request) or ``verify2`` to ``verify8``."""
    heads: int
    """Heads of one rank."""
    head_dim: int
    gate_rank: int
    conv_size: int
    lower_bound: float
    eps: float

    @property
    def label(self) -> str:
        """E.g. ``plain-tp16-rows8``."""
        return f"{self.kind}-tp{self.tp}-rows{self.rows}"

    @property
    def q_len(self) -> int:
        """New tokens a request."""
        return VERIFY[self.kind]

    @property
    def requests(self) -> int:
        """Requests in the step."""
        return self.rows // self.q_len

    @property
    def width(self) -> int:
        """Columns of q, of k, of v and of g on one rank."""
        return self.heads * self.head_dim


class KdaFamily(TwinFamily):
    """See :class:`Kda`. States are written after every token, so that a roll-back picks one."""

    name = "kda"
    title = "Kimi Delta Attention core: conv, gates, delta rule, gated norm"
    outputs = ("out", "conv_states", "states")
    rotated = (*WEIGHTS, "conv_state", "state")
    problem_type = Kda

    @property
    def kinds(self) -> tuple[str, ...]:
        """Plain and verify steps."""
        return tuple(VERIFY)

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> Kda:
        """See :meth:`Family.problem`; ``kind`` defaults to ``plain``; rows are a multiple of its tokens."""
        kind = kind or "plain"
        self.check(card, tp, rows, kind)
        if rows % VERIFY[kind]:
            raise InputError(f"rows is {rows}; {kind} steps have a multiple of {VERIFY[kind]} rows")
        return Kda(
            tp, rows, kind, card.kda_num_heads // tp, card.kda_head_dim, card.kda_gate_rank, card.kda_conv_size,
            card.kda_gate_lower_bound, card.rms_norm_eps,
        )  # fmt: skip

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """Projections N(0, 1), decays spread over their range, a state that has seen some tokens."""
        assert isinstance(problem, Kda)
        width, taps, requests = problem.width, problem.conv_size, problem.requests
        conv = Draw((width, taps), std=taps**-0.5, dtype="float32")
        dim = problem.head_dim
        return {
            "proj": Draw((problem.rows, -(-(4 * width + problem.gate_rank + problem.heads) // 16) * 16)),
            "f_b": Draw((width, problem.gate_rank), std=problem.gate_rank**-0.5),
            "conv_q": conv,
            "conv_k": conv,
            "conv_v": conv,
            "a_log": Draw((problem.heads,), std=0.5, dtype="float32"),
            "dt_bias": Draw((width,), mean=-2.0, dtype="float32"),
            "o_norm": Draw((dim,), std=0.1, mean=1.0, dtype="float32"),
            "conv_state": Draw((requests, taps - 1, 3 * width)),
            "state": Draw((requests, problem.heads, dim, dim), std=0.2, dtype="float32"),
        }

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``out`` [rows, hD] BF16, and the two states after every token."""
        assert isinstance(problem, Kda)
        per_token, dim = (problem.requests, problem.q_len), problem.head_dim
        return {
            "out": ((problem.rows, problem.width), "bfloat16"),
            "conv_states": ((*per_token, problem.conv_size - 1, 3 * problem.width), "bfloat16"),
            "states": ((*per_token, problem.heads, dim, dim), "float32"),
        }

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, not rounded."""
        from .twin import KdaWeights, kda

        assert isinstance(problem, Kda)
        t = in_fp32(inputs)
        outputs = kda(
            t["proj"], KdaWeights(**{name: t[name] for name in WEIGHTS}), t["conv_state"], t["state"],
            q_len=problem.q_len, lower_bound=problem.lower_bound, eps=problem.eps,
        )  # fmt: skip
        return dict(zip(self.outputs, outputs, strict=True))

    def flops(self, problem: Problem) -> int:
        """Gate projection, conv, and seven per state element: decay, S k, update, S q."""
        assert isinstance(problem, Kda)
        per_row = 2 * problem.width * (problem.gate_rank + 3 * problem.conv_size) + 7 * problem.width * problem.head_dim
        return problem.rows * per_row

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """The decay gate's projection and the output are rounded; raw rows in the conv state are exact."""
        assert isinstance(problem, Kda)
        if output == "conv_states":
            return Tolerance(0.0, 0.0, "copies of BF16 inputs")
        length = problem.gate_rank + problem.head_dim * problem.q_len
        # d(log decay) = 5/4 exp(a_log) d(gate) at most: single elements err by several roundings of the gate
        if output == "states":
            return replace(rounding_tolerance(1, length, "decay gate's projection"), element=2**-3)
        return replace(rounding_tolerance(2, length, "decay gate's projection, the result"), element=2**-4)


FAMILY = KdaFamily()
