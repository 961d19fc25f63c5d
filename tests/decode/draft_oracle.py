"""The drafter written straight down in FP64 for one request: no cache, no absorption, no sharding, complex rotation."""

from __future__ import annotations

import math

import torch
from k3lab.decode.dspark.card import DraftCard
from torch import Tensor


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-5).sqrt() * w


def angles(card: DraftCard) -> list[float]:
    """YaRN by its definition: pairs that turn more than 32 times in the original context stay, fewer than once stretch."""
    dim, found = card.qk_rope_head_dim, []
    pair_of = lambda turns: dim / 2 * math.log(card.yarn_original / turns / 2 / math.pi) / math.log(card.rope_theta)  # noqa: E731
    first, last = max(0, math.floor(pair_of(32))), min(dim - 1, math.ceil(pair_of(1)))
    for i in range(dim // 2):
        plain = card.rope_theta ** (-2 * i / dim)
        share = min(1.0, max(0.0, (i - first) / max(last - first, 1e-3)))
        found.append((1 - share) * plain + share * plain / card.yarn_factor)
    return found


def turned(x: Tensor, position: int, card: DraftCard) -> Tensor:
    pairs = torch.view_as_complex(x.view(-1, 2).contiguous())
    turn = torch.tensor(
        [complex(math.cos(position * a), math.sin(position * a)) for a in angles(card)], dtype=torch.complex128
    )
    return torch.view_as_real(pairs * turn).flatten()


class DraftOracle:
    """Context of one request, and blocks drafted from it."""

    def __init__(self, card: DraftCard, tensors: dict[str, Tensor], embed: Tensor, lm_head: Tensor) -> None:
        self.card, self.w, self.embed, self.lm_head = card, tensors, embed, lm_head
        self.context: list[list[Tensor]] = [[] for _ in range(card.num_layers)]
        """Per layer, inputs of the key and value projections at positions 0, 1, ..."""

    def accept(self, residuals: list[Tensor]) -> None:
        """One position's residuals after the tapped layers."""
        row = rms(self.w["context_proj"] @ torch.cat(residuals), self.w["context_norm"])
        for rows in self.context:
            rows.append(row)

    def attend(self, layer: int, inputs: list[Tensor], positions: list[int]) -> list[Tensor]:
        card, own = self.card, {k.removeprefix(f"layers.{layer}.self_attn."): v for k, v in self.w.items()}
        nope, rope, value = card.qk_nope_head_dim, card.qk_rope_head_dim, card.v_head_dim
        keys, values = [], []
        for at, x in [*enumerate(self.context[layer]), *zip(positions, inputs, strict=True)]:
            latent, key = (own["kv_a_proj_with_mqa"] @ x).split([card.kv_lora_rank, rope])
            wide = (own["kv_b_proj"] @ rms(latent, own["kv_a_layernorm"])).view(card.num_heads, nope + value)
            keys.append(torch.cat([wide[:, :nope], turned(key, at, card).expand(card.num_heads, rope)], dim=1))
            values.append(wide[:, nope:])
        outs = []
        for at, x in zip(positions, inputs, strict=True):
            q = (own["q_b_proj"] @ rms(own["q_a_proj"] @ x, own["q_a_layernorm"])).view(card.num_heads, nope + rope)
            heads = []
            for h in range(card.num_heads):
                query = torch.cat([q[h, :nope], turned(q[h, nope:], at, card)])
                scale = (0.1 * math.log(card.yarn_factor) + 1) ** 2 / math.sqrt(nope + rope)
                scores = torch.stack([query @ key[h] for key in keys]) * scale
                heads.append(sum(p * v[h] for p, v in zip(scores.softmax(0), values, strict=True)))
            outs.append(own["o_proj"] @ torch.cat(heads))
        return outs

    def draft(self, last: int, count: int) -> tuple[list[int], Tensor]:
        """Tokens, and the logits [count, V] each was chosen from."""
        card, start = self.card, len(self.context[0])
        positions = [start + i for i in range(count)]
        xs = [self.embed[token] for token in [last, *[card.mask_token_id] * (count - 1)]]
        for layer in range(card.num_layers):
            own = {k.removeprefix(f"layers.{layer}."): v for k, v in self.w.items()}
            attended = self.attend(layer, [rms(x, own["input_layernorm"]) for x in xs], positions)
            xs = [x + a for x, a in zip(xs, attended, strict=True)]
            for i, x in enumerate(xs):
                inner = rms(x, own["post_attention_layernorm"])
                gate = own["mlp.gate_proj"] @ inner
                xs[i] = x + own["mlp.down_proj"] @ (gate / (1 + torch.exp(-gate)) * (own["mlp.up_proj"] @ inner))
        tokens, every, previous = [], [], last
        for x in xs:
            logits = self.lm_head @ rms(x, self.w["final_norm"])
            logits = logits + self.w["markov_head.markov_w2"] @ self.w["markov_head.markov_w1"][previous]
            previous = int(logits.argmax())
            tokens.append(previous)
            every.append(logits)
        return tokens, torch.stack(every)
