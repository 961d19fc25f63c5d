"""Words that several commands print alike."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """The number with its noun: ``1 entry``, ``2 entries``; the plural adds an s where none is given."""
    return f"{number} {one if number == 1 else many or one + 's'}"
