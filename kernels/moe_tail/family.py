"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract import Engine, Problem, Tensors, Tolerance
from ..model_card import ModelCard
from ..space import Config
from ..twin_family import Draw, TwinFamily, attn_res_draws, in_fp32, norm_weight, rounding_tolerance

if TYPE_CHECKING:
    import torch

    from ..collectives import Collectives


@dataclass(frozen=True)
class MoeTail(Problem):
    """From the experts' partial sums to the running residual and the next layer's input."""

    hidden: int
    latent: int
    blocks: int
    """Saved blocks: the most a step has."""
    eps: float


class MoeTailFamily(TwinFamily):
    """See :class:`MoeTail`. Inputs and twin are one rank's alone: its columns stand in for its peers'.

    Engines are checked and timed on one GPU over the loopback transport: see :meth:`expected`.
    """

    name = "moe_tail"
    title = "latent all-reduce and norm, up-projection, shared expert, residual, next AttnRes"
    outputs = ("prefix_out", "next_input")
    rotated = ("latent_norm", "w_up", "res_norm", "res_proj", "norm_w")
    problem_type = MoeTail
    default_engine = "cute_fused"

    @property
    def engines(self) -> tuple[Engine, ...]:  # type: ignore[override]
        """Built on first use: engine modules are light, their kernels are not."""
        from .engines import ENGINES

        return ENGINES

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

        return self._over(StandIn(0, problem.tp), problem, inputs)

    def expected(
        self, problem: Problem, config: Config, inputs: Tensors, factors: tuple[float, ...] | None = None
    ) -> dict[str, torch.Tensor]:
        """The twin where one GPU plays all ranks: what goes to rank r or comes from it is this rank's, times ``factors[r]``.

        Args:
            problem: its TP is the number of slots.
            config: ``exchange`` is ``two_shot`` where the owners of latents sum and broadcast them.
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
        from .twin import moe_tail

        assert isinstance(problem, MoeTail)
        t = in_fp32(inputs)
        prefix, next_input = moe_tail(
            t["latent_partial"], t["shared_partial"], t["latent_norm"], t["w_up"], t["prefix"], list(t["blocks"]),
            t["res_norm"], t["res_proj"], t["norm_w"], eps=problem.eps, comm=group,
        )  # fmt: skip
        return {"prefix_out": prefix, "next_input": next_input}

    def alternative(self, problem: Problem, tensors: Tensors) -> Callable[[], None]:
        """PyTorch operators, the exchanges over the same slots in one GPU's memory."""
        from .chain import chain_call

        assert isinstance(problem, MoeTail)
        return chain_call(problem, tensors)

    def operators(self, problem: Problem) -> Callable[[Tensors], Tensors]:
        """The same as a function."""
        from .chain import chain

        assert isinstance(problem, MoeTail)
        return chain(problem)

    def flops(self, problem: Problem) -> int:
        """This rank's rows of the up-projection, and six per AttnRes source element."""
        assert isinstance(problem, MoeTail)
        projection = problem.latent * problem.hidden // problem.tp
        return 2 * problem.rows * (projection + 3 * problem.hidden * (problem.blocks + 1))

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """Latent norm, up-projection, sum with the shared expert, residual; one more for the norm."""
        assert isinstance(problem, MoeTail)
        length = problem.latent + problem.hidden
        if output == "prefix_out":
            return rounding_tolerance(4, length, "latent norm, up-projection, shared sum, residual")
        return rounding_tolerance(5, length, "latent norm, up-projection, shared sum, residual, norm")


FAMILY = MoeTailFamily()
