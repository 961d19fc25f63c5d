"""Cuts a step where kernels of ours that a layer has once begin it: a better mark than what merely recurs.

A layer kind without such a kernel (its projection was a stock GEMM) is found by the kernels that come before one:
the norm that ends just before the projection does so in every layer. A norm may end twice in a layer (before the
MLP, too); how many of its places lie from one known projection to the next tells every how many a layer begins.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from itertools import pairwise
from math import gcd
from statistics import median

from .recurrence import MIN_KERNELS, MIN_LAYERS, likeness

_PROJECTION = re.compile(r"(?<![A-Za-z0-9])k3_attention_projection(?![a-z0-9])")
_CONTEXT = 4
"""Kernels before a projection that must be the same for another kernel to stand in its place."""
_APART = 2
"""A projection of several launches (split-K and its reduction) is one anchor while they follow so closely."""
_ALIKE = 0.5
_FIRST_ALIKE = 0.3
_LONGEST = 1.6  # of the median: a longer piece holds two layers
_EDGE = 0.75  # of the median: more kernels before the first layer may be one
_MAX_KERNELS = 4096

Spans = tuple[tuple[int, int], ...]


def our_anchors(names: Sequence[str]) -> list[int]:
    """Where our attention projections begin: their kernels are ours by name, and every layer projects once."""
    found: list[int] = []
    last = -_APART - 1
    for index, name in enumerate(names):
        if _PROJECTION.search(name):
            if index - last > _APART:
                found.append(index)
            last = index
    return found


def cut_at_anchors(tokens: Sequence[Hashable], anchors: Sequence[int], layers: int | None = None) -> Spans | None:
    """Layers that begin at known anchors and at places like them; None where that does not hold together.

    Args:
        tokens: one hashable a kernel, in launch order.
        anchors: where layers are known to begin, ascending; other layers may begin elsewhere.
        layers: the number of layers if known; any other number is then not accepted.
    """
    sequence = tuple(tokens)
    if len(anchors) < 2:
        return None
    places = sorted(set(anchors) | _places_like(sequence, anchors))
    index_of = {place: index for index, place in enumerate(places)}
    known = [index_of[anchor] for anchor in anchors]
    stride = gcd(*(b - a for a, b in pairwise(known)))
    for step in (step for step in range(1, stride + 1) if stride % step == 0):  # the finest cut into like pieces
        spans = _pieces(sequence, places[known[0] % step :: step])
        if spans is not None and (layers is None or len(spans) == layers):
            return spans
    return None


def agree(spans: Spans, anchors: Sequence[int]) -> bool:
    """Whether known anchors lie in layers, at most one in each, and all at the same place of their layer."""
    offsets = []
    for start, end in spans:
        inside = [anchor - start for anchor in anchors if start <= anchor < end]
        if len(inside) > 1:
            return False
        offsets.extend(inside)
    return len(offsets) == len(anchors) and len(set(offsets)) <= 1


def _places_like(sequence: tuple[Hashable, ...], anchors: Sequence[int]) -> set[int]:
    """Where the kernels before are those before an anchor; the first anchor is often preceded by others."""
    contexts = {sequence[anchor - _CONTEXT : anchor] for anchor in anchors[1:] if anchor >= _CONTEXT}
    return {place for place in range(_CONTEXT, len(sequence)) if sequence[place - _CONTEXT : place] in contexts}


def _pieces(sequence: tuple[Hashable, ...], starts: Sequence[int]) -> Spans | None:
    spans = list(pairwise(starts))
    sizes = [end - start for start, end in spans]
    if len(spans) < MIN_LAYERS - 1 or min(sizes) < MIN_KERNELS or max(sizes) > _MAX_KERNELS:
        return None
    typical = median(sizes)
    end = _end_of_last(sequence, starts[-1], spans)
    if end is not None:
        spans.append((starts[-1], end))
    if len(spans) < MIN_LAYERS or max(sizes) > _LONGEST * typical or spans[0][0] > _EDGE * typical:
        return None
    pieces = [sequence[start:end] for start, end in spans]
    near = [likeness(one, other) for one, other in pairwise(pieces)]
    if near[0] < _FIRST_ALIKE or min(near[1:]) < _ALIKE:
        return None
    return tuple(spans)


def _end_of_last(sequence: tuple[Hashable, ...], start: int, spans: Sequence[tuple[int, int]]) -> int | None:
    """Where the layer at the last start ends: where it is most like another; None where it is no layer at all."""
    forms = dict.fromkeys(sequence[a:b] for a, b in spans)
    limit = min(len(sequence), start + round(1.3 * max(map(len, forms))) + 1)
    least = start + round(0.5 * min(map(len, forms)))
    ends = range(limit, max(start, least - 1), -1)
    # the size nearest to a form's is looked at first, and most ends are far off: compare only those
    near = [end for end in ends if any(abs(end - start - len(form)) <= max(2, 0.1 * len(form)) for form in forms)]
    ranked = [(max(likeness(sequence[start:end], form) for form in forms), end) for end in near]
    if not ranked:
        return None
    best = max(closeness for closeness, _ in ranked)
    return max(end for closeness, end in ranked if closeness == best) if best >= _ALIKE else None
