"""The two backends of an evaluation here and now: on a GPU the real ones, without one PyTorch operators beside the twins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels import ModelCard
from ...kernels.device import discover
from ..choices import Choice, Finder, choose
from ..plan import TUNED_FAMILIES
from ..scope import digest, group_scope, here

if TYPE_CHECKING:
    import torch

    from ..dispatch import Dispatcher
    from ..operators import Operators
    from ..weights import RankWeights

Say = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Places:
    """What :func:`~k3lab.decode.evaluation.evaluate.evaluate` needs, and what its report must say of it."""

    backends: dict[str, Callable[[int], Dispatcher]]
    conditions: dict[str, Any]
    """Model, weights, GPU, bundle: what outputs depend on beside the problems."""
    notes: tuple[str, ...]
    """What must be known before a number is read."""
    bundle: dict[str, Any] | None = None
    """Its digest and evidence, and what of it was used."""


def weights_digest(checkpoint: Path | None, seed: int) -> str:
    """Names, sizes and index of a checkpoint, 16 hex digits; or which random weights. The bytes are not read."""
    if checkpoint is None:
        return f"random, seed {seed}"
    made = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors*")):
        made.update(f"{file.name} {file.stat().st_size}\n".encode())
        if file.suffix == ".json":
            made.update(file.read_bytes())
    return made.hexdigest()[:16]


def places(
    card: ModelCard, *, checkpoint: Path | None, bundle: Finder | None, gpu: str, rows: int, seed: int, say: Say | None = None
) -> Places:  # fmt: skip
    """Load the weights, once for both.

    Args:
        card: the model.
        checkpoint: a folder in the published form; None: random weights of that seed.
        bundle: what ``latency_specialized`` runs; without one, or where an entry is missing, ``auto``'s operators do.
        gpu: whose entries are meant where no GPU is here.
        rows: requests in a step at most.
        seed: of random weights.
        say: is told how far it is.

    Raises:
        InputError: a checkpoint that cannot be read.
    """
    import torch

    from ..auto import AutoOperators
    from ..bench.reports import bundled
    from ..operators import ReferenceOperators

    device = discover()
    where = f"cuda:{device.index}" if device else "cpu"
    weights = _weights(card, checkpoint, where, seed, say)
    auto: Any = AutoOperators(card, dtype=weights.dtype, device=where)
    notes = [] if checkpoint else [f"random weights (seed {seed}): scores say nothing of the model"]
    scope, known, choices = None, None, tuple[Choice, ...]()
    specialized: Callable[[int], Operators]
    if device is None:
        notes.append("no GPU: latency_specialized is the twins, auto is PyTorch on the CPU; no kernel is judged")
        twins = ReferenceOperators(card)
        specialized = lambda _rows: twins  # noqa: E731
    else:
        from ...kernels.launch import unfit
        from ..fitting import fitting
        from ..tuned import TunedOperators

        known = device.card.name if device.card else gpu
        wanted = partial(
            choose, card, tp=1, rows=rows, gpu=known, only=TUNED_FAMILIES, objective="measured", command=("eval",)
        )
        if device.card:
            bundle = fitting(bundle, wanted(bundle=bundle), None, lambda compiled: unfit(compiled, where))
        choices = wanted(bundle=bundle)
        tuned = TunedOperators(card, choices, dtype=weights.dtype, device=where)
        tuned.take(weights)
        scope, specialized = group_scope([here(card, device, bundle, tp=1)]), lambda _rows: tuned
        notes.append(
            "kernels are launched one by one, in no captured graph: the same kernels, and no step time is told"
        )

    def make(backend: str, context: int) -> Dispatcher:
        return _dispatcher(backend, context, weights, rows, auto, specialized, scope, torch.bfloat16)

    conditions = {
        "model": card.name, "weights": weights_digest(checkpoint, seed), "tp": 1, "device": device.name if device else "cpu",
        "gpu": known, "bundle": f"{digest(bundle)} {bundle.path}" if bundle else None,
    }  # fmt: skip
    return Places(
        {name: partial(make, name) for name in ("auto", "latency_specialized")},
        conditions, tuple(notes), bundled(bundle, choices),
    )  # fmt: skip


def _weights(card: ModelCard, checkpoint: Path | None, where: str, seed: int, say: Say | None) -> RankWeights:
    import torch

    told = (lambda done, of: say("weights", done, of)) if say else None
    if checkpoint:
        from ..checkpoint.load import load_rank

        return load_rank(checkpoint, tp=1, rank=0, device=where, card=card, progress=told)
    from ..random_weights import random_rank_weights

    return random_rank_weights(card, seed=seed, dtype=torch.bfloat16, device=where, tp=1, progress=told)


def _dispatcher(
    backend: str, context: int, weights: RankWeights, rows: int, auto: Any, specialized: Any, scope: Any, dtype: torch.dtype
) -> Dispatcher:  # fmt: skip
    from ...kernels.collectives import SingleRank
    from ..caches import DecodeCache
    from ..dispatch import Dispatcher

    cache = DecodeCache(weights.card, max_requests=rows, max_context=context, dtype=dtype, device=weights.device)
    if scope is None and backend != "auto":  # the twins serve every step
        return Dispatcher(weights, cache, SingleRank(), auto=specialized(rows))
    return Dispatcher(
        weights, cache, SingleRank(), auto=auto, specialized=specialized, scope=scope if backend != "auto" else None,
        backend=backend,
    )  # fmt: skip
