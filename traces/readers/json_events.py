"""The events of a Chrome trace, one after the other: a trace of hundreds of MB is never held as objects at once.

Numbers with a decimal point or an exponent stay the text they are in the file: a float holds no nanoseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

from ..errors import TraceError

_SPACE = re.compile(r"[ \t\n\r]*")
_BARE = re.compile(r"[-+]?(?:inf(?:inity)?|nan)\b", re.IGNORECASE)
_STRING_OR_BARE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|' + _BARE.pattern, re.IGNORECASE | re.DOTALL)
_NEGATIVE = re.compile(r"-?\d*\.-\d+")
_EVENTS = "traceEvents"
_NEAR = 24  # characters told on either side of a damaged place


class Events:
    """A Chrome trace: iterate over it for its events, then ``head`` holds the rest of its object.

    ``notes`` says what had to be forgiven, ``not_finite`` how many NaN and infinite numbers there were; they read as
    the strings ``NaN`` and ``Infinity``.
    """

    def __init__(self, text: str, name: str, bom: int = 0) -> None:
        """Take a text.

        Args:
            text: the JSON.
            name: of the file, for messages.
            bom: bytes before the text, for offsets.
        """
        self.head: dict[str, Any] = {}
        self.found = False
        self.notes: list[str] = []
        self.not_finite = 0
        self._text, self._name, self._bom = text, name, bom
        self._bare_seen = False
        self._scan = self._decoder(strict=True)

    def _decoder(self, strict: bool) -> Any:
        # str as parse_float: the digits are kept, and nothing is converted twice
        decoder: Any = json.JSONDecoder(parse_float=str, parse_constant=self._constant, strict=strict)
        return decoder.scan_once

    def _constant(self, word: str) -> str:
        self.not_finite += 1
        return word

    def __iter__(self) -> Iterator[Any]:
        """The events in the order of the file.

        Raises:
            TraceError: not JSON; the message has the byte offset and the text around it.
        """
        try:
            yield from self._parse()
        except RecursionError:
            raise TraceError(f"{self._name}: JSON nested too deep for a trace; capture it again") from None
        except (ValueError, ArithmeticError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(
                f"{self._name}: a number in the JSON is too long to be a time; capture the trace again"
            ) from None

    def _parse(self) -> Iterator[Any]:
        position = self._skip(0)
        if self._text.startswith("[", position):
            self.found = True
            position = yield from self._list(position)
        elif self._text.startswith("{", position):
            position = yield from self._object(position)
        else:
            self._fail(position, "no JSON object or list")
        if self._skip(position) < len(self._text):
            self._fail(self._skip(position), "text after the end of the JSON")

    def _skip(self, position: int) -> int:
        found = _SPACE.match(self._text, position)
        return found.end() if found else position

    def _object(self, position: int) -> Generator[Any, None, int]:
        position = self._skip(position + 1)
        while not self._text.startswith("}", position):
            key, position = self._value(position)
            if not isinstance(key, str):
                self._fail(position, "a key that is no string")
            position = self._expect(":", self._skip(position))
            if key == _EVENTS and self._text.startswith("[", position):
                self.found = True
                position = yield from self._list(position)
            else:
                self.head[key], position = self._value(position)
            position = self._next("}", position)
        return position + 1

    def _list(self, position: int) -> Generator[Any, None, int]:
        position = self._skip(position + 1)
        while not self._text.startswith("]", position):
            event, position = self._value(position)
            yield event
            position = self._next("]", position)
        return position + 1

    def _next(self, end: str, position: int) -> int:
        """Past the comma to the next item, or to the end of the list or object."""
        position = self._skip(position)
        if self._text.startswith(",", position):
            following = self._skip(position + 1)
            if not self._text.startswith(end, following):
                return following
            self._fail(position, "a comma with nothing after it")
        if not self._text.startswith(end, position):
            self._fail(position, f"neither ',' nor '{end}'")
        return position

    def _expect(self, mark: str, position: int) -> int:
        if not self._text.startswith(mark, position):
            self._fail(position, f"no '{mark}'")
        return self._skip(position + len(mark))

    def _value(self, position: int) -> tuple[Any, int]:
        try:
            return self._scan(self._text, position)
        except StopIteration as stop:
            return self._forgive(position, stop.value, "no value")
        except json.JSONDecodeError as error:
            return self._forgive(position, error.pos, error.msg)

    def _forgive(self, position: int, damaged: int, reason: str) -> tuple[Any, int]:
        """Read once more what is wrong in a known way: control characters, and infinities printed by C."""
        if "control character" in reason:
            offset = self._offset(damaged)
            self.notes.append(f"control characters inside strings (first at byte {offset}) were accepted")
            self._scan = self._decoder(strict=False)
            return self._value(position)
        if _BARE.match(self._text, damaged) and not self._bare_seen:
            self._bare_seen = True
            self._text = self._text[:position] + _STRING_OR_BARE.sub(_finite_word, self._text[position:])
            self.notes.append("bare inf and nan, which are no JSON, were read as missing numbers")
            return self._value(position)
        self._fail(damaged, reason)

    def _offset(self, position: int) -> int:
        return self._bom + len(self._text[:position].encode("utf-8", errors="replace"))

    def _fail(self, position: int, reason: str) -> NoReturn:
        text, place = self._text, min(position, len(self._text))
        near = json.dumps(text[max(0, place - _NEAR) : place + _NEAR])
        where = f"{self._name}: not valid JSON at byte {self._offset(place)}: "
        again = "copy or capture the trace again"
        for number in _NEGATIVE.finditer(text, max(0, place - _NEAR), place + _NEAR):
            raise TraceError(f"{where}{number[0]} is how kineto prints a negative time; {again}")
        whole = len(text.rstrip())
        cut = place >= whole or "Unterminated string" in reason or (whole - place < 8 and text[whole - 1] not in "]}")
        end = " (the file ends there: it was cut short)" if cut else ""
        raise TraceError(f"{where}{reason} near {near}{end}; {again}")


def _finite_word(found: re.Match[str]) -> str:
    """A word Python reads in place of one it does not, of the same length, so that all offsets stay."""
    word = found[0]
    if word.startswith('"') or word in ("NaN", "Infinity", "-Infinity"):
        return word
    return ("Infinity" if len(word) >= 8 else "NaN").rjust(len(word))
