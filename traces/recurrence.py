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
    found = [split for split in _candidates(sequence) if len(split.layers) >= MIN_LAYERS]
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
    for where in anchors[:_MAX_ANCHORS]:
        for starts in {tuple(where), tuple(_extended(sequence, where)), tuple(index + 1 for index in where)}:
            if (split := _cut(sequence, [start for start in starts if start < len(sequence)])) is not None:
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


def _cut(sequence: Tokens, starts: Sequence[int]) -> Split | None:
    """Layers from the starts of the pieces: the inner pieces must be alike, the edges are matched to them."""
    inner = list(pairwise(starts))
    if len(inner) < MIN_LAYERS - 1:
        return None
    pieces = [sequence[a:b] for a, b in inner]
    forms = Counter(pieces)
    if len(forms) > _MAX_FORMS:
        return None
    common = max(forms, key=lambda form: (forms[form], len(form), -pieces.index(form)))
    if len(common) < MIN_KERNELS:
        return None
    like = {form: likeness(form, common) for form in forms}
    if like[pieces[0]] < _MIN_LIKE and not _could_be_first(pieces[0], common, like[pieces[0]]):
        inner, pieces = inner[1:], pieces[1:]  # the anchor occurs before the first layer, too
    if len(pieces) < MIN_LAYERS - 1 or any(like[piece] < _MIN_LIKE for piece in pieces[1:]):
        return None
    if sum(like[piece] for piece in pieces) < _MEAN_LIKE * len(pieces):
        return None
    known = [form for form, count in forms.items() if count > 1] or [common]
    weight = sum(len(piece) * max(likeness(piece, form) for form in known) for piece in pieces)
    layers = list(inner)
    for find in (_first, _last):
        for _ in range(_MAX_EDGE_LAYERS):
            edge = find(sequence, layers, known)
            if edge is None:
                break
            (start, end), closeness = edge
            layers = [(start, end), *layers] if end == layers[0][0] else [*layers, (start, end)]
            weight += (end - start) * closeness
    return Split(tuple(layers), round(weight, 6))


def _could_be_first(piece: Tokens, common: Tokens, like: float) -> bool:
    return like >= 0.4 and len(piece) >= 0.5 * len(common)


def _first(
    sequence: Tokens, layers: Sequence[tuple[int, int]], known: Sequence[Tokens]
) -> tuple[tuple[int, int], float] | None:
    """A layer that ends where the first piece begins; one with another half (dense MLP) begins like the rest."""
    end = layers[0][0]
    spans = [(start, end) for start in range(max(0, end - _longest(known)), end)]
    if (found := _edge(spans, sequence, known)) is not None:
        return found
    heads = {form[0] for form in known}
    shortest = 0.4 * min(map(len, known))
    for start, _ in spans:
        if sequence[start] in heads and end - start >= shortest:
            closeness = max(likeness(sequence[start:end], form) for form in known)
            if closeness >= _FIRST_LIKE:
                return (start, end), closeness
    return None


def _last(
    sequence: Tokens, layers: Sequence[tuple[int, int]], known: Sequence[Tokens]
) -> tuple[tuple[int, int], float] | None:
    """A layer that begins where the last piece ends; what follows it is the suffix."""
    start = layers[-1][1]
    ends = range(min(len(sequence), start + _longest(known)), start, -1)
    return _edge([(start, end) for end in ends], sequence, known)


def _longest(known: Sequence[Tokens]) -> int:
    return round(1.3 * max(map(len, known))) + 1


def _edge(
    spans: Sequence[tuple[int, int]], sequence: Tokens, known: Sequence[Tokens]
) -> tuple[tuple[int, int], float] | None:
    shortest = 0.5 * min(map(len, known))
    best: tuple[tuple[int, int], float] | None = None
    for start, end in spans:
        if end - start < shortest:
            continue
        closeness = max(likeness(sequence[start:end], form) for form in known)
        if closeness >= _EDGE_LIKE and (best is None or closeness > best[1]):
            best = ((start, end), closeness)
    return best
