"""The family's work in PyTorch operators, as a user would write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..contract import Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from .family import AttnRes


def mix(problem: AttnRes, tensors: Tensors) -> Tensor:
    """The mix of all sources, FP32 [rows, hidden]."""
    import torch

    if problem.kind == "first":
        return tensors["prefix"].float()
    sources = torch.cat([tensors["blocks"], tensors["prefix"][None]]).float()
    query = tensors["res_norm"].float() * tensors["res_proj"][0].float()
    scores = (sources @ query) * torch.rsqrt(sources.square().mean(-1) + problem.eps)
    return torch.einsum("sr,srh->rh", scores.softmax(0), sources)


def chain(problem: AttnRes) -> Callable[[Tensors], Tensors]:
    """From inputs to outputs; what torch.compile is given."""
    import torch

    def run(tensors: Tensors) -> Tensors:
        dtype, value = tensors["prefix"].dtype, mix(problem, tensors)
        if problem.kind == "final":
            value = value.to(dtype).float()
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + problem.eps)
        if problem.kind == "final":
            value = value.to(dtype).float()
        return {"out": (value * tensors["norm_w"].float()).to(dtype)}

    return run


def chain_call(problem: AttnRes, tensors: Tensors) -> Callable[[], None]:
    """A call on fixed tensors, capturable in a graph."""
    run = chain(problem)

    def call() -> None:
        tensors["out"].copy_(run(tensors)["out"])

    return call
