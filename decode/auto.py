"""The ``auto`` backend's operators: plain PyTorch in the model's dtype, a stand-in for a stock engine.

Every operator is free of data-dependent control flow and of reads from the device, so a step can be
captured in a CUDA graph. Only chosen experts are read. Both backends read one copy of the weights, so
the router and the latent projections are sharded here too, where stock engines replicate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import ModelCard
from ..kernels.collectives import Collectives
from ..kernels.kda.twin import KdaWeights
from ..kernels.mla.twin import MlaWeights
from ..kernels.mxfp4 import E2M1, decode_scale
from .context_parallel import held_tokens, joined_parts, of_all_heads, rows_of
from .expert_memory import routed_of, shared_of
from .kda_slots import KdaSlots
from .likeliest import likeliest_of
from .lone import LonePeers
from .tensors import EXPERT_ROWS
from .weights import DenseMlp, KdaAttention, Mix, MlaAttention, MoeMlp

L2_EPS = 1e-6


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in ``x.dtype``'s wide type, rounded once."""
    wide = x.to(_wide(x))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


class KdaParts(NamedTuple):
    """What the recurrence of a KDA layer reads, [B, q, h, ...] in the wide type, and what its surroundings keep."""

    q: Tensor
    """Normalised and scaled."""
    k: Tensor
    """Normalised."""
    v: Tensor
    log_decay: Tensor
    """[B, q, h, K]."""
    beta: Tensor
    """[B, q, h, 1]."""
    gate: Tensor
    """Of the output, [n, hD], as projected."""
    history: Tensor
    """Raw rows from the first tap of the first token on, [B, W-1+q, 3hD]."""


def embedded(ids: Tensor, table: Tensor, comm: Collectives) -> Tensor:
    """Rows of an embedding that is sharded by vocabulary, [n, H]; ids are not checked, which would need the host."""
    local = ids - comm.rank * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = F.embedding(local.clamp(0, table.shape[0] - 1), table)
    return comm.all_reduce(rows * mine[:, None].to(rows.dtype))


