"""Memory for one rank's tensors of a layer, experts laid out so that packing copies none of them."""

from __future__ import annotations

import torch

from .expert_memory import side_by_side
from .tensors import TensorSpec

_PAIRS = (
    ("experts.w1.weight_packed", "experts.w3.weight_packed"),
    ("experts.w1.weight_scale", "experts.w3.weight_scale"),
    ("shared_experts.gate_proj", "shared_experts.up_proj"),
)
"""Tensors of ``block_sparse_moe`` that lie side by side, expert by expert."""


def tensor_dtype(spec: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    """Of the tensor in a model of ``dtype``: FP32 tensors become FP64 in an FP64 model."""
    if spec.kind == "uint8":
        return torch.uint8
    return torch.float32 if spec.kind == "float32" and dtype != torch.float64 else dtype


def empty_tensors(
    specs: tuple[TensorSpec, ...], tp: int, *, dtype: torch.dtype, device: str | torch.device
) -> dict[str, torch.Tensor]:
    """Uninitialised tensors of one rank, by name of the spec."""
    by_name = {spec.name: spec for spec in specs}
    made: dict[str, torch.Tensor] = {}
    for pair in _PAIRS:
        first, second = (by_name.get(f"block_sparse_moe.{name}") for name in pair)
        if first is None or second is None:
            continue
        shapes, stacked = [spec.local_shape(tp) for spec in (first, second)], "experts.w" in pair[0]
        count = shapes[0][0] if stacked else 1
        one, other = (shape[1:] if stacked else shape for shape in shapes)
        both = side_by_side(count, one, other, dtype=tensor_dtype(first, dtype), device=device)
        for spec, tensor in zip((first, second), both, strict=True):
            made[spec.name] = tensor if stacked else tensor[0]
    for spec in specs:
        if spec.name not in made:
            made[spec.name] = torch.empty(spec.local_shape(tp), dtype=tensor_dtype(spec, dtype), device=device)
    return made
