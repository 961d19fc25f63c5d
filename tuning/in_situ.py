"""The last word of a family's choice: its best configs inside the captured layer, one replacement at a time.

A config that wins alone may lose where the next kernel waits for its SMs or the L2 holds another's data. Here everything else of
the layer stays as it is chosen, one place is given to each of its three best configs in turn, and the layer is timed as a whole.
What is timed is given as a capture, so that the rule is the same for the decode path on a GPU and for a made-up one in tests.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..kernels.errors import InputError
from ..kernels.space import Config, config_digest
from .choose import LEAST_BAND
from .contest import turns

TOP = 3
"""Configs of a place that are tried in the layer."""
ROUNDS = 5


@dataclass(frozen=True)
class Candidate:
    """A config that a place of the layer could have."""

    engine: str
    config: Config
    isolated_us: float

    @property
    def digest(self) -> str:
        """Of the config."""
        return config_digest(self.config)


Layer = Mapping[str, Candidate]
"""Place (a family, with its kind where it has several) to what runs there."""
Replay = Callable[[], float]
"""Runs a captured layer a few times; microseconds of one pass."""
Capture = Callable[[Layer], Replay]
"""Captures a layer; raises what its kernels raise."""


@dataclass(frozen=True)
class InSitu:
    """One candidate in the layer."""

    engine: str
    digest: str
    config: Config
    isolated_us: float
    values_us: tuple[float, ...]
    """Of the whole layer, one a round."""
    failed: str = ""

    @property
    def us(self) -> float:
        """Median of the rounds; infinite where it failed."""
        return statistics.median(self.values_us) if self.values_us and not self.failed else float("inf")

    @property
    def band(self) -> float:
        """Relative difference within which another is as good."""
        return max((max(self.values_us) - min(self.values_us)) / self.us, LEAST_BAND)

    def to_json(self) -> dict[str, Any]:
        """Both numbers: what it takes alone, and what the layer takes with it."""
        timed: dict[str, float | None] = {"in_situ_us": None, "band": None}
        if self.us < float("inf"):
            timed = {"in_situ_us": round(self.us, 4), "band": round(self.band, 4)}
        return (
            asdict(self)
            | {"config": dict(self.config), "values_us": [round(value, 4) for value in self.values_us]}
            | timed
        )


@dataclass(frozen=True)
class Verdict:
    """What became of a place."""

    place: str
    winner: InSitu
    entries: tuple[InSitu, ...]
    """In the order of their isolated times."""
    reason: str

    @property
    def changed(self) -> bool:
        """Whether the layer chose another than the isolated winner."""
        return self.winner is not self.entries[0]

    def to_json(self) -> dict[str, Any]:
        """For a study's note."""
        return {
            "place": self.place, "engine": self.winner.engine, "digest": self.winner.digest, "reason": self.reason, "changed": self.changed,
            "entries": [one.to_json() for one in self.entries],
        }  # fmt: skip


def both_numbers(told: Mapping[str, Any]) -> dict[str, Any]:
    """Of a verdict that is stored (:meth:`Verdict.to_json`) what a table's row and a bundle's entry keep: each candidate alone and in the layer."""
    fields = ("engine", "digest", "isolated_us", "in_situ_us", "band", "failed")
    entries = [{name: one[name] for name in fields} for one in told["entries"]]
    return {name: told[name] for name in ("place", "digest", "changed", "reason")} | {"entries": entries}


def try_in_layer(
    chosen: Layer, candidates: Mapping[str, Sequence[Candidate]], capture: Capture, check: Callable[[Layer], str] | None = None,
    rounds: int = ROUNDS, say: Callable[[str], None] = lambda text: None,
) -> list[Verdict]:  # fmt: skip
    """Time each place's best configs in the layer, all else as chosen.

    The rounds take the candidates in another order each, so that drift hits all alike. A place that changes its config keeps
    it while the places behind it are tried: what is exported was timed together.

    Args:
        chosen: the isolated winner of every place of the layer that is tuned.
        candidates: of the places to try, with the isolated winner among them; :data:`TOP` of them are tried, of as many engines as that allows.
        capture: makes a layer that can be timed.
        check: what is wrong with a layer's results, or nothing; asked of each winner after it was timed.
        rounds: series of each.
        say: hears of each place.

    Raises:
        InputError: a place that the layer has not, or whose isolated winner is not among its candidates; or a layer that
            does not even run as it is chosen.
    """
    layer = dict(chosen)
    verdicts = []
    for place, offered in candidates.items():
        if place not in layer:
            raise InputError(f"the layer has no tuned {place}; it has {', '.join(layer) or 'none'}")
        first = layer[place]
        ranked = sorted(offered, key=lambda one: (one.isolated_us, one.digest))
        own = [one for one in ranked if (one.engine, one.digest) == (first.engine, first.digest)]
        if not own:
            raise InputError(f"the isolated winner of {place} is not among its candidates")
        tried = [own[0], *_others(ranked, own[0])][:TOP]
        entries = _timed(layer, place, tried, capture, rounds)
        if entries[0].failed:
            raise InputError(f"the layer does not run with what {place} has now: {entries[0].failed}")
        verdict = _decided(place, entries)
        while check is not None and (why := check({**layer, place: _candidate(verdict.winner)})):
            if not verdict.changed:
                raise InputError(f"the layer is wrong with what {place} has now: {why}")
            out = InSitu(**{**asdict(verdict.winner), "failed": f"wrong after timing: {why}"})
            entries = [out if one is verdict.winner else one for one in entries]
            verdict = _decided(place, entries)
        layer[place] = _candidate(verdict.winner)
        verdicts.append(verdict)
        say(f"{place}: {verdict.reason}")
    return verdicts


