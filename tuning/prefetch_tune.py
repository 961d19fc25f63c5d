"""Which prefetch shortens the chain, for each rows value; off where none does by more than the noise.

Parameters are taken one after the other, what promises most first: all values of one, the others as they won so far.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kernels import Config, ModelCard, Space
from .choose import LEAST_BAND
from .contest import turns
from .policy import QUICK, TimingPolicy

if TYPE_CHECKING:
    from ..kernels.device import Device
    from .timing import Series

ORDER = ("cap_mb", "fork", "blocks", "chunk_kb", "kept", "reach", "order", "priority")
SEARCH_ROUNDS, FINAL_ROUNDS = 2, 5

Times = list[tuple[float, float]]
"""(median in microseconds, spread as a share of it) of each round."""


@dataclass(frozen=True)
class Verdict:
    """What a prefetch is worth in the chain; microseconds a pass."""

    off_us: float
    on_us: float
    """Of the best config, whether it wins or not."""
    band_us: float
    """Differences that nobody should act on."""

    @property
    def gain_us(self) -> float:
        """How much shorter the chain is with it; negative where it loses."""
        return self.off_us - self.on_us

    @property
    def worth_it(self) -> bool:
        """A gain beyond the noise; a tie is off."""
        return self.gain_us > self.band_us


def middle(times: Times) -> float:
    """Median of the rounds' medians."""
    return statistics.median(us for us, _ in times)


def judged(off: Times, on: Times) -> Verdict:
    """The band is what either chain's rounds differ by among themselves, or the larger spread within one, or the least of all bands."""
    noise = [max(us for us, _ in times) - min(us for us, _ in times) for times in (off, on)]
    within = [us * spread for times in (off, on) for us, spread in times]
    return Verdict(middle(off), middle(on), max(*noise, *within, middle(off) * LEAST_BAND))


def climbed(
    space: Space, measure: Callable[[Sequence[Config]], Sequence[Times]], say: Callable[[str], None]
) -> tuple[Config, int]:
    """The best config but off, and how many were timed.

    Args:
        space: of the prefetch.
        measure: rounds of each config, in one process and in turn.
        say: hears each winner of a parameter.
    """
    params = {param.name: param for param in space.params}
    best, seen = dict(space.default), 0
    for name in ORDER:
        others = [{**best, name: value} for value in params[name].values if value != best[name]]
        tried = [best, *(one for one in others if one["cap_mb"] and space.illegal(one) is None)]
        if len(tried) == 1:
            continue
        times = measure(tried)
        seen += len(tried)
        place = min(range(len(tried)), key=lambda index: middle(times[index]))
        best = dict(tried[place])
        say(f"{name} {best[name]}: {middle(times[place]):.2f} us, {len(tried)} values tried")
    return best, seen


def tune_prefetch(
    device: Device, card: ModelCard, tp: int, rows: int, kind: str, configs: Mapping[str, Config], given: Config | None,
    say: Callable[[str], None], policy: TimingPolicy = QUICK, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Measure one rows value on the current GPU.

    Args:
        device: the GPU.
        card: of the model.
        tp: ranks; the others are played by this GPU.
        rows: token rows.
        kind: of the next layer.
        configs: of the chain's kernels, by family, what differs from the defaults.
        given: the one prefetch to time; None searches.
        say: hears of progress.
        policy: of one round.
        seed: of the inputs.

    Returns:
        JSON-able: ``off_us``, ``on_us``, ``gain_us``, ``band_us`` of the chain, the ``best`` config tried, and what the
        table says: ``config``, whose cap is 0 where the best one loses.

    Raises:
        InputError: no engine serves the problem, or an illegal config.
        BrokenMeasurement: a prefetch changed a bit, edges were lost, or a wait gave up.
    """
    import torch

    from ..kernels.experts.prefetch import OFF, space
    from .compiling import compile_config
    from .prefetch_chain import Chain, links
    from .timing import BrokenMeasurement, capture_calls

    chain = links(card, tp, rows, kind, device.need_card(), configs)
    compiled = [compile_config(one.engine, one.problem, one.config, device.arch) for one in chain]
    made = Chain(chain, compiled, policy, seed)
    reference = made.outputs(made.passes(OFF, device.arch))

    def measure(tried: Sequence[Config], rounds: int = SEARCH_ROUNDS) -> list[Times]:
        made.kept.clear()
        graphs = []
        for config in tried:
            passes = made.passes(config, device.arch)
            edges = made.require_edges(passes, config)
            if not all(
                torch.equal(a.view(torch.int16), b.view(torch.int16))
                for a, b in zip(made.outputs(passes), reference, strict=True)
            ):
                raise BrokenMeasurement(f"a prefetch changed the results: {dict(config)}")
            graphs.append((capture_calls(passes, policy), edges))
        found: list[Times] = [[] for _ in tried]
        for order in turns(len(tried), rounds):
            for place in order:
                series: Series = graphs[place][0].replayed(policy)
                found[place].append((series.median_us, series.spread))
        made.check_health()
        return found

    best, seen = (dict(given), 1) if given is not None else climbed(space(), measure, say)
    off, on = measure([OFF, best], FINAL_ROUNDS)
    verdict = judged(off, on)
    figures = {"off_us": verdict.off_us, "on_us": verdict.on_us, "gain_us": verdict.gain_us, "band_us": verdict.band_us}
    return {
        "rows": rows, "kind": kind, **{name: round(value, 4) for name, value in figures.items()}, "best": best,
        "config": best if verdict.worth_it else dict(OFF), "worth_it": verdict.worth_it, "timed": seen,
        "distinct_experts": len(made.copies[0][0]["ids"].unique()), "passes": len(made.copies[0]),
        "chain": [
            {"family": one.family.name, "engine": one.engine.name, "problem": one.problem.label, "config": dict(one.config)}
            for one in chain
        ],
    }  # fmt: skip
