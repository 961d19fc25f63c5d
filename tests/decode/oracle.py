"""The model written straight down in FP64, one request, one token at a time: no twin, no cache, no sharding.

Tensors are the checkpoint's, by name. MLA expands keys and values of the whole history; KDA keeps its raw
history; experts are looped over. Used to judge the reference step.
"""

from __future__ import annotations

import torch
from k3lab.decode.sharding import ModelTensors
from k3lab.kernels import ModelCard
from torch import Tensor

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * w


def mix(blocks: list[Tensor], prefix: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
    sources = [*blocks, prefix]
    scores = torch.stack([(v * norm * proj[0]).sum() / (v.pow(2).mean() + 1e-5).sqrt() for v in sources])
    return sum(a * v for a, v in zip(scores.softmax(0), sources, strict=True))


def situ(g: Tensor, u: Tensor) -> Tensor:
    return 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 25 * torch.tanh(u / 25)


def mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    out = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=torch.float64)
    out[:, 0::2], out[:, 1::2] = table[(packed % 16).long()], table[(packed // 16).long()]
    return out * (2.0 ** (scale.double() - 127)).repeat_interleave(32, dim=1)


class Oracle:
    """State of one request."""

    def __init__(self, card: ModelCard, tensors: ModelTensors) -> None:
        self.card, self.tensors = card, tensors
        self.raws: list[dict[str, list[Tensor]]] = [{"q": [], "k": [], "v": []} for _ in tensors.layers]
        heads, dim = card.kda_num_heads, card.kda_head_dim
        self.states = [torch.zeros(heads, dim, dim, dtype=torch.float64) for _ in tensors.layers]
        self.rows: list[list[Tensor]] = [[] for _ in tensors.layers]

    def kda(self, layer: int, x: Tensor) -> Tensor:
        card = self.card
        w = {name.removeprefix("self_attn."): t for name, t in self.tensors.layers[layer].items()}
        heads, dim = card.kda_num_heads, card.kda_head_dim
        conv = {}
        for part in "qkv":
            history = self.raws[layer][part]
            history.append(w[f"{part}_proj"] @ x)
            taps = w[f"{part}_conv1d"][:, 0]
            total = torch.zeros_like(history[-1])
            for back in range(min(4, len(history))):
                total = total + taps[:, 3 - back] * history[-1 - back]
            conv[part] = (total / (1 + torch.exp(-total))).view(heads, dim)
        gate = (w["f_b_proj"] @ (w["f_a_proj"] @ x)).view(heads, dim)
        decay = torch.exp(-5 / (1 + torch.exp(-w["A_log"].exp()[:, None] * (gate + w["dt_bias"].view(heads, dim)))))
        beta = 1 / (1 + torch.exp(-(w["b_proj"] @ x)))
        out_gate = 1 / (1 + torch.exp(-(w["g_proj"] @ x))).view(heads, dim)
        outs = []
        for h in range(heads):
            q, k, v = (conv[part][h] for part in "qkv")
            q = q / (q.pow(2).sum() + 1e-6).sqrt() / dim**0.5
            k = k / (k.pow(2).sum() + 1e-6).sqrt()
            state = self.states[layer][h] * decay[h]
            state = state + torch.outer(beta[h] * (v - state @ k), k)
            self.states[layer][h] = state
            outs.append(rms(state @ q, w["o_norm"], 1e-5) * out_gate[h])
        return w["o_proj"] @ torch.cat(outs)

    def mla(self, layer: int, x: Tensor) -> Tensor:
        card, eps = self.card, self.card.mla_low_rank_norm_eps
        w = {name.removeprefix("self_attn."): t for name, t in self.tensors.layers[layer].items()}
        heads, nope, rope, value = (
            card.num_attention_heads,
            card.qk_nope_head_dim,
            card.qk_rope_head_dim,
            card.v_head_dim,
        )
        q = (w["q_b_proj"] @ rms(w["q_a_proj"] @ x, w["q_a_layernorm"], eps)).view(heads, nope + rope)
        kv = w["kv_a_proj_with_mqa"] @ x
        latent = rms(kv[: card.kv_lora_rank], w["kv_a_layernorm"], eps)
        self.rows[layer].append(torch.cat([w["kv_b_proj"] @ latent, kv[card.kv_lora_rank :]]))
        outs = []
        for h in range(heads):
            width = nope + value
            own = [row[h * width : (h + 1) * width] for row in self.rows[layer]]
            keys = torch.stack(
                [torch.cat([mine[:nope], row[-rope:]]) for mine, row in zip(own, self.rows[layer], strict=True)]
            )
            weight = (keys @ q[h] / (nope + rope) ** 0.5).softmax(0)
            outs.append(weight @ torch.stack([mine[nope:] for mine in own]))
        return w["o_proj"] @ (torch.cat(outs) / (1 + torch.exp(-(w["g_proj"] @ x))))

    def moe(self, layer: int, x: Tensor) -> Tensor:
        w = {name.removeprefix("block_sparse_moe."): t for name, t in self.tensors.layers[layer].items()}
        scores = 1 / (1 + torch.exp(-(w["gate"] @ x)))
        biased = (scores + w["gate.e_score_correction_bias"]).tolist()
        chosen = sorted(range(len(biased)), key=lambda e: (-biased[e], e))[: self.card.num_experts_per_token]
        z = w["routed_expert_down_proj"] @ x
        total = torch.zeros_like(z)
        for e in chosen:
            w1, w3, w2 = (
                mxfp4(w[f"experts.{name}.weight_packed"][e], w[f"experts.{name}.weight_scale"][e])
                for name in ("w1", "w3", "w2")
            )
            total = total + scores[e] / scores[chosen].sum() * (w2 @ situ(w1 @ z, w3 @ z))
        routed = w["routed_expert_up_proj"] @ rms(total, w["routed_expert_norm"], 1e-5)
        shared = situ(w["shared_experts.gate_proj"] @ x, w["shared_experts.up_proj"] @ x)
        return routed + w["shared_experts.down_proj"] @ shared

    def step(self, token: int) -> Tensor:
        """Logits [V] after one more token."""
        card, out = self.card, self.tensors.outside
        prefix, blocks = out["embed_tokens"][token], []
        for layer, w in enumerate(self.tensors.layers):
            a = mix(blocks, prefix, w["self_attention_res_norm"], w["self_attention_res_proj"]) if blocks else prefix
            x = rms(a, w["input_layernorm"], 1e-5)
            y = self.kda(layer, x) if card.kind_of(layer) == "kda" else self.mla(layer, x)
            if layer % card.attn_res_block_size == 0:
                blocks.append(prefix)
                prefix = y
            else:
                prefix = prefix + y
            x = rms(mix(blocks, prefix, w["mlp_res_norm"], w["mlp_res_proj"]), w["post_attention_layernorm"], 1e-5)
            if layer < card.first_k_dense:
                z = w["mlp.down_proj"] @ situ(w["mlp.gate_proj"] @ x, w["mlp.up_proj"] @ x)
            else:
                z = self.moe(layer, x)
            prefix = prefix + z
        h = mix(blocks, prefix, out["output_attn_res_norm"], out["output_attn_res_proj"])
        return out["lm_head"] @ rms(h, out["norm"], 1e-5)
