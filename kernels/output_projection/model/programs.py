"""What the kernels' blocks do, step by step, as far as other blocks and ranks can tell; and the faults.

An actor is what runs in order by itself: the producing or the finishing warps of a block of the fused kernel, or a
block of the split ones. Launches of one rank follow one another with programmatic edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ...health import Phase

FAULTS: dict[str, str] = {
    "publish before the wait": "fused",
    "no wait": "fused",
    "counter read before the wait": "fused",
    "activation read before the wait": "fused",
    "scalars published before the wait": "fused",
    "one parity": "fused",
    "no epoch check": "fused",
    "a packet in two accesses": "fused",
    "no barrier before the counter is written": "fused",
    "one counter for all blocks": "fused",
    "counter not written": "fused",
    "scalars without an epoch": "fused",
    "only live rows published": "fused",
    "the producer releases at entry": "split",
    "the producer does not wait": "split",
    "the consumer does not wait at its exit": "split",
    "the consumer's exit wait, two shots": "two_shot",
    "the producer does not wait, two shots": "two_shot",
    "sums sent before all partials are in": "two_shot",
    "not re-armed": "flag",
    "re-armed with one parity": "flag",
    "only the first word checked": "flag",
    "only the first access checked": "pairs",
    "a payload like the sentinel": "flag",
    "re-armed, published before the wait": "flag",
    "waits without a limit": "dead",
    "who gave up goes on publishing": "late",
    "the first to give up names the rank": "dead two_shot",
    "later launches add to the ranks that were missed": "dead",
    "memory cleared while stores are under way": "stale",
}
"""One removal each, and the kind of setting that shows it: see :func:`setting_of`."""


class Op(NamedTuple):
    """One step of an actor."""

    kind: Literal["release", "wait", "know", "count", "see", "put", "tell", "poll", "meet", "bump", "rearm", "write"]
    """A tell is a put that happens whatever came before: who hears it learns whether it is worth anything."""
    box: str = ""
    """Which memory; of a counter, whose."""
    slots: tuple[int, ...] = (0,)
    """Of the box: all at once, as one round of polls; the parity of an activation; the partner of a meeting."""
    packet: int = 0
    """Packet or block."""
    to: tuple[int, ...] = ()
    """Ranks a put goes to."""
    step: int = 0
    """Of an activation: whose step wrote it."""
    phase: Phase | None = None
    """Of a poll; None where it has no limit of its own."""
    needs: tuple[str, ...] = ()
    """Of a put: the boxes that must have been waited for before, or it is worth nothing."""


@dataclass(frozen=True)
class Setting:
    """Sizes, shape and fault of one exploration."""

    shape: Literal["fused", "split", "two_shot", "tail", "tail_two_shot", "context"]
    ranks: int = 2
    steps: int = 4
    """Epochs: calls of the whole kernel (or pair of kernels)."""
    form: Literal["epoch", "pairs", "flag"] = "epoch"
    """Packets with an epoch; several of them for what a lane takes, and ranks polled one after the other (b32e32);
    or data as flag: words that differ from a sentinel."""
    fault: str = ""
    rows: tuple[int, ...] = ()
    """Live rows of each step, out of two; one row in all if empty."""
    idle: bool = False
    """The finishing warps of the second block have no row: they wait for nobody."""
    consumer_waits: Literal["exit", "start"] = "exit"
    """Where the split's consumer has its dependency wait; with ``start`` the producer releases at entry."""
    tag_bits: int = 16
    lands: int | None = None
    """A store on another GPU has arrived when that many launches after its own have ended; None: it may take for ever
    unless someone waits for it."""
    parities: int = 2
    ends: Literal["", "dead", "late", "stale"] = ""
    """A rank dies at any moment; one wait ends too soon; a store of a former life is still under way."""

    @property
    def words(self) -> int:
        """Accesses a packet is written and read in."""
        return 2 if self.form in ("flag", "pairs") or self.fault == "a packet in two accesses" else 1

    def live(self, step: int) -> int:
        """Rows of a step."""
        return self.rows[step] if self.rows else 1

    @property
    def most_rows(self) -> int:
        """Rows that were compiled for."""
        return max(self.rows, default=1)


Program = tuple[Op, ...]
BLOCKS = 2
"""Of a kernel: each consumes what the other makes."""


def setting_of(fault: str) -> Setting:
    """The small setting in which a fault must break the protocol, and which is right without it."""
    named = {
        "one parity": Setting("fused", parities=1),
        "no barrier before the counter is written": Setting("fused", idle=True),
        "one counter for all blocks": Setting("fused", idle=True),
        "only live rows published": Setting("fused", steps=9, rows=(2, *[1] * 7, 2), tag_bits=3, lands=2),
        "re-armed with one parity": Setting("fused", form="flag", steps=3, parities=1),
    }
    kinds = {
        "fused": Setting("fused"),
        "split": Setting("split"),
        "two_shot": Setting("two_shot", steps=3),
        "flag": Setting("fused", form="flag", steps=3),
        "pairs": Setting("fused", form="pairs", steps=3),
        "dead": Setting("fused", steps=2, ends="dead"),
        "dead two_shot": Setting("two_shot", steps=2, ends="dead"),
        "late": Setting("two_shot", steps=2, ends="late"),
        "stale": Setting("fused", steps=2, ends="stale"),
    }
    return replace(named.get(fault, kinds[FAULTS[fault]]), fault=fault)


def launches(s: Setting, rank: int) -> list[list[Program]]:
    """The programs of each launch of a rank, in order."""
    from .context import context
    from .tail import tail

    make = {
        "fused": _fused, "split": _split, "two_shot": _two_shot, "tail": tail, "tail_two_shot": tail, "context": context,
    }[s.shape]  # fmt: skip
    return [launch for step in range(s.steps) for launch in make(s, rank, step)]


