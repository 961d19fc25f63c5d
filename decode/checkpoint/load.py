"""Loading one rank of a checkpoint: only its slices are read, tensor by tensor, straight to where they stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...kernels import InputError, ModelCard
from ..allocate import empty_tensors
from ..packing import pack_layer, pack_outside
from ..sharding import check_rank
from ..tensors import TensorSpec, layer_specs, model_specs, rank_bytes
from ..weights import RankWeights
from .names import SKIPPED, StoredTensor, layer_tensors, outside_tensors, text_tensors
from .shards import Checkpoint, OpenShards

TP_SIZES = (1, 2, 4, 8, 16)
Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes of this rank in a BF16 model)."""


def checkpoint_card(folder: str | Path) -> ModelCard:
    """The model of a checkpoint, from its ``config.json``.

    Raises:
        InputError: there is none, or it describes no model of the Kimi K3 structure.
    """
    return ModelCard.from_file(Path(folder) / "config.json")


def rank_slices(spec: TensorSpec, tp: int, rank: int, *, stacked: bool) -> tuple[slice, ...]:
    """What of a stored tensor the rank holds, axis by axis.

    ``stacked``: the stored tensor is one entry of the spec's leading dimension. What the checkpoint pads (A_log) is
    left out.
    """
    parts = []
    for axis, size in enumerate(spec.shape):
        width = size // tp if axis == spec.split else size
        start = rank * width if axis == spec.split else 0
        parts.append(slice(start, start + width))
    return tuple(parts[1:] if stacked else parts)


def fill(
    shards: OpenShards, tensors: Iterable[StoredTensor], specs: Mapping[str, TensorSpec], out: Mapping[str, torch.Tensor],
    tp: int, rank: int, loaded: Callable[[int], None] = lambda _count: None,
) -> None:  # fmt: skip
    """Copy a rank's slices of stored tensors to ``out``, by names of the specs; ``loaded`` is told their bytes."""
    for one in tensors:
        spec = specs[one.spec]
        where = rank_slices(spec, tp, rank, stacked=one.expert is not None)
        target = out[one.spec] if one.expert is None else out[one.spec][one.expert]
        stored = shards.slice(one.name)
        if len(stored.get_shape()) < len(where):  # a filter without its middle axis
            where = (where[0], where[-1])
        part = stored[where]
        target.copy_(part.reshape(target.shape))
        loaded(part.numel() * part.element_size())


def load_rank(
    folder: str | Path,
    *,
    tp: int,
    rank: int,
    device: str = "cpu",
    card: ModelCard | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
) -> RankWeights:
    """The weights of one rank, from a checkpoint in the published form.

    Layer by layer: beside the weights there is never more than one layer's attention projection twice on the device, and
    on the host no more than one slice of one tensor (the shards are mapped, their pages the system's to take back).

    Args:
        folder: with ``config.json``, the index and the shards.
        tp: tensor-parallel size.
        rank: this one.
        device: where the weights go.
        card: the model, if ``config.json`` is not to be read.
        dtype: of the model; ``float64`` for a reference.
        progress: called as it gets on.

    Raises:
        InputError: the first of the checkpoint's faults, or TP does not divide. Nothing was loaded.
    """
    card = card or checkpoint_card(folder)
    check_rank(card, tp, rank)
    checkpoint = Checkpoint.read(folder)
    checkpoint.check(text_tensors(card), SKIPPED)
    total, done = rank_bytes(card, tp), 0

    def loaded(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    def part(tensors: Iterable[StoredTensor], specs: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
        out = empty_tensors(specs, tp, dtype=dtype, device=device)
        with OpenShards(checkpoint) as shards:
            fill(shards, tensors, {spec.name: spec for spec in specs}, out, tp, rank, loaded)
        return out

    try:
        layers = []
        for layer in range(card.num_hidden_layers):
            tensors = part(layer_tensors(card, layer), layer_specs(card, layer))
            layers.append(pack_layer(tensors, card, layer, tp))
        outside = part(outside_tensors(card), model_specs(card))
    except OSError as error:  # a shard went away, or its disk failed, after the headers were read
        raise InputError(f"{folder}: reading failed: {error}") from error
    return pack_outside(outside, tuple(layers), card, tp=tp, rank=rank)


def survey(folder: str | Path, most: int) -> dict[str, Any]:
    """What a checkpoint is and what is wrong with it, as data: at most ``most`` faults, and how many there are.

    Raises:
        InputError: it cannot be looked at: no folder, no config.json of a Kimi K3 model, no index.
    """
    card, checkpoint = checkpoint_card(folder), Checkpoint.read(folder)
    expected = list(text_tensors(card))
    found = list(checkpoint.faults(expected, SKIPPED))
    return {
        "folder": str(folder), "model": card.name, "shards": len(checkpoint.files), "text_tensors": len(expected),
        "faults_found": len(found), "faults": found[:most],
        "rank_bytes": {tp: rank_bytes(card, tp) for tp in TP_SIZES if divides(card, tp)},
    }  # fmt: skip


def divides(card: ModelCard, tp: int) -> bool:
    """Whether the model can be cut for the TP size."""
    try:
        card.check_tp(tp)
    except InputError:
        return False
    return True
