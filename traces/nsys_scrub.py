"""Takes out of an SQLite export of nsys what a trace need not tell: environment, command line, output, users, hosts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from .errors import TraceError

_KEEP_PREFIXES = ("CUPTI_ACTIVITY_KIND_", "CUDA_GRAPH_", "NVTX_", "ENUM_", "TARGET_INFO_CUDA_")
_KEEP = frozenset({
    "StringIds", "TARGET_INFO_GPU", "TARGET_INFO_SESSION_START_TIME", "ANALYSIS_DETAILS", "PROFILER_OVERHEAD",
    "DIAGNOSTIC_EVENT", "PROCESSES", "META_DATA_EXPORT", "META_DATA_CAPTURE",
})  # fmt: skip
_KEEP_CAPTURE = "CUDA_GRAPH_TRACE_OPTIONS:"
_QUOTES = ("/", "\\", "=", "--")  # a path, a variable or an argument of the process is quoted in the text
_KEEP_EXPORT = ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION", "EXPORT_PARAM_LAZY", "EXPORT_PARAM_TIME")
_NAMES = ("nameId", "demangledName", "shortName", "mangledName", "textId", "jsonTextId")
"""Columns that hold the id of a string. All other strings go."""


def scrub(path: Path) -> list[str]:
    """Rewrite an export in place, keeping device events, marks and what is needed to read them; returns its GPUs' names.

    Raises:
        TraceError: it is not an SQLite file.
    """
    try:
        database = sqlite3.connect(path)
        try:
            return _scrub(database)
        finally:
            database.close()
    except sqlite3.Error as error:
        raise TraceError(f"nsys exported no usable SQLite file ({error}); nothing was written") from None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _scrub(database: sqlite3.Connection) -> list[str]:
    objects = database.execute("SELECT name, type FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
    tables = [name for name, kind in objects if kind == "table"]
    database.execute("PRAGMA secure_delete = ON")
    for name, kind in objects:
        if kind == "view":
            database.execute(f"DROP VIEW {_quoted(name)}")
    kept = []
    for name in tables:
        if name in _KEEP or name.startswith(_KEEP_PREFIXES):
            kept.append(name)
        else:
            database.execute(f"DROP TABLE {_quoted(name)}")
    if "META_DATA_CAPTURE" in kept:
        database.execute("DELETE FROM META_DATA_CAPTURE WHERE instr(name, ?) = 0", (_KEEP_CAPTURE,))
    if "META_DATA_EXPORT" in kept:
        wanted = " OR ".join("instr(name, ?) = 1" for _ in _KEEP_EXPORT)
        database.execute(f"DELETE FROM META_DATA_EXPORT WHERE NOT ({wanted})", _KEEP_EXPORT)
    if "DIAGNOSTIC_EVENT" in kept:
        for mark in _QUOTES:
            database.execute("UPDATE DIAGNOSTIC_EVENT SET text = '' WHERE instr(text, ?) > 0", (mark,))
    if "PROCESSES" in kept:
        _drop_processes(database, kept)
    if "StringIds" in kept:
        _drop_strings(database, kept)
    database.commit()
    database.execute("VACUUM")  # what was deleted is not left in free pages
    if "TARGET_INFO_GPU" not in kept:
        return []
    return [str(name) for (name,) in database.execute("SELECT name FROM TARGET_INFO_GPU")]


def _drop_processes(database: sqlite3.Connection, kept: list[str]) -> None:
    """Keep the processes named like one that owns kernels: workers without any are then still seen as missing."""
    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    known = [
        kernels in kept and "globalPid" in _columns(database, kernels),
        {"globalPid", "name"} <= _columns(database, "PROCESSES"),
    ]
    if not all(known):
        database.execute("DELETE FROM PROCESSES")
        return
    owners = f"SELECT name FROM PROCESSES WHERE globalPid IN (SELECT DISTINCT globalPid FROM {kernels})"
    keep = set(database.execute(owners))
    others = set(database.execute("SELECT name FROM PROCESSES")) - keep
    database.executemany("DELETE FROM PROCESSES WHERE name IS ?", others)


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in database.execute(f"PRAGMA table_info({_quoted(table)})")}


def _drop_strings(database: sqlite3.Connection, kept: list[str]) -> None:
    """Delete the strings that no kept row names: output and file contents of the process are among them."""
    database.execute("CREATE TEMP TABLE used (id INTEGER PRIMARY KEY)")
    for table in kept:
        for column in _columns(database, table).intersection(_NAMES):
            database.execute(
                f"INSERT OR IGNORE INTO used SELECT {column} FROM {_quoted(table)} WHERE typeof({column}) = 'integer'"
            )
    database.execute("DELETE FROM StringIds WHERE id NOT IN (SELECT id FROM used)")
    database.execute("DROP TABLE used")