def _everyone(s: Setting) -> tuple[int, ...]:
    return tuple(range(s.ranks))


def _fused(s: Setting, rank: int, step: int) -> list[list[Program]]:
    return [[make(s, rank, step, block) for block in range(BLOCKS) for make in (_making, _finishing)]]


def _counter(s: Setting, block: int) -> str:
    return "one" if s.fault == "one counter for all blocks" else f"block {block}"


def _making(s: Setting, rank: int, step: int, block: int) -> Program:
    """The warps that make and publish a block's packets."""
    rows = s.live(step) if s.fault == "only live rows published" else s.most_rows
    puts = [Op("put", "mail", (rank,), block * s.most_rows + row, _everyone(s)) for row in range(rows)]
    count, wait = Op("count", _counter(s, block)), Op("wait")
    return {
        "publish before the wait": (Op("release"), Op("know"), *puts, wait),
        "re-armed, published before the wait": (Op("release"), Op("know"), *puts, wait),
        "no wait": (Op("release"), count, *puts),
        "counter read before the wait": (Op("release"), count, wait, *puts),
    }.get(s.fault, (Op("release"), wait, count, *puts))


def _finishing(s: Setting, rank: int, step: int, block: int) -> Program:
    """The warps that take a block's part of a row to the end: of the packets that the other block makes."""
    other = 1 - block
    count, wait = Op("count", _counter(s, block)), Op("wait")
    see = Op("see", "act", (step % 2,), other, step=step)
    meet = [] if s.fault == "no barrier before the counter is written" else [Op("meet", slots=(2 * block,))]
    write = Op("write", "act", ((step + 1) % 2,), block, step=step + 1)
    bump = [] if s.fault == "counter not written" else [Op("bump", _counter(s, block))]
    if s.idle and block:
        return (Op("release"), wait, count, *meet, write, *bump)
    partner, indices = (block, (0, 1)) if s.idle else (other, (other,))
    tell = [Op("put", f"row {turn}", (block,), 0, (rank,)) for turn in (1, 2)]
    hear = [Op("poll", f"row {turn}", (partner,), phase=Phase.ROW) for turn in (1, 2)]
    begin = {
        "no wait": [count, see, tell[0]],
        "activation read before the wait": [see, wait, count, tell[0]],
        "scalars published before the wait": [Op("know"), tell[0], wait, see],
    }.get(s.fault, [wait, count, see, tell[0]])
    got = [
        op
        for row in range(s.live(step))
        for index in indices
        for op in _taken(s, "mail", index * s.most_rows + row, Phase.PARTIAL)
    ]
    return (Op("release"), *begin, hear[0], *meet, *got, tell[1], hear[1], write, *bump)


def _taken(s: Setting, box: str, index: int, phase: Phase) -> list[Op]:
    """Wait for a packet of every rank; with data as flag, make its places ready again."""
    if s.form == "pairs":
        return [Op("poll", box, (slot,), index, phase=phase) for slot in _everyone(s)]
    poll = Op("poll", box, _everyone(s), index, phase=phase)
    rearms = s.form == "flag" and s.fault != "not re-armed"
    return [poll, Op("rearm", box, _everyone(s), index)] if rearms else [poll]


def _producer(s: Setting, step: int, block: int, puts: list[Op]) -> Program:
    counter, see = f"producer {block}", Op("see", "act", (step % 2,), block, step=step)
    work = [Op("count", counter), see, *puts, Op("bump", counter)]
    if s.fault.startswith("the producer does not wait"):
        return (Op("release"), *work)
    if s.fault == "the producer releases at entry" or s.consumer_waits == "start":
        return (Op("release"), Op("wait"), *work)
    return (Op("wait"), Op("release"), *work)


def _consumer(s: Setting, rank: int, step: int, block: int, work: list[Op]) -> Program:
    counter = f"consumer {block}"
    see = Op("see", "act", (step % 2,), 1 - block, step=step)
    write = Op("write", "act", ((step + 1) % 2,), block, step=step + 1)
    row = [Op("put", "row 1", (block,), 0, (rank,)), Op("poll", "row 1", (1 - block,), phase=Phase.ROW)]
    ops = [Op("release"), Op("count", counter), see, *work, *row, write, Op("bump", counter)]
    if s.consumer_waits == "start":
        return (Op("release"), Op("wait"), *ops[1:])
    return tuple(ops) if s.fault.startswith("the consumer") else (*ops, Op("wait"))


def _split(s: Setting, rank: int, step: int) -> list[list[Program]]:
    producers, consumers = [], []
    for block in range(BLOCKS):
        producers.append(_producer(s, step, block, [Op("put", "mail", (rank,), block, _everyone(s))]))
        consumers.append(_consumer(s, rank, step, block, _taken(s, "mail", 1 - block, Phase.PARTIAL)))
    return [producers, consumers]


def _two_shot(s: Setting, rank: int, step: int) -> list[list[Program]]:
    producers, consumers = [], []
    for block in range(BLOCKS):
        # each owner gets its own columns: a packet of its own
        puts = [Op("put", "mail", (rank,), block, (owner,)) for owner in range(s.ranks)]
        producers.append(_producer(s, step, block, puts))
        partials = _taken(s, "mail", block, Phase.PARTIAL)
        send = [Op("put", "totals", (rank,), block, _everyone(s), needs=("mail",))]
        early = s.fault == "sums sent before all partials are in"
        first = [*send, *partials] if early else [*partials, *send]
        consumers.append(_consumer(s, rank, step, block, [*first, *_taken(s, "totals", 1 - block, Phase.TOTAL)]))
    return [producers, consumers]
