"""Finds layers in a sequence of kernels by what recurs, and abstains where nothing does clearly.

A layer has a kernel that occurs once in it (an anchor). Cutting the sequence at the right anchor gives pieces
that resemble each other: all alike, or a few kinds in turn (three KDA and one MLA layer). A period found on the
whole sequence would be the four of them together, so the finest cut into like pieces is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import pairwise
from statistics import median

Tokens = tuple[Hashable, ...]

MIN_LAYERS = 3
MIN_KERNELS = 3
_MAX_ANCHORS = 200
_MAX_FORMS = 40
_MAX_EDGE_LAYERS = 4  # before the first and after the last anchor
_MIN_LIKE = 0.5  # every piece against the commonest one
_MEAN_LIKE = 0.85  # on average: halves of a layer in turn stay below this, three KDA and one MLA above
_EDGE_LIKE = 0.6  # a first or last layer that differs (dense MLP, missing kernel)
_FIRST_LIKE = 0.3  # a first layer that shares only its attention half, when it begins with the same kernel
_OUT_OF_PHASE = 0.2  # of a layer's kernels
_COVERED = 0.6  # share of the step's kernels that must lie in layers
_MAX_KERNELS = 512  # of a layer: a longer piece is a whole step, and comparing such pieces takes minutes
_EFFORT = 400_000_000  # pairs of kernels compared: some seconds


@dataclass(frozen=True)
class Split:
    """Layers as half-open index ranges, back to back; what lies before and after them is prefix and suffix."""

    layers: tuple[tuple[int, int], ...]
    score: float

    @property
    def kernels(self) -> int:
        """The median number of kernels in a layer."""
        return round(median(end - start for start, end in self.layers))


@dataclass(frozen=True)
class Abstain:
    """No split can be trusted; why, and what came closest as (layers, kernels in a layer)."""

    reason: str
    candidates: tuple[tuple[int, int], ...] = ()


class _TooMuch(Exception):
    """The search would take too long."""


class _Comparer:
    """Likeness with a bound on the work of one search; what an earlier search left in the cache does not count."""

    def __init__(self) -> None:
        self._left = _EFFORT

    def __call__(self, one: Tokens, other: Tokens) -> float:
        if one == other:
            return 1.0
        self._left -= len(one) * len(other)
        if self._left < 0:
            raise _TooMuch
        return likeness(one, other)

    def closest(self, piece: Tokens, forms: Sequence[Tokens], least: float = 0.0) -> float:
        """Likeness of the piece to the form nearest to it; below ``least`` any number below it."""
        best = 0.0
        for form in forms:
            if _at_most(piece, form) > max(best, least - 1e-9):
                best = max(best, self(piece, form))
        return best


def _at_most(one: Tokens, other: Tokens) -> float:
    """An upper bound of the likeness, from which kernels there are."""
    total = len(one) + len(other)
    if 2 * min(len(one), len(other)) < _EDGE_LIKE * total:
        return 2 * min(len(one), len(other)) / total
    return 2 * sum((_counts(one) & _counts(other)).values()) / total


@lru_cache(maxsize=20000)
def _counts(tokens: Tokens) -> Counter[Hashable]:
    return Counter(tokens)


@lru_cache(maxsize=20000)
def likeness(one: Tokens, other: Tokens) -> float:
    """Similarity of two kernel sequences, 0 to 1 (twice the matched kernels over all kernels)."""
    if one == other:
        return 1.0
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def find_layers(tokens: Sequence[Hashable], layers: int | None = None) -> Split | Abstain:
    """Split one step's kernels into layers.

    Args:
        tokens: one hashable a kernel, in launch order.
        layers: the number of layers if known; any other number is then not accepted.
    """
    sequence = tuple(tokens)
    try:
        found = [split for split in _candidates(sequence) if len(split.layers) >= MIN_LAYERS]
    except _TooMuch:
        return Abstain("the kernels recur too irregularly to search them all; mark steps and layers (NVTX)")
    clear = [split for split in found if _covered(split) >= _COVERED * len(sequence)]
    if not clear:
        return Abstain("no sequence of kernels recurs clearly enough to be a layer", _summary(found))
    best = max(split.score for split in clear)
    if layers is not None:
        # a cut that is out of phase gains a layer from two halves at the edges, but explains less
        fitting = [s for s in clear if len(s.layers) == layers and best - s.score <= _OUT_OF_PHASE * s.kernels]
        if not fitting:
            return Abstain(f"no recurring sequence gives {layers} layers", _summary(found))
        return max(fitting, key=_preference)
    finest = min(split.kernels for split in clear if split.score >= 0.9 * best)
    return max((split for split in clear if split.kernels <= 1.3 * finest), key=_preference)


def _preference(split: Split) -> tuple[float, int, int]:
    return (split.score, len(split.layers), -split.layers[0][0])


def _covered(split: Split) -> int:
    return split.layers[-1][1] - split.layers[0][0]


def _summary(splits: Sequence[Split]) -> tuple[tuple[int, int], ...]:
    ranked = sorted(splits, key=lambda split: -split.score)
    return tuple(dict.fromkeys((len(split.layers), split.kernels) for split in ranked))[:3]


def _candidates(sequence: Tokens) -> Iterator[Split]:
    places: dict[Hashable, list[int]] = {}
    for index, token in enumerate(sequence):
        places.setdefault(token, []).append(index)
    anchors = [where for where in places.values() if len(where) >= MIN_LAYERS]
    anchors.sort(key=lambda where: (-len(where), where[0]))
    alike = _Comparer()
    for where in anchors[:_MAX_ANCHORS]:
        for starts in {tuple(where), tuple(_extended(sequence, where)), tuple(index + 1 for index in where)}:
            if (split := _cut(sequence, [start for start in starts if start < len(sequence)], alike)) is not None:
                yield split


def _extended(sequence: Tokens, starts: Sequence[int]) -> list[int]:
    """Move the starts to the left as long as (nearly) all pieces are preceded by the same kernel."""
    moved, moving = list(starts), [True] * len(starts)
    room = min((b - a for a, b in pairwise(starts)), default=1) - 1
    for _ in range(room):
        if moved[0] == 0:
            break
        before = [sequence[start - 1] for start, live in zip(moved, moving, strict=True) if live]
        token, votes = Counter(before).most_common(1)[0]
        if sequence[moved[0] - 1] != token or votes < 0.8 * len(starts):
            break
        for index, start in enumerate(moved):
            moving[index] = moving[index] and sequence[start - 1] == token
            moved[index] = start - 1 if moving[index] else start
    return moved


def _cut(sequence: Tokens, starts: Sequence[int], alike: _Comparer) -> Split | None:
    """Layers from the starts of the pieces: the inner pieces must be alike, the edges are matched to them."""
    inner = list(pairwise(starts))
    if len(inner) < MIN_LAYERS - 1:
        return None
    pieces = [sequence[a:b] for a, b in inner]
    forms = Counter(pieces)
    if len(forms) > _MAX_FORMS:
        return None
    common = max(forms, key=lambda form: (forms[form], len(form), -pieces.index(form)))
    if not MIN_KERNELS <= len(common) <= _MAX_KERNELS:
        return None
    like = {form: alike(form, common) for form in forms}
    if like[pieces[0]] < _MIN_LIKE and not _could_be_first(pieces[0], common, like[pieces[0]]):
        inner, pieces = inner[1:], pieces[1:]  # the anchor occurs before the first layer, too
    if len(pieces) < MIN_LAYERS - 1 or any(like[piece] < _MIN_LIKE for piece in pieces[1:]):
        return None
    if sum(like[piece] for piece in pieces) < _MEAN_LIKE * len(pieces):
        return None
    known = [form for form, count in forms.items() if count > 1] or [common]
    nearest = {form: alike.closest(form, known) for form in forms}
    weight = sum(len(piece) * nearest[piece] for piece in pieces)
    layers = list(inner)
    for find in (_first, _last):
        for _ in range(_MAX_EDGE_LAYERS):
            edge = find(sequence, layers, known, alike)
            if edge is None:
                break
            (start, end), closeness = edge
            layers = [(start, end), *layers] if end == layers[0][0] else [*layers, (start, end)]
            weight += (end - start) * closeness
    return Split(tuple(layers), round(weight, 6))


def _could_be_first(piece: Tokens, common: Tokens, like: float) -> bool:
    return like >= 0.4 and len(piece) >= 0.5 * len(common)


def _first(
    sequence: Tokens, layers: Sequence[tuple[int, int]], known: Sequence[Tokens], alike: _Comparer
) -> tuple[tuple[int, int], float] | None:
    """A layer that ends where the first piece begins; one with another half (dense MLP) begins like the rest."""
    end = layers[0][0]
    spans = [(start, end) for start in range(max(0, end - _longest(known)), end)]
    if (found := _edge(spans, sequence, known, alike)) is not None:
        return found
    heads = {form[0] for form in known}
    shortest = 0.4 * min(map(len, known))
    for start, _ in spans:
        if sequence[start] in heads and end - start >= shortest:
            closeness = alike.closest(sequence[start:end], known, _FIRST_LIKE)
            if closeness >= _FIRST_LIKE:
                return (start, end), closeness
    return None


def _last(
    sequence: Tokens, layers: Sequence[tuple[int, int]], known: Sequence[Tokens], alike: _Comparer
) -> tuple[tuple[int, int], float] | None:
    """A layer that begins where the last piece ends; what follows it is the suffix."""
    start = layers[-1][1]
    ends = range(min(len(sequence), start + _longest(known)), start, -1)
    return _edge([(start, end) for end in ends], sequence, known, alike)


def _longest(known: Sequence[Tokens]) -> int:
    return round(1.3 * max(map(len, known))) + 1


def _edge(
    spans: Sequence[tuple[int, int]], sequence: Tokens, known: Sequence[Tokens], alike: _Comparer
) -> tuple[tuple[int, int], float] | None:
    """The span most like a known form, the first of equals; those that could be most alike are compared first."""
    shortest = 0.5 * min(map(len, known))
    pieces = [sequence[start:end] for start, end in spans]
    bounds = [max(_at_most(piece, form) for form in known) if len(piece) >= shortest else 0.0 for piece in pieces]
    best, chosen = 0.0, -1
    for index in sorted(range(len(spans)), key=lambda index: (-bounds[index], index)):
        if bounds[index] < max(best, _EDGE_LIKE):
            break
        closeness = alike.closest(pieces[index], known, max(best, _EDGE_LIKE))
        if closeness >= _EDGE_LIKE and (closeness, -index) > (best, -chosen):
            best, chosen = closeness, index
    return (spans[chosen], best) if chosen >= 0 else None
