"""The ``latency_specialized`` backend's operators: a bundle's kernels, and ``auto``'s where there are none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import ModelCard
from ..kernels.launch import Runner
from .auto import AutoOperators
from .choices import Choice, Tuned
from .weights import KdaAttention, MlaAttention


class TunedOperators(AutoOperators):
    """See :class:`~k3lab.decode.operators.Operators`; runs on a GPU.

    Kernels are loaded at construction; a call binds its tensors, which the launches hold. In a captured
    graph binding happens once, at capture.
    """

    name = "latency_specialized"

    def __init__(
        self,
        card: ModelCard,
        choices: Sequence[Choice],
        *,
        dtype: torch.dtype,
        device: str | torch.device,
        k_scale: float = 1.0,
    ) -> None:
        """``choices``: of :func:`~k3lab.decode.choices.choose`; those that are tuned are loaded."""
        super().__init__(card, dtype=dtype, device=device, k_scale=k_scale)
        self._projection = {
            choice.kind: Runner(choice.compiled, str(device))
            for choice in choices
            if isinstance(choice, Tuned) and choice.family == "attention_projection"
        }

    def attention_projection(self, x: Tensor, attention: KdaAttention | MlaAttention) -> Tensor:
        """The bundle's kernel of the layer's kind, or ``auto``'s GEMM."""
        runner = self._projection.get("kda" if isinstance(attention, KdaAttention) else "mla")
        if runner is None:
            return super().attention_projection(x, attention)
        out = torch.empty(x.shape[0], attention.in_proj.shape[0], dtype=x.dtype, device=x.device)
        call = runner.bind({"x": x.contiguous(), "w": attention.in_proj, "out": out}, rows=x.shape[0])
        call()
        return out
