"""Access to the tables of an Nsight Systems SQLite export whose columns and tables come and go by version."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from ..errors import TraceError


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Tables:
    """A read-only view of one export; every query names its columns and survives their absence."""

    def __init__(self, path: Path) -> None:
        """Open the file without locking it or writing beside it.

        Raises:
            TraceError: not an SQLite database.
        """
        self.name = path.name
        # what was not yet moved into the file is not read: doing so would write beside it
        self.unsaved = any(_size(path.with_name(path.name + end)) for end in ("-wal", "-journal"))
        uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        try:
            self._db = sqlite3.connect(uri, uri=True)
            self._db.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
            rows = self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        except (sqlite3.Error, UnicodeError) as error:
            raise self._damaged(error) from None
        self._tables = {name for (name,) in rows if isinstance(name, str)}
        self._columns: dict[str, frozenset[str]] = {}
        self._strings: dict[object, str] | None = None

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _damaged(self, error: Exception) -> TraceError:
        return TraceError(f"{self.name}: not a usable SQLite file ({error}); export the report again with nsys export")

    def has(self, table: str) -> bool:
        """Whether the table exists; exports leave out tables without rows."""
        return table in self._tables

    def columns(self, table: str) -> frozenset[str]:
        """The names of the table's columns; empty for a table that is not there."""
        if table not in self._columns:
            found: set[str] = set()
            if self.has(table):
                found = {row[1] for row in self.query(f'PRAGMA table_info("{table}")')}
            self._columns[table] = frozenset(found)
        return self._columns[table]

    def query(self, sql: str, values: Sequence[object] = ()) -> list[tuple]:
        """All rows of a statement.

        Raises:
            TraceError: the file is damaged where the statement reads it.
        """
        try:
            return self._db.execute(sql, tuple(values)).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            raise self._damaged(error) from None

    def rows(self, table: str, wanted: Sequence[str]) -> Iterator[tuple]:
        """Rows of a table with the ``wanted`` columns, one after the other; a column the table lacks reads as None.

        Raises:
            TraceError: the file is damaged where the table lies.
        """
        if not self.has(table):
            return
        have = self.columns(table)
        parts = [f'"{column}"' if column in have else "NULL" for column in wanted]
        try:
            yield from self._db.execute(f'SELECT {", ".join(parts)} FROM "{table}"')
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            raise self._damaged(error) from None

    def string(self, reference: object) -> str | None:
        """The string a cell refers to; see ``nsys_source``."""
        if reference is None:
            return None
        if self._strings is None:
            # all at once: joined to a million rows, each row would get a copy of its own
            rows = self.rows("StringIds", ("id", "value")) if {"id", "value"} <= self.columns("StringIds") else ()
            self._strings = {number: text for number, text in rows if isinstance(text, str)}
        return self._strings.get(reference, f"<missing string {reference}>")

    def settings(self, table: str, key: str) -> list[str]:
        """The values under a key, or under ``PROCESS_n:key``; other rows of the table are not read."""
        if not {"name", "value"} <= self.columns(table):
            return []
        sql = f"SELECT value FROM \"{table}\" WHERE name = ? OR (name LIKE 'PROCESS%' AND name LIKE ?)"
        return [value for (value,) in self.query(sql, (key, f"%:{key}")) if isinstance(value, str)]
