"""Names tables: which kernels of another engine belong to which family, as data.

An entry matches a name exactly, by its beginning, or by a glob in which only ``*`` is special; all take time linear
in the name. Of several that match, an exact one comes first, then the one with the most literal characters. An entry
with ``family`` settles it. One with ``could_be`` is ambiguous (a GEMM of a library serves many families): a rule of the
table may settle it from the landmarks around it in the layer, and without one the family stays unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import TraceError
from .names import base_name
from .side_files import named_or_given

SCHEMA = "k3lab.names_table/1"
_FOLDER = Path(__file__).parent / "names_tables"
_KINDS = ("exact", "prefix", "glob")
_FIELDS = {*_KINDS, "family", "could_be", "role", "why"}
_MAX_ENTRIES = 2000


def glob_matches(pattern: str, name: str) -> bool:
    """Whether the name is the pattern, where ``*`` stands for any characters; case counts, time is linear.

    Each part is looked for from where the one before ended: the leftmost place is always as good as a later one.
    """
    first, *middle = pattern.split("*")
    if not middle:
        return name == pattern
    last = middle.pop()
    if not name.startswith(first) or not name.endswith(last) or len(name) < len(first) + len(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


@dataclass(frozen=True)
class Entry:
    """One pattern. ``family`` is None where only ``could_be`` is known; ``role`` names its part in the layer."""

    kind: str
    pattern: str
    family: str | None
    could_be: frozenset[str]
    role: str

    def matches(self, name: str) -> bool:
        """Whether the kernel's name, or its name without template and parameters, is meant."""
        if self.kind == "glob":
            return glob_matches(self.pattern, name)
        bases = (name, base_name(name))
        return any(one == self.pattern if self.kind == "exact" else one.startswith(self.pattern) for one in bases)

    @property
    def rank(self) -> tuple[bool, int, str]:
        """Greater for the more specific."""
        return (self.kind == "exact", len(self.pattern.replace("*", "")), self.pattern)


@dataclass(frozen=True)
class Rule:
    """Kernels of a role are of a family where the landmark before, or the one after, is one of these roles.

    ``alone``: only where no other kernel of the role lies between the same landmarks.
    """

    role: str
    after: frozenset[str]
    before: frozenset[str]
    family: str
    alone: bool = False


@dataclass(frozen=True, eq=False)  # by identity: what was looked up is kept by table
class NamesTable:
    """A table. ``follows`` are roles that belong to the kernel just before them (the reduction of a split-K GEMM)."""

    name: str
    entries: tuple[Entry, ...]
    landmarks: frozenset[str] = frozenset()
    rules: tuple[Rule, ...] = ()
    follows: frozenset[str] = frozenset()

    def entry(self, name: str) -> Entry | None:
        """The most specific entry for a kernel, or None."""
        return _entry(self, name)

    def families(self, names: Sequence[str]) -> tuple[str | None, ...]:
        """Families of a layer's kernels in launch order; layers follow each other, so the last precedes the first."""
        entries = [self.entry(name) for name in names]
        found: list[str | None] = []
        for index, item in enumerate(entries):
            if item is None or item.family is not None:
                found.append(item.family if item else None)
            elif item.role in self.follows:
                before = entries[index - 1] if index else None
                found.append(found[index - 1] if before is not None and before.role not in self.follows else None)
            else:
                found.append(self._by_place(entries, index))
        return tuple(found)

    def _by_place(self, entries: Sequence[Entry | None], index: int) -> str | None:
        item = entries[index]
        role = item.role if item else ""
        previous, before = self._landmark(entries, index, -1)
        following, behind = self._landmark(entries, index, 1)
        settled = {
            rule.family
            for rule in self.rules
            if rule.role == role
            and (not rule.after or previous in rule.after)
            and (not rule.before or following in rule.before)
            and not (rule.alone and role in before + behind)
        }
        return settled.pop() if len(settled) == 1 else None

    def _landmark(self, entries: Sequence[Entry | None], index: int, step: int) -> tuple[str, list[str]]:
        """The nearest landmark in a direction, and the roles passed on the way to it."""
        passed: list[str] = []
        for away in range(1, len(entries)):
            item = entries[(index + step * away) % len(entries)]
            if item is not None and item.role in self.landmarks:
                return item.role, passed
            passed.append(item.role if item else "")
        return "", passed