def _others(ranked: Sequence[Candidate], own: Candidate) -> list[Candidate]:
    """Beside the isolated winner, fastest first, but the best of each other engine ahead of them: configs of one engine are much alike
    in what they leave of an SM to the kernels around them, which is what a layer tells and an isolated time does not.
    """
    left = [one for one in ranked if one is not own]
    best = {one.engine: one for one in reversed(left) if one.engine != own.engine}
    firsts = sorted(best.values(), key=left.index)
    return firsts + [one for one in left if one not in firsts]


def _candidate(one: InSitu) -> Candidate:
    return Candidate(one.engine, one.config, one.isolated_us)


def _timed(layer: Layer, place: str, tried: Sequence[Candidate], capture: Capture, rounds: int) -> list[InSitu]:
    """Each candidate's rounds; one that cannot be captured or replayed is out, and says why."""
    replays: list[Replay | None] = []
    failed = [""] * len(tried)
    for number, one in enumerate(tried):
        try:
            replays.append(capture({**layer, place: one}))
        except Exception as error:  # whatever a kernel's launch raises is that candidate's
            replays.append(None)
            failed[number] = f"{type(error).__name__}: {error}"
    values: list[list[float]] = [[] for _ in tried]
    for order in turns(len(tried), rounds):
        for number in order:
            replay = replays[number]
            if replay is None or failed[number]:
                continue
            try:
                values[number].append(replay())
            except Exception as error:
                failed[number] = f"{type(error).__name__}: {error}"
    return [
        InSitu(one.engine, one.digest, one.config, one.isolated_us, tuple(own), why)
        for one, own, why in zip(tried, values, failed, strict=True)
    ]


def _decided(place: str, entries: Sequence[InSitu]) -> Verdict:
    """The isolated winner, unless another is faster in the layer by more than both bands."""
    first = entries[0]
    best = min(entries, key=lambda one: (one.us, one.isolated_us, one.digest))
    ahead = first.us - best.us
    if best is not first and ahead > max(first.band, best.band) * best.us:
        reason = (
            f"{best.engine} is {ahead:.2f} us ahead in the layer ({best.us:.2f} against {first.us:.2f} us), though {best.isolated_us:.2f} against "
            f"{first.isolated_us:.2f} us alone"
        )  # fmt: skip
        return Verdict(place, best, tuple(entries), reason)
    told = "no other is ahead of it" if best is first else f"{best.engine} is {ahead:.2f} us ahead, inside the noise"
    return Verdict(
        place, first, tuple(entries), f"the isolated winner stays: the layer takes {first.us:.2f} us, {told}"
    )


def holding(times: Mapping[str, Mapping[str, tuple[float, float]]], limit: float = 0.05) -> dict[str, float]:
    """Config digest to its largest loss over the profiles, of those that lose no more than the limit against any profile's best;
    where none does, the one that loses least (see :func:`robust`).
    """
    found = {digest: max(own) for digest, own in _losses(times).items()}
    kept = {digest: loss for digest, loss in found.items() if loss <= limit}
    return kept or dict([robust(times)])


def _losses(times: Mapping[str, Mapping[str, tuple[float, float]]]) -> dict[str, list[float]]:
    """Config digest to its loss against each profile's best, 0 inside the two bands; configs that miss a profile are out."""
    common = set.intersection(*(set(own) for own in times.values())) if times else set()
    found: dict[str, list[float]] = {digest: [] for digest in sorted(common)}
    for own in times.values():
        best = min(own, key=lambda other: (own[other][0], other)) if own else ""
        for digest, losses in found.items():
            loss = own[digest][0] / own[best][0] - 1
            losses.append(0.0 if loss <= max(own[digest][1], own[best][1]) else loss)
    return found


def robust(times: Mapping[str, Mapping[str, tuple[float, float]]]) -> tuple[str, float]:
    """The config that holds over routing profiles: the least of the largest losses against each profile's best.

    Args:
        times: profile to config digest to (microseconds, relative band). A config that misses a profile is out.

    Returns:
        Its digest, and its largest loss; a loss inside the two bands counts as none, and of equals the least sum wins.

    Raises:
        InputError: no config has a time under every profile.
    """
    losses = _losses(times)
    if not losses:
        raise InputError("no config was timed under every routing profile")
    chosen = min(
        losses, key=lambda digest: (max(losses[digest]), sum(own[digest][0] for own in times.values()), digest)
    )
    return chosen, max(losses[chosen])
