"""Kernels a layer has and its class has not, or the other way round, and what their names say of why."""

from __future__ import annotations

import re
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
    parts = []
    for name in names:
        role = role_of(name)
        parts.append(f"{short_name(name)} ({role[1]})" if role else short_name(name))
    return ", ".join(parts)


def _word(names: Sequence[str]) -> str:
    roles = [role for name in names if (role := role_of(name))]
    return roles[0][0] if roles else ""


def _blocks(usual: Sequence[str], own: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """Where two sequences differ: ranges of the usual and of the own one, without other instances of a template."""
    found = []
    for operation, a, b, c, d in SequenceMatcher(None, usual, own, autojunk=False).get_opcodes():
        if operation == "equal":
            continue
        if [base_name(name) for name in usual[a:b]] != [base_name(name) for name in own[c:d]]:
            found.append((a, b, c, d))
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
        for a, b, c, d in _blocks(one.group.sequence, layer.kernels):
            gone, new = one.group.sequence[a:b], layer.kernels[c:d]
            saved, cost = sum(increments[a:b]), _adds(layer, c, d)
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


def _adds(layer: Layer, start: int, end: int) -> int:
    """What a range of a layer's kernels adds with the idle time before them: median over the steps, ns."""
    return median_ns(sum(times.increments[start:end]) + sum(times.bubbles[start:end]) for times in layer.times)


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
        for a, b, c, d in _blocks(usual.sequence, one.group.sequence):
            head = f"class {one.group.name}, {len(one.group.members)} layers, against class {usual.name}"
            gone, new = usual.sequence[a:b], one.group.sequence[c:d]
            if new:
                cost = sum(increments[c:d])
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
