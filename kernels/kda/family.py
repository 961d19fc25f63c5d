"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..contract import Engine, Problem, Tensors, Tolerance
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

    @property
    def columns(self) -> int:
        """Of a row of the fused projection: q, k, v, g, the low-rank gate and beta, padded to whole 32 bytes."""
        return -(-(4 * self.width + self.gate_rank + self.heads) // 16) * 16


class KdaFamily(TwinFamily):
    """See :class:`Kda`. States are written after every token, so that a roll-back picks one.

    States lie in slots: ``slots`` [requests, 1 + q] names the slot of ``state`` and ``conv_state`` that a request reads, and
    those of ``states`` and ``conv_states`` written after each token. Slot s is entry s - 1; a slot of zero or less is
    padding, never read, never written: a pool whose entry 0 is nobody's is passed from its entry 1 on. Where a cache is
    updated in place the tensors read are those written. Slots of different requests differ.

    Slots, states and weights are read before the dependency wait: the last to write them is the step before this one, and
    steps are launched one after the other without a programmatic edge. What else a step makes comes from its projection.
    """

    name = "kda"
    title = "Kimi Delta Attention core: conv, gates, delta rule, gated norm"
    outputs = ("out", "conv_states", "states")
    rotated = (*WEIGHTS, "conv_state", "state")
    constant = ("slots",)
    problem_type = Kda
    default_engine = "cute"

    @property
    def engines(self) -> tuple[Engine, ...]:  # type: ignore[override]
        """Built on first use: engine modules are light, their kernels are not."""
        from .engines import ENGINES

        return ENGINES

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
            "proj": Draw((problem.rows, problem.columns)),
            "f_b": Draw((width, problem.gate_rank), std=problem.gate_rank**-0.5),
            "conv_q": conv,
            "conv_k": conv,
            "conv_v": conv,
            "a_log": Draw((problem.heads,), std=0.5, dtype="float32"),
            "dt_bias": Draw((width,), mean=-2.0, dtype="float32"),
            "o_norm": Draw((dim,), std=0.1, mean=1.0, dtype="float32"),
            "conv_state": Draw((requests, taps - 1, 3 * width)),
            "state": Draw((requests, problem.heads, dim, dim), std=0.2, dtype="float32"),
            "slots": Draw((requests, 1 + problem.q_len), dtype="int32", low=1, high=1 + requests),
        }

    def inputs(self, problem: Problem, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """As drawn, but for the slots: each request reads one of its own, in a random order, and writes those of its rows."""
        import torch

        assert isinstance(problem, Kda)
        inputs = super().inputs(problem, seed, device)
        read = torch.randperm(problem.requests, generator=torch.Generator().manual_seed(seed))
        written = torch.arange(problem.requests * problem.q_len).view(problem.requests, problem.q_len)
        inputs["slots"] = (1 + torch.cat([read[:, None], written], dim=1)).to(torch.int32).to(device)
        return inputs

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``out`` [rows, hD] BF16, and the two states after every token: a slot a row."""
        assert isinstance(problem, Kda)
        rows, dim = problem.rows, problem.head_dim
        return {
            "out": ((rows, problem.width), "bfloat16"),
            "conv_states": ((rows, problem.conv_size - 1, 3 * problem.width), "bfloat16"),
            "states": ((rows, problem.heads, dim, dim), "float32"),
        }

    def cold_copies(self, problem: Problem, tensors: Tensors, rotate_bytes: int) -> list[dict[str, torch.Tensor]]:
        """Each call has states of its own to read and to write: half the bytes are stores, which one tensor for all calls
        would leave in the L2.
        """
        import torch

        assert isinstance(problem, Kda)
        own = (*self.rotated, "states", "conv_states")
        one = sum(tensors[name].numel() * tensors[name].element_size() for name in own)
        count = -(-rotate_bytes // one) + 1
        if tensors["state"].is_cuda:
            count = max(1, min(count, torch.cuda.mem_get_info()[0] // 2 // one))
        copies = [{**tensors, **{name: tensors[name].clone() for name in own}} for _ in range(count - 1)]
        return [dict(tensors), *copies]

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, not rounded."""
        from .twin import KdaWeights, kda

        assert isinstance(problem, Kda)
        t = in_fp32(inputs)
        read = inputs["slots"][:, 0].long() - 1
        out, conv_states, states = kda(
            t["proj"], KdaWeights(**{name: t[name] for name in WEIGHTS}), t["conv_state"][read], t["state"][read],
            q_len=problem.q_len, lower_bound=problem.lower_bound, eps=problem.eps,
        )  # fmt: skip
        return {"out": out, "conv_states": conv_states.flatten(0, 1), "states": states.flatten(0, 1)}

    def alternative(self, problem: Problem, tensors: Tensors) -> Callable[[], None]:
        """PyTorch operators."""
        from .chain import chain_call

        assert isinstance(problem, Kda)
        return chain_call(problem, tensors)

    def operators(self, problem: Problem) -> Callable[[Tensors], Tensors]:
        """The same as a function."""
        from .chain import chain

        assert isinstance(problem, Kda)
        return chain(problem)

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
