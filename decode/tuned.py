"""The ``latency_specialized`` backend's operators: a bundle's kernels, and ``auto``'s where there are none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import InputError, ModelCard
from ..kernels.collectives import Collectives, LoopbackGroup, SingleRank, StandIn
from ..kernels.health import check_health
from ..kernels.launch import Runner
from ..kernels.transports import Loopback, Transport
from .auto import AutoOperators
from .choices import ARGMAX, EMBED, Choice, Tuned
from .expert_memory import held_experts, held_shared, hold
from .family_kernels import FamilyKernels, SavedBlocks
from .kda_slots import KdaSlots
from .lone import LonePeers
from .weights import KdaAttention, Mix, MlaAttention, MoeMlp, RankWeights

NO_LOGIT = -(1 << 23)
"""Bits of minus infinity in FP32, as a signed number."""
KernelPool = dict[tuple[str, str, str, int], FamilyKernels]
"""Loaded kernels by the place of their entry: operators of several row counts share them."""


def _kind(attention: KdaAttention | MlaAttention) -> str:
    return "kda" if isinstance(attention, KdaAttention) else "mla"


class TunedOperators(AutoOperators):
    """See :class:`~k3lab.decode.operators.Operators`; runs on a GPU.

    Kernels are loaded at construction; a call binds its tensors, which the launches hold. In a captured graph binding
    happens once, at capture. Where the experts are tuned the layers' experts must be held
    (:func:`~k3lab.decode.expert_memory.hold`).
    """

    name = "latency_specialized"

    def __init__(
        self,
        card: ModelCard,
        choices: Sequence[Choice],
        *,
        dtype: torch.dtype,
        device: str | torch.device,
        k_scale: float = 1.0,
        transport: Transport | None = None,
        pool: KernelPool | None = None,
        peers: LonePeers | None = None,
        context_group: Collectives | None = None,
    ) -> None:
        """Load the kernels.

        Args:
            card: the model.
            choices: of :func:`~k3lab.decode.choices.choose`; those that are tuned are loaded.
            dtype: of the model.
            device: the GPU.
            k_scale: of an FP8 MLA cache.
            transport: of kernels that write to other ranks; without one this rank is alone, and what the others would
                send counts as zero.
            pool: kernels that are loaded already; gains those that are not.
            peers: what the others of a rank alone would have said to its routers.
            context_group: ranks that share each context (DCP), those of the transport; the cache is made for as many.

        Raises:
            InputError: MLA kernels for contexts over another number of ranks.
        """
        super().__init__(card, dtype=dtype, device=device, k_scale=k_scale, peers=peers, context_group=context_group)
        self._alone, pool = transport is None, {} if pool is None else pool
        self._kernels: dict[tuple[str, str | None], FamilyKernels] = {}
        for choice in choices:
            if not isinstance(choice, Tuned):
                continue
            if choice.place not in pool:
                sent = transport or Loopback.alone(choice.compiled.problem.tp)
                pool[choice.place] = FamilyKernels(choice, dtype=dtype, device=device, transport=sent, make=Runner)
            self._kernels[choice.family, choice.kind] = pool[choice.place]
        self._check_contexts()
        used = self._kernels.values()
        sizes = (card.num_attn_res_blocks, card.hidden_size)
        self._saved = {
            one.rows: SavedBlocks(sizes[0], one.rows, sizes[1], dtype=dtype, device=device)
            for one in used
            if getattr(one.problem, "blocks", 0)
        }
        self._factor = torch.full((1,), k_scale, dtype=torch.float32, device=device)
        self._words: dict[int, Tensor] = {}
        self._heads: dict[int, Tensor] = {}
        self._others: dict[int, Tensor] = {}
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def _check_contexts(self) -> None:
        own, size = self._kernels.get(("mla", None)), self.context_group.size if self.context_group else 1
        if own is not None and own.dcp != size:
            raise InputError(f"the kernels of mla are for contexts over {own.dcp} ranks, the context group has {size}")

    @property
    def holds_experts(self) -> bool:
        """Whether a step reads held experts."""
        return ("experts", None) in self._kernels

    def take(self, weights: RankWeights) -> None:
        """Turn the weights' experts into the layout that a step reads, in place; other operators go on reading them."""
        for layer in weights.layers if self.holds_experts else ():
            if isinstance(layer.mlp, MoeMlp):
                hold(layer.mlp)

    def _own(self, family: str, kind: str | None, comm: Collectives | None = None) -> FamilyKernels | None:
        """Kernels of a family, for a rank alone or for the group they were loaded for.

        Raises:
            InputError: this rank was set up alone, and the group is a real one.
        """
        found = self._kernels.get((family, kind))
        if found and comm and self._alone and not isinstance(comm, SingleRank | StandIn | LoopbackGroup):
            raise InputError(f"a group of {comm.size} ranks needs a transport; these kernels were set up for one alone")
        return found

    def _mixed(self, kernels: FamilyKernels, blocks: Sequence[Tensor], mix: Mix) -> dict[str, Tensor]:
        saved = {"blocks": self._saved[kernels.rows].side_by_side(blocks)} if blocks else {}
        return {**saved, "res_norm": mix.res_norm, "res_proj": mix.res_proj, "norm_w": mix.norm}

    # -- attention ----------------------------------------------------------------------------
    def attention_projection(self, x: Tensor, attention: KdaAttention | MlaAttention) -> Tensor:
        """The bundle's kernel of the layer's kind, or ``auto``'s GEMM."""
        own = self._own("attention_projection", _kind(attention))
        if own is None:
            return super().attention_projection(x, attention)
        return own({"x": x, "w": attention.in_proj}, rows=x.shape[0])["out"]

    def kda(self, proj: Tensor, attention: KdaAttention, states: KdaSlots, q_len: int) -> Tensor:
        """On the cache's own slots, in place."""
        own = self._own("kda", None)
        if own is None:
            return super().kda(proj, attention, states, q_len)
        # entry s - 1 is slot s: entry 0 of the pools is nobody's
        conv, state = (pool[1:] for pool in states.pools)
        given = {"proj": proj, **vars(attention.core), "slots": states.places}
        in_place = {"conv_states=conv_state": conv, "states=state": state}
        return own(given, rows=proj.shape[0], updated=in_place)["out"]

    def mla(
        self, proj: Tensor, attention: MlaAttention, cache: Tensor, block_table: Tensor, context: Tensor, q_len: int
    ) -> Tensor:
        """On the cache's own pages.

        Raises:
            InputError: pages of another size than the kernels were compiled for.
        """
        own = self._own("mla", None, self.context_group)
        if own is None:
            return super().mla(proj, attention, cache, block_table, context, q_len)
        if cache.shape[1] != own.block_size:
            raise InputError(f"MLA pages of {cache.shape[1]} tokens; the bundle's kernels have {own.block_size}")
        scale = {"k_scale": self._factor} if cache.dtype == torch.float8_e4m3fn else {}
        given = {
            "proj": proj[:, : own.columns], **vars(attention.core), "block_table": self._table(block_table, own.blocks_each),
            "context": context, **scale,
        }  # fmt: skip
        return own(given, rows=proj.shape[0], updated={"cache": cache})["out"]

    def _table(self, table: Tensor, width: int) -> Tensor:
        """The block table as wide as the kernels have it; made once a step."""
        seen, made = self._tables.get(width, (None, table))
        if seen is not table:
            made = table[:, :width]
            if table.shape[1] < width:
                made = torch.nn.functional.pad(table, (0, width - table.shape[1]))
            made = made.contiguous()
            self._tables[width] = (table, made)
        return made

    def output_projection(
        self,
        x: Tensor,
        attention: KdaAttention | MlaAttention,
        prefix: Tensor | None,
        blocks: Sequence[Tensor],
        mix: Mix,
        comm: Collectives,
    ) -> tuple[Tensor, Tensor]:
        """The bundle's kernels of the layer's kind, or of one that restarts the residual; else ``auto``'s operators.

        Raises:
            InputError: this rank was set up alone, and the group is a real one.
        """
        kind = "restart" if prefix is None else _kind(attention)
        if prefix is None and len(blocks) == 1:
            self._begin()
        own = self._own("output_projection", kind, comm)
        if own is None or not blocks:
            return super().output_projection(x, attention, prefix, blocks, mix, comm)
        given = {"x": x, "w_o": attention.o_proj, **self._mixed(own, blocks, mix)}
        if prefix is not None:
            given["prefix"] = prefix
        before = "kda" if _kind(attention) == "kda" else "mla"
        early = self._begins_alone(before) and not self._saved[own.rows].copied
        made = own(given, rows=x.shape[0], fewer={"blocks": len(blocks)}, early=early)
        return made["prefix_out"], made["mlp_input"]

    def _begins_alone(self, family: str) -> bool:
        """Whether what follows a family's launches begins when all that was before these has ended, and may read it early."""
        before = self._kernels.get((family, None))
        return before is None or before.releases_behind

    def _begin(self) -> None:
        """A step begins: what is copied in it may be captured."""
        for memory in self._saved.values():
            memory.forget()

    # -- residual -----------------------------------------------------------------------------
    def attn_res(self, blocks: Sequence[Tensor], prefix: Tensor, mix: Mix, *, final: bool = False) -> Tensor:
        """The bundle's kernel of its place in the step, or ``auto``'s operators."""
        own = self._own("attn_res", "final" if final else "blocks" if blocks else "first")
        if own is None:
            return super().attn_res(blocks, prefix, mix, final=final)
        fewer = {"blocks": len(blocks)} if blocks else {}
        return own({"prefix": prefix, **self._mixed(own, blocks, mix)}, rows=prefix.shape[0], fewer=fewer)["out"]

    # -- MLP ----------------------------------------------------------------------------------
    def router(self, x: Tensor, mlp: MoeMlp, comm: Collectives) -> tuple[Tensor, Tensor, Tensor]:
        """The bundle's step of router, latent down-projection and choice."""
        own = self._own("router", None, comm)
        if own is None:
            return super().router(x, mlp, comm)
        given = {"x": x, "w_router": mlp.router, "w_down": mlp.latent_down, "bias": mlp.correction_bias}
        made = own({**given, "peers": self._peer_words(own)}, rows=x.shape[0])
        return made["ids"], made["weights"], made["latent"]

    def _peer_words(self, own: FamilyKernels) -> Tensor:
        """What the other ranks' routers would have published, where this rank is alone; in a group nobody reads it."""
        if own.rows not in self._words:
            words = torch.zeros(own.tp, own.rows, own.experts + own.latent // 2, dtype=torch.int32, device=own.device)
            self._words[own.rows] = self.peers.words(own.rows) if self.peers else words
        return self._words[own.rows]

    def experts(self, latent: Tensor, ids: Tensor, weights: Tensor, x: Tensor, mlp: MoeMlp) -> tuple[Tensor, Tensor]:
        """The bundle's kernels on the held experts.

        Raises:
            InputError: the layer's experts are not held.
        """
        own = self._own("experts", None)
        if own is None:
            return super().experts(latent, ids, weights, x, mlp)
        if not mlp.layout.held:
            raise InputError("the bundle's experts read the held layout; expert_memory.hold turns a layer into it")
        given = {
            # the tuned router's are int32 already: no launch
            "latent": latent, "ids": ids.int(), "weights": weights, "x": x, **held_experts(mlp.experts), **held_shared(mlp),
        }  # fmt: skip
        made = own(given, rows=x.shape[0], early=self._begins_alone("router"))
        return made["latent_partial"], made["shared_partial"]

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
        """The bundle's kernels; the last layer's own mix is made anew, since it is rounded otherwise."""
        own = self._own("moe_tail", None, comm)
        if own is None:
            return super().moe_tail(latent_partial, shared_partial, mlp, prefix, blocks, mix, comm, final=final)
        given = {
            "latent_partial": latent_partial, "shared_partial": shared_partial, "latent_norm": mlp.latent_norm,
            "w_up": mlp.latent_up, "prefix": prefix, **self._mixed(own, blocks, mix),
        }  # fmt: skip
        made = own(given, rows=prefix.shape[0], fewer={"blocks": len(blocks)})
        new, following = made["prefix_out"], made["next_input"]
        return new, self.attn_res(blocks, new, mix, final=True) if final else following

    # -- ends ---------------------------------------------------------------------------------
    def embed(self, ids: Tensor, table: Tensor, comm: Collectives) -> Tensor:
        """The bundle's kernel of rows, each from the rank that holds it; else ``auto``'s operators."""
        own = self._own("lm_head", EMBED, comm)
        if own is None:
            return super().embed(ids, table, comm)
        if first := self._first_of_alone(own, table, comm):  # what other ranks hold stays theirs
            ids = (ids - first) % (own.tp * own.vocab)
        given = {"tokens": ids.int(), "table": table, "peers": self._rows_of_others(own)[: ids.shape[0]]}
        return own(given, rows=ids.shape[0])["x"]

    def _rows_of_others(self, own: FamilyKernels) -> Tensor:
        """What a rank alone gets from others: zeros, as its sums do; in a group nobody reads it."""
        if own.rows not in self._others:
            self._others[own.rows] = torch.zeros(own.rows, own.hidden, dtype=own.dtype, device=own.device)
        return self._others[own.rows]

    @staticmethod
    def _first_of_alone(own: FamilyKernels, part: Tensor, comm: Collectives) -> int:
        """First id of the part of the vocabulary of a rank alone: over loopback every one is rank 0. Zero in a group."""
        return (comm.rank - own.runner.transport.rank) * part.shape[0]

    def lm_head(self, h: Tensor, w: Tensor, comm: Collectives) -> Tensor:
        """The bundle's kernel of this rank's logits, and an all-gather."""
        own = self._own("lm_head", None)
        if own is None:
            return super().lm_head(h, w, comm)
        return comm.all_gather(own({"h": h, "w": w}, rows=h.shape[0])["logits"], dim=-1)

    def next_token(self, h: Tensor, w: Tensor, comm: Collectives) -> Tensor:
        """The bundle's kernel of the token, which ranks find together; else that of all logits."""
        own = self._own("lm_head", ARGMAX, comm)
        if own is None:
            return super().next_token(h, w, comm)
        ids = own({"h": h, "w": w, "peers": self._silent_peers(own)}, rows=h.shape[0])["ids"]
        first = self._first_of_alone(own, w, comm)
        return ids + first if first else ids

    def _silent_peers(self, own: FamilyKernels) -> Tensor:
        """Other ranks' best tokens, for a rank alone: none as likely as its own, whose rows alone its embedding has."""
        if own.rows not in self._heads:
            made = torch.full((own.tp, own.rows, 2), own.tp * own.vocab - 1, dtype=torch.int32, device=own.device)
            made[..., 0] = NO_LOGIT
            self._heads[own.rows] = made
        return self._heads[own.rows]

    def check(self) -> None:
        """See :class:`~k3lab.decode.operators.Operators`."""
        for kernels in self._kernels.values():
            check_health(kernels.runner.buffers, kernels.runner.transport.rank)
