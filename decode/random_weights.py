"""Seeded random weights of realistic magnitude, whole or for one rank, made where they will be used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..kernels import ModelCard
from .packing import pack, pack_layer, pack_outside
from .sharding import ModelTensors, check_rank, shard
from .tensors import TensorSpec, layer_specs, model_specs
from .weights import RankWeights

if TYPE_CHECKING:
    import torch


def random_tensor(
    spec: TensorSpec, shape: tuple[int, ...], *, seed: str, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Draw one tensor on the device from a generator of its own, so that no tensor depends on another.

    ``seed`` is any text; equal texts give equal tensors on the same kind of device. FP32 tensors
    become FP64 in an FP64 model.
    """
    import torch

    from .allocate import tensor_dtype

    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little") >> 1)
    init = spec.init
    if init.draw in ("bytes", "exponents"):
        return torch.randint(
            int(init.low), int(init.high), shape, generator=generator, dtype=torch.uint8, device=device
        )
    target = tensor_dtype(spec, dtype)
    out = torch.empty(shape, dtype=torch.float32 if target == torch.bfloat16 else target, device=device)
    if init.draw == "normal":
        out.normal_(init.low, init.high, generator=generator)
    else:
        out.uniform_(init.low, init.high, generator=generator)
    return out.to(target)


def random_tensors(card: ModelCard, *, seed: int, dtype: torch.dtype, device: str = "cpu") -> ModelTensors:
    """Whole tensors of the model: shard them with :func:`~k3lab.decode.sharding.shard`."""

    def draw(specs: tuple[TensorSpec, ...], where: str) -> dict[str, torch.Tensor]:
        return {
            spec.name: random_tensor(spec, spec.shape, seed=f"{seed}/{where}/{spec.name}", dtype=dtype, device=device)
            for spec in specs
        }

    layers = [draw(layer_specs(card, layer), f"layer{layer}") for layer in range(card.num_hidden_layers)]
    return ModelTensors(draw(model_specs(card), "model"), layers)


def random_weights(
    card: ModelCard, *, seed: int, dtype: torch.dtype, device: str = "cpu", tp: int = 1, rank: int = 0
) -> RankWeights:
    """Weights of one rank, cut from the whole random model of that seed."""
    check_rank(card, tp, rank)
    return pack(shard(random_tensors(card, seed=seed, dtype=dtype, device=device), card, tp=tp, rank=rank), card, tp=tp, rank=rank)  # fmt: skip


BALANCED = 0.2
"""Of a random selection bias, in a rank's own weights: a trained bias balances the experts, a whole random one makes favourites (8 rows
hit 112 of K3's experts in place of 120)."""


def random_rank_weights(
    card: ModelCard,
    *,
    seed: int,
    dtype: torch.dtype,
    device: str = "cpu",
    tp: int,
    rank: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> RankWeights:
    """Weights of one rank alone, drawn in the rank's own shapes: the whole model is never made.

    Replicated tensors are equal on all ranks; the slices are independent draws, so they are not the
    slices of :func:`random_tensors`. Routing is nearly uniform (:data:`BALANCED`). ``progress`` is called with (layers done, layers).
    """
    check_rank(card, tp, rank)

    from .allocate import empty_tensors

    def draw(specs: tuple[TensorSpec, ...], where: str) -> dict[str, torch.Tensor]:
        out, own = empty_tensors(specs, tp, dtype=dtype, device=device), f"/rank{rank}of{tp}"
        for spec in specs:
            text = f"{seed}/{where}/{spec.name}" + ("" if spec.split is None else own)
            drawn = random_tensor(spec, spec.local_shape(tp), seed=text, dtype=dtype, device=device)
            out[spec.name].copy_(drawn * BALANCED if spec.name.endswith("e_score_correction_bias") else drawn)
        return out

    layers = []
    for layer in range(card.num_hidden_layers):
        # packed layer by layer, so that a rank's weights are never there twice
        layers.append(pack_layer(draw(layer_specs(card, layer), f"layer{layer}"), card, layer, tp))
        if progress:
            progress(layer + 1, card.num_hidden_layers)
    return pack_outside(draw(model_specs(card), "model"), tuple(layers), card, tp=tp, rank=rank)
