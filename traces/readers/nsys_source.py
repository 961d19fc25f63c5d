"""The tables of an Nsight Systems export as its reader asks for them, whatever kind of files hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

_VERSION = re.compile(r"^[0-9]+(\.[0-9]+){0,4}$")
_SHIFT = re.compile(r"^-?[0-9]{1,20}$")
_MODE = "CUDA_GRAPH_TRACE_OPTIONS:MODE"
_ALLOWED = ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")
"""The only metadata read by name. The same tables hold the environment and the output of the profiled process."""


class Source(Protocol):
    """Named tables whose columns may be absent. All methods raise TraceError where the files are damaged."""

    name: str
    unsaved: bool
    """Whether rows are known to lie outside the files that are read."""

    def has(self, table: str) -> bool:
        """Whether the table exists."""

    def columns(self, table: str) -> frozenset[str]:
        """The names of its columns; empty for a table that is not there."""

    def rows(self, table: str, wanted: Sequence[str]) -> Iterable[tuple]:
        """Its rows, once: the ``wanted`` columns, None where absent. References to strings stay numbers."""

    def string(self, reference: object) -> str | None:
        """The string a cell refers to, the same object for all who ask; None for no reference.

        A missing one reads as ``<missing string 123>``: its row must not be dropped.
        """

    def settings(self, table: str, key: str) -> list[str]:
        """The values under a key of a table of names and values, and no others."""


def metadata(tables: Source) -> dict[str, str]:
    """Version facts of the export, by allow-list and only where they look like versions."""
    found: dict[str, str] = {}
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        for key in _ALLOWED:
            for value in tables.settings(table, key):
                if _VERSION.match(value):
                    found.setdefault(key, value)
    return found


def graph_mode(tables: Source) -> str | None:
    """How graphs were traced: ``graph``, ``node``, or None where the capture does not say."""
    modes = {value.lower() for value in tables.settings("META_DATA_CAPTURE", _MODE)}
    modes &= {"graph", "node"}
    return modes.pop() if len(modes) == 1 else None


def time_changes(tables: Source) -> str:
    """How the export moved its times (``shifted by 5 ns``, ``normalised``); empty where it did not."""
    found = []
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        for value in tables.settings(table, "EXPORT_PARAM_TIME_NORMALIZE"):
            if value.lower() in ("true", "1"):
                found.append("normalised")
        for value in tables.settings(table, "EXPORT_PARAM_TIME_SHIFT"):
            if _SHIFT.match(value) and int(value):
                found.append(f"shifted by {int(value)} ns")
    return ", ".join(found)
