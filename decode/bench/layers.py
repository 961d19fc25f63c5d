"""Time a layer by kind, its launches and its share of the byte floor: slopes between graphs of the step that a bench runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...kernels import InputError
from ...kernels.gpu_cards import GpuCard
from ...kernels.model_card import LayerKind
from ..bars import KINDS, depths
from ..run_options import RunOptions

if TYPE_CHECKING:
    from ...kernels.collectives import Collectives
    from ..measure_bars import Load, Timer
    from ..operators import Operators
    from ..weights import RankWeights


def load_of(options: RunOptions) -> Load:
    """The bench's step half-way through its output."""
    from ..measure_bars import Load

    context = options.fill + options.prompt + options.tokens // 2
    return Load(options.rows, options.drafts + 1, context, options.dcp, options.kv_dtype)


def by_kind(
    weights: RankWeights, comm: Collectives, operators: Operators, options: RunOptions, name: str, gpu: GpuCard, *,
    samples: int, timer: Timer | None = None, say: Callable[[str, int, int], None] = lambda _what, _done, _of: None,
) -> dict[str, Any]:  # fmt: skip
    """Layers and step of one backend, as ``decode bars`` measures them.

    Args:
        weights: this rank's.
        comm: its group.
        operators: that serve the step.
        options: of the bench.
        name: of the backend: stock engines read more a layer than a path that shards the router does.
        gpu: for the floor.
        samples: of each graph.
        timer: times runs (default: by the device's events).
        say: is told how far it is.

    Returns:
        The table of :class:`~k3lab.decode.measure_bars.Bench`, with ``context`` and, by kind, why it is ``absent``.
    """
    from ..measure_bars import Bench, by_events

    kinds, absent = list[LayerKind](), dict[str, str]()
    for kind in KINDS:
        try:
            depths(weights.card, kind)
            kinds.append(kind)
        except InputError as error:
            absent[f"time of a layer, {kind}"] = str(error)
    load = load_of(options)
    made = Bench(weights, comm, load, seed=options.seed).table(
        name, operators, gpu, timer or by_events, samples, kinds, say
    )
    return {**made, "context": load.context, "absent": absent}
