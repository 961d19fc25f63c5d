"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..contract import Engine, Problem, Tensors, Tolerance
from ..model_card import ModelCard
from ..twin_family import Draw, TwinFamily, attn_res_draws, in_fp32, rounding_tolerance

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttnRes(Problem):
    """Mix of the saved blocks and the running residual, and the norm after it; the same on every rank."""

    hidden: int
    blocks: int
    """Saved blocks: the most a step has; of a ``first`` problem none."""
    eps: float
    kind: str = "blocks"
    """``blocks``: between layers, rounded once. ``first``: before the first layer, no block is saved yet, so only the norm is
    left. ``final``: after the last layer, the mix and the normalised value are rounded too."""

    @property
    def label(self) -> str:
        """E.g. ``final-tp16-rows8``."""
        return f"{self.kind}-tp{self.tp}-rows{self.rows}"


class AttnResFamily(TwinFamily):
    """See :class:`AttnRes`."""

    name = "attn_res"
    title = "attention residuals: softmax mix of saved blocks, and the norm after it"
    outputs = ("out",)
    rotated = ("res_norm", "res_proj", "norm_w")
    problem_type = AttnRes
    default_engine = "cute_cluster"

    @property
    def engines(self) -> tuple[Engine, ...]:  # type: ignore[override]
        """Built on first use: engine modules are light, their kernels are not."""
        from .engines import ENGINES

        return ENGINES

    @property
    def kinds(self) -> tuple[str, ...]:
        """Where in the step it stands."""
        return ("blocks", "first", "final")

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> AttnRes:
        """See :meth:`Family.problem`; ``kind`` defaults to ``blocks``."""
        self.check(card, tp, rows, kind)
        kind = kind or "blocks"
        blocks = 0 if kind == "first" else card.num_attn_res_blocks
        return AttnRes(tp, rows, card.hidden_size, blocks, card.rms_norm_eps, kind)

    def problem_from_json(self, data: Mapping[str, Any]) -> AttnRes:
        """Inverse of ``to_json``; a problem without a kind is of ``blocks``."""
        found = super().problem_from_json({"kind": "blocks", **data})
        assert isinstance(found, AttnRes)
        return found

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """Sources N(0, 1)."""
        assert isinstance(problem, AttnRes)
        draws = attn_res_draws(problem.rows, problem.hidden, problem.blocks)
        if problem.kind == "first":
            return {name: draws[name] for name in ("prefix", "norm_w")}
        return draws

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``out``: [rows, hidden]."""
        assert isinstance(problem, AttnRes)
        return {"out": ((problem.rows, problem.hidden), "bfloat16")}

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, not rounded."""
        from ..numerics import rms_norm
        from .twin import attn_res_norm

        assert isinstance(problem, AttnRes)
        t = in_fp32(inputs)
        once = problem.kind != "final"
        if problem.kind == "first":  # the mix of one source is that source
            return {"out": rms_norm(t["prefix"], t["norm_w"], problem.eps, single_rounding=once)}
        out = attn_res_norm(
            list(t["blocks"]), t["prefix"], t["res_norm"], t["res_proj"], t["norm_w"], problem.eps, single_rounding=once
        )
        return {"out": out}

    def alternative(self, problem: Problem, tensors: Tensors) -> Callable[[], None]:
        """PyTorch operators."""
        from .chain import chain_call

        assert isinstance(problem, AttnRes)
        return chain_call(problem, tensors)

    def operators(self, problem: Problem) -> Callable[[Tensors], Tensors]:
        """The same as a function."""
        from .chain import chain

        assert isinstance(problem, AttnRes)
        return chain(problem)

    def flops(self, problem: Problem) -> int:
        """Score, square and mix of each source element."""
        assert isinstance(problem, AttnRes)
        return 6 * problem.rows * problem.hidden * (problem.blocks + 1)

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """One rounding; of a ``final`` mix three."""
        assert isinstance(problem, AttnRes)
        if problem.kind == "final":
            return rounding_tolerance(3, problem.hidden, "mix, norm, result")
        return rounding_tolerance(1, problem.hidden, "the result")


FAMILY = AttnResFamily()
