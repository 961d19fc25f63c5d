"""The one exception of this package: the file or the call is wrong; and the commonest wrong call."""

from __future__ import annotations


class TraceError(ValueError):
    """A file that is not a usable trace, or a wrong call.

    The message is one plain line that says what is wrong and what would be right.
    """


def require_positive(**values: int | None) -> None:
    """Whole numbers that are given are 1 or more.

    Raises:
        TraceError: one of them is not.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise TraceError(f"{name} must be 1 or more, not {value}")
