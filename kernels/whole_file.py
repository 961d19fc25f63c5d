"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file beside its place and move it there; what was there before stays until then, and if that fails.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        os.chmod(partial, 0o644)  # a temporary file is its owner's alone
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
