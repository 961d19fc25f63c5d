"""Which kernel family a kernel of a trace belongs to, and which kind of layer a sequence of kernels is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .errors import TraceError
from .names_table import NamesTable, load_table, own_tables
from .side_files import read_json, why

FAMILIES = (
    "attention_projection", "output_projection", "router", "experts", "kda", "mla", "moe_tail", "attn_res", "lm_head",
)  # fmt: skip
"""The model's families. Names that hold underscores must be known to cut ``k3_<family>_<engine>_<role>``."""

_OURS = re.compile(r"(?<![A-Za-z0-9])(?<!kimi_)k3_([a-z0-9]+(?:_[a-z0-9]+)*)")  # vLLM has kimi_k3_ in its own
_MLA = re.compile(r"(?<![a-z])(?:flash)?mla(?![a-z])", re.IGNORECASE)
_KDA = re.compile(r"(?<![a-z])kda(?![a-z])", re.IGNORECASE)


@cache
def known_families() -> tuple[str, ...]:
    """The model's families, then those that installed packages register (entry points ``k3lab.families``)."""
    more = sorted({point.name for point in entry_points(group="k3lab.families")} - set(FAMILIES))
    return (*FAMILIES, *more)


PlanLike = str | Path | Mapping[str, Any] | list[Any]
"""A plan as :func:`read_plan` takes it."""


@dataclass(frozen=True, eq=False)  # what was looked up is kept by identity
class Names:
    """What is known of kernel names: a plan, and the names tables of other engines.

    ``plan`` maps a kernel name, or a part of one, to its family; ``kinds`` maps a planned kernel of ours to the layer
    kinds it is planned in (none: any).
    """

    plan: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, frozenset[str]] = field(default_factory=dict)
    tables: tuple[NamesTable, ...] = ()

    def family(self, kernel: str) -> str | None:
        """The family by the name alone: the plan's whole name, our own name, a part in the plan, the tables."""
        return _family(self, kernel)

    def families(self, kernels: Sequence[str]) -> tuple[str | None, ...]:
        """The families of a layer's kernels in launch order; what a name alone leaves open, its place may tell."""
        found = [self.family(name) for name in kernels]
        for table in self.tables:
            if None in found:
                placed = table.families(kernels)
                found = [old or new for old, new in zip(found, placed, strict=True)]
        return tuple(found)

    def could_be(self, kernel: str, family: str) -> bool:
        """Whether a kernel whose family is unknown may be of this one; a table may rule it out."""
        entries = [entry for table in self.tables if (entry := table.entry(kernel)) is not None]
        return not entries or any(family in entry.could_be for entry in entries)


UNNAMED = Names()
"""Nothing is known but our own names."""


@lru_cache(maxsize=20000)
def _family(names: Names, kernel: str) -> str | None:
    if (planned := _planned_family(kernel, names.plan)) is not None:
        return planned
    entries = (entry for table in names.tables if (entry := table.entry(kernel)) is not None)
    settled = {entry.family for entry in entries}
    return settled.pop() if len(settled) == 1 else None


def _planned_family(kernel: str, plan: Mapping[str, str]) -> str | None:
    if kernel in plan:
        return plan[kernel]
    found = _OURS.search(kernel)
    if found is not None:
        words = found[1]
        known = [name for name in known_families() if words == name or words.startswith(name + "_")]
        return max(known, key=len) if known else words.split("_")[0]
    parts = [name for name in plan if name and name in kernel]
    return plan[max(parts, key=lambda name: (len(name), name))] if parts else None


def is_ours(kernel: str) -> bool:
    """Whether the kernel is one of this project by its name."""
    return _OURS.search(kernel) is not None


def gather_names(plan: PlanLike | None = None, tables: Iterable[str | Path] | None = None) -> Names:
    """Names from a plan and from names tables (by name or path); without any, from all tables of the package.

    Raises:
        TraceError: an unreadable plan or table.
    """
    chosen = own_tables() if tables is None else tuple(load_table(table) for table in tables)
    if plan is None:
        return Names(tables=chosen)
    data = _read_json(plan)
    return Names(read_plan(data), _planned_kinds(data), chosen)


def layer_kind(names: Iterable[str]) -> str | None:
    """``mla`` or ``kda`` where kernel names say so, by the word or by a table of the package; an MLA kernel decides."""
    told = {_kind(name) for name in names}
    return "mla" if "mla" in told else "kda" if "kda" in told else None


