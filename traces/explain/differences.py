"""Kernels a layer has and its class has not, or the other way round, and what their names say of why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from ..analysis import DeviceLayers, Layer
from ..budget import Budget
from ..families import is_ours
from ..names import base_name, short_name
from ..recurrence import likeness
from ..timing import median_ns
from ..verdict import microseconds
from .alignment import Aligned, usual_increments
from .finding import Finding

_LIKE = 0.8
_NAMES = 3
"""Different kernels that one finding names."""
_ROLES = (
    ("split-K reduce", re.compile(r"split_?k.*reduc|reduc\w*_?split_?k|splitkreduce", re.IGNORECASE),
     "the GEMM before it is split along K and needs this sum"),
    ("cast or copy", re.compile(
        r"bfloat16_copy|float16_copy|float8_copy|direct_copy|_to_copy|copy_kernel|\bcast|_cast|convert_(?:fp|bf|to)"
        r"|(?:fp|bf)16_to_|_to_(?:fp|bf|fp8)", re.IGNORECASE),
     "an elementwise cast or copy that fusion should have removed"),
    ("fill", re.compile(r"fillfunctor|fill_kernel|zero_kernel|memset", re.IGNORECASE), "a fill of a buffer"),
    ("elementwise", re.compile(r"elementwise_kernel|triton_poi_", re.IGNORECASE),
     "an elementwise kernel that fusion could take in"),
)  # fmt: skip


def role_of(name: str) -> tuple[str, str] | None:
    """What a kernel's name says it is for (word, sentence), where that is a thing a layer can do without."""
    for word, pattern, sentence in _ROLES:
        if pattern.search(name):
            return word, sentence
    return None


def _listed(names: Sequence[str]) -> str:
    """Kernels by name, equal ones once with their count, the most frequent first, at most so many."""
    parts: Counter[str] = Counter()
    for name in names:
        role = role_of(name)
        parts[f"{short_name(name)} ({role[1]})" if role else short_name(name)] += 1
    named = [text if count == 1 else f"{count} times {text}" for text, count in parts.most_common(_NAMES)]
    rest = len(names) - sum(count for _, count in parts.most_common(_NAMES))
    return ", ".join(named) + (f" and {rest} more" if rest else "")


def _word(names: Sequence[str]) -> str:
    roles = [role for name in names if (role := role_of(name))]
    return roles[0][0] if roles else ""


def _blocks(usual: Sequence[str], own: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Where two sequences differ: positions in the usual and in the own one.

    Left out are other instances of a template, and kernels that both have at different places: between streams the
    order may be that of the starts, which says nothing.
    """
    opcodes = SequenceMatcher(None, usual, own, autojunk=False).get_opcodes()
    places = [(range(a, b), range(c, d)) for operation, a, b, c, d in opcodes if operation != "equal"]
    gone = Counter(usual[at] for ranges in places for at in ranges[0])
    new = Counter(own[at] for ranges in places for at in ranges[1])
    moved = gone & new, gone & new  # each side counts down its own
    found = []
    for ranges in places:
        left: tuple[list[int], list[int]] = ([], [])
        for side, names in enumerate((usual, own)):
            for at in ranges[side]:
                if moved[side][names[at]]:
                    moved[side][names[at]] -= 1
                else:
                    left[side].append(at)
        if [base_name(usual[at]) for at in left[0]] != [base_name(own[at]) for at in left[1]]:
            found.append(left)
    return found


def against_class(one: Aligned, device: DeviceLayers) -> list[Finding]:
    """Extra, missing and replaced kernels of the layers of a class."""
    increments: list[int] = []
    found = []
    for index in one.group.members:
        layer = device.layers[index]
        if layer.kernels == one.group.sequence:
            continue
        increments = increments or usual_increments(one)
        for lacking, more in _blocks(one.group.sequence, layer.kernels):
            gone, new = [one.group.sequence[at] for at in lacking], [layer.kernels[at] for at in more]
            saved, cost = sum(increments[at] for at in lacking), _adds(layer, more)
            if gone and new and any(map(is_ours, gone)) and not any(map(is_ours, new)):
                text = (
                    f"{layer.name}: stock kernels {_listed(new)} in place of {_listed(gone)} "
                    f"({microseconds(cost)} against {microseconds(saved)})"
                )
                found.append(Finding("fallback", layer.number, text, cost - saved, "stock kernel"))
                continue
            if new:
                text = f"{layer.name}: extra kernels against its class: {_listed(new)}, {microseconds(cost)}"
                found.append(Finding("extra", layer.number, text, cost, _word(new)))
            if gone:
                text = f"{layer.name}: kernels of its class missing: {_listed(gone)}, there {microseconds(saved)}"
                found.append(Finding("missing", layer.number, text, -saved, _word(gone)))
    return found


def _adds(layer: Layer, places: Sequence[int]) -> int:
    """What some of a layer's kernels add with the idle time before them: median over the steps, ns."""
    return median_ns(sum(times.increments[at] + times.bubbles[at] for at in places) for times in layer.times)


def between_classes(classes: Sequence[Aligned]) -> list[Finding]:
    """What the layers of a class have more or less than a larger class of the same kind."""
    found = []
    for one in classes:
        larger = [
            other.group
            for other in classes
            if len(other.group.members) > len(one.group.members)
            and other.group.kind == one.group.kind
            and likeness(other.group.sequence, one.group.sequence) >= _LIKE
        ]
        if not larger:
            continue
        usual = max(larger, key=lambda group: likeness(group.sequence, one.group.sequence))
        increments = usual_increments(one)
        head = f"class {one.group.name}, {len(one.group.members)} layers, against class {usual.name}"
        for lacking, more in _blocks(usual.sequence, one.group.sequence):
            gone, new = [usual.sequence[at] for at in lacking], [one.group.sequence[at] for at in more]
            if new:
                cost = sum(increments[at] for at in more)
                text = f"{head}: extra kernels {_listed(new)}, {microseconds(cost)} a layer"
                found.append(Finding("extra", None, text, cost * len(one.group.members), _word(new)))
            if gone:
                found.append(Finding("missing", None, f"{head}: without {_listed(gone)}", None, _word(gone)))
    return found


def over_count(one: Aligned, budget: Budget) -> list[Finding]:
    """Kernels whose names say that they could go, where a class has more than the budget's; a line for each kind."""
    group = one.group
    limit = budget.limit(group.kind)
    if limit is None and group.kind is None and (bounds := budget.bounds()) is not None:
        limit = bounds[1]  # over the loosest is over its own, whatever its kind
    if limit is None or limit.kernels is None or len(group.sequence) <= limit.kernels:
        return []
    increments = usual_increments(one)
    by_role: dict[tuple[str, str], list[int]] = {}
    for position, name in enumerate(group.sequence):
        if (role := role_of(name)) is not None:
            by_role.setdefault(role, []).append(position)
    found = []
    for (word, sentence), places in by_role.items():
        each = sum(increments[position] for position in places)
        unlike = list(dict.fromkeys(short_name(group.sequence[position]) for position in places))
        names = ", ".join([*unlike[:_NAMES], *(["..."] if len(unlike) > _NAMES else [])])
        text = (
            f"class {group.name}: {len(group.sequence)} kernels, budget {limit.kernels}; {len(places)} of them "
            f"({names}): {sentence}, {microseconds(each)} a layer"
        )
        found.append(Finding("extra", None, text, each * len(group.members), word))
    return found
