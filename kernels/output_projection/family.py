"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract import Engine, Problem, Tensors, Tolerance
from ..model_card import ModelCard
from ..space import Config
from ..twin_family import Draw, TwinFamily, attn_res_draws, in_fp32, rounding_tolerance

if TYPE_CHECKING:
    import torch

    from ..collectives import Collectives


@dataclass(frozen=True)
class OutputProjection(Problem):
    """o-proj of this rank's heads, all-reduce, residual, AttnRes and the norm before the MLP."""

    kind: str
    """``kda`` or ``mla``; ``restart`` where the running residual starts anew (block-start layers, all KDA)."""
    width: int
    """Attention output of one rank, D/T."""
    hidden: int
    blocks: int
    """Saved blocks: the most a step has."""
    eps: float

    @property
    def label(self) -> str:
        """E.g. ``kda-tp16-rows8``."""
        return f"{self.kind}-tp{self.tp}-rows{self.rows}"


class OutputProjectionFamily(TwinFamily):
    """See :class:`OutputProjection`. Inputs and twin are one rank's alone: its peers' partial sums are zero.

    Engines are checked and timed on one GPU over the loopback transport: see :meth:`expected`.
    """

    name = "output_projection"
    title = "output projection, all-reduce, residual, AttnRes and norm"
    outputs = ("prefix_out", "mlp_input")
    rotated = ("w_o", "res_norm", "res_proj", "norm_w")
    older = ("prefix", "blocks")
    problem_type = OutputProjection
    default_engine = "cute_fused"

    @property
    def engines(self) -> tuple[Engine, ...]:  # type: ignore[override]
        """Built on first use: engine modules are light, their kernels are not."""
        from .engines import ENGINES

        return ENGINES

    @property
    def kinds(self) -> tuple[str, ...]:
        """Layer kinds, and the layer that restarts the residual."""
        return ("kda", "mla", "restart")

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> OutputProjection:
        """See :meth:`Family.problem`; ``kind`` defaults to ``kda``."""
        kind = kind or "kda"
        self.check(card, tp, rows, kind)
        width = (card.mla_dim if kind == "mla" else card.kda_dim) // tp
        return OutputProjection(
            tp, rows, kind, width, card.hidden_size, card.num_attn_res_blocks, card.rms_norm_eps
        )  # fmt: skip

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """A gated attention output, and a projection that keeps its magnitude over all ranks."""
        assert isinstance(problem, OutputProjection)
        draws = {
            "x": Draw((problem.rows, problem.width)),
            "w_o": Draw((problem.hidden, problem.width), std=(problem.width * problem.tp) ** -0.5),
            **attn_res_draws(problem.rows, problem.hidden, problem.blocks),
        }
        if problem.kind == "restart":
            del draws["prefix"]
        return draws

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """Both [rows, hidden]."""
        assert isinstance(problem, OutputProjection)
        return dict.fromkeys(self.outputs, ((problem.rows, problem.hidden), "bfloat16"))

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, not rounded; this rank alone."""
        from ..collectives import StandIn

        return self._over(StandIn(0, problem.tp), problem, inputs)

    def expected(
        self, problem: Problem, config: Config, inputs: Tensors, factors: tuple[float, ...] | None = None
    ) -> dict[str, torch.Tensor]:
        """The twin where one GPU plays all ranks: slot r holds this rank's partial times ``factors[r]``.

        Args:
            problem: its TP is the number of slots.
            config: ``exchange`` is ``two_shot`` where column owners sum and broadcast; then what this rank sends to the
                owners is added up, and comes back for every owner, times the factors once more.
            inputs: this rank's.
            factors: of the loopback transport, if not its usual ones.
        """
        from ..collectives import LoopbackGroup, TwoShot
        from ..transports import loopback_factors

        group: Collectives = LoopbackGroup(factors or loopback_factors(problem.tp))
        if config.get("exchange") == "two_shot":
            group = TwoShot(group)
        return self._over(group, problem, inputs)

    @staticmethod
    def _over(group: Collectives, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        from .twin import output_projection

        assert isinstance(problem, OutputProjection)
        t = in_fp32(inputs)
        prefix, mlp_input = output_projection(
            t["x"], t["w_o"], t.get("prefix"), list(t["blocks"]), t["res_norm"], t["res_proj"], t["norm_w"],
            eps=problem.eps, comm=group,
        )  # fmt: skip
        return {"prefix_out": prefix, "mlp_input": mlp_input}

    def alternative(self, problem: Problem, tensors: Tensors) -> Callable[[], None]:
        """PyTorch operators, the exchange over the same slots in one GPU's memory."""
        from .chain import chain_call

        assert isinstance(problem, OutputProjection)
        return chain_call(problem, tensors)

    def operators(self, problem: Problem) -> Callable[[Tensors], Tensors]:
        """The same as a function."""
        from .chain import chain

        assert isinstance(problem, OutputProjection)
        return chain(problem)

    def flops(self, problem: Problem) -> int:
        """The projection, and six per AttnRes source element."""
        assert isinstance(problem, OutputProjection)
        return 2 * problem.rows * problem.hidden * (problem.width + 3 * (problem.blocks + 1))

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """Partial, sum over ranks and residual; one more for the norm.

        Where one GPU plays all ranks the partials are one and the same, so their roundings do not average out.
        """
        assert isinstance(problem, OutputProjection)
        if output == "prefix_out":
            return rounding_tolerance(3, problem.width * problem.tp, "partial, sum, residual")
        return rounding_tolerance(4, problem.width * problem.tp + problem.hidden, "partial, sum, residual, norm")


FAMILY = OutputProjectionFamily()
