"""The operators a decode step is composed of, one method a kernel family, and the twins behind them.

All methods take and return rows flattened request-major: n = requests * q_len. ``comm`` is the
tensor-parallel group. Weight containers are those of :mod:`k3lab.decode.weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..kernels import ModelCard
from ..kernels.attention_projection.twin import project
from ..kernels.attn_res.twin import attn_res_norm
from ..kernels.collectives import Collectives
from ..kernels.experts.twin import routed, shared
from ..kernels.kda.twin import kda
from ..kernels.lm_head.twin import embed, lm_head, next_token
from ..kernels.mla.twin import mla
from ..kernels.mla.twin_context import mla_context_parallel
from ..kernels.moe_tail.twin import moe_tail
from ..kernels.output_projection.twin import add_residual, output_projection
from ..kernels.router.twin import front, route
from .expert_memory import routed_of, shared_of
from .kda_slots import KdaSlots
from .weights import DenseMlp, KdaAttention, Mix, MlaAttention, MoeMlp


class Operators(Protocol):
    """What a backend must provide."""

    name: str

    def embed(self, ids: Tensor, table: Tensor, comm: Collectives) -> Tensor:
        """Token ids [n] to [n, H]."""
        ...

    def attn_res(self, blocks: Sequence[Tensor], prefix: Tensor, mix: Mix, *, final: bool = False) -> Tensor:
        """Mix of blocks and running residual, then the norm: [n, H]; ``final``: the mix is rounded first."""
        ...

    def attention_projection(self, x: Tensor, attention: KdaAttention | MlaAttention) -> Tensor:
        """[n, H] to [n, N]."""
        ...

    def kda(self, proj: Tensor, attention: KdaAttention, states: KdaSlots, q_len: int) -> Tensor:
        """Gated output [n, hD/T]; history and state after every token are left in their slots."""
        ...

    def mla(
        self, proj: Tensor, attention: MlaAttention, cache: Tensor, block_table: Tensor, context: Tensor, q_len: int
    ) -> Tensor:
        """Gated output [n, h*v/T]; the cache gains the new rows."""
        ...

    def output_projection(
        self,
        x: Tensor,
        attention: KdaAttention | MlaAttention,
        prefix: Tensor | None,
        blocks: Sequence[Tensor],
        mix: Mix,
        comm: Collectives,
    ) -> tuple[Tensor, Tensor]:
        """Running residual and MLP input, [n, H] each; ``prefix`` None restarts the residual."""
        ...

    def router(self, x: Tensor, mlp: MoeMlp, comm: Collectives) -> tuple[Tensor, Tensor, Tensor]:
        """Expert ids [n, k], their weights [n, k], the latent [n, L]."""
        ...

    def experts(self, latent: Tensor, ids: Tensor, weights: Tensor, x: Tensor, mlp: MoeMlp) -> tuple[Tensor, Tensor]:
        """This rank's partials of the routed experts [n, L] and of the shared expert [n, H]."""
        ...

    def moe_tail(
        self,
        latent_partial: Tensor,
        shared_partial: Tensor,
        mlp: MoeMlp,
        prefix: Tensor,
        blocks: Sequence[Tensor],
        mix: Mix,
        comm: Collectives,
        *,
        final: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Running residual and the next layer's input; ``final`` as in :meth:`attn_res`."""
        ...

    def dense(self, x: Tensor, mlp: DenseMlp, prefix: Tensor, comm: Collectives) -> Tensor:
        """Running residual after a dense MLP, [n, H]."""
        ...

    def lm_head(self, h: Tensor, w: Tensor, comm: Collectives) -> Tensor:
        """Logits [n, V]."""
        ...

    def next_token(self, h: Tensor, w: Tensor, comm: Collectives) -> Tensor:
        """The likeliest token of each row over all ranks, the lower id among equals: whole numbers [n].

        A rank alone in place of a group has only its own part of the vocabulary to choose from: the embedding knows no
        other ids.
        """
        ...

    def check(self) -> None:
        """Called where the host has synchronised: raises CollectiveError if a kernel gave up on another rank."""
        ...


class ReferenceOperators:
    """The twins: readable, on any device, FP64 where the weights are FP64."""

    name = "reference"

    def __init__(
        self,
        card: ModelCard,
        *,
        activations: str = "bf16",
        k_scale: float = 1.0,
        context_group: Collectives | None = None,
    ) -> None:
        """Set up.

        Args:
            card: the model.
            activations: how the routed experts see theirs.
            k_scale: of an FP8 MLA cache.
            context_group: ranks that share each context (DCP); the cache is made for as many.
        """
        self.card, self.context_group = card, context_group
        self.activations = activations
        self.k_scale = k_scale

    def embed(self, ids: Tensor, table: Tensor, comm: Collectives) -> Tensor:
        """See :class:`Operators`."""
        return embed(ids, table, comm)

    def attn_res(self, blocks: Sequence[Tensor], prefix: Tensor, mix: Mix, *, final: bool = False) -> Tensor:
        """See :class:`Operators`."""
        eps = self.card.rms_norm_eps
        return attn_res_norm(blocks, prefix, mix.res_norm, mix.res_proj, mix.norm, eps, single_rounding=not final)

    def attention_projection(self, x: Tensor, attention: KdaAttention | MlaAttention) -> Tensor:
        """See :class:`Operators`."""
        return project(x, attention.in_proj)

    def kda(self, proj: Tensor, attention: KdaAttention, states: KdaSlots, q_len: int) -> Tensor:
        """See :class:`Operators`."""
        bound, eps = self.card.kda_gate_lower_bound, self.card.rms_norm_eps
        out, *after = kda(proj, attention.core, *states.read(), q_len=q_len, lower_bound=bound, eps=eps)
        states.write(*after)
        return out

    def mla(
        self, proj: Tensor, attention: MlaAttention, cache: Tensor, block_table: Tensor, context: Tensor, q_len: int
    ) -> Tensor:
        """See :class:`Operators`; with a context group, on this rank's part of each context."""
        card = self.card
        parallel: dict[str, Any] = {} if self.context_group is None else {"comm": self.context_group}
        return (mla_context_parallel if parallel else mla)(
            proj,
            attention.core,
            cache,
            block_table,
            context,
            q_len=q_len,
            eps=card.mla_low_rank_norm_eps,
            nope=card.qk_nope_head_dim,
            rope=card.qk_rope_head_dim,
            k_scale=self.k_scale,
            **parallel,
        )

    def output_projection(
        self,
        x: Tensor,
        attention: KdaAttention | MlaAttention,
        prefix: Tensor | None,
        blocks: Sequence[Tensor],
        mix: Mix,
        comm: Collectives,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Operators`."""
        eps, w_o = self.card.rms_norm_eps, attention.o_proj
        return output_projection(x, w_o, prefix, blocks, mix.res_norm, mix.res_proj, mix.norm, eps=eps, comm=comm)

    def router(self, x: Tensor, mlp: MoeMlp, comm: Collectives) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`Operators`."""
        logits, latent = front(x, mlp.router, mlp.latent_down, comm)
        ids, weights = route(
            logits, mlp.correction_bias, self.card.num_experts_per_token, self.card.routed_scaling_factor
        )
        return ids, weights, latent

    def experts(self, latent: Tensor, ids: Tensor, weights: Tensor, x: Tensor, mlp: MoeMlp) -> tuple[Tensor, Tensor]:
        """See :class:`Operators`."""
        beta, linear_beta = self.card.situ_beta, self.card.situ_linear_beta
        partial = routed(
            latent, ids, weights, routed_of(mlp), activations=self.activations, beta=beta, linear_beta=linear_beta
        )
        return partial, self._mlp(x, *shared_of(mlp))

    def _mlp(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return shared(x, gate, up, down, beta=self.card.situ_beta, linear_beta=self.card.situ_linear_beta)

    def moe_tail(
        self,
        latent_partial: Tensor,
        shared_partial: Tensor,
        mlp: MoeMlp,
        prefix: Tensor,
        blocks: Sequence[Tensor],
        mix: Mix,
        comm: Collectives,
        *,
        final: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Operators`."""
        prefix, following = moe_tail(
            latent_partial,
            shared_partial,
            mlp.latent_norm,
            mlp.latent_up,
            prefix,
            blocks,
            mix.res_norm,
            mix.res_proj,
            mix.norm,
            eps=self.card.rms_norm_eps,
            comm=comm,
        )
        # the last mix of a step is rounded before the final norm; the tail's own is not
        return prefix, self.attn_res(blocks, prefix, mix, final=True) if final else following

    def dense(self, x: Tensor, mlp: DenseMlp, prefix: Tensor, comm: Collectives) -> Tensor:
        """See :class:`Operators`."""
        return add_residual(prefix, comm.all_reduce(self._mlp(x, mlp.gate, mlp.up, mlp.down)))

    def lm_head(self, h: Tensor, w: Tensor, comm: Collectives) -> Tensor:
        """See :class:`Operators`."""
        return lm_head(h, w, comm)

    def next_token(self, h: Tensor, w: Tensor, comm: Collectives) -> Tensor:
        """See :class:`Operators`."""
        return next_token(h, w, comm)[1]

    def check(self) -> None:
        """No kernel here waits."""
