"""The family's work in PyTorch operators: what a user without these kernels would run on weights dequantised beforehand.

The alternative is treated kindly: dequantisation and the grouping of rows by expert, which depends on the routing, are done
once and not timed; one batched product a projection then reads every chosen expert once, in BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..contract import Tensors
from ..mxfp4 import dequantize
from ..numerics import situ
from .layout import LOADED, unload, unload_shared

if TYPE_CHECKING:
    from torch import Tensor

    from .family import Experts

EXPERTS_AT_A_TIME = 32
"""Experts dequantised at once: bounds the scratch memory."""


def grouped(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by expert of ids [n, k]: distinct experts [D]; rows [D, m], the first one repeated where there are fewer; and where slot
    (row, k) lies in [D * m].
    """
    chosen, places = torch.unique(ids, return_inverse=True)
    flat = places.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=len(chosen))
    starts = torch.cumsum(counts, 0) - counts
    rank = torch.empty_like(flat)
    rank[order] = torch.arange(len(flat), device=flat.device) - starts[flat[order]]
    width = int(counts.max())
    rows = torch.zeros(len(chosen), width, dtype=torch.long, device=ids.device)
    at = flat * width + rank
    rows.view(-1)[at] = torch.arange(len(flat), device=flat.device) // ids.shape[1]
    return chosen, rows, at.view(ids.shape)


def dequantised(tensors: Tensors, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """BF16 weights of the experts, laid out for batched products: [D, L, 2 I] of gate and up, [D, I, L] of down."""
    first, second = [], []
    for some in chosen.split(EXPERTS_AT_A_TIME):
        experts = unload({name: tensors[name][some] for name in LOADED})
        gate, up, down = (
            dequantize(getattr(experts, name), getattr(experts, f"{name}_scale"), torch.bfloat16)
            for name in ("w1", "w3", "w2")
        )
        first.append(torch.cat((gate, up), 1))
        second.append(down)
    return torch.cat(first).mT, torch.cat(second).mT


def alternative(problem: Experts, tensors: Tensors) -> Callable[[], None]:
    """A call that leaves its results in the outputs; capturable in a graph."""
    chosen, rows, at = grouped(tensors["ids"])
    first, second = dequantised(tensors, chosen)
    shared = unload_shared(tensors["gate_up"], tensors["down"]) if problem.has_shared else None
    weights = None if shared is None else (torch.cat(shared[:2]).T.contiguous(), shared[2].T.contiguous())
    beta, linear = problem.beta, problem.linear_beta

    def call() -> None:
        gate, up = torch.bmm(tensors["latent"][rows], first).chunk(2, -1)
        made = torch.bmm(situ(gate, up, beta, linear), second).flatten(0, 1)
        total = (made[at].float() * tensors["weights"][..., None]).sum(1)
        tensors["latent_partial"].copy_(total)
        if weights is not None:
            gate, up = torch.mm(tensors["x"], weights[0]).chunk(2, -1)
            torch.mm(situ(gate, up, beta, linear), weights[1], out=tensors["shared_partial"])

    return call
