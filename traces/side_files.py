"""The small JSON files beside a trace: budgets, plans, names tables. They come from anybody, as traces do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import TraceError

MAX_BYTES = 64 << 20
"""More is no file of this kind."""


def is_there(path: Path) -> bool:
    """Whether it is a regular file; one that cannot be asked for (its name too long, its folder closed) is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_json(path: Path) -> Any:
    """The data of a regular file of bounded size in which no key is given twice.

    Raises:
        OSError: it cannot be read.
        ValueError: too large, no file (a pipe would keep us waiting), not JSON, nested too deep, or a key twice.
    """
    size = path.stat().st_size
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory")
    if not path.is_file():
        raise ValueError("no regular file")
    if size > MAX_BYTES:
        raise ValueError(f"over {MAX_BYTES >> 20} MiB")
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key that is there twice nobody knows which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def why(error: Exception) -> str:
    """The reason ``read_json`` gives, in a few words."""
    if isinstance(error, OSError):
        return error.strerror or "cannot be read"
    return "not JSON" if isinstance(error, (json.JSONDecodeError, UnicodeError)) else str(error)


def named_or_given(name: str | Path, folder: Path, known: Sequence[str], what: str, like: str) -> tuple[Any, str]:
    """(data, file name) of a file of the package by its name, or of one of the user's by its path.

    Args:
        name: ``gb300-tp16`` stands for ``gb300_tp16.json`` in the folder; a path must end in ``.json``.
        folder: the package's files of this kind.
        known: their names, as they are told.
        what: the kind, in words.
        like: how one of the package's is called, to look at.

    Raises:
        TraceError: no such file, or it cannot be read.
    """
    path = folder / f"{str(name).replace('-', '_')}.json"
    if not is_there(path):
        path = Path(name)
        if path.suffix != ".json" or not is_there(path):
            raise TraceError(f"no {what} {str(name)!r}; known: {', '.join(known)}, or give a .json file")
    try:
        return read_json(path), path.name
    except (OSError, ValueError) as error:
        reason = f"not a readable JSON file ({why(error)}); a {what} looks like {folder.name}/{like}.json"
        raise TraceError(f"{path.name}: {reason}") from None
