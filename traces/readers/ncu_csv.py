"""Reader of ``ncu --csv``: one row a metric (details, chosen metrics), or one row a launch (``--page raw``)."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

from ..errors import TraceError
from .csv_tables import DAMAGED, HEADER, exact, tables
from .ncu import WANTED, NcuReport, Value, launch_of, unknown_units
from .stamps import BadStamp

_GPU = "device__attribute_display_name"


def is_ncu_header(cells: Sequence[str]) -> bool:
    """Whether a line is the header of a table of ncu, of either form."""
    if {"Metric Name", "Metric Value"} <= set(cells):
        return True
    return "Kernel Name" in cells and any(("__" in cell and "." in cell) or cell in WANTED for cell in cells)


class _Launches:
    """Launches as they are met, each with its metrics."""

    def __init__(self) -> None:
        self.about: dict[tuple[int, str, str], tuple[str, str, str, str]] = {}
        self.values: dict[tuple[int, str, str], dict[str, list[Value]]] = {}
        self.gpus: set[str] = set()

    def start(self, key: tuple[int, str, str], name: str, grid: str, block: str) -> None:
        if key not in self.about:
            self.about[key] = (key[1] or str(len(self.about)), name, grid, block)
            self.values[key] = {}

    def add(self, key: tuple[int, str, str], metric: str, unit: str, text: str) -> None:
        """Keep a value; blank, n/a and words mean that it was not measured."""
        if metric == _GPU and text:
            self.gpus.add(text)
        if metric in WANTED and (value := _number(text)) is not None:
            self.values[key].setdefault(metric, []).append((unit, value))


def _number(text: str) -> Decimal | None:
    try:
        return exact(text, "value")
    except BadStamp:
        return None


def read_ncu_csv(path: Path) -> NcuReport:
    """Read the launches of a CSV of Nsight Compute.

    Raises:
        TraceError: no launch in it.
    """
    found = _Launches()
    header: dict[str, int] = {}
    units: list[str] = []
    number = damaged = 0
    for event in tables(path, is_ncu_header, ragged=True):
        if event.kind == HEADER:
            header, units, number = {name: index for index, name in enumerate(event.cells)}, [], number + 1
            continue
        cells = event.cells

        def cell(name: str, cells: Sequence[str] = cells, header: dict[str, int] = header) -> str:
            index = header.get(name)
            return cells[index].strip() if index is not None and index < len(cells) else ""

        if event.kind == DAMAGED:
            damaged += 1
            continue
        long = "Metric Name" in header
        if not cell("Kernel Name"):
            if not long and not units:
                units = [text.strip() for text in cells]  # the raw page has its units in a row of their own
            continue
        # without an ID every row of the raw page is a launch of its own
        identity = cell("ID") or ("" if long else str(event.line))
        key = (number, identity, cell("Process ID"))
        found.start(key, cell("Kernel Name"), cell("Grid Size"), cell("Block Size"))
        if long:
            found.add(key, cell("Metric Name"), cell("Metric Unit"), cell("Metric Value"))
            continue
        for name, index in header.items():
            found.add(key, name, units[index] if index < len(units) else "", cell(name))
    if not found.about:
        raise TraceError(f"{path.name}: a table of Nsight Compute without a kernel launch; run ncu --csv again")
    notes = [f"{damaged} rows are damaged and were skipped"] if damaged else []
    strange = dict.fromkeys(text for values in found.values.values() for text in unknown_units(values))
    if strange:
        notes.append(f"not used, the unit is not known: {', '.join(list(strange)[:5])}")
    launches = tuple(launch_of(*found.about[key], found.values[key]) for key in found.about)
    return NcuReport(path.name, "Nsight Compute CSV", launches, tuple(sorted(found.gpus)), tuple(notes))
