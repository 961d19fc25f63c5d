"""Which kernel of a layer stands where in its class, and what the kernels of a class usually add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from ..analysis import DeviceLayers, Layer
from ..layers import LayerClass
from ..timing import median_ns
from .finding import NOTABLE_NS

_MOST_STEPS = 20
_SHARE = 0.02


class Parts(NamedTuple):
    """What a kernel adds and the idle time before it, ns, one entry a step."""

    increments: Sequence[int]
    bubbles: Sequence[int]


def aligned(layer: Layer, modal: Sequence[str]) -> dict[int, int]:
    """Position in the layer to position in the modal sequence of its class; a kernel may have its place elsewhere.

    Kernels of two streams stand in the order of their starts where no file tells that of their launches.
    """
    if layer.kernels == modal:
        return {index: index for index in range(len(modal))}
    blocks = SequenceMatcher(None, layer.kernels, modal, autojunk=False).get_matching_blocks()
    found = {block.a + step: block.b + step for block in blocks for step in range(block.size)}
    free: dict[str, list[int]] = {}
    for position in sorted(set(range(len(modal))) - set(found.values()), reverse=True):
        free.setdefault(modal[position], []).append(position)
    for own, name in enumerate(layer.kernels):
        if own not in found and free.get(name):
            found[own] = free[name].pop()
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Aligned:
    """A class with its layers (by position) aligned to its modal sequence.

    ``places``: position in the layer to position in the sequence. ``parts``: by the latter, what the kernel there adds.
    """

    group: LayerClass
    places: Mapping[int, Mapping[int, int]]
    parts: Mapping[int, Mapping[int, Parts]]

    @cached_property
    def medians(self) -> Mapping[int, Mapping[int, tuple[int, int]]]:
        """Of every kernel in ``parts`` the median increment and the median bubble over the steps, ns."""
        return {
            index: {at: (median_ns(part.increments), median_ns(part.bubbles)) for at, part in parts.items()}
            for index, parts in self.parts.items()
        }

    def in_peers(self, index: int, position: int) -> tuple[int, int] | None:
        """The median of the medians of the other layers that have the kernel; None where none has.

        Not of all their steps together: that would be sorted anew for every layer.
        """
        peers = [parts[position] for other, parts in self.medians.items() if other != index and position in parts]
        if not peers:
            return None
        return median_ns(increment for increment, _ in peers), median_ns(bubble for _, bubble in peers)


def align(group: LayerClass, device: DeviceLayers) -> Aligned:
    """Align all layers of a class."""
    places = {index: aligned(device.layers[index], group.sequence) for index in group.members}
    parts = {}
    for index, own_places in places.items():
        times = device.layers[index].times
        increments = list(zip(*(item.increments for item in times), strict=True))
        bubbles = list(zip(*(item.bubbles for item in times), strict=True))
        parts[index] = {modal: Parts(increments[own], bubbles[own]) for own, modal in own_places.items()}
    return Aligned(group, places, parts)


def columns_of(one: Aligned, device: DeviceLayers) -> list[dict[int, int]]:
    """By modal position: layer position to the index of its kernel there in a step."""
    columns: list[dict[int, int]] = [{} for _ in one.group.sequence]
    for index, places in one.places.items():
        for own, modal in places.items():
            columns[modal][index] = device.spans[index][0] + own
    return columns


def usual_increments(found: Aligned) -> list[int]:
    """Median increment at every modal position over all layers and steps, ns."""
    return [
        median_ns(chain.from_iterable(one[position].increments for one in found.parts.values() if position in one))
        for position in range(len(found.group.sequence))
    ]


def median_increments(group: LayerClass, device: DeviceLayers) -> list[int]:
    """Median increment of every kernel of a class's modal sequence over its layers and steps, ns."""
    return usual_increments(align(group, device))


def notable(layer: Layer) -> int:
    """From how much on a difference to its peers is told of a layer: a microsecond, and two percent of it; ns."""
    return max(NOTABLE_NS, round(_SHARE * layer.period))


def examined(device: DeviceLayers) -> list[int]:
    """The steps in which single gaps and overlaps are looked at: all, or 20 spread evenly over them."""
    count = len(device.steps)
    if count <= _MOST_STEPS:
        return list(range(count))
    return [index * (count - 1) // (_MOST_STEPS - 1) for index in range(_MOST_STEPS)]
