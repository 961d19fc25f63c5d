"""Which class of one trace is which of another, and which kernel of a layer is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

from ..layers import LayerClass
from ..names import base_name
from ..recurrence import likeness

_LIKE = 0.3
_SIMILAR = 0.6
_LARGEST_TABLE = 4_000_000  # cells; longer layers are aligned by their names alone

SAME, RENAMED, REPLACED, ADDED, REMOVED = "same", "renamed", "replaced", "added", "removed"


@dataclass(frozen=True)
class Pair:
    """A kernel's position in the layers of both traces; None where it is not there. ``state``: same, renamed, ..."""

    a: int | None
    b: int | None
    state: str


@dataclass(frozen=True)
class ClassPair:
    """Two classes that stand for each other; ``second``: the one is paired already, and this is a part split off."""

    a: int
    b: int
    second: bool = False


def match_classes(a: Sequence[LayerClass], b: Sequence[LayerClass]) -> list[ClassPair]:
    """Pairs of indices: the likeliest first, each class once; then what is left with the likeliest of the other trace.

    Classes of different known kinds are never paired, nor those with next to nothing in common.
    """
    bases = [[tuple(map(base_name, group.sequence)) for group in side] for side in (a, b)]
    scores = {}
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            if one.kind and other.kind and one.kind != other.kind:
                continue
            alike = likeness(bases[0][i], bases[1][j])
            if alike >= _LIKE or (one.kind and one.kind == other.kind):
                scores[i, j] = (bool(one.kind and one.kind == other.kind), alike, len(one.members) + len(other.members))
    found: list[ClassPair] = []
    ranked = sorted(scores, key=lambda pair: (scores[pair], -pair[0], -pair[1]), reverse=True)
    for i, j in ranked:
        if all(i != pair.a and j != pair.b for pair in found):
            found.append(ClassPair(i, j))
    for i, j in ranked:
        if all(i != pair.a for pair in found) or all(j != pair.b for pair in found):
            found.append(ClassPair(i, j, second=True))
    return sorted(found, key=lambda pair: (pair.second, pair.a, pair.b))


@lru_cache(maxsize=50_000)
def _similar(one: str, other: str) -> bool:
    return SequenceMatcher(None, one, other, autojunk=False).ratio() >= _SIMILAR


def _score(one: str, other: str, family: str | None, other_family: str | None) -> float:
    """How well two kernels stand for each other; 0 where they do not."""
    if one == other:
        return 4.0
    if base_name(one) == base_name(other):
        return 3.0
    if family is not None and other_family is not None and family != other_family:
        return 0.0
    similar = _similar(base_name(one), base_name(other))
    if family is not None and family == other_family:
        return 1.5 + 0.5 * similar
    return 1.0 if similar else 0.0


def align_kernels(
    a: Sequence[str], b: Sequence[str], a_families: Sequence[str | None], b_families: Sequence[str | None]
) -> list[Pair]:
    """Align two layers' kernels in order, so that the kernels paired are as like as can be.

    Kernels at one place that are left over on both sides, as many here as there, are ``replaced``.
    """
    matched = _by_table(a, b, a_families, b_families) if len(a) * len(b) <= _LARGEST_TABLE else _by_name(a, b)
    pairs: list[Pair] = []
    i = j = 0
    for at, bt in [*matched, (len(a), len(b))]:
        gone, new = range(i, at), range(j, bt)
        if len(gone) == len(new):
            pairs += [Pair(x, y, REPLACED) for x, y in zip(gone, new, strict=True)]
        else:
            pairs += [Pair(x, None, REMOVED) for x in gone]
            pairs += [Pair(None, y, ADDED) for y in new]
        if at < len(a):
            same = base_name(a[at]) == base_name(b[bt])
            pairs.append(Pair(at, bt, SAME if same else RENAMED))
        i, j = at + 1, bt + 1
    return _elsewhere(a, b, pairs)


def _elsewhere(a: Sequence[str], b: Sequence[str], pairs: Sequence[Pair]) -> list[Pair]:
    """A kernel removed at one place and added at another is the same: of two streams the order may be chance."""
    added: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.state == ADDED and pair.b is not None:
            added.setdefault(base_name(b[pair.b]), []).append(pair)
    found = []
    taken: set[Pair] = set()
    for pair in pairs:
        if pair.state == REMOVED and pair.a is not None and (same := added.get(base_name(a[pair.a]))):
            other = same.pop(0)
            taken.add(other)
            pair = Pair(pair.a, other.b, SAME)
        found.append(pair)
    return [pair for pair in found if pair not in taken]


def _by_name(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    blocks = SequenceMatcher(None, list(map(base_name, a)), list(map(base_name, b)), autojunk=False)
    return [(block.a + n, block.b + n) for block in blocks.get_matching_blocks() for n in range(block.size)]


def _by_table(
    a: Sequence[str], b: Sequence[str], a_families: Sequence[str | None], b_families: Sequence[str | None]
) -> list[tuple[int, int]]:
    """The pairs of the best alignment: the classic table, filled from the ends."""
    best = [[0.0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) - 1, -1, -1):
        for j in range(len(b) - 1, -1, -1):
            score = _score(a[i], b[j], a_families[i], b_families[j])
            paired = score + best[i + 1][j + 1] if score else 0.0
            best[i][j] = max(paired, best[i + 1][j], best[i][j + 1])
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        score = _score(a[i], b[j], a_families[i], b_families[j])
        if score and best[i][j] == score + best[i + 1][j + 1]:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return found
