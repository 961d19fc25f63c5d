"""The likeliest token of each row of logits, where PyTorch chooses: eagerly or captured."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.collectives import Collectives, StandIn


def likeliest(logits: Tensor) -> Tensor:
    """Highest of the last dimension, the lower id among equals; the last id where there is a NaN.

    What the head's kernels choose (:func:`k3lab.kernels.lm_head.twin.best_token`), by few operators.
    """
    # argmax leaves open which of equals it returns
    best = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1] - 1).amin(-1)


def likeliest_of(logits: Tensor, part: int, comm: Collectives) -> Tensor:
    """The likeliest token of each row of what a group gathered: int64, without the last dimension.

    A rank alone in place of a group has only its own part of the vocabulary to choose from: its gather
    repeats that part, and the embedding knows no other ids.

    Args:
        logits: [..., V], gathered.
        part: of the vocabulary that a rank has, V/T.
        comm: the group.
    """
    if isinstance(comm, StandIn):
        return comm.rank * part + likeliest(logits[..., :part])
    return likeliest(logits)
