"""Operators for many tokens of one request: what decode's are for few, in PyTorch, with bounded scratch memory.

They read and leave the host's view of nothing captured: the experts' counts and the context come back from the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.collectives import Collectives
from .auto import AutoOperators, _wide
from .chunked_kda import delta_rule_of_many
from .context_parallel import rows_of
from .expert_memory import routed_of, shared_of
from .kda_slots import KdaSlots
from .weights import KdaAttention, MlaAttention, MoeMlp

SCORES = 2**25
"""Attention scores that are there at once: the context is read in stretches, whose softmax sums are joined."""
GATHERED = 2**14
"""Cache rows that a rank sends to the others at once, where each context lies over all of them."""


class PrefillOperators(AutoOperators):
    """See :class:`~k3lab.decode.operators.Operators`; one request, and only what decode goes on from is kept.

    KDA keeps history and state after the last token alone, the head returns the logits of the last row alone.
    """

    name = "prefill"

    def kda(self, proj: Tensor, attention: KdaAttention, states: KdaSlots, q_len: int) -> Tensor:
        """The recurrence in pieces; what is after the last token goes to the first snapshot."""
        core = attention.core
        conv, state = states.read()
        q, k, v, log_decay, beta, gate, history = self._kda_parts(proj, core, conv, q_len)
        out, after = delta_rule_of_many(state[0], q[0], k[0], v[0], log_decay[0], beta[0])
        last = history[:, None, history.shape[1] - conv.shape[1] :]
        states.write(last, after[None, None])
        return self._kda_out(out[None], gate, core)

    def mla(
        self, proj: Tensor, attention: MlaAttention, cache: Tensor, block_table: Tensor, context: Tensor, q_len: int
    ) -> Tensor:
        """Absorbed attention over the request's own rows, a stretch of blocks at a time.

        With a context group every rank keeps its tokens of the chunk; a stretch is then gathered from all ranks. For many
        tokens their rows are less to send than the queries of all heads, which decode exchanges.
        """
        core, wide, size, group = attention.core, _wide(proj), cache.shape[1], self.context_group
        ranks = group.size if group else 1
        latent = core.kv_a_norm.shape[0]
        before = int(context[0])
        position = torch.arange(before, before + q_len, device=proj.device)
        blocks = block_table[0, : -(-(before + q_len) // (ranks * size))].long()
        query, gate = self._mla_front(proj, core, cache, rows_of(position[None], block_table, cache, group)[0])
        heads = query.shape[1]
        query = query.to(wide).transpose(0, 1).reshape(heads * q_len, -1) * self._scale
        most = torch.full((heads * q_len, 1), float("-inf"), dtype=wide, device=proj.device)
        total, mixed = torch.zeros_like(most), most.new_zeros(heads * q_len, latent)
        stretch = max(1, SCORES // (heads * q_len * size * ranks))
        stretch = stretch if group is None else min(stretch, max(1, GATHERED // size))
        for start in range(0, len(blocks), stretch):
            keys = self._rows(cache, blocks[None, start : start + stretch], wide, group)[0]
            where = start * size * ranks + torch.arange(keys.shape[0], device=proj.device)
            # rows of the last block that nobody wrote may hold NaN
            keys = keys.masked_fill((where > position[-1])[:, None], 0.0)
            scores = (query @ keys.T).view(heads, q_len, -1)
            scores = scores.masked_fill(where > position[:, None], float("-inf")).flatten(0, 1)
            peak = torch.maximum(most, scores.amax(-1, keepdim=True))
            # the first stretch holds token 0, which every token sees: no peak is infinite
            weight, factor = (scores - peak).exp(), (most - peak).exp()
            total = total * factor + weight.sum(-1, keepdim=True)
            mixed = mixed * factor + weight @ keys[:, :latent]
            most = peak
        mixed = (mixed / total).view(heads, q_len, latent).transpose(0, 1).to(proj.dtype)
        return self._mla_out(mixed, gate, core)

    def experts(self, latent: Tensor, ids: Tensor, weights: Tensor, x: Tensor, mlp: MoeMlp) -> tuple[Tensor, Tensor]:
        """Every chosen expert is dequantised once, for all of its tokens."""
        wide, top = _wide(latent), ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=mlp.experts.w1.shape[0]).tolist()
        outs = latent.new_empty(order.shape[0], latent.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            where = order[start : start + count]
            start += count
            z = latent[where // top]
            one = routed_of(mlp, torch.tensor([expert], device=ids.device))
            gate = F.linear(z, self._dequantize(one.w1[0], one.w1_scale[0]))
            up = F.linear(z, self._dequantize(one.w3[0], one.w3_scale[0]))
            outs[where] = F.linear(self._situ(gate, up), self._dequantize(one.w2[0], one.w2_scale[0]))
        # summed slot by slot, not as the experts come: the same bits on every run
        routed = (outs.view(-1, top, latent.shape[1]).to(wide) * weights[..., None].to(wide)).sum(1)
        return routed.to(latent.dtype), self._mlp(x, *shared_of(mlp))

    def lm_head(self, h: Tensor, w: Tensor, comm: Collectives) -> Tensor:
        """GEMM of the last row, all-gather: [1, V]."""
        return super().lm_head(h[-1:], w, comm)
