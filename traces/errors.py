"""The one exception of this package: the file or the call is wrong."""

from __future__ import annotations


class TraceError(ValueError):
    """A file that is not a usable trace, or a wrong call.

    The message is one plain line that says what is wrong and what would be right.
    """
