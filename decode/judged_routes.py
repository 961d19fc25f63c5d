"""Followers that go by the judge's experts, so that a near tie of two experts does not hide what kernels add to an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.collectives import Collectives
from .operators import Operators
from .step import MAX_ROWS
from .weights import MoeMlp, RankWeights


class Routes:
    """Which experts the judge's routers chose in a step, layer by layer.

    At a near tie of two experts the last bit decides, and another expert is another text: errors behind one say nothing of the
    kernels. Followers that are led choose for themselves, and where they chose otherwise, which is counted, go on with the judge's.
    """

    def __init__(self, weights: RankWeights) -> None:
        """For steps on these weights' device."""
        self.layers, top = (
            sum(isinstance(layer.mlp, MoeMlp) for layer in weights.layers),
            weights.card.num_experts_per_token,
        )
        whole = (self.layers, MAX_ROWS, top)
        self.ids = torch.arange(top, device=weights.device).expand(whole).clone()
        self.weights = torch.zeros(whole, dtype=torch.float64, device=weights.device)
        self.rows = 0
        """Of the judge's last step."""

    def judging(self, operators: Operators) -> Any:
        """Operators of the judge: what their routers choose is kept."""
        return _Routed(operators, self, leads=True)

    def led(self, operators: Operators) -> Any:
        """Operators of a follower; ``routed`` and ``otherwise`` count its rows and layers, and those in which it chose otherwise."""
        return _Routed(operators, self, leads=False)


class _Routed:
    """Operators whose routers are looked at. A captured step calls them as an eager one does: layer by layer."""

    def __init__(self, operators: Operators, routes: Routes, *, leads: bool) -> None:
        self._operators, self._routes, self._leads = operators, routes, leads
        self._layer = 0
        self._alike = torch.ones(routes.ids.shape[:2], dtype=torch.bool, device=routes.ids.device)
        self.routed = self.otherwise = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def router(self, x: Tensor, mlp: MoeMlp, comm: Collectives) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~k3lab.decode.operators.Operators`."""
        ids, weights, latent = self._operators.router(x, mlp, comm)
        layer, rows, routes = self._layer, ids.shape[0], self._routes
        self._layer = (layer + 1) % routes.layers
        if self._leads:
            routes.ids[layer, :rows], routes.weights[layer, :rows], routes.rows = ids, weights, rows
            return ids, weights, latent
        judged = routes.ids[layer, :rows]
        alike = (ids.long().sort(-1).values == judged.sort(-1).values).all(-1)
        self._alike[layer, :rows] = alike
        chosen = torch.where(alike[:, None], ids, judged.to(ids.dtype))
        return chosen, torch.where(alike[:, None], weights, routes.weights[layer, :rows].to(weights.dtype)), latent

    def check(self) -> None:
        """See :class:`~k3lab.decode.operators.Operators`; counts the step's rows, filled up ones left out."""
        self._operators.check()
        self.routed += self._routes.layers * self._routes.rows
        self.otherwise += int((~self._alike[:, : self._routes.rows]).sum())
