"""What the users of a replay saw: percentiles over turns, and rates of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .replay import Replay, Served


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between neighbours; None of nothing."""
    import numpy as np

    return float(np.quantile(values, share)) if values else None


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, 90th percentile and the 10th: which end is bad depends on what it is."""
    return {"p10": percentile(values, 0.1), "p50": percentile(values, 0.5), "p90": percentile(values, 0.9)}


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
