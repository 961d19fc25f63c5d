"""The one exception that means: the call or the input was wrong."""

from __future__ import annotations


class InputError(ValueError):
    """A wrong call or a wrong input file.

    The message is one plain line that says what is wrong and what would be right; the command line
    prints it and exits with 2, without a traceback.
    """


class KernelError(RuntimeError):
    """The kernel at hand is at fault, not the call: it does not compile.

    The message is one plain line with file, line and reason; the command line prints it and exits with 1.
    """
