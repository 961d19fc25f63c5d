"""Which tensors a checkpoint of a model holds: name, shape, dtype, and what of the model each one is. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...kernels import ModelCard
from ...kernels import weight_shapes as shapes
from ...kernels.weight_shapes import Weight

PREFIX = "language_model.model."
HEAD = "language_model.lm_head.weight"
"""The one text tensor outside :data:`PREFIX`."""
SKIPPED = ("vision_tower.", "mm_projector.")
"""Beginnings of names that a text model has no use for."""
Stored = Literal["BF16", "F32", "U8"]
"""Dtypes by their names in a safetensors header."""
STORED_BYTES: dict[Stored, int] = {"BF16": 2, "F32": 4, "U8": 1}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the checkpoint."""

    name: str
    """As published."""
    shape: tuple[int, ...]
    dtype: Stored
    spec: str
    """Name of the :class:`~k3lab.decode.tensors.TensorSpec` it is, or is a part of."""
    expert: int | None = None
    """Which entry of the spec's leading dimension; None if the spec is this tensor alone."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored shape is the expected one; a filter may come as [channels, width] too."""
        return shape == self.shape or (self.spec.endswith("_conv1d") and shape == (self.shape[0], self.shape[2]))


def _stored(weight: Weight, prefix: str, group: int) -> Iterator[StoredTensor]:
    spec = weight.name.removesuffix(".weight")
    if weight.dtype != "mxfp4":
        yield StoredTensor(prefix + weight.name, weight.shape, "BF16" if weight.dtype == "bfloat16" else "F32", spec)
        return
    rows, columns = weight.shape
    bank, matrix = weight.name.rsplit(".", 1)
    for expert in range(weight.copies):
        for part, width in (("packed", columns // 2), ("scale", columns // group)):
            name = f"{prefix}{bank}.{expert}.{matrix}.weight_{part}"
            yield StoredTensor(name, (rows, width), "U8", f"{spec}.weight_{part}", expert)


def layer_tensors(card: ModelCard, layer: int) -> Iterator[StoredTensor]:
    """Those of one layer (zero-based)."""
    weights = (*shapes.layer_vectors(card), *shapes.attention_weights(card, card.kind_of(layer), stored=True))
    if card.is_dense(layer):
        weights += shapes.dense_weights(card)
    else:
        weights += (*shapes.moe_weights(card), *shapes.moe_vectors(card), *shapes.expert_weights(card))
    for weight in weights:
        yield from _stored(weight, f"{PREFIX}layers.{layer}.", card.mxfp4_group_size)


def outside_tensors(card: ModelCard) -> Iterator[StoredTensor]:
    """Those outside the layers."""
    for weight in shapes.model_weights(card):
        prefix = HEAD.removesuffix(weight.name) if HEAD.endswith(f".{weight.name}") else PREFIX
        yield from _stored(weight, prefix, card.mxfp4_group_size)


def text_tensors(card: ModelCard) -> Iterator[StoredTensor]:
    """All text tensors."""
    yield from outside_tensors(card)
    for layer in range(card.num_hidden_layers):
        yield from layer_tensors(card, layer)
