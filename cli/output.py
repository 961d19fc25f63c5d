"""How every command prints: a JSON object with ``--json``, rich tables without."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")]
"""The ``--json`` option every command takes: ``as_json: Json = False``."""

PIPE_WIDTH = 160
"""Columns of a table that is not printed to a terminal."""


_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Controls of terminals, marks that reverse the reading order, and lone surrogates, which no encoding can hold."""


def visible(text: str) -> str:
    """The text with all that would steer a terminal or mislead its reader told as an escape: names come from anybody's files."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _visible_in(value: Any) -> Any:
    """The data with all its texts ``visible``."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Path):
        return visible(str(value))
    if isinstance(value, dict):
        return {_visible_in(key): _visible_in(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_visible_in(item) for item in value)
    return value


def plain(value: Any) -> Any:
    """The value as JSON can hold it: dataclasses and mappings become objects, infinities and NaN null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def console(stderr: bool = False) -> Console:
    """A rich console; wide where its output goes to a file, a pipe or a notebook, so that tables keep their columns."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, force_jupyter=False)  # its widgets need a package of their own
    if not made.file.isatty():
        made = Console(stderr=stderr, highlight=False, width=PIPE_WIDTH, force_jupyter=False)
    return made


def emit(data: Any, as_json: bool, render: Callable[[Console, Any], None]) -> None:
    """Print a command's result: the data as JSON, or what ``render(console, data)`` makes of it.

    A reader that went away (``k3lab ... | head``) ends the command as SIGPIPE would.
    """
    try:
        if as_json:
            text = json.dumps(plain(data), indent=2, ensure_ascii=False)
            print(visible(text))  # as escapes of JSON: what is read back is the same
        else:
            render(console(), _visible_in(data))
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        raise typer.Exit(141) from None


def drop_output() -> None:
    """Send what is still held back of standard output nowhere: it cannot be written, at exit neither."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def check_file(path: Path) -> None:
    """Raise InputError where :func:`write_file` could not write: for what takes long, before it begins; leaves nothing."""
    import tempfile

    from ..kernels.errors import InputError

    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def write_file(path: Path, data: bytes | str) -> None:
    """Write what the user named, whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    from ..kernels.errors import InputError
    from ..kernels.whole_file import write_whole

    try:
        write_whole(path, data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
