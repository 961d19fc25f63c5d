"""Where a kernel author must look: file, line and reason of an exception out of a compiler."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

from ..kernels import Engine


def _glue(engine: Engine) -> list[Path]:
    file = getattr(sys.modules.get(type(engine).__module__), "__file__", None)
    return [Path(file)] if file else []


def _pointed_at(text: str) -> tuple[str, str] | None:
    """(source line above the caret, what follows it) of a message that points into source, as Triton's do."""
    lines = text.splitlines()
    for index, line in enumerate(lines[1:], 1):
        if line.strip() and not line.strip("^~ \t"):
            after = [rest.strip() for rest in lines[index + 1 :] if rest.strip()]
            return lines[index - 1].strip(), after[-1] if after else ""
    return None


def _line_of(code: str, files: list[Path]) -> str | None:
    """``file:line`` of a line of source, where it stands once."""
    found = [
        f"{path.name}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip() == code
    ]
    return found[0] if len(found) == 1 else None


def blame(engine: Engine, error: BaseException) -> str:
    """One line: ``file:line: source: reason``, as far as the exception tells."""
    files = [*engine.sources, *_glue(engine)]
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    root = chain[-1]
    reason = f"{type(root).__name__}: {' '.join(str(root).split())}"
    for one in chain:
        if pointed := _pointed_at(str(one)):
            code, after = pointed
            place = _line_of(code, files) or files[0].name
            return f"{place}: `{code}`: {after or reason}"
    names = {str(path.resolve()): path for path in files}
    for one in reversed(chain):
        for frame in reversed(traceback.extract_tb(one.__traceback__)):
            if (path := names.get(str(Path(frame.filename).resolve()))) is not None:
                return re.sub(r"\s+", " ", f"{path.name}:{frame.lineno}: `{(frame.line or '').strip()}`: {reason}")
    return f"{files[0].name}: {reason}"
