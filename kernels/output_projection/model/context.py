"""What the launches of the MLA core do where contexts lie over ranks, as far as other launches and ranks can tell; and the faults.

Four launches a step, of a block each: queries to all ranks, attention to what they ask, rows to the owners of their heads, values.
"""

from __future__ import annotations

from dataclasses import replace

from ...health import Phase
from .programs import Op, Program, Setting

FAULTS: dict[str, str] = {
    "queries sent before the wait": "steps",
    "the query's launch does not wait": "steps",
    "the attention does not wait": "steps",
    "the sending launch does not wait": "steps",
    "the last launch does not wait": "steps",
    "no epoch check": "steps",
    "counter not written": "steps",
    "rows sent whatever the attention waited for": "late",
    "who gave up goes on publishing": "late",
    "waits without a limit": "dead",
    "queries are taken for rows": "dead",
    "the first to give up names the rank": "dead",
}
"""One removal each, and the kind of setting that shows it: see :func:`setting_of`."""


def setting_of(fault: str) -> Setting:
    """The small setting in which a fault must break the protocol, and which is right without it."""
    kinds = {
        "steps": Setting("context", steps=3),
        "late": Setting("context", steps=1, ends="late"),
        "dead": Setting("context", ranks=3, steps=1, ends="dead"),
    }
    return replace(kinds[FAULTS[fault]], fault=fault)


def context(s: Setting, rank: int, step: int) -> list[list[Program]]:
    """The programs of one step's launches."""
    return [[_query(s, rank, step)], [_attend(s, step)], [_send(s, rank, step)], [_value(s, step)]]


def _launch(s: Setting, name: str, *ops: Op, waits: bool = True) -> Program:
    begin = (Op("wait"), Op("count", name)) if waits else (Op("count", name),)
    end = () if s.fault == "counter not written" else (Op("bump", name),)
    return (Op("release"), *begin, *ops, *end)


def _query(s: Setting, rank: int, step: int) -> Program:
    """Makes the own heads' queries of an activation, and sends them to all."""
    see = Op("see", "act", (step % 2,), 0, step=step)
    put = Op("put", "queries", (rank,), 0, tuple(range(s.ranks)))
    if s.fault == "queries sent before the wait":
        return (Op("release"), Op("know"), put, Op("wait"), see)
    return _launch(s, "query", see, put, waits=s.fault != "the query's launch does not wait")


def _attend(s: Setting, step: int) -> Program:
    """Leaves parts in memory of this rank alone."""
    phase = Phase.PARTIAL if s.fault == "queries are taken for rows" else Phase.QUERIES
    poll = Op("poll", "queries", tuple(range(s.ranks)), 0, phase=phase)
    write = Op("write", "act", (0,), 1, step=step + 1)
    return _launch(s, "attend", poll, write, waits=s.fault != "the attention does not wait")


def _send(s: Setting, rank: int, step: int) -> Program:
    """A packet of its own to each owner, of the parts."""
    see = Op("see", "act", (0,), 1, step=step + 1)
    puts = [Op("put", "mail", (rank,), 0, (owner,)) for owner in range(s.ranks)]
    if s.fault == "rows sent whatever the attention waited for":
        puts = [one._replace(kind="tell") for one in puts]
    return _launch(s, "send", see, *puts, waits=s.fault != "the sending launch does not wait")


def _value(s: Setting, step: int) -> Program:
    """The next step's activation, of all ranks' rows."""
    poll = Op("poll", "mail", tuple(range(s.ranks)), 0, phase=Phase.PARTIAL)
    write = Op("write", "act", ((step + 1) % 2,), 0, step=step + 1)
    return _launch(s, "value", poll, write, waits=s.fault != "the last launch does not wait")
