"""Chains of several contestants, in turn in one process: what each adds to the same predecessor.

As in a contest all have the same inputs and one graph each, and every round takes them in another order. The
predecessor alone is timed in every round and taken off all, so that its noise is no difference between them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..kernels import Compiled, Family, Problem
from .chain import PREDECESSOR_US, pairs, predecessor_of, require_edges
from .choose import LEAST_BAND
from .contest import gave_up, turns
from .outcome import describe
from .policy import TimingPolicy
from .timing import BrokenMeasurement, Captured, Series, capture_calls, input_copies, restorer

if TYPE_CHECKING:
    import torch

ROUNDS = 2


@dataclass
class Link:
    """One contestant behind the predecessor."""

    plain: Captured | None = None
    """Pairs without a programmatic edge."""
    chained: Captured | None = None
    """Pairs with one; None where no launch asks for it."""
    kept: list[Any] = field(default_factory=list)
    """What the graphs' launches point to."""
    failed: str = ""
    carveout: int = 0
    """Percent of an SM's memory that the predecessor leaves to shared memory: what the kernel takes."""
    with_edge: list[Series] = field(default_factory=list)
    without: list[Series] = field(default_factory=list)

    def to_json(self, predecessor_us: float) -> dict[str, Any]:
        """Microseconds: what it adds with the edge and without, what the edge hides, and the noise of the first.

        Without programmatic launches the first is the second, and nothing is hidden.
        """
        if self.failed:
            return {"failed": self.failed}
        plain = _middle(self.without)
        series = self.with_edge or self.without
        pair = _middle(series)
        middles = [one.median_us for one in series]
        band = max(max(middles) - min(middles), pair * max(LEAST_BAND, *(one.spread for one in series)))
        figures = {"chain_us": pair - predecessor_us, "plain_us": plain - predecessor_us, "hidden_us": plain - pair, "band_us": band}  # fmt: skip
        return {
            **{name: round(value, 4) for name, value in figures.items()},
            "programmatic": bool(self.with_edge),
            "carveout": self.carveout,
            "failed": "",
        }


def time_chains(
    family: Family, problem: Problem, contestants: Sequence[Compiled | str], policy: TimingPolicy, seed: int, sign: Callable[[], None],
    microseconds: float = PREDECESSOR_US,
) -> dict[str, Any]:  # fmt: skip
    """Time all on the current GPU behind the same predecessor, weights cold; it leaves each the shared memory it takes.

    Args:
        family: the engines'.
        problem: which instance.
        contestants: compiled, or why not.
        policy: of one round.
        seed: of the inputs.
        sign: called before each piece of work: a sign of life.
        microseconds: what the predecessor spins.

    Returns:
        ``results`` in the order of the contestants (see :meth:`Link.to_json`), ``predecessor_us``, and how.
    """
    import torch

    sign()
    copies = input_copies(family, problem, policy, seed)
    restore = restorer(family, copies)
    # what it takes alone is the same whatever it leaves to shared memory
    alone, quiet = capture_calls([predecessor_of(family, copies, 0, microseconds)], policy), []
    links = []
    for compiled in contestants:
        sign()
        links.append(
            Link(failed=compiled)
            if isinstance(compiled, str)
            else _link(compiled, partial(predecessor_of, family, copies, microseconds=microseconds), copies, policy)
        )
    for turn, order in enumerate(turns(len(links), ROUNDS)):
        quiet.append(alone.replayed(policy))
        for link in (links[place] for place in order):
            if link.failed or link.plain is None:
                continue
            sign()
            if link.chained is not None:
                link.with_edge.append(link.chained.replayed(policy, restore))
            if link.chained is None or turn == 0:  # beside the edge it decides nothing
                link.without.append(link.plain.replayed(policy, restore))
            buffers = link.kept[0].buffers
            link.failed = gave_up(buffers) or family.measurement_fault(problem, {**copies[0], **buffers}) or ""
    predecessor_us = _middle(quiet)
    result = {
        "results": [link.to_json(predecessor_us) for link in links],
        "spin_us": microseconds,
        "predecessor_us": round(predecessor_us, 4),
        "rounds": ROUNDS,
        "policy": policy.to_json(),
    }
    del links, alone, copies, restore
    torch.cuda.empty_cache()
    return result


def _middle(series: Sequence[Series]) -> float:
    return statistics.median(one.median_us for one in series)


def _link(
    compiled: Compiled,
    before_of: Callable[[int], Callable[[], None]],
    copies: Sequence[dict[str, torch.Tensor]],
    policy: TimingPolicy,
) -> Link:
    from ..kernels.launch import ResidencyError, Runner

    try:
        runner = Runner(compiled)
        before = before_of(runner.carveout)
        plain = pairs(before, runner, copies, pdl=False)
        if not any(launch.pdl for launch in compiled.launches):
            return Link(capture_calls(plain, policy), None, [runner, plain], carveout=runner.carveout)
        chained = pairs(before, runner, copies)
        require_edges(chained, compiled)
    except (ResidencyError, BrokenMeasurement) as error:
        return Link(failed=describe(error))
    kept = [runner, plain, chained]
    return Link(capture_calls(plain, policy), capture_calls(chained, policy), kept, carveout=runner.carveout)
