"""What the blocks of the MoE tail do, step by step, as far as other blocks and ranks can tell; and the faults.

Two blocks of a cluster make a rank's columns, each of half of the latents; a third block finishes the row.
"""

from __future__ import annotations

from dataclasses import replace

from ...health import Phase
from .programs import Op, Program, Setting

FAULTS: dict[str, str] = {
    "partials sent before the wait": "tail",
    "the making blocks do not wait": "tail",
    "the making blocks do not wait, two shots": "tail_two_shot",
    "the finishing block does not wait": "tail",
    "no epoch check": "tail",
    "counter not written": "tail",
    "columns sent before all latents are in": "tail",
    "columns sent before the shared expert is in": "tail",
    "columns sent before the cluster's sums": "tail",
    "totals sent before all latents are in": "tail_two_shot",
    "lateness is not told in the cluster": "late",
    "who gave up goes on publishing": "late",
    "waits without a limit": "dead",
    "columns are taken for sums": "dead two shots",
    "the first to give up names the rank": "dead two shots",
}
"""One removal each, and the kind of setting that shows it: see :func:`setting_of`."""
MAKERS = 2


def setting_of(fault: str) -> Setting:
    """The small setting in which a fault must break the protocol, and which is right without it."""
    kinds = {
        "tail": Setting("tail", steps=3),
        "tail_two_shot": Setting("tail_two_shot", steps=3),
        "late": Setting("tail", steps=1, ends="late"),
        "dead": Setting("tail", steps=1, ends="dead"),
        "dead two shots": Setting("tail_two_shot", steps=1, ends="dead"),
    }
    return replace(kinds[FAULTS[fault]], fault=fault)


def tail(s: Setting, rank: int, step: int) -> list[list[Program]]:
    """The programs of one launch."""
    return [[*(_making(s, rank, step, block) for block in range(MAKERS)), _finishing(s, rank, step)]]


def _bump(s: Setting, block: int) -> list[Op]:
    return [] if s.fault == "counter not written" else [Op("bump", f"block {block}")]


def _making(s: Setting, rank: int, step: int, block: int) -> Program:
    """A block of the cluster: sends partials, sums latents, tells its partner, and sends its columns to all ranks."""
    everyone, two = tuple(range(s.ranks)), s.shape == "tail_two_shot"
    owners = [(owner,) for owner in everyone]
    # with two shots and for the shared expert each owner gets a packet of its own
    latents = [Op("put", "mail", (rank,), block, to) for to in (owners if two else [everyone])]
    shares = [Op("put", "shares", (rank,), block, to) for to in owners]
    begin = [Op("wait"), Op("count", f"block {block}"), Op("see", "act", (step % 2,), 0, step=step), *latents, *shares]
    if s.fault == "partials sent before the wait":
        begin = [Op("know"), *latents, *shares, Op("wait"), Op("see", "act", (step % 2,), 0, step=step)]
    if s.fault.startswith("the making blocks do not wait"):
        begin = begin[1:]
    partials = [Op("poll", "mail", everyone, block, phase=Phase.PARTIAL)]
    sums = partials
    if two:
        send = [Op("put", "totals", (rank,), block, everyone, needs=("mail",))]
        first = [*send, *partials] if s.fault == "totals sent before all latents are in" else [*partials, *send]
        sums = [*first, Op("poll", "totals", everyone, block, phase=Phase.TOTAL)]
    share = [Op("poll", "shares", everyone, block, phase=Phase.PARTIAL)]
    told = [Op("tell", "row 1", (block,), 0, (rank,), needs=("mail", "totals"))]
    heard = [Op("poll", "row 1", (1 - block,), 0)]
    columns = [Op("put", "deltas", (rank,), block, everyone, needs=("mail", "totals", "shares", "row 1"))]
    order = {
        "columns sent before all latents are in": [*columns, *sums, *told, *share, *heard],
        "columns sent before the shared expert is in": [*sums, *told, *heard, *columns, *share],
        "columns sent before the cluster's sums": [*sums, *told, *share, *columns, *heard],
    }.get(s.fault, [*sums, *told, *share, *heard, *columns])
    return (Op("release"), *begin, *order, *_bump(s, block))


def _finishing(s: Setting, rank: int, step: int) -> Program:
    """The block that finishes the row: of the columns of all ranks."""
    everyone = tuple(range(s.ranks))
    see = Op("see", "act", (step % 2,), 0, step=step)
    begin = [Op("wait"), Op("count", f"block {MAKERS}"), see]
    if s.fault == "the finishing block does not wait":
        begin = begin[1:]
    phase = Phase.TOTAL if s.fault == "columns are taken for sums" else Phase.COLUMNS
    columns = [Op("poll", "deltas", everyone, block, phase=phase) for block in range(MAKERS)]
    write = Op("write", "act", ((step + 1) % 2,), 0, step=step + 1)
    return (Op("release"), *begin, *columns, write, *_bump(s, MAKERS))