@lru_cache(maxsize=20000)
def _kind(name: str) -> str | None:
    for kind, word in (("mla", _MLA), ("kda", _KDA)):
        if word.search(name):
            return kind
    entries = (entry for table in own_tables() if (entry := table.entry(name)) is not None)
    return next((entry.family for entry in entries if entry.family in ("mla", "kda")), None)


def read_plan(plan: PlanLike) -> dict[str, str]:
    """A plan as {kernel name: family}.

    Args:
        plan: such a mapping; or any JSON data (or the path of a file) that somewhere holds objects with ``kernel``
            (or ``name``) and ``family``, like what ``k3lab decode plan --json`` prints.

    Raises:
        TraceError: unreadable, or nothing of that kind in it.
    """
    plan = _read_json(plan)
    if isinstance(plan, Mapping) and plan and all(isinstance(value, str) for value in plan.values()):
        return dict(plan)
    found: dict[str, str] = {}
    for item in _objects(plan):
        if (name := _kernel(item)) is not None:
            found[name] = item["family"]
    if not found:
        raise TraceError(_WRONG_PLAN)
    return found


_WRONG_PLAN = "a plan is a JSON object {kernel name: family}, or what k3lab decode plan --json prints"


def _read_json(plan: PlanLike) -> Any:
    if not isinstance(plan, (str, Path)):
        return plan
    try:
        return read_json(Path(plan))
    except OSError as error:
        raise TraceError(f"{plan}: cannot be read ({error.strerror or error}); {_WRONG_PLAN}") from None
    except ValueError as error:
        raise TraceError(f"{plan}: {why(error)}; {_WRONG_PLAN}") from None


def _objects(data: Any) -> Iterable[Mapping[str, Any]]:
    pending: list[Any] = [data]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, Mapping):
            pending.extend(item.values())
            yield item


def _kernel(item: Mapping[str, Any]) -> str | None:
    name, family = item.get("kernel") or item.get("name"), item.get("family")
    return name if isinstance(name, str) and name and isinstance(family, str) else None


def _planned_kinds(data: Any) -> dict[str, frozenset[str]]:
    """Our planned kernels and the kinds of the layers they are planned in, where the plan is cut by layers."""
    found: dict[str, frozenset[str]] = {}
    for item in _objects(data):
        kind, launches = item.get("kind"), item.get("launches")
        if isinstance(kind, str) and isinstance(launches, list):
            names = {_kernel(launch) for launch in launches if isinstance(launch, Mapping)}
            for name in names:
                if name is not None and is_ours(name):
                    found[name] = found.get(name, frozenset()) | {kind}
    return found


@dataclass(frozen=True)
class StockInstead:
    """A kernel of ours that is planned and did not run in these layers (by position), and what ran of its family.

    ``unknown`` are kernels of unknown family that may have run in its place.
    """

    planned: str
    family: str
    layers: tuple[int, ...]
    ran: tuple[str, ...]
    unknown: tuple[str, ...]


def stock_instead(names: Names, layers: Sequence[Sequence[str]]) -> list[StockInstead]:
    """Fallback kernels: where the plan has a kernel of ours and the layer ran without it.

    A layer counts where its kernels tell that it is of a kind the kernel is planned in. Where the plan is not cut by
    kinds, or no layer tells its own, a kernel is missed only if it ran in none.

    Args:
        names: with a plan; without one nothing is planned.
        layers: the kernel names of each layer in launch order.
    """
    found = []
    kinds = [layer_kind(layer) for layer in layers]
    for planned, family in sorted(names.plan.items()):
        if not is_ours(planned):
            continue
        wanted = names.kinds.get(planned)
        without = [index for index, layer in enumerate(layers) if not any(planned in name for name in layer)]
        if wanted and any(kinds):
            lacking = [index for index in without if kinds[index] in wanted]
        else:
            lacking = without if len(without) == len(layers) else []
        if not lacking:
            continue
        ran: dict[str, None] = {}
        unknown: dict[str, None] = {}
        for index in lacking:
            for name, known in zip(layers[index], names.families(layers[index]), strict=True):
                if known == family:
                    ran[name] = None
                elif known is None and names.could_be(name, family):
                    unknown[name] = None
        found.append(StockInstead(planned, family, tuple(lacking), tuple(ran), tuple(unknown)))
    return found
