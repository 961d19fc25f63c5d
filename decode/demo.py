"""The demo model: real widths of one rank of K3, few layers, few experts, a small vocabulary."""

from __future__ import annotations

from dataclasses import replace

from ..kernels import K3, InputError, ModelCard
from .tensors import rank_bytes

DEMO_TP = 16
"""The TP size the demo model is meant for: rank 0 of 16, alone."""

_SIZES = (
    # layers, MLA layers, experts, vocabulary
    (5, (2, 3, 4), 32, 16384),
    (3, (1, 2), 32, 4096),
    (3, (1, 2), 16, 1024),
)


def demo_card(free_bytes: int | None = None, *, tp: int = DEMO_TP) -> ModelCard:
    """The largest demo model whose weights take at most half of ``free_bytes`` on one rank of TP ``tp``.

    Hidden size, heads, latent, expert width, low ranks and the choice of 16 experts are K3's, so the
    projection problems are those of the real model and a bundle made for it serves here. It ends with
    two MLA layers in a row, as K3 does; AttnRes blocks begin every two layers, so several are live.

    Raises:
        InputError: not even the smallest fits.
    """
    for layers, mla, experts, vocabulary in _SIZES:
        card = replace(
            K3,
            name=f"demo-k3-{layers}l-{experts}e",
            num_hidden_layers=layers,
            mla_layers=mla,
            num_experts=experts,
            vocab_size=vocabulary,
            attn_res_block_size=2,
            max_position_embeddings=4096,
            bos_token_id=vocabulary - 4,
            eos_token_id=vocabulary - 3,
            pad_token_id=vocabulary - 1,
        )
        if free_bytes is None or 2 * rank_bytes(card, tp) <= free_bytes:
            return card
    need = 2 * rank_bytes(card, tp) / 1e9
    raise InputError(f"the demo model needs {need:.1f} GB of free memory at TP {tp}; --model small needs almost none")
