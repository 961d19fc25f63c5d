"""One copy of the experts for both backends: the checkpoint's layout and the held one, turned into each other in place.

The tuned kernels want the layout of :mod:`k3lab.kernels.experts.layout`, ``auto`` the checkpoint's. Both have as many
bytes: w1 and w3 of an expert side by side are what the held ``w13`` takes. So a bank is laid out for both, and turning
it changes bytes and no address: what a graph captured stays valid, if the bank is turned back before it is replayed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..kernels import InputError
from ..kernels.experts.layout import COLUMNS, ROWS, load, load_shared, unload, unload_shared
from ..kernels.experts.twin import ExpertWeights
from .weights import MoeMlp

EXPERTS_AT_A_TIME = 16
"""Experts that are turned at once: bounds the scratch memory, not the result."""


def side_by_side(
    count: int, first: tuple[int, ...], second: tuple[int, ...], *, dtype: torch.dtype, device: str | torch.device
) -> tuple[Tensor, Tensor]:
    """Empty tensors [count, *first] and [count, *second] of which each pair of entries lies in one stretch."""
    sizes = math.prod(first), math.prod(second)
    memory = torch.empty(count, sum(sizes), dtype=dtype, device=device)
    a, b = memory.split(sizes, dim=1)
    return a.unflatten(1, first), b.unflatten(1, second)


def _together(a: Tensor, b: Tensor) -> bool:
    """Whether the tensors are those of :func:`side_by_side`."""
    size = a[0].numel()
    stride = size + b[0].numel()
    return (
        a[0].is_contiguous()
        and b[0].is_contiguous()
        and (a.shape[0] == 1 or a.stride(0) == b.stride(0) == stride)
        and b.data_ptr() - a.data_ptr() == size * a.element_size()
    )


def _pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if _together(a, b):
        return a, b
    first, second = side_by_side(a.shape[0], tuple(a.shape[1:]), tuple(b.shape[1:]), dtype=a.dtype, device=a.device)
    return first.copy_(a), second.copy_(b)


def bank(experts: ExpertWeights) -> ExpertWeights:
    """The same experts in memory that can be held; what lies there already is not copied."""
    w1, w3 = _pair(experts.w1, experts.w3)
    w1_scale, w3_scale = _pair(experts.w1_scale, experts.w3_scale)
    return ExpertWeights(w1, w1_scale, w3, w3_scale, experts.w2.contiguous(), experts.w2_scale.contiguous())


def shared_pair(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of a shared expert, [I, H] each, in memory that can be held."""
    first, second = _pair(gate[None], up[None])
    return first[0], second[0]


def _as(tensor: Tensor, shape: tuple[int, ...], stride: int) -> Tensor:
    """The memory from the tensor's first entry on as [E, *shape]; entries ``stride`` elements apart."""
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return tensor.as_strided((tensor.shape[0], *shape), (stride, *inner))


