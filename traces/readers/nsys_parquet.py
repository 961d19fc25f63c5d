"""Reader of ``nsys export --type parquetdir``: one ``<TABLE>.parquet`` a table, with the columns of the SQLite export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import TraceError
from ..model import Trace
from .nsys_sqlite import read_tables

_ROWS = 1 << 16  # at a time: a capture has millions
INSTALL = "pip install 'k3lab[parquet]'"


def _pyarrow(name: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TraceError(
            f"{name}: Parquet files need pyarrow: {INSTALL}; or export with nsys export --type sqlite"
        ) from None
    return pyarrow


class ParquetTables:
    """A folder of Parquet files as the tables of an export; each file is read when it is asked for, by column."""

    unsaved = False

    def __init__(self, folder: Path) -> None:
        """Find the tables.

        Raises:
            TraceError: pyarrow is not installed.
        """
        self.name = folder.name or str(folder)
        self._pa = _pyarrow(self.name)
        self._files = {path.name.removesuffix(".parquet"): path for path in sorted(folder.glob("*.parquet"))}
        self._columns: dict[str, frozenset[str]] = {}
        self._strings: dict[object, str] | None = None

    def close(self) -> None:
        """Nothing stays open."""

    def _damaged(self, table: str, error: Exception) -> TraceError:
        lines = str(error).splitlines() or [type(error).__name__]
        return TraceError(f"{self.name}: {table}.parquet is damaged ({lines[0][:120]}); export the report again")

    def has(self, table: str) -> bool:
        """Whether there is such a file."""
        return table in self._files

    def columns(self, table: str) -> frozenset[str]:
        """The names of the table's columns; empty for a table that is not there."""
        if table not in self._columns:
            names: list[str] = []
            if self.has(table):
                try:
                    names = self._pa.parquet.read_schema(self._files[table]).names
                except (self._pa.ArrowException, OSError, ValueError) as error:
                    raise self._damaged(table, error) from None
            self._columns[table] = frozenset(names)
        return self._columns[table]

    def _read(self, table: str, columns: Sequence[str]) -> dict[str, list[Any]]:
        """Columns as lists of plain values; strings stored as bytes are strings."""
        try:
            # without partitioning: else a parent folder named key=value would become a column
            data = self._pa.parquet.read_table(self._files[table], columns=list(columns), partitioning=None)
            return {name: _plain(data.column(name).to_pylist()) for name in columns}
        except (self._pa.ArrowException, OSError, ValueError, KeyError, UnicodeError) as error:
            raise self._damaged(table, error) from None

    def string(self, reference: object) -> str | None:
        """The string a cell refers to; see ``nsys_source``."""
        if reference is None:
            return None
        if self._strings is None:
            self._strings = {}
            if {"id", "value"} <= self.columns("StringIds"):
                found = self._read("StringIds", ("id", "value"))
                self._strings = {
                    key: value for key, value in zip(found["id"], found["value"], strict=True) if isinstance(value, str)
                }
        known = self._strings.get(reference) if isinstance(reference, (int, str)) else None
        return f"<missing string {reference}>" if known is None else known

    def rows(self, table: str, wanted: Sequence[str]) -> Iterator[tuple]:
        """Rows of a table with the ``wanted`` columns, one after the other; see ``nsys_source``."""
        if not self.has(table):
            return
        have = self.columns(table)
        # a table with none of the columns still has its rows
        present = list(dict.fromkeys(column for column in wanted if column in have)) or sorted(have)[:1]
        try:
            with self._pa.parquet.ParquetFile(self._files[table]) as file:
                for batch in file.iter_batches(batch_size=_ROWS, columns=present):
                    absent = [None] * batch.num_rows
                    found = {name: _plain(batch.column(name).to_pylist()) for name in present}
                    yield from zip(*(found.get(name, absent) for name in wanted), strict=True)
        except (self._pa.ArrowException, OSError, ValueError, KeyError, UnicodeError) as error:
            raise self._damaged(table, error) from None

    def settings(self, table: str, key: str) -> list[str]:
        """The values under a key, or under ``PROCESS_n:key``; of the table nothing else is kept."""
        if not {"name", "value"} <= self.columns(table):
            return []
        found = self._read(table, ("name", "value"))
        return [
            value
            for name, value in zip(found["name"], found["value"], strict=True)
            if isinstance(name, str)
            and isinstance(value, str)
            and (name == key or (name.startswith("PROCESS") and name.endswith(f":{key}")))
        ]


def _plain(values: list[Any]) -> list[Any]:
    if not any(isinstance(value, bytes) for value in values):
        return values
    return [value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value for value in values]


def read_parquet(folder: Path) -> Trace:
    """Read a parquetdir export of Nsight Systems.

    Raises:
        TraceError: pyarrow is not installed, a file is damaged, or the folder holds no export of nsys.
    """
    return read_tables(ParquetTables(folder), "parquetdir")
