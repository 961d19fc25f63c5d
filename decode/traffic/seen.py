"""What users saw: percentiles over turns or requests, each with the samples behind it, and rates of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .replay import Replay, Served


PERCENTILES = {"p10": 10, "p50": 50, "p90": 90}
"""Those of a :func:`spread`, in percent."""
Wanted = Mapping[str, tuple[str, str | None, float, str]]
"""Measure to its key, which percentile of a spread (None: it is none), by how much it is multiplied, and its unit."""
USERS: Wanted = {
    "user rate, median": ("user_tokens_a_s", "p50", 1.0, "tok/s/user"),
    "user rate, P90": ("user_tokens_a_s", "p90", 1.0, "tok/s/user"),
    "time to first token, median": ("time_to_first_token_s", "p50", 1e3, "ms"),
    "time to first token, P90": ("time_to_first_token_s", "p90", 1e3, "ms"),
    "request latency, median": ("request_latency_s", "p50", 1.0, "s"),
    "request latency, P90": ("request_latency_s", "p90", 1.0, "s"),
}
"""What each request saw, in a batch or a replay."""
Measured = dict[str, dict[str, Any]]
"""By name ``value`` and ``unit``; of a percentile also ``samples`` and ``tail_covered``."""


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between neighbours; None of nothing."""
    import numpy as np

    return float(np.quantile(values, share)) if values else None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, 90th percentile and the 10th, since which end is bad depends on what it is; and of how many ``samples``."""
    return {name: percentile(values, percent / 100) for name, percent in PERCENTILES.items()} | {"samples": len(values)}


def tail_covered(samples: int, name: str) -> bool:
    """Whether the tail beyond a percentile is one sample or more: 10 for P90, 2 for the median. With fewer it is drawn from the rest."""
    percent = PERCENTILES[name]
    return samples * min(percent, 100 - percent) >= 100


def measured(seen: Mapping[str, Any], wanted: Wanted) -> Measured:
    """What of ``wanted`` there is a figure of, among figures and spreads of them."""
    made: Measured = {}
    for name, (key, part, factor, unit) in wanted.items():
        value = seen[key] if part is None else seen[key][part]
        if value is None:
            continue
        made[name] = {"value": value * factor, "unit": unit}
        if part is not None:
            samples = seen[key]["samples"]
            made[name] |= {"samples": samples, "tail_covered": tail_covered(samples, part)}
    return made


def seen(turns: Sequence[Served], replay: Replay) -> dict[str, Any]:
    """The measures of a replay.

    A user's rate is of one turn's tokens after the first; a turn of one token has none. The prefill rate counts tokens
    that were computed and the time in which they were. The group's decode rate is of decode steps alone. Both are told over
    all, and as percentiles of turns and of steps.
    """
    rates = [(one.output - 1) / (one.ended - one.first) for one in turns if one.output > 1 and one.ended > one.first]
    prefill_s = sum(one.prefill_s for one in turns)
    prefilled = sum(one.prefilled for one in turns)
    reused = sum(one.reused for one in turns)
    return {
        "turns": len(turns),
        "output_tokens": sum(one.output for one in turns),
        "user_tokens_a_s": spread(rates),
        "time_to_first_token_s": spread([one.first - one.due for one in turns]),
        "queued_s": spread([one.begun - one.due for one in turns]),
        "request_latency_s": spread([one.ended - one.due for one in turns]),
        "prefill_tokens_a_s": prefilled / prefill_s if prefill_s else None,
        "group_decode_tokens_a_s": replay.decode_tokens / replay.decode_s if replay.decode_s else None,
        "prefill_tokens_a_s_by_turn": spread([one.prefilled / one.prefill_s for one in turns if one.prefill_s > 0]),
        "group_decode_tokens_a_s_by_step": spread(replay.rates),
        "decode_steps": replay.steps,
        "mean_tokens_a_step": sum(replay.how.accepted) / len(replay.how.accepted) if replay.how.accepted else None,
        "prefilled_tokens": prefilled,
        "reused_tokens": reused,
        "reused_share": reused / (reused + prefilled) if reused + prefilled else None,
        "contexts_given_up": replay.kept.evicted,
        "longest_context": max((one.context for one in turns), default=0),
    }
