"""The weights of one rank, as the decode step reads them: packed projections, cores, experts.

Shapes are per rank; T is the TP size, H the hidden size. Both backends read this one copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from ..kernels import ModelCard

if TYPE_CHECKING:
    import torch

    from ..kernels.experts.twin import ExpertWeights
    from ..kernels.kda.twin import KdaWeights
    from ..kernels.mla.twin import MlaWeights


@dataclass(frozen=True)
class Mix:
    """An AttnRes and the norm that follows it."""

    res_norm: torch.Tensor
    """[H]."""
    res_proj: torch.Tensor
    """[1, H]."""
    norm: torch.Tensor
    """[H], weight of the RMSNorm on the mix."""


@dataclass(frozen=True)
class KdaAttention:
    """A KDA layer's attention."""

    in_proj: torch.Tensor
    """[N, H], rows q, k, v, g (hD/T each), f_a (R), b (h/T), zeros to a multiple of 16."""
    core: KdaWeights
    o_proj: torch.Tensor
    """[H, hD/T]."""


@dataclass(frozen=True)
class MlaAttention:
    """An MLA layer's attention."""

    in_proj: torch.Tensor
    """[N, H], rows q_a, kv_a (latent and rope part), gate (h*v/T), zeros to a multiple of 16."""
    core: MlaWeights
    o_proj: torch.Tensor
    """[H, h*v/T]."""


class Layout:
    """Which layout a layer's experts are in; see :mod:`k3lab.decode.expert_memory`."""

    def __init__(self) -> None:
        """The checkpoint's."""
        self.held = False


@dataclass(frozen=True)
class MoeMlp:
    """A latent MoE."""

    router: torch.Tensor
    """[E/T, H]."""
    correction_bias: torch.Tensor
    """[E], FP32, for the choice only."""
    latent_down: torch.Tensor
    """[L/T, H]."""
    experts: ExpertWeights
    latent_norm: torch.Tensor
    """[L]."""
    latent_up: torch.Tensor
    """[H/T, L]."""
    shared_gate: torch.Tensor
    """[S/T, H]."""
    shared_up: torch.Tensor
    """[S/T, H]."""
    shared_down: torch.Tensor
    """[H, S/T]."""
    layout: Layout = field(default_factory=Layout, compare=False, repr=False)
    """Of the experts and the shared expert, whose memory serves both."""


@dataclass(frozen=True)
class DenseMlp:
    """The MLP of a dense layer."""

    gate: torch.Tensor
    """[I/T, H]."""
    up: torch.Tensor
    """[I/T, H]."""
    down: torch.Tensor
    """[H, I/T]."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer."""

    attention_mix: Mix
    attention: KdaAttention | MlaAttention
    mlp_mix: Mix
    mlp: MoeMlp | DenseMlp


@dataclass(frozen=True)
class RankWeights:
    """Everything one rank holds."""

    card: ModelCard
    tp: int
    rank: int
    embed: torch.Tensor
    """[V/T, H]."""
    layers: tuple[LayerWeights, ...]
    output_mix: Mix
    lm_head: torch.Tensor
    """[V/T, H]."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.device

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return _bytes(self)


def _bytes(value: Any) -> int:
    if is_dataclass(value):
        return sum(_bytes(getattr(value, one.name)) for one in fields(value))
    if isinstance(value, tuple):
        return sum(map(_bytes, value))
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0
