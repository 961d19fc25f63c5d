"""Workloads: files that say which steps a server runs, and how much of one the specialised path serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..kernels import InputError
from .json_lines import read_json_lines
from .scope import Scope, StepShape, Tally

FIELDS = ("count", "requests", "drafts", "prefill")
FORM = 'a line is an object like {"count": 900, "requests": 4, "drafts": 7, "prefill": 0}; drafts may be a list'
LARGEST = 2**40


def _whole(line: dict[str, Any], name: str, default: int, least: int, where: str) -> int:
    value = line.get(name, default)
    if type(value) is not int or not least <= value <= LARGEST:
        raise InputError(f"{where}: {name} is {value!r}, must be a whole number from {least} on")
    return value


def _step(line: Any, where: str) -> tuple[StepShape, int]:
    if not isinstance(line, dict):
        raise InputError(f"{where} is no object; {FORM}")
    if unknown := sorted(set(line) - set(FIELDS)):
        raise InputError(f"{where} has a field {unknown[0]!r}; {FORM}")
    count, prefill = _whole(line, "count", 1, 1, where), _whole(line, "prefill", 0, 0, where)
    drafts = line.get("drafts", 0)
    if isinstance(drafts, list):
        if not all(type(one) is int and 0 <= one <= LARGEST for one in drafts):
            raise InputError(f"{where}: drafts {drafts!r} are not all whole numbers from 0 on")
        if "requests" in line and line["requests"] != len(drafts):
            raise InputError(f"{where}: {line['requests']!r} requests, but drafts of {len(drafts)}")
        each = tuple(drafts)
    else:
        requests = _whole(line, "requests", 0 if prefill else 1, 0, where)
        if requests > 2**16:
            raise InputError(f"{where}: {requests} requests in one step")
        each = (_whole(line, "drafts", 0, 0, where),) * requests
    if not each and not prefill:
        raise InputError(f"{where} is a step in which nothing runs; {FORM}")
    return StepShape(each, prefill), count


def read_workload(path: str | Path) -> Iterator[tuple[StepShape, int]]:
    """Steps and how often each is run, from a file of JSON lines.

    Raises:
        InputError: it cannot be read, has no steps, or a line is none; the line is named.
    """
    path = Path(path)
    _, lines = read_json_lines(path, FORM)
    if not lines:
        raise InputError(f"{path} has no steps; {FORM}")
    for number, data in lines.items():
        yield _step(data, f"{path} line {number}")


def judge_workload(path: str | Path, scope: Scope) -> Tally:
    """How many steps of the workload the path would serve, and why not the others."""
    tally = Tally()
    for step, count in read_workload(path):
        tally.note(scope.judge(step), count)
    return tally
