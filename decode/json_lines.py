"""Files of JSON lines, as users give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..kernels import InputError


def read_json_lines(path: Path, form: str = "") -> tuple[bytes, dict[int, Any]]:
    """The file's bytes, and by its number from 1 what each line holds; empty lines are passed over.

    Args:
        path: of the file.
        form: that its lines should have, for the errors.

    Raises:
        InputError: it cannot be read, or a line is no JSON; the line is named.
    """
    more = f"; {form}" if form else ""
    try:
        data = path.read_bytes()
        lines = data.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no text{more}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found[number] = json.loads(line)
            except (ValueError, RecursionError):
                raise InputError(f"{path} line {number} is not JSON{more}") from None
    return data, found
