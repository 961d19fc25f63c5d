"""One file of traffic through a backend: what its users saw as measures, and a file for what ended."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...kernels import InputError
from .clock import WallClock
from .seen import USERS, Wanted, seen
from .sessions import Traffic

if TYPE_CHECKING:
    from ...kernels.collectives import Collectives
    from ..dispatch import Dispatcher
    from .replay import Served
    from .steps import Steps

MEASURES: Wanted = {
    **USERS,
    "prefill rate": ("prefill_tokens_a_s", None, 1.0, "tok/s"),
    "prefill rate of a turn, median": ("prefill_tokens_a_s_by_turn", "p50", 1.0, "tok/s"),
    "prefill rate of a turn, P90": ("prefill_tokens_a_s_by_turn", "p90", 1.0, "tok/s"),
    "group decode rate": ("group_decode_tokens_a_s", None, 1.0, "tok/s"),
    "group decode rate of a step, median": ("group_decode_tokens_a_s_by_step", "p50", 1.0, "tok/s"),
    "group decode rate of a step, P90": ("group_decode_tokens_a_s_by_step", "p90", 1.0, "tok/s"),
}
"""Of :func:`~k3lab.decode.traffic.seen.seen`, as :func:`~k3lab.decode.traffic.seen.measured` takes them."""


def replay_backend(
    dispatcher: Dispatcher, traffic: Traffic, *, rows: int, keep_bytes: int, reuse: bool, real_pauses: bool,
    kept: Callable[[Served], None] | None = None, done: Callable[[int, int], None] | None = None,
    steps: Callable[[Dispatcher], Steps] | None = None, host: Collectives | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Replay once; what users saw, and what the tuned path left to ``auto``. ``kept`` gets every turn as it ends.

    ``host``: of a group, whose ranks all call this.
    """
    from .replay import Replay
    from .steps import PlainSteps

    replay = Replay(
        dispatcher, traffic, rows=rows, clock=WallClock(real_pauses=real_pauses, host=host), keep_bytes=keep_bytes, reuse=reuse, done=done,
        steps=steps or PlainSteps,
    )  # fmt: skip
    turns: list[Served] = []
    for turn in replay.run():
        turns.append(turn)
        if kept:
            kept(turn)
    return seen(turns, replay) | {
        "steps": dispatcher.tally.to_json() if dispatcher.backend != "auto" else None,
        "each": [one.to_json() for one in turns],
    }


class Ended(Protocol):
    """A turn or a request."""

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        ...


class Turns:
    """A file that holds every turn or request that ended, whatever happens then; a line each."""

    def __init__(self, path: Path | None) -> None:
        """Begin the file.

        Raises:
            InputError: it is there, or cannot be written.
        """
        self._path = path
        if path is None:
            return
        try:
            path.open("x").close()
        except FileExistsError:
            raise InputError(f"{path} is there already; name another folder, or remove it") from None
        except OSError as error:
            raise InputError(f"cannot write {path} ({error.strerror})") from None

    def add(self, turn: Ended) -> None:
        """Keep one.

        Raises:
            InputError: it cannot be written.
        """
        if self._path is None:
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                line, before = (json.dumps(turn.to_json()) + "\n").encode(), file.seek(0, os.SEEK_END)
                try:
                    written = file.write(line)
                    while written < len(line):  # a disk that fills takes a part, and fails with the next
                        written += file.write(line[written:])
                except BaseException:
                    file.truncate(before)  # no half of a line
                    raise
        except OSError as error:
            raise InputError(f"cannot write {self._path} ({error.strerror})") from None