class AutoOperators:
    """See :class:`~k3lab.decode.operators.Operators`."""

    name = "auto"

    def __init__(
        self, card: ModelCard, *, dtype: torch.dtype, device: str | torch.device, k_scale: float = 1.0,
        peers: LonePeers | None = None, context_group: Collectives | None = None,
    ) -> None:  # fmt: skip
        """Tables that a captured step must find on the device are made here; ``peers`` speak for a rank alone's group, ``context_group`` shares each context (DCP)."""
        self.card, self.peers, self.context_group = card, peers, context_group
        self.k_scale = k_scale
        low = torch.arange(256) % 16
        high = torch.arange(256) // 16
        values = torch.tensor(E2M1, dtype=dtype)
        # a byte's two columns as one element of twice the width: one lookup a byte
        pair = {2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]
        self._pairs = torch.stack((values[low], values[high]), dim=-1).view(pair).flatten().to(device)
        self._dtype = dtype

    # -- residual -----------------------------------------------------------------------------
    def attn_res(self, blocks: Sequence[Tensor], prefix: Tensor, mix: Mix, *, final: bool = False) -> Tensor:
        """Sources stacked, scored, mixed, normed."""
        eps = self.card.rms_norm_eps
        if not blocks:
            return _rms(prefix, mix.norm, eps)
        sources = torch.stack((*blocks, prefix), dim=1).to(_wide(prefix))  # [n, K+1, H]
        query = (mix.res_norm.to(sources.dtype) * mix.res_proj[0].to(sources.dtype))[:, None]
        scores = (sources @ query).squeeze(-1) * torch.rsqrt(sources.square().mean(-1) + eps)
        mixed = torch.bmm(scores.softmax(-1)[:, None], sources).squeeze(1)
        if final:
            mixed = mixed.to(prefix.dtype)
        return _rms(mixed, mix.norm, eps).to(prefix.dtype)

    # -- attention ----------------------------------------------------------------------------
    def attention_projection(self, x: Tensor, attention: KdaAttention | MlaAttention) -> Tensor:
        """One GEMM on the packed rows."""
        return F.linear(x, attention.in_proj)

    def kda(self, proj: Tensor, attention: KdaAttention, states: KdaSlots, q_len: int) -> Tensor:
        """Convolution of all tokens at once, then the recurrence token by token in FP32."""
        core = attention.core
        conv, state = states.read()
        q, k, v, log_decay, beta, gate, history = self._kda_parts(proj, core, conv, q_len)
        decay = log_decay.exp()
        running, outs, after = state, [], []
        for t in range(q_len):
            running = running * decay[:, t, :, None, :]
            error = beta[:, t] * (v[:, t] - torch.einsum("bhvk,bhk->bhv", running, k[:, t]))
            running = running + error[..., None] * k[:, t, :, None, :]
            outs.append(torch.einsum("bhvk,bhk->bhv", running, q[:, t]))
            after.append(running)
        size = core.conv_q.shape[1]
        convs = torch.stack([history[:, t + 1 : t + size] for t in range(q_len)], dim=1)
        states.write(convs, torch.stack(after, dim=1))
        return self._kda_out(torch.stack(outs, dim=1), gate, core)

    def _kda_parts(self, proj: Tensor, core: KdaWeights, conv: Tensor, q_len: int) -> KdaParts:
        """All that precedes the recurrence, of all tokens at once: conv, norms, gates."""
        requests, heads, dim = conv.shape[0], core.a_log.shape[0], core.o_norm.shape[0]
        wide, width = _wide(proj), heads * dim
        rank = core.f_b.shape[1]
        qkv, gate, fa, beta, _pad = proj.split(
            [3 * width, width, rank, heads, proj.shape[1] - 4 * width - rank - heads], dim=-1
        )
        raw = F.linear(fa, core.f_b).to(wide).view(requests, q_len, heads, dim)
        rate = core.a_log.to(wide).exp().view(heads, 1)
        log_decay = self.card.kda_gate_lower_bound * torch.sigmoid(
            rate * (raw + core.dt_bias.to(wide).view(heads, dim))
        )
        beta = torch.sigmoid(beta.to(wide)).view(requests, q_len, heads, 1)
        history = torch.cat((conv, qkv.view(requests, q_len, 3 * width)), dim=1)  # [B, W-1+q, 3hD]
        taps = torch.cat((core.conv_q, core.conv_k, core.conv_v)).to(wide)
        size = taps.shape[1]
        mixed = F.silu(torch.stack([history[:, j : j + q_len].to(wide) * taps[:, j] for j in range(size)]).sum(0))
        q, k, v = mixed.view(requests, q_len, 3, heads, dim).unbind(2)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
        return KdaParts(q, k, v, log_decay, beta, gate, history)

    def _kda_out(self, out: Tensor, gate: Tensor, core: KdaWeights) -> Tensor:
        """Norm and output gate of [B, q, h, V]: [n, hD] in the dtype of ``gate``."""
        normed = _rms(out, core.o_norm, self.card.rms_norm_eps).reshape(gate.shape)
        return (normed * torch.sigmoid(gate.to(out.dtype))).to(gate.dtype)

    def mla(
        self, proj: Tensor, attention: MlaAttention, cache: Tensor, block_table: Tensor, context: Tensor, q_len: int
    ) -> Tensor:
        """Absorbed attention over every row a request's block table can hold, masked to its context.

        With a context group all heads attend to this rank's part of each context, and the parts meet at the heads' owners.
        """
        core, wide, group = attention.core, _wide(proj), self.context_group
        latent, requests = core.kv_a_norm.shape[0], context.shape[0]
        position = context.long()[:, None] + torch.arange(q_len, device=proj.device)  # [B, q]
        query, gate = self._mla_front(proj, core, cache, rows_of(position, block_table, cache, group).flatten())
        query = of_all_heads(query, group)
        # rows past a request's own belong to others or to nobody: their share is 0, but 0 times NaN is NaN
        keys = self._rows(cache, block_table, wide)  # [B, tokens, latent + rope]
        token = held_tokens(keys.shape[1], group, proj.device)
        keys = keys.masked_fill((token > position[:, -1:])[..., None], 0.0)
        heads = query.shape[1]
        query = query.to(wide).view(requests, q_len * heads, -1)
        scores = (torch.bmm(query, keys.transpose(1, 2)) * self._scale).view(requests, q_len, heads, -1)
        hidden = (token > position[..., None])[:, :, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        # all are hidden where a rank holds no token of a request: a softmax over nothing
        weight = scores.softmax(-1).masked_fill(hidden, 0.0)
        mixed = torch.bmm(weight.view(requests, q_len * heads, -1), keys[..., :latent]).view(-1, heads, latent)
        if group is not None:
            mixed = joined_parts(mixed, scores.logsumexp(-1).view(-1, heads), group, proj.dtype)
        return self._mla_out(mixed.to(proj.dtype), gate, core)

    @property
    def _scale(self) -> float:
        return (self.card.qk_nope_head_dim + self.card.qk_rope_head_dim) ** -0.5

    def _mla_front(self, proj: Tensor, core: MlaWeights, cache: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        """Absorbed query [n, h, latent + rope], rounded as the cache is, and gate [n, h*v]; new rows go to ``where``."""
        eps, nope, rope = self.card.mla_low_rank_norm_eps, self.card.qk_nope_head_dim, self.card.qk_rope_head_dim
        lora, latent = core.q_a_norm.shape[0], core.kv_a_norm.shape[0]
        heads, value = core.w_uv.shape[:2]
        qa, kv, kpe, gate = proj[:, : lora + latent + rope + heads * value].split(
            [lora, latent, rope, heads * value], dim=-1
        )
        query = F.linear(_rms(qa, core.q_a_norm, eps), core.q_b).view(-1, heads, nope + rope)
        absorbed = torch.bmm(query[..., :nope].transpose(0, 1), core.w_uk).transpose(0, 1)  # [n, h, latent]
        query = torch.cat((absorbed, query[..., nope:]), dim=-1)
        new = torch.cat((_rms(kv, core.kv_a_norm, eps), kpe), dim=-1)
        if cache.dtype == torch.float8_e4m3fn:
            wide = _wide(proj)
            new = (new.to(wide) / self.k_scale).clamp(-448, 448).to(cache.dtype)
            query = query.to(wide).clamp(-448, 448).to(cache.dtype)
            # indexed writes know no FP8: the bytes are the same
            cache.view(torch.uint8).flatten(0, 1)[where] = new.view(torch.uint8)
        else:
            cache.flatten(0, 1)[where] = new.to(cache.dtype)
        return query, gate

    def _rows(self, cache: Tensor, blocks: Tensor, wide: torch.dtype, group: Collectives | None = None) -> Tensor:
        """Cache rows of blocks [B, m] as [B, tokens, latent + rope]; with a group those of all ranks, in the order of tokens."""
        fp8 = cache.dtype == torch.float8_e4m3fn
        # indexing knows no FP8: the bytes are the same
        rows = (cache.view(torch.uint8) if fp8 else cache)[blocks.long()].flatten(1, 2)
        if group is not None:
            rows = group.all_gather(rows[:, :, None], dim=2).flatten(1, 2)
        return rows.view(cache.dtype).to(wide) * self.k_scale if fp8 else rows.to(wide)

    def _mla_out(self, mixed: Tensor, gate: Tensor, core: MlaWeights) -> Tensor:
        """Latents [n, h, latent] to gated values [n, h*v]."""
        out = torch.bmm(mixed.transpose(0, 1), core.w_uv.transpose(1, 2)).transpose(0, 1)
        wide = _wide(gate)
        return (out.reshape(gate.shape).to(wide) * torch.sigmoid(gate.to(wide))).to(gate.dtype)

    def output_projection(
        self,
        x: Tensor,
        attention: KdaAttention | MlaAttention,
        prefix: Tensor | None,
        blocks: Sequence[Tensor],
        mix: Mix,
        comm: Collectives,
    ) -> tuple[Tensor, Tensor]:
        """GEMM, all-reduce, add, AttnRes."""
        out = comm.all_reduce(F.linear(x, attention.o_proj))
        prefix = out if prefix is None else prefix + out
        return prefix, self.attn_res(blocks, prefix, mix)

    # -- MLP ----------------------------------------------------------------------------------
    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, linear = self.card.situ_beta, self.card.situ_linear_beta
        g, u = gate.to(_wide(gate)), up.to(_wide(up))
        return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear * torch.tanh(u / linear)).to(gate.dtype)

    def _dequantize(self, packed: Tensor, scale: Tensor) -> Tensor:
        pairs = self._pairs[packed.int()].view(self._dtype)
        scales = decode_scale(scale).to(pairs.dtype)
        return (pairs.unflatten(-1, (scale.shape[-1], -1)) * scales[..., None]).flatten(-2)

    def router(self, x: Tensor, mlp: MoeMlp, comm: Collectives) -> tuple[Tensor, Tensor, Tensor]:
        """Two GEMMs, two gathers, sigmoid, a stable sort (ties to the lower id)."""
        wide = _wide(x)
        logits, latent = x.to(wide) @ mlp.router.to(wide).T, F.linear(x, mlp.latent_down)
        if self.peers:
            logits, latent = self.peers.logits_around(logits), self.peers.latents_around(latent)
        else:
            logits, latent = comm.all_gather(logits, dim=-1), comm.all_gather(latent, dim=-1)
        scores = torch.sigmoid(logits)
        order = torch.sort(scores + mlp.correction_bias.to(wide), dim=-1, descending=True, stable=True).indices
        ids = order[:, : self.card.num_experts_per_token]
        chosen = scores.gather(1, ids)
        return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * self.card.routed_scaling_factor, latent

    def experts(self, latent: Tensor, ids: Tensor, weights: Tensor, x: Tensor, mlp: MoeMlp) -> tuple[Tensor, Tensor]:
        """The chosen experts' bytes are gathered and dequantised; one batched GEMV a projection."""
        wide, parts = _wide(latent), []
        for start in range(0, latent.shape[0], EXPERT_ROWS):
            z, chosen = latent[start : start + EXPERT_ROWS], ids[start : start + EXPERT_ROWS]
            count, top = chosen.shape
            bank = routed_of(mlp, chosen.flatten())
            column = z[:, None].expand(count, top, -1).reshape(count * top, -1, 1)
            gate = torch.bmm(self._dequantize(bank.w1, bank.w1_scale), column)
            up = torch.bmm(self._dequantize(bank.w3, bank.w3_scale), column)
            out = torch.bmm(self._dequantize(bank.w2, bank.w2_scale), self._situ(gate, up))
            share = weights[start : start + EXPERT_ROWS, :, None].to(wide)
            parts.append((out.view(count, top, -1).to(wide) * share).sum(1).to(latent.dtype))
        return torch.cat(parts), self._mlp(x, *shared_of(mlp))

    def _mlp(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(self._situ(F.linear(x, gate), F.linear(x, up)), down)

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
        """All-reduce, norm, sharded up-projection beside a reduce-scatter, gather, add, AttnRes."""
        latent = _rms(comm.all_reduce(latent_partial), mlp.latent_norm, self.card.rms_norm_eps)
        own = F.linear(latent, mlp.latent_up) + comm.reduce_scatter(shared_partial, dim=-1)
        prefix = prefix + comm.all_gather(own, dim=-1)
        return prefix, self.attn_res(blocks, prefix, mix, final=final)

    def dense(self, x: Tensor, mlp: DenseMlp, prefix: Tensor, comm: Collectives) -> Tensor:
        """Two GEMMs, SiTU, one GEMM, all-reduce, add."""
        return prefix + comm.all_reduce(self._mlp(x, mlp.gate, mlp.up, mlp.down))

    # -- ends ---------------------------------------------------------------------------------
    def embed(self, ids: Tensor, table: Tensor, comm: Collectives) -> Tensor:
        """Own rows looked up, others zero, all-reduce."""
        return embedded(ids, table, comm)

    def lm_head(self, h: Tensor, w: Tensor, comm: Collectives) -> Tensor:
        """GEMM, all-gather."""
        return comm.all_gather(F.linear(h, w), dim=-1)

    def next_token(self, h: Tensor, w: Tensor, comm: Collectives) -> Tensor:
        """Of all logits, gathered."""
        return likeliest_of(self.lm_head(h, w, comm), w.shape[0], comm)

    def check(self) -> None:
        """No kernel here waits."""