def held_experts(experts: ExpertWeights) -> dict[str, Tensor]:
    """The memory of a bank under the names and shapes of the held layout (:func:`~k3lab.kernels.experts.layout.load`).

    Raises:
        InputError: the memory is not that of :func:`bank`, or a width is no multiple of 32.
    """
    if not (_together(experts.w1, experts.w3) and _together(experts.w1_scale, experts.w3_scale)):
        raise InputError("these experts' w1 and w3 do not lie side by side; expert_memory.bank puts them so")
    inner, latent = experts.w1.shape[1], experts.w2.shape[1]
    if inner % ROWS or latent % ROWS:
        raise InputError(f"experts of {latent} x {inner}: both widths must be multiples of {ROWS}")
    tiles = (inner // 16, latent // COLUMNS), (latent // ROWS, inner // COLUMNS)
    block, scales = ROWS * COLUMNS // 2, ROWS
    return {
        "w13": _as(experts.w1, (*tiles[0], block), 2 * experts.w1[0].numel()),
        "w13_scale": _as(experts.w1_scale, (*tiles[0], scales), 2 * experts.w1_scale[0].numel()),
        "w2": _as(experts.w2, (*tiles[1], block), experts.w2[0].numel()),
        "w2_scale": _as(experts.w2_scale, (*tiles[1], scales), experts.w2_scale[0].numel()),
    }


def held_shared(mlp: MoeMlp) -> dict[str, Tensor]:
    """The memory of a shared expert under the names and shapes of the held layout.

    Raises:
        InputError: gate and up do not lie side by side.
    """
    gate, up, down = mlp.shared_gate, mlp.shared_up, mlp.shared_down
    if not _together(gate[None], up[None]) or not down.is_contiguous():
        raise InputError(
            "this shared expert's gate and up do not lie side by side; expert_memory.shared_pair puts them so"
        )
    inner, hidden = gate.shape
    return {
        "gate_up": gate.as_strided((inner // 4, hidden // COLUMNS, 8 * COLUMNS), (8 * hidden, 8 * COLUMNS, 1)),
        "down": down.view(hidden // 8, inner // COLUMNS, 8 * COLUMNS),
    }


def _some(experts: ExpertWeights, where: slice) -> ExpertWeights:
    return ExpertWeights(**{name: tensor[where] for name, tensor in vars(experts).items()})


def hold(mlp: MoeMlp) -> dict[str, Tensor]:
    """Turn a layer's experts into the held layout, in place; returns the views that kernels read.

    Until :func:`release`, ``mlp.experts`` and its shared expert are other bits in the same memory: whoever wants them in
    the checkpoint's layout asks :func:`routed_of` and :func:`shared_of`. A layer that is held already stays so.

    Raises:
        InputError: the memory was not laid out for it.
    """
    views, shared = held_experts(mlp.experts), held_shared(mlp)
    if mlp.layout.held:
        return {**views, **shared}
    mlp.layout.held = True
    for start in range(0, mlp.experts.w1.shape[0], EXPERTS_AT_A_TIME):
        where = slice(start, start + EXPERTS_AT_A_TIME)
        for name, made in load(_some(mlp.experts, where)).items():
            views[name][where].copy_(made)
    for name, made in load_shared(mlp.shared_gate, mlp.shared_up, mlp.shared_down).items():
        shared[name].copy_(made)
    return {**views, **shared}


def release(mlp: MoeMlp) -> None:
    """Inverse of :func:`hold`: the checkpoint's layout again, bit for bit."""
    if not mlp.layout.held:
        return
    views, shared = held_experts(mlp.experts), held_shared(mlp)
    for start in range(0, mlp.experts.w1.shape[0], EXPERTS_AT_A_TIME):
        where = slice(start, start + EXPERTS_AT_A_TIME)
        turned = unload({name: view[where] for name, view in views.items()})
        for name, tensor in vars(turned).items():
            getattr(mlp.experts, name)[where].copy_(tensor)
    gate, up, down = unload_shared(shared["gate_up"], shared["down"])
    # all three are read before one is written: gate and up share the memory of gate_up
    for target, made in zip((mlp.shared_gate, mlp.shared_up, mlp.shared_down), (gate, up, down), strict=True):
        target.copy_(made)
    mlp.layout.held = False


def routed_of(mlp: MoeMlp, chosen: Tensor | None = None) -> ExpertWeights:
    """Experts in the checkpoint's layout, whichever they are in: all of them, or copies of those of ids [n]."""
    if not mlp.layout.held:
        everyone = mlp.experts
        return (
            everyone if chosen is None else ExpertWeights(**{name: one[chosen] for name, one in vars(everyone).items()})
        )
    views = held_experts(mlp.experts)
    return unload({name: view if chosen is None else view[chosen] for name, view in views.items()})


def shared_of(mlp: MoeMlp) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down of the shared expert in the checkpoint's layout, whichever they are in."""
    if not mlp.layout.held:
        return mlp.shared_gate, mlp.shared_up, mlp.shared_down
    views = held_shared(mlp)
    return unload_shared(views["gate_up"], views["down"])


@contextmanager
def held(mlp: MoeMlp) -> Iterator[dict[str, Tensor]]:
    """:func:`hold` for the block under it."""
    views = hold(mlp)
    try:
        yield views
    finally:
        release(mlp)
