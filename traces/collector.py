"""Keeps Python's garbage collector still while a trace is read and judged."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """No collections inside; also a decorator.

    A trace makes millions of tuples that all stay, in no cycles: the collector would walk them again and again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
