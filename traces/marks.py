"""Names of step and layer marks, and which marks enclose a launch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .model import HostRange, Thread


@dataclass(frozen=True)
class StepMark:
    """What the name of a step mark says; None where it does not say. ``rows``: tokens over all requests."""

    decode: bool | None
    requests: int | None
    rows: int | None = None


_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)(?:\([^)]*\))?_generation_(\d+)(?:\((?:sq)?(\d+))?")
_SGLANG = re.compile(r"step\[\s*(\w+)(?:[^\]]*?\bbs=(\d+))?")
_TRTLLM = re.compile(r"_forward_step\s+\d+:\s*(\d+) ctx reqs,\s*(\d+) gen reqs")
_PLAIN = re.compile(r"^(?:k3lab[ ./:_-]?)?(?:(decode|verify)[ ._-]?)?step(?:[ ._:#-]*\d+|\b)", re.IGNORECASE)
_PROFILER = re.compile(r"^ProfilerStep#\d+")
_DECODE_MODES = frozenset({"DECODE", "VERIFY", "TARGET_VERIFY", "DRAFT_EXTEND", "IDLE"})
_LAYER = re.compile(
    r"(?<![a-z])(?:layers?(?:_?idx)?|blocks?|transformer_?block|decoder_?layer)\s{0,4}[._\[\(:=# -]\s{0,4}(\d+)",
    re.IGNORECASE,
)
_MAX_OPEN = 200  # marks open at once on a thread; more are left-overs, and every launch would be held against each
_CAMEL_LAYER = re.compile(r"(?:Transformer|Decoder)(?:Block|Layer)[._\[\(:=# -]+(\d+)")


@lru_cache(maxsize=20000)
def step_mark(name: str) -> StepMark | None:
    """Read a range name as a step mark of vLLM, SGLang, TensorRT-LLM or this project; None if it is not one."""
    if found := _VLLM.search(name):
        decode = int(found[1]) == 0 and int(found[2]) > 0
        return StepMark(decode, int(found[2]), int(found[3]) if decode and found[3] else None)
    if found := _SGLANG.search(name):
        return StepMark(found[1].upper() in _DECODE_MODES, int(found[2]) if found[2] else None)
    if found := _TRTLLM.search(name):
        return StepMark(int(found[1]) == 0 and int(found[2]) > 0, int(found[2]))
    if found := _PLAIN.match(name):
        return StepMark(True if found[1] else None, None)
    return StepMark(None, None) if _PROFILER.match(name) else None


def step_of(marks: Sequence[HostRange]) -> HostRange | None:
    """Of the step marks around a launch (outermost first) the one that is the step.

    That is the outermost which says whether it decodes; else the outermost that is not the profiler's own
    schedule, which may span several steps; else that.
    """
    telling = [item for item in marks if (said := step_mark(item.name)) is not None and said.decode is not None]
    own = [item for item in marks if not _PROFILER.match(item.name)]
    return next(iter((*telling, *own, *marks)), None)


@lru_cache(maxsize=20000)
def layer_number(name: str) -> int | None:
    """The layer a range name speaks of (``layer_12``, ``model.layers.12.mlp``, ``TransformerBlock[3]``), or None."""
    found = _LAYER.search(name) or _CAMEL_LAYER.search(name)
    return int(found[1]) if found and len(found[1]) < 6 else None


def enclosing(
    ranges: Iterable[HostRange], queries: Sequence[tuple[Thread, int]], keep: Callable[[HostRange], bool]
) -> list[tuple[HostRange, ...]]:
    """For every (thread, time) the kept ranges that are open there, outermost first.

    Ranges that do not nest (start/end ranges) are handled: a range is open from its start to its end.
    """
    by_thread: dict[Thread, list[HostRange]] = defaultdict(list)
    for item in ranges:
        if keep(item):
            by_thread[item.thread].append(item)
            if item.end_thread is not None and item.end_thread != item.thread:
                by_thread[item.end_thread].append(item)
    asked: dict[Thread, list[int]] = {thread: [] for thread in by_thread}
    last, bucket = None, None
    for index, (thread, _) in enumerate(queries):
        if thread is not last:  # else that of the query before: there may be millions
            last, bucket = thread, asked.get(thread)
        if bucket is not None:
            bucket.append(index)
    times = [time for _, time in queries]
    answers: list[tuple[HostRange, ...]] = [()] * len(queries)
    for thread, indices in asked.items():
        pending = sorted(by_thread[thread], key=lambda item: (item.start, -item.end, item.name))
        indices.sort(key=times.__getitem__)
        opened: list[HostRange] = []
        position, soonest = 0, 0
        answer: tuple[HostRange, ...] = ()
        for index in indices:
            time = times[index]
            changed = opened and time > soonest
            while position < len(pending) and pending[position].start <= time:
                opened.append(pending[position])
                position += 1
                changed = True
            if changed:  # else the same tuple serves: most launches follow each other under the same ranges
                opened = [item for item in opened if item.end >= time][-_MAX_OPEN:]
                soonest = min([item.end for item in opened], default=0)
                answer = tuple(opened)
            answers[index] = answer
    return answers
