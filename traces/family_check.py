"""Families within layers: how many kernels each has, what they add to the completion period, and its share of it.

The time of a family is the median over the steps of what its kernels add to the completion period together, by exclusive
increments and the bubbles before them: of kernels slow in turn no median of one tells.
Kernels of unknown family are told apart, never dropped, and keep a family from passing where they may be of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

from .analysis import DeviceLayers, Layer
from .budget import Budget, Limit
from .errors import TraceError
from .families import FAMILIES, Names, known_families
from .layers import LayerClass
from .timing import median_ns
from .verdict import FAIL, INCONCLUSIVE, NOT_JUDGED, Doubts, Judgement, judge_any_kind, judge_part, microseconds

LEAST_SHARE_NS = 1000
"""Below this a share by bytes is less than any launch takes: a time over it says nothing."""
_WITH_EXPERTS = ("router", "moe_tail")  # what a dense layer has none of
_OF_EXPERTS = ("router", "experts", "moe_tail")


@dataclass(frozen=True)
class Part:
    """Kernels of one family in a layer, or of no known one: how many, and what they add, ns."""

    kernels: int
    time_ns: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class FamilyRow:
    """A family in a class of layers; ``limit`` is its share, where the budget has one."""

    family: str
    part: Part
    limit: Limit | None
    judgement: Judgement


@dataclass(frozen=True)
class ClassFamilies:
    """The families of a class in the order of FAMILIES, then others; ``unknown`` counts what no family is known of."""

    rows: tuple[FamilyRow, ...]
    unknown: Part


@dataclass(frozen=True)
class FamilyView:
    """What is known of the families of a device: by layer position, the parts of each family (None: unknown)."""

    names: Names
    layers: tuple[Mapping[str | None, Part], ...]
    device: DeviceLayers
    dense: frozenset[int]


def known_family(name: str) -> str:
    """The name, where it is one of ours or of an installed package.

    Raises:
        TraceError: it is not.
    """
    if name not in known_families():
        raise TraceError(f"no family {name!r}; families: {', '.join(known_families())}")
    return name


def view_families(device: DeviceLayers, names: Names) -> FamilyView:
    """Sort the kernels of all layers into families."""
    known = {kernels: names.families(kernels) for kernels in dict.fromkeys(layer.kernels for layer in device.layers)}
    layers = tuple(_parts(layer, known[layer.kernels]) for layer in device.layers)
    leading = 0  # dense layers are the first ones
    while leading < len(layers) and not any(family in layers[leading] for family in (*_WITH_EXPERTS, None)):
        leading += 1
    dense = frozenset(range(leading)) if leading < len(layers) else frozenset()
    return FamilyView(names, layers, device, dense)


def _parts(layer: Layer, families: Sequence[str | None]) -> dict[str | None, Part]:
    places: dict[str | None, list[int]] = {}
    for index, family in enumerate(families):
        places.setdefault(family, []).append(index)
    columns = list(zip(*(map(add, item.increments, item.bubbles) for item in layer.times), strict=True))
    found = {}
    for family, where in places.items():
        time = median_ns(map(sum, zip(*(columns[at] for at in where), strict=True)))
        found[family] = Part(len(where), time, tuple([layer.kernels[at] for at in where]))
    return found


NOTHING = Part(0, 0, ())


def class_families(view: FamilyView, group: LayerClass, budget: Budget | None, doubts: Doubts | None) -> ClassFamilies:
    """A class: kernels as in the layer that stands for it, times as medians over its layers."""
    model = next(i for i in group.members if view.device.layers[i].kernels == group.sequence)
    limit = budget.limit(group.kind) if budget else None
    shares = limit.families if limit else {}
    present = {family for family in view.layers[model] if family is not None} | set(shares)
    ranked = [family for family in FAMILIES if family in present] + sorted(present - set(FAMILIES))
    rows = []
    for family in ranked:
        part = _typical(view, group, model, family)
        judgement = Judgement(NOT_JUDGED)
        if budget is not None and doubts is not None:
            judgement = _judge(view, model, family, part, budget, group.kind, doubts)
        rows.append(FamilyRow(family, part, shares.get(family), judgement))
    return ClassFamilies(tuple(rows), _typical(view, group, model, None))


def _typical(view: FamilyView, group: LayerClass, model: int, family: str | None) -> Part:
    part = view.layers[model].get(family, NOTHING)
    times = [view.layers[index][family].time_ns for index in group.members if family in view.layers[index]]
    return replace(part, time_ns=median_ns(times)) if times else part


def judge_family_layer(
    view: FamilyView, position: int, family: str, kind: str | None, budget: Budget, doubts: Doubts
) -> Judgement:
    """One family of one layer against its share, by its kernel count and its time."""
    part = view.layers[position].get(family, NOTHING)
    return _judge(view, position, family, part, budget, kind, doubts)


def _judge(
    view: FamilyView, position: int, family: str, part: Part, budget: Budget, kind: str | None, doubts: Doubts
) -> Judgement:
    if doubts.everything:
        return Judgement(INCONCLUSIVE, doubts.everything, INCONCLUSIVE, INCONCLUSIVE)
    limit, any_kind = budget.limit(kind), kind is None and budget.limit(None) is None
    if not any_kind and (limit is None or family not in limit.families):
        return Judgement(NOT_JUDGED, (f"the budget has no share of {family} in {kind or 'such'} layers",))
    if position in view.dense and family in _OF_EXPERTS:
        return Judgement(NOT_JUDGED, ("a dense layer; the budget is for layers with experts",))
    unknown = view.layers[position].get(None, NOTHING)
    doubtful = [name for name in unknown.names if view.names.could_be(name, family)]
    if not part.kernels:
        more = f", and {len(doubtful)} kernels of unknown family" if doubtful else ""
        return Judgement(INCONCLUSIVE, (f"{family}: no kernel of it is known in the layer{more}",), INCONCLUSIVE, INCONCLUSIVE)  # fmt: skip
    if doubtful:
        reason = f"{family}: {len(doubtful)} kernels of unknown family may be of it ({doubtful[0]:.60})"
        doubts = replace(doubts, passing=(*doubts.passing, reason))
    if any_kind or limit is None:
        return judge_any_kind(part.kernels, part.time_ns, budget, doubts, family)
    share = limit.families[family]
    found = judge_part(part.kernels, part.time_ns, share, doubts, what=family)
    small = share.period_ns is not None and share.period_ns < LEAST_SHARE_NS
    if small and found.time == FAIL and share.period_ns is not None:
        reason = (
            f"{family}: adds {microseconds(part.time_ns)}; its share by bytes, {microseconds(share.period_ns)}, is less "
            "than a launch takes"
        )
        counted = judge_part(part.kernels, 0, replace(share, period_ns=None), doubts, what=family)
        if counted.verdict == FAIL:
            return replace(counted, time=INCONCLUSIVE)
        return Judgement(INCONCLUSIVE, (reason, *counted.reasons), counted.count, INCONCLUSIVE)
    return found
