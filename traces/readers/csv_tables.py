"""Tables inside a CSV text: what a tool prints around them is told from their headers and rows."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, NamedTuple

from ..errors import TraceError
from .packed import open_text
from .stamps import BadStamp

HEADER, ROW, DAMAGED = "header", "row", "damaged"

_THOUSANDS = re.compile(r"^[+-]?\d{1,3}(,\d{3})+(\.\d+)?$")
_DIGITS = frozenset("-0123456789")
_MAX_DIGITS = 18
_LONGEST = 60  # characters of a number that may be one


class Event(NamedTuple):
    """A header, a row, or a row that is damaged, of a table; ``line`` is its last line in the file, from 1."""

    kind: str
    cells: list[str]
    line: int
    reason: str = ""


class _Lines:
    """The lines of a file; remembers whether the last one ends inside quotes."""

    def __init__(self, text: IO[str]) -> None:
        self._text, self.last = text, ""

    def __iter__(self) -> Iterator[str]:
        for line in self._text:
            self.last = line
            yield line

    @property
    def cut(self) -> bool:
        return self.last.count('"') % 2 == 1


def _delimiter(path: Path, is_header: Callable[[list[str]], bool]) -> str:
    with open_text(path) as text:
        for line in text:
            for delimiter in ("\t", ","):
                if is_header([cell.strip(' "\r\n') for cell in line.split(delimiter)]):
                    return delimiter
    return ","


def tables(path: Path, is_header: Callable[[list[str]], bool], ragged: bool = False) -> Iterator[Event]:
    """The headers and rows of all tables of a CSV (or tab-separated) file, in the order of the file.

    Lines before, between and after them are skipped. A row that has not as many cells as its header (``ragged``: more
    of them), holds a line end, or is cut off is ``damaged``.

    Raises:
        TraceError: a line no CSV has.
    """
    delimiter = _delimiter(path, is_header)
    width = 0
    with open_text(path) as text:
        lines = _Lines(text)
        reader = csv.reader(iter(lines), delimiter=delimiter)
        line = 0
        held: Event | None = None  # a row is given out once the next line shows that it was not the last
        try:
            for cells in reader:
                number = cells and cells[0][:1] in _DIGITS  # most rows begin with one, and no header does
                if not number and is_header([cell.strip() for cell in cells]):
                    event = Event(HEADER, [cell.strip() for cell in cells], reader.line_num)
                    width = len(cells)
                elif not width or not _is_row(cells, width, ragged):
                    continue
                elif reader.line_num != line + 1 and any("\n" in cell or "\r" in cell for cell in cells):
                    event = Event(DAMAGED, cells, reader.line_num, "a line end inside a cell")
                elif len(cells) == width or (ragged and len(cells) < width):
                    event = Event(ROW, cells, reader.line_num)
                else:
                    event = Event(DAMAGED, cells, reader.line_num, f"{len(cells)} cells, the header has {width}")
                if held is not None:
                    yield held
                held = event
                line = reader.line_num
        except csv.Error as error:
            if not width:
                return  # no table up to here: not a CSV at all
            raise TraceError(f"{path.name}: no CSV from line {reader.line_num} on ({error}); export it again") from None
        if held is not None:
            yield held._replace(kind=DAMAGED, reason="cut off inside quotes") if lines.cut else held


def _is_row(cells: list[str], width: int, ragged: bool) -> bool:
    """Whether a line that is no header is a row, whole or damaged, and not something a tool said."""
    if not cells:
        return False
    return len(cells) == width or (ragged and len(cells) > 1) or cells[0].strip()[:1] in _DIGITS


def exact(text: str, what: str) -> Decimal:
    """A number as written, with thousands separators or without, never through a float.

    Raises:
        BadStamp: no number, not finite, or too large.
    """
    text = text.strip()
    if not text:
        raise BadStamp(f"no {what}")
    if len(text) > _LONGEST:
        raise BadStamp(f"{what} out of range")
    if "," in text:
        if not _THOUSANDS.match(text):
            raise BadStamp(f"{what} is not a number")
        text = text.replace(",", "")
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise BadStamp(f"{what} is not a number") from None
    if not value.is_finite():
        raise BadStamp(f"{what} is {'NaN' if value.is_nan() else 'infinite'}")
    if value and value.adjusted() >= _MAX_DIGITS + 6:
        raise BadStamp(f"{what} out of range")
    return value


def whole(text: str) -> int | None:
    """A whole number that is not negative, or None where the cell holds something else."""
    text = text.strip()
    if text.isdecimal() and len(text) < _MAX_DIGITS:
        return int(text)
    try:
        value = exact(text, "number")
    except BadStamp:
        return None
    return int(value) if 0 <= value < 10**_MAX_DIGITS and value == int(value) else None
