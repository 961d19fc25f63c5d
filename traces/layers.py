"""Layers of a step, by the most trusted means that works, and the classes of like layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from .anchors import agree, cut_at_anchors, our_anchors
from .families import layer_kind
from .lent import Lent, placed
from .marking import LayerMark
from .names import base_name
from .recurrence import Abstain, find_layers, likeness
from .steps import Step

NODE_MARKS = "NVTX ranges at graph capture"
LAUNCH_MARKS = "NVTX or user ranges around the launches"
ANCHORS = "our attention projections"
RECURRENCE = "recurring kernel sequence"
WHOLE = "your word that a step is one layer"
LENT = "the marked layers of another trace"


@dataclass(frozen=True)
class StepLayers:
    """Layers of one step: index ranges into its kernels, back to back, with their numbers and names.

    ``between`` counts kernels outside every layer mark but between layers; they are counted in the layer that
    follows, which waits for them.
    """

    spans: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    names: tuple[str, ...]
    method: str
    between: int = 0


def split_step(step: Step, layers: int | None = None, lent: Lent | None = None) -> StepLayers | Abstain:
    """Layers of one step: by marks if there are any that hold together, by another trace's, our projections, recurrence.

    Where nothing recurs, a step is one layer if ``layers`` says so.
    """
    marks = [item.layer for item in step.kernels]
    captured = any(item.layer is not None and item.replay is not None for item in step.kernels)
    marked = _by_marks(marks, NODE_MARKS if captured else LAUNCH_MARKS)
    if marked is not None and (layers is None or len(marked.spans) == layers):
        return marked
    if lent is not None:
        return _by_another(step, layers, lent)
    tokens = [_token(item.kernel.name, item.kernel.grid, item.kernel.block) for item in step.kernels]
    anchors = our_anchors(step.names)
    if (cut := cut_at_anchors(tokens, anchors, layers)) is not None:
        return _numbered(cut, ANCHORS)
    found = find_layers(tokens, layers)
    if layers == 1 and marked is None and len(anchors) < 2 and isinstance(find_layers(tokens), Abstain):
        return _numbered(((0, len(tokens)),), WHOLE)  # a capture of one layer has nothing that recurs
    if isinstance(found, Abstain):
        if marked is not None:
            return Abstain(f"the marks name {len(marked.spans)} layers and {found.reason}", found.candidates)
        return found
    spans = _begin_alike([base_name(item.kernel.name) for item in step.kernels], found.layers)
    if not agree(spans, anchors):
        return Abstain("our attention projections, one a layer, do not fit what recurs", ((len(spans), found.kernels),))
    return _numbered(spans, RECURRENCE)


def _numbered(spans: tuple[tuple[int, int], ...], method: str) -> StepLayers:
    numbers = tuple(range(len(spans)))
    return StepLayers(spans, numbers, tuple(f"layer {number}" for number in numbers), method)


def _token(name: str, grid: tuple[int, ...], block: tuple[int, ...]) -> Hashable:
    return (name, grid, block)  # a name alone merges different GEMMs; some files have no grid


def _by_another(step: Step, layers: int | None, lent: Lent) -> StepLayers | Abstain:
    found = placed(step.names, lent)
    if isinstance(found, str):
        return Abstain(found)
    split = _by_marks([item and LayerMark(*item) for item in found], LENT)
    if split is None:
        return Abstain(f"the layers of {lent.file} come in another order here")
    if layers is not None and len(split.spans) != layers:
        return Abstain(f"{lent.file} has {len(split.spans)} layers, not {layers}")
    return split


def _by_marks(marks: Sequence[LayerMark | None], method: str) -> StepLayers | None:
    spans: list[list[int]] = []
    numbers: list[int] = []
    names: list[str] = []
    between = 0
    for index, mark in enumerate(marks):
        if mark is None:
            continue
        if numbers and numbers[-1] == mark.number:
            between += index - spans[-1][1]
            spans[-1][1] = index + 1
            continue
        start = index
        if spans:
            between += index - spans[-1][1]
            start = spans[-1][1]
        spans.append([start, index + 1])
        numbers.append(mark.number)
        names.append(mark.name)
    if not spans or len(set(numbers)) != len(numbers):
        return None  # a number that comes back is not a layer of this step alone
    if between > 0.5 * (spans[-1][1] - spans[0][0]):
        return None
    return StepLayers(tuple((a, b) for a, b in spans), tuple(numbers), tuple(names), method, between)


def _begin_alike(bases: Sequence[str], spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Begin all layers one kernel earlier while the kernel before each of them is the same but for its template.

    The norm before the first layer often is another instance of the one before the others.
    """
    moved = list(spans)
    for _ in range(min(end - start for start, end in spans) - 1):
        before = {bases[start - 1] for start, _ in moved if start > 0}
        if moved[0][0] == 0 or len(before) != 1:
            break
        moved = [(start - 1, end - 1) for start, end in moved]
    return tuple(moved)


@dataclass(frozen=True)
class LayerClass:
    """Like layers: a letter, the kind their kernels tell, their modal kernel names, and which layers (by position)."""

    name: str
    kind: str | None
    sequence: tuple[str, ...]
    members: tuple[int, ...]


def classify(sequences: Sequence[tuple[str, ...]]) -> list[LayerClass]:
    """Group the layers of a step by their kernel names, in order of first appearance.

    The same names in another order are one class: of two streams the order may be that of the starts. A rare sequence
    that differs from a commoner one by a kernel or so joins its class: what is extra or missing there is then told as
    such.
    """
    usual: dict[tuple[str, ...], tuple[str, ...]] = {}  # names sorted to their commonest order
    for names, _ in Counter(sequences).most_common():
        usual.setdefault(tuple(sorted(names)), names)
    sequences = [usual[tuple(sorted(names))] for names in sequences]
    counts = Counter(sequences)
    ranked = sorted(counts, key=lambda names: (-counts[names], sequences.index(names)))
    home: dict[tuple[str, ...], tuple[str, ...]] = {}
    for names in ranked:
        near = [
            modal
            for modal in dict.fromkeys(home.values())
            if counts[names] < max(2, 0.25 * counts[modal])
            and layer_kind(modal) == layer_kind(names)
            and _shared(names, modal) >= 0.9
        ]
        home[names] = (
            max(near, key=lambda modal: (_shared(names, modal), likeness(names, modal), counts[modal]))
            if near
            else names
        )
    classes: list[LayerClass] = []
    for modal in dict.fromkeys(home[names] for names in sequences):
        members = tuple(index for index, names in enumerate(sequences) if home[names] == modal)
        classes.append(LayerClass(_letters(len(classes)), layer_kind(modal), modal, members))
    return classes


def by_position(classes: Iterable[LayerClass]) -> tuple[LayerClass, ...]:
    """The class of each layer, by position."""
    placed = {index: group for group in classes for index in group.members}
    return tuple(placed[index] for index in range(len(placed)))


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> float:
    """Likeness whatever the order: twice the kernels that both have over all kernels."""
    return 2 * sum((Counter(one) & Counter(other)).values()) / (len(one) + len(other))


def _letters(index: int) -> str:
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = chr(ord("A") + rest) + text
    return text
