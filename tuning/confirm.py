"""A winner is confirmed inside a chain: who is timed there, and who loses by it.

The isolated figure stays the objective and the bar. The chain figure stands beside it, and decides only where
the isolated winner loses there by more than it wins alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST = 6
"""Contestants timed in a chain: half a second of GPU time a problem."""
OVERALL = 3
"""The fastest of all engines that are among them."""


@dataclass(frozen=True)
class Standing:
    """What a config takes alone, and what it adds to a predecessor; microseconds."""

    name: str
    us: float
    band_us: float
    """Difference within which another is as good."""
    chain: Mapping[str, Any] | None
    """See :meth:`k3lab.tuning.chain_contest.Link.to_json`; None where it was not timed in a chain."""


def better_in_chain(winner: Standing, others: Sequence[Standing]) -> Standing | None:
    """Who takes the isolated winner's place, or None where it is kept.

    The winner is kept unless another adds less to the predecessor, by more than the sum of

    - what the winner is ahead of it alone (0 if it is not: a tie that something else broke),
    - the larger of their two isolated bands,
    - the larger of their two chain bands.

    Of several such the one whose two figures have the least sum takes its place. Who has no chain figure neither
    takes a place nor loses it.
    """

    def ahead_in_chain(other: Standing) -> bool:
        if winner.chain is None or other.chain is None:
            return False
        gain = max(other.us - winner.us, 0.0)
        noise = max(winner.band_us, other.band_us) + max(winner.chain["band_us"], other.chain["band_us"])
        return bool(winner.chain["chain_us"] - other.chain["chain_us"] > gain + noise)

    def both(other: Standing) -> tuple[float, str]:
        return other.us + (other.chain["chain_us"] if other.chain else 0.0), other.name

    return min(filter(ahead_in_chain, others), key=both, default=None)


def dropped_because(winner: Standing, taker: Standing) -> str:
    """Why the isolated winner is not the choice, with both figures of both."""
    assert winner.chain is not None and taker.chain is not None
    return (
        f"{winner.name} is dropped in the chain: it takes {winner.us:.2f} us alone and adds {winner.chain['chain_us']:.2f} us "
        f"to a predecessor, {taker.name} takes {taker.us:.2f} us and adds {taker.chain['chain_us']:.2f} us"
    )


def told(chain: Mapping[str, Any] | None) -> str:
    """What a choice says of its chain."""
    if chain is None:
        return "not timed in a chain"
    if not chain["programmatic"]:
        return f"it has no programmatic launch and adds {chain['chain_us']:.2f} us to a predecessor"
    return f"it adds {chain['chain_us']:.2f} us to a predecessor, {chain['hidden_us']:.2f} us of it hidden"


def within_reach(us: Sequence[float | None], chosen: Sequence[int]) -> list[int]:
    """Places of the contestants that are timed in a chain: each engine's choice, then the three fastest overall.

    Args:
        us: isolated microseconds of all contestants; None where one has none.
        chosen: the places of the engines' own choices.

    Returns:
        At most :data:`MOST`, the choices first, fastest first.
    """

    def fastest(places: Sequence[int]) -> list[int]:
        return sorted((place for place in places if us[place] is not None), key=lambda place: (us[place], place))

    return list(dict.fromkeys([*fastest(chosen), *fastest(range(len(us)))[:OVERALL]]))[:MOST]
