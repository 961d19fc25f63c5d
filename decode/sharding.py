"""Cutting whole tensors into the slices of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernels import InputError, ModelCard
from .tensors import TensorSpec, layer_specs, model_specs

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class ModelTensors:
    """Tensors by name, whole or those of one rank, before they are packed."""

    outside: Tensors
    """Those of :func:`~k3lab.decode.tensors.model_specs`."""
    layers: Sequence[Tensors]
    """Those of :func:`~k3lab.decode.tensors.layer_specs`, layer by layer."""


def check_rank(card: ModelCard, tp: int, rank: int) -> None:
    """Raise InputError unless TP divides the model and the rank lies in it."""
    card.check_tp(tp)
    if not 0 <= rank < tp:
        raise InputError(f"rank {rank} lies outside 0..{tp - 1}, the ranks of TP {tp}")


def check_dcp(dcp: int, tp: int) -> None:
    """Raise InputError unless each rank holds whole contexts, or all ranks share each (DCP)."""
    if dcp not in (1, tp):
        ways = "1" if tp == 1 else f"1, or {tp}: all ranks"
        raise InputError(f"dcp is {dcp}; at TP {tp} decode context parallelism is {ways}")


def check_holds(rank: int, dcp: int, context: int, cure: str) -> None:
    """Raise InputError for a rank that runs alone and would hold no token of a shared context: nobody attends for it."""
    if dcp > 1 and context <= rank:
        raise InputError(f"rank {rank} alone holds no token of a context of {context} over {dcp} ranks; {cure}")


def shard_tensor(tensor: torch.Tensor, spec: TensorSpec, tp: int, rank: int) -> torch.Tensor:
    """The rank's slice, contiguous and where kernels can read it, from a multiple of 16 bytes on; a replicated tensor as it is.

    Raises:
        InputError: the tensor has not the unsharded shape of its spec.
    """
    if tuple(tensor.shape) != spec.shape:
        raise InputError(f"tensor {spec.name} has shape {list(tensor.shape)}, the model card says {list(spec.shape)}")
    if spec.split is None or tp == 1:
        return tensor
    width = spec.shape[spec.split] // tp
    own = tensor.narrow(spec.split, rank * width, width).contiguous()
    return own.clone() if own.data_ptr() % 16 else own


def shard(tensors: ModelTensors, card: ModelCard, *, tp: int, rank: int) -> ModelTensors:
    """The tensors of one rank of TP ``tp`` from whole ones.

    Raises:
        InputError: TP does not divide, the rank is outside, a tensor is missing or has the wrong shape.
    """
    check_rank(card, tp, rank)

    def cut(have: Tensors, specs: Sequence[TensorSpec], where: str) -> dict[str, torch.Tensor]:
        missing = [spec.name for spec in specs if spec.name not in have]
        if missing:
            raise InputError(f"{where} of {card.name} lacks the tensor {missing[0]}")
        return {spec.name: shard_tensor(have[spec.name], spec, tp, rank) for spec in specs}

    return ModelTensors(
        cut(tensors.outside, model_specs(card), "the model outside the layers"),
        [cut(layer, layer_specs(card, index), f"layer {index}") for index, layer in enumerate(tensors.layers)],
    )