@lru_cache(maxsize=20000)
def _entry(table: NamesTable, name: str) -> Entry | None:
    return max((item for item in table.entries if item.matches(name)), key=lambda item: item.rank, default=None)


def table_names() -> tuple[str, ...]:
    """The tables that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_table(name: str | Path) -> NamesTable:
    """A table of the package by name (``vllm_stock``), or one of yours by the path of its JSON file.

    Raises:
        TraceError: no such table, or a file of another form.
    """
    return parse_table(*named_or_given(name, _FOLDER, table_names(), "names table", "vllm_stock"))


def sequences(name: str) -> dict[str, list[dict[str, Any]]]:
    """The lists of launches that come with a table of the package: by title, {kernel, family, what} in launch order."""
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))["sequences"]


@lru_cache(maxsize=1)
def own_tables() -> tuple[NamesTable, ...]:
    """All tables of the package."""
    return tuple(load_table(name) for name in table_names())


def parse_table(data: Any, where: str = "names table") -> NamesTable:
    """Check the data of a names table.

    Raises:
        TraceError: a field is missing, unknown or of the wrong type, or one pattern stands there twice.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise TraceError(f"{where}: not a names table of schema {SCHEMA}")
    if not isinstance(data.get("name"), str) or not data["name"]:
        raise TraceError(f"{where}: 'name' must be a text")
    rows = data.get("entries")
    if not isinstance(rows, list) or not 1 <= len(rows) <= _MAX_ENTRIES:
        raise TraceError(f"{where}: 'entries' must be a list of 1 to {_MAX_ENTRIES} patterns")
    entries = tuple(_parse_entry(row, f"{where}: entry {index}") for index, row in enumerate(rows))
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        if (entry.kind, entry.pattern) in seen:
            raise TraceError(f"{where}: {entry.kind} {entry.pattern!r} stands there twice")
        seen.add((entry.kind, entry.pattern))
    rules = data.get("rules", [])
    if not isinstance(rules, list):
        raise TraceError(f"{where}: 'rules' must be a list")
    return NamesTable(
        name=data["name"],
        entries=entries,
        landmarks=_words(data, "landmarks", where),
        rules=tuple(_parse_rule(row, f"{where}: rule {index}") for index, row in enumerate(rules)),
        follows=_words(data, "follows", where),
    )


def _parse_entry(row: Any, where: str) -> Entry:
    if not isinstance(row, dict) or set(row) - _FIELDS:
        raise TraceError(f"{where}: must be an object with one of {', '.join(_KINDS)}, and family or could_be")
    kinds = [kind for kind in _KINDS if kind in row]
    if len(kinds) != 1 or not isinstance(row[kinds[0]], str) or not row[kinds[0]].strip("*"):
        raise TraceError(f"{where}: needs one pattern, as {', '.join(_KINDS)}, with more than * in it")
    family, could_be, role = row.get("family"), _words(row, "could_be", where), row.get("role", "")
    if not isinstance(role, str) or (family is None) == (not could_be):
        raise TraceError(f"{where}: needs either family or could_be, and role is a text")
    if family is not None and not (isinstance(family, str) and family):
        raise TraceError(f"{where}: family must be a text")
    return Entry(kinds[0], row[kinds[0]], family, could_be, role)


def _parse_rule(row: Any, where: str) -> Rule:
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) and row[key] for key in ("role", "family")):
        raise TraceError(f"{where}: must be an object with role and family, and after or before")
    after, before = _words(row, "after", where), _words(row, "before", where)
    if not after and not before:
        raise TraceError(f"{where}: names no landmark, in after or before")
    return Rule(row["role"], after, before, row["family"], row.get("alone") is True)


def _words(row: Mapping[str, Any], key: str, where: str) -> frozenset[str]:
    value = row.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise TraceError(f"{where}: {key!r} must be a list of texts")
    return frozenset(value)
