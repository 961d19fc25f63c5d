"""Sessions of agents, a file of JSON lines.

A line is a session::

    {"session": "a", "start_s": 0.5, "system": {"name": "coder", "tokens": 4000},
     "turns": [{"pause_s": 0, "prompt": 900, "output": 200}, {"pause_s": 3.2, "prompt": 1500, "output": 80}]}

``prompt`` tokens join everything the session has seen and put out before, ``pause_s`` lies between the end of one turn
and the next one's being due, and sessions of one ``system`` begin with the same tokens. Lengths alone are in a file:
the tokens themselves are random, of the names and places.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels import InputError
from ..json_lines import read_json_lines

MOST_TOKENS = 2**24
MOST_SECONDS = 7 * 86_400


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    pause_s: float
    prompt: int
    """New tokens."""
    output: int


@dataclass(frozen=True)
class Session:
    """One user."""

    name: str
    start_s: float
    """When its first pause begins, from the replay's start."""
    system: str | None
    """Name of what it shares with others at its beginning."""
    system_tokens: int
    turns: tuple[Turn, ...]

    @property
    def context(self) -> int:
        """Tokens after the last turn."""
        return self.system_tokens + sum(turn.prompt + turn.output for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """A line of a file."""
        data: dict[str, Any] = {"session": self.name, "start_s": self.start_s}
        if self.system is not None:
            data["system"] = {"name": self.system, "tokens": self.system_tokens}
        turns = [{"pause_s": turn.pause_s, "prompt": turn.prompt, "output": turn.output} for turn in self.turns]
        return {**data, "turns": turns}


@dataclass(frozen=True)
class Traffic:
    """The sessions of a file."""

    sessions: tuple[Session, ...]
    digest: str
    """SHA-256 of what the sessions are, 16 hex digits; spaces and the order of fields do not change it."""

    @property
    def context(self) -> int:
        """The longest session's."""
        return max(one.context for one in self.sessions)


def traffic_of(sessions: Iterable[Session]) -> Traffic:
    """Sessions with their digest.

    Raises:
        InputError: none, a name twice, or a system prompt of two lengths.
    """
    own = tuple(sessions)
    if not own:
        raise InputError("traffic without a session")
    names: set[str] = set()
    lengths: dict[str, int] = {}
    for one in own:
        if one.name in names:
            raise InputError(f"session {one.name!r} is there twice")
        names.add(one.name)
        if one.system is not None and lengths.setdefault(one.system, one.system_tokens) != one.system_tokens:
            raise InputError(
                f"session {one.name!r}: system {one.system!r} has {one.system_tokens} tokens, before {lengths[one.system]}"
            )
    text = "\n".join(json.dumps(one.to_json(), sort_keys=True) for one in own)
    return Traffic(own, hashlib.sha256(text.encode()).hexdigest()[:16])


def read_traffic(path: str | Path) -> Traffic:
    """Read a file.

    Raises:
        InputError: it cannot be read, or a line is no session; the line and the field are named.
    """
    path = Path(path)
    _, lines = read_json_lines(path)
    sessions = [_session(data, f"{path} line {number}") for number, data in lines.items()]
    try:
        return traffic_of(sessions)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _fields(data: Any, where: str, needed: set[str], more: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    if not isinstance(data, dict):
        raise InputError(f"{where} is no object")
    if missing := sorted(needed - set(data)):
        raise InputError(f"{where} lacks {missing[0]}")
    if unknown := sorted(set(data) - needed - more):
        raise InputError(f"{where} has a field {unknown[0][:100]!r} that is unknown")
    return data


def _seconds(value: Any, name: str, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MOST_SECONDS:  # no comparison holds for NaN
        raise InputError(f"{where}: {name} is {repr(value)[:22]}, must be seconds from 0 to {MOST_SECONDS}")
    return float(value)


def _tokens(value: Any, name: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MOST_TOKENS:
        raise InputError(
            f"{where}: {name} is {repr(value)[:22]}, must be a whole number of tokens from 1 to {MOST_TOKENS}"
        )
    return value


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= 200 and value.isprintable()


def _session(data: Any, where: str) -> Session:
    data = _fields(data, where, {"session", "turns"}, {"start_s", "system"})
    if not _is_name(data["session"]):
        raise InputError(f"{where}: session is {repr(data['session'])[:22]}, must be a name")
    system, system_tokens = None, 0
    if data.get("system") is not None:
        shared = _fields(data["system"], f"{where}: system", {"name", "tokens"})
        if not _is_name(shared["name"]):
            raise InputError(f"{where}: the system's name is {repr(shared['name'])[:22]}, must be a name")
        system, system_tokens = shared["name"], _tokens(shared["tokens"], "tokens of the system", where)
    if not isinstance(data["turns"], list) or not data["turns"]:
        raise InputError(f"{where}: turns is no list of turns")
    turns = []
    for index, turn in enumerate(data["turns"]):
        here = f"{where}, turn {index}"
        turn = _fields(turn, here, {"prompt", "output"}, {"pause_s"})
        turns.append(
            Turn(
                _seconds(turn.get("pause_s", 0), "pause_s", here), _tokens(turn["prompt"], "prompt", here),
                _tokens(turn["output"], "output", here),
            )
        )  # fmt: skip
    return Session(
        data["session"], _seconds(data.get("start_s", 0), "start_s", where), system, system_tokens, tuple(turns)
    )
