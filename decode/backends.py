"""Both operators of a rank on a GPU, and what decides between them: agreed on by all ranks before anything waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kernels import InputError, ModelCard
from .choices import Choice, Finder
from .letters import letters
from .run_options import RunOptions
from .scope import Scope, StepShape, here

if TYPE_CHECKING:
    from ..kernels.collectives import Collectives
    from .auto import AutoOperators
    from .caches import DecodeCache
    from .dispatch import Dispatcher
    from .group import Group
    from .weights import RankWeights

Say = Callable[[str, int, int], None]
"""Called with (what, done, of)."""


@dataclass(frozen=True)
class Backend:
    """Both operators of a GPU rank, and what decides between them."""

    auto: AutoOperators
    used: AutoOperators
    """Those of the backend that was asked for."""
    scope: Scope | None
    """None for ``auto``."""

    def dispatcher(self, weights: RankWeights, cache: DecodeCache, comm: Collectives, options: RunOptions, say: Say, **more: Any) -> Dispatcher:  # fmt: skip
        """What judges the steps of this run."""
        from .dispatch import Dispatcher

        return Dispatcher(
            weights, cache, comm, auto=self.auto, specialized=(lambda _rows: self.used) if self.scope else None,
            scope=self.scope, backend=options.backend, chunk=options.chunk, say=lambda line: say(line, 0, 1), **more,
        )  # fmt: skip

    def check(self) -> None:
        """See :class:`~k3lab.decode.operators.Operators`."""
        self.used.check()

    def planned(self, launches: Mapping[str, int] | None, options: RunOptions) -> Mapping[str, int]:
        """Launches of tuned kernels in this run's step: none where the scope leaves it to ``auto``."""
        served = self.of(StepShape((options.drafts,) * options.rows)) is self.used
        return launches or {} if served and self.scope else {}

    def of(self, shape: StepShape) -> AutoOperators:
        """The operators of a step, as the scope judges it."""
        return self.auto if self.scope is None or self.scope.judge(shape) else self.used


def backend_of(
    card: ModelCard, options: RunOptions, choices: tuple[Choice, ...], weights: RankWeights, group: Group,
    bundle: Finder | None,
) -> Backend:  # fmt: skip
    """Operators on this GPU; what all ranks can do is agreed on here, before anything waits."""
    from .auto import AutoOperators
    from .context_parallel import context_group
    from .lone import lone_peers
    from .scope import agree, group_scope

    if group.host:
        told = letters(options.dcp, group.host, 16, "dcp")
        if len(set(told)) > 1:  # no backend can run: their caches differ
            raise InputError(f"ranks have dcp {', '.join(map(str, told))}; start every rank with the same options")
    shared = context_group(group.comm, options.dcp)
    where: dict[str, Any] = {"dtype": weights.dtype, "device": weights.device, "context_group": shared}
    peers = lone_peers(card, tp=options.tp, rows=options.step_rows, device=weights.device) if group.alone else None
    auto = AutoOperators(card, **where, peers=peers)
    if options.backend == "auto":
        return Backend(auto, auto, None)
    from .tuned import TunedOperators

    assert group.device
    mine = here(card, group.device, bundle, tp=options.tp, graph_rows=options.step_rows, kv_dtype=options.kv_dtype)
    scope = agree(mine, group.host) if group.host else group_scope([mine])
    # loading makes mailboxes together: ranks that differ have no kernels in common
    loaded = () if scope.session else choices
    tuned = TunedOperators(card, loaded, **where, transport=group.transport, peers=peers)
    tuned.take(weights)
    return Backend(auto, tuned, scope)
