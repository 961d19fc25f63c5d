"""Every tensor of the model as the decode path holds it: shape, dtype, split over ranks, random magnitude.

Shapes and splits are those of :mod:`k3lab.kernels.weight_shapes` with all three MoE matrices (router,
latent down, latent up) sharded; names are the checkpoint's without ``.weight``. The tensors of all
experts of a layer are stacked, MXFP4 ones as packed bytes and scales. This module imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..kernels import ModelCard
from ..kernels import weight_shapes as shapes
from ..kernels.weight_shapes import Weight

Kind = Literal["model", "float32", "uint8"]
E2M1_RMS = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
"""Root mean square of a uniformly drawn E2M1 value."""
EXPERT_ROWS = 8
"""Rows whose experts the ``auto`` operators dequantise at a time: bounds their scratch memory, not the result."""


@dataclass(frozen=True)
class Init:
    """How random weights are drawn."""

    draw: Literal["normal", "uniform", "bytes", "exponents"]
    """``bytes``: two random E2M1 nibbles; ``exponents``: E8M0 scales ``low`` to ``high`` - 1."""
    low: float = 0.0
    """Mean of a normal, lower end of the others."""
    high: float = 1.0
    """Standard deviation of a normal, upper end of the others."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model."""

    name: str
    shape: tuple[int, ...]
    """Unsharded."""
    kind: Kind
    """``model``: the model's dtype (BF16); ``float32``: kept in FP32 (FP64 in an FP64 model)."""
    split: int | None
    """Dimension cut in equal slices over the ranks; None = every rank holds it whole."""
    init: Init

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape on one rank."""
        if self.split is None:
            return self.shape
        return tuple(size // tp if dim == self.split else size for dim, size in enumerate(self.shape))

    def local_bytes(self, tp: int) -> int:
        """Bytes on one rank of a BF16 model."""
        return math.prod(self.local_shape(tp)) * {"model": 2, "float32": 4, "uint8": 1}[self.kind]


_SPECIAL = {
    # a row of f_b sums R terms of size 1: the gate must stay small against dt_bias
    "self_attn.f_b_proj": 0.5,
}
"""Gain of matrices that do not keep the magnitude of their input."""

_INITS = {
    # log decay -5 sigmoid(exp(A_log) (gate + dt_bias)): mostly in -0.6..-0.002 with these two
    "self_attn.A_log": Init("uniform", 0.0, math.log(4)),
    "self_attn.dt_bias": Init("normal", -2.0, 0.7),
    "block_sparse_moe.gate.e_score_correction_bias": Init("normal", 0.0, 0.05),
    "embed_tokens": Init("normal", 0.0, 1.0),
}


def _init(name: str, shape: tuple[int, ...]) -> Init:
    if name in _INITS:
        return _INITS[name]
    if len(shape) == 1:
        return Init("normal", 1.0, 0.1)  # a norm
    # a matrix (or a filter) that keeps the magnitude of its input
    return Init("normal", 0.0, _SPECIAL.get(name, 1.0) / math.sqrt(shape[-1]))


def _specs(weight: Weight, card: ModelCard) -> tuple[TensorSpec, ...]:
    name = weight.name.removesuffix(".weight")
    if weight.dtype != "mxfp4":
        kind: Kind = "model" if weight.dtype == "bfloat16" else "float32"
        return (TensorSpec(name, weight.shape, kind, weight.split, _init(name, weight.shape)),)
    rows, columns = weight.shape
    split = None if weight.split is None else weight.split + 1
    middle = 127 + round(math.log2(1 / (E2M1_RMS * math.sqrt(columns))))
    packed, scales = (weight.copies, rows, columns // 2), (weight.copies, rows, columns // card.mxfp4_group_size)
    return (
        TensorSpec(f"{name}.weight_packed", packed, "uint8", split, Init("bytes", 0, 256)),
        TensorSpec(f"{name}.weight_scale", scales, "uint8", split, Init("exponents", middle - 1, middle + 2)),
    )


def layer_specs(card: ModelCard, layer: int) -> tuple[TensorSpec, ...]:
    """All tensors of one layer (zero-based)."""
    weights = (*shapes.layer_vectors(card), *shapes.attention_weights(card, card.kind_of(layer)))
    if card.is_dense(layer):
        weights += shapes.dense_weights(card)
    else:
        weights += (*shapes.moe_weights(card), *shapes.moe_vectors(card), *shapes.expert_weights(card))
    return tuple(spec for weight in weights for spec in _specs(weight, card))


def model_specs(card: ModelCard) -> tuple[TensorSpec, ...]:
    """The tensors outside the layers."""
    return tuple(spec for weight in shapes.model_weights(card) for spec in _specs(weight, card))


def rank_bytes(card: ModelCard, tp: int) -> int:
    """Weight bytes one rank holds in a BF16 model (packed MXFP4 experts, no padding)."""
    total = sum(spec.local_bytes(tp) for spec in model_specs(card))
    return total + sum(
        spec.local_bytes(tp) for layer in range(card.num_hidden_layers) for spec in layer_specs(card, layer)
    )
