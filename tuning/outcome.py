"""What became of one config: a typed status, a short reason, and the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ..kernels.errors import InputError

REASON_LENGTH = 300
"""Longest reason kept, in characters."""


class SetupError(InputError):
    """Not a config's fault: a tool is missing, a disk is full, or the kernel files are others than at the start.

    It ends a search; the running trial is finished by the next one.
    """


class Status(StrEnum):
    """How a trial ended. Every trial ends in exactly one of these."""

    OK = "ok"
    ILLEGAL = "illegal"
    """Breaks a constraint of the space, or asks for more than the GPU has."""
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    WRONG = "wrong"
    """Ran, and differs from the twin."""
    CRASHED = "crashed"
    """The worker process died, or the launch failed."""
    TIMEOUT = "timeout"
    """The check or the measurement passed its wall limit."""
    OOM = "oom"
    UNSTABLE = "unstable"
    """Timed, but the samples do not support a number."""


def one_line(text: object) -> str:
    """The text without line breaks, cut to :data:`REASON_LENGTH` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 3] + "..."


def describe(error: BaseException) -> str:
    """An exception as a short reason: its type and first words."""
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(frozen=True)
class Outcome:
    """The end of one trial."""

    status: Status
    reason: str = ""
    value: float | None = None
    """The objective in microseconds; None unless the status is ok."""
    resources: tuple[Mapping[str, Any], ...] = ()
    """Per kernel: registers, shared bytes, spills, instruction mix."""
    prediction: Mapping[str, Any] | None = None
    timing: Mapping[str, Any] | None = None
    check: Mapping[str, Any] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds by stage: compile, check, time."""
    payload: Mapping[str, Any] | None = None
    """What a build job hands back; never stored with a trial."""

    def checked(self) -> Outcome:
        """The same outcome; unstable in place of ok where the value is not a positive finite number."""
        if self.status is Status.OK and not (self.value is not None and math.isfinite(self.value) and self.value > 0):
            return replace(
                self, status=Status.UNSTABLE, reason=f"the objective is {self.value}, not a time", value=None
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """JSON-able form without the payload; inverse of :func:`from_json`."""
        return {
            "status": str(self.status),
            "reason": self.reason,
            "value": self.value,
            "resources": [dict(item) for item in self.resources],
            "prediction": self.prediction,
            "timing": self.timing,
            "check": self.check,
            "seconds": dict(self.seconds),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Outcome:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: a field is missing or not of its kind: the text is not what was written.
        """
        value = data.get("value")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (value is not None and not number) or (data["status"] == Status.OK and not (number and value > 0)):  # type: ignore[operator]
            raise ValueError(f"an outcome {data['status']} has the value {value!r}")
        for name in ("prediction", "timing", "check", "payload"):
            if not isinstance(data.get(name), (Mapping, type(None))):
                raise ValueError(f"{name} of an outcome is {data[name]!r}")
        return Outcome(
            status=Status(data["status"]),
            reason=data.get("reason", ""),
            value=data.get("value"),
            resources=tuple(data.get("resources") or ()),
            prediction=data.get("prediction"),
            timing=data.get("timing"),
            check=data.get("check"),
            seconds=dict(data.get("seconds") or {}),
            payload=data.get("payload"),
        )


def failure(status: Status, reason: object) -> Outcome:
    """An outcome that is not ok."""
    return Outcome(status=status, reason=one_line(reason))
