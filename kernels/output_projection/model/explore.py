"""Every order of steps and of arriving stores, until all blocks have ended; or the order that breaks the protocol."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...health import MISSED, WORDS, Phase, culprits, read
from ..mailbox import PARITIES, parity
from .memory import Cell, dropped, empty, flushed, outcomes, stored
from .programs import Op, Program, Setting, launches

SENTINEL = ("sentinel", -1, -1, True)
"""What an armed word holds where data is the flag."""
NEVER = (0, -1, -1, True)
"""Memory as it was allocated: (tag, step, origin, sound)."""


class Violation(Exception):
    """The protocol was broken; the message says how."""


class Register(NamedTuple):
    """What an actor knows."""

    epoch: int
    silent: bool = False
    """It gave up, or came after one that did: it publishes nothing more."""
    tainted: bool = False
    """What it has is worth nothing, whether or not it knows."""


class State(NamedTuple):
    """Everything that tells two moments apart."""

    pcs: tuple[int, ...]
    registers: tuple[Register | None, ...]
    ended: tuple[tuple[bool, ...], ...]
    """Of each rank's launches: all blocks have ended, and their stores to this GPU are delivered."""
    memory: tuple[Cell, ...]
    claims: tuple[tuple[int, ...] | None, ...]
    """Each rank's health record once a wait gave up."""
    dead: int
    early: bool
    """One wait may still end too soon."""


@dataclass(frozen=True)
class Actor:
    """Where a program runs."""

    rank: int
    launch: int
    place: int
    """Within its launch."""
    step: int
    program: Program
    released: int
    """Program counter from which the next launch may start."""
    counted: int
    """Program counter from which it knows its epoch."""


class Explorer:
    """All behaviours of one setting."""

    def __init__(self, setting: Setting, *, careful: bool | None = None) -> None:
        """``careful`` takes reads and ends of launches as steps of their own even where nothing can come between;
        by default where a fault makes that possible.
        """
        self.s = setting
        self.careful = bool(setting.fault) if careful is None else careful
        self.actors: list[Actor] = []
        self.of_launch: list[list[list[int]]] = []
        """By rank and launch."""
        for rank in range(setting.ranks):
            programs = launches(setting, rank)
            a_step = len(programs) // setting.steps
            self.of_launch.append([])
            for launch, blocks in enumerate(programs):
                self.of_launch[rank].append(list(range(len(self.actors), len(self.actors) + len(blocks))))
                for place, program in enumerate(blocks):
                    kinds = [op.kind for op in program]
                    counted = next(i for i, kind in enumerate(kinds) if kind in ("count", "know"))
                    self.actors.append(
                        Actor(rank, launch, place, launch // a_step, program, kinds.index("release") + 1, counted + 1)
                    )
        self.cells: dict[tuple[Any, ...], int] = {}
        self.memory: list[Cell] = []
        for actor in self.actors:
            for op in actor.program:
                for epoch in (0, 1):
                    for rank in op.to or (actor.rank,):
                        for key in self._keys(op, rank, epoch) if op.box else ():
                            self._allocate(key)

    def _allocate(self, key: tuple[Any, ...]) -> None:
        if key in self.cells:
            return
        armed = SENTINEL if self.s.form == "flag" else NEVER
        mailboxes = dict.fromkeys(("mail", "shares", "totals", "deltas", "queries"), armed)
        cell = empty({**mailboxes, "row 1": NEVER, "row 2": NEVER}.get(key[1], 0))
        if self.s.ends == "stale" and key == (0, "mail", 1, parity(1), 1, 0):
            cell = stored(cell, 1, (1, -2, 1, True), -1)
        self.cells[key] = len(self.memory)
        self.memory.append(cell)

    def _keys(self, op: Op, rank: int, epoch: int) -> list[tuple[Any, ...]]:
        """The cells that a step touches: of each slot, word by word."""
        if op.kind in ("count", "bump"):
            return [(rank, "counter", op.box)]
        if op.box == "act" or op.box.startswith("row"):
            return [(rank, op.box, slot, op.packet) for slot in op.slots]
        half = parity(epoch) if self.s.parities == PARITIES else 0
        return [(rank, op.box, slot, half, op.packet, word) for slot in op.slots for word in range(self.s.words)]

    def explore(self, most: int = 1_000_000) -> int:
        """States visited.

        Raises:
            Violation: a block read what it must not, blocks wait for ever, or the wrong rank is named.
        """
        none = tuple(tuple(False for _ in launches) for launches in self.of_launch)
        count = len(self.actors)
        first = State(
            (0,) * count, (None,) * count, none, tuple(self.memory), (None,) * self.s.ranks, -1, self.s.ends == "late"
        )
        stack = list(self._settled(first))
        seen, came = set(stack), {first}
        while stack:
            state = stack.pop()
            after = list(self._steps(state)) or list(self._expired(state))
            if not after:
                self._judge(state)
            for one in after:
                if one in seen or one in came:
                    continue
                came.add(one)
                for settled in self._settled(one):
                    if settled not in seen:
                        seen.add(settled)
                        stack.append(settled)
            if len(seen) > most:
                raise RuntimeError(f"more than {most} states")
        return len(seen)

    # who may go on

    def _present(self, state: State) -> Iterator[int]:
        """Actors that run: their launch was let in by the one before it, and they are not at their end."""
        for rank, by_launch in enumerate(self.of_launch):
            if rank == state.dead:
                continue
            for launch, ids in enumerate(by_launch):
                if not state.ended[rank][launch]:
                    for who in ids:
                        if state.pcs[who] < len(self.actors[who].program):
                            yield who
                    if not all(state.pcs[who] >= self.actors[who].released for who in ids):
                        break

    def _may(self, state: State, who: int, op: Op) -> bool:
        """Whether a step can be taken whose moment does not matter."""
        actor = self.actors[who]
        if op.kind == "wait":
            return actor.launch == 0 or state.ended[actor.rank][actor.launch - 1]
        if op.kind == "meet":
            partner = self.of_launch[actor.rank][actor.launch][op.slots[0]]
            return state.pcs[partner] >= self.actors[partner].counted
        if op.kind in ("count", "see"):
            return not self.careful and not state.memory[self.cells[self._keys(op, actor.rank, 0)[0]]][1]
        return op.kind != "poll"

    def _settled(self, state: State) -> Iterator[State]:
        """The states in which only steps are left that matter when they happen."""
        todo = [state]
        while todo:
            at = todo.pop()
            moved = True
            while moved:
                moved = False
                for who in list(self._present(at)):
                    program = self.actors[who].program
                    while at.pcs[who] < len(program) and self._may(at, who, program[at.pcs[who]]):
                        at, moved = self._do(at, who, program[at.pcs[who]]), True
                if not self.careful and not moved and (over := next(self._over(at), None)):
                    at, *more = self._end(at, *over)
                    todo += more
                    moved = True
            yield at

    def _over(self, state: State) -> Iterator[tuple[int, int]]:
        """Launches all of whose blocks are at their end, and that have not ended yet."""
        for rank, by_launch in enumerate(self.of_launch):
            for launch, ids in enumerate(by_launch):
                if rank != state.dead and not state.ended[rank][launch]:
                    if all(state.pcs[who] == len(self.actors[who].program) for who in ids):
                        yield rank, launch
                    elif not self.careful:
                        break

    def _end(self, state: State, rank: int, launch: int) -> list[State]:
        """A launch is over: what it stored on its own GPU is there. What it stored on others may still be under way."""
        own = list(state.ended[rank])
        own[launch] = True
        ended = (*state.ended[:rank], tuple(own), *state.ended[rank + 1 :])
        variants = [state.memory]
        for key, at in self.cells.items():
            if not state.memory[at][1]:
                continue
            landed = launch if key[0] == rank else -1 if self.s.lands is None else launch - self.s.lands
            variants = [
                (*memory[:at], cell, *memory[at + 1 :])
                for memory in variants
                for cell in flushed(memory[at], rank, landed)
            ]
        return [state._replace(ended=ended, memory=memory) for memory in variants]

    # steps

    def _do(self, state: State, who: int, op: Op) -> State:
        actor, memory, register = self.actors[who], list(state.memory), state.registers[who]
        rank = actor.rank

        def store(keys: list[tuple[Any, ...]], value: Any) -> None:
            for key in keys:
                at = self.cells[key]
                memory[at] = stored(memory[at], rank, value, actor.launch)

        if op.kind in ("count", "see"):
            (key,) = self._keys(op, rank, 0)
            return self._read(state, who, *state.memory[self.cells[key]])
        if op.kind == "know":
            register = Register(actor.step + 1, state.claims[rank] is not None)
        elif op.kind == "write":
            store(self._keys(op, rank, 0), op.step)
        elif op.kind not in ("release", "wait", "meet"):
            assert register is not None
            if op.kind == "bump":
                store(self._keys(op, rank, 0), register.epoch)
            elif op.kind == "rearm":
                store(self._keys(op, rank, register.epoch), SENTINEL)
            elif op.kind == "tell" or not register.silent or self.s.fault == "who gave up goes on publishing":
                # sums are what they should be once that of which they are has been waited for
                whole = not any(one.box in op.needs for one in actor.program[state.pcs[who] :] if one.kind == "poll")
                tag = register.epoch if op.box.startswith("row") else self._tag(register.epoch)
                value = (tag, actor.step, op.slots[0], whole and not (register.silent or register.tainted))
                for to in op.to:
                    store(self._keys(op, to, register.epoch), value)
                if self.s.fault == "a payload like the sentinel" and (op.box, actor.step, rank) == ("mail", 1, 0):
                    store(self._keys(op, op.to[-1], register.epoch)[:1], SENTINEL)
        return self._gone_on(state, who, register, memory)

    def _tag(self, epoch: int) -> int:
        return epoch & ((1 << self.s.tag_bits) - 1)

    @staticmethod
    def _gone_on(state: State, who: int, register: Register | None, memory: list[Cell], by: int = 1) -> State:
        pcs, registers = list(state.pcs), list(state.registers)
        pcs[who] += by
        registers[who] = register
        return state._replace(pcs=tuple(pcs), registers=tuple(registers), memory=tuple(memory))

    def _steps(self, state: State) -> Iterator[State]:
        """The steps whose moment matters."""
        if self.careful:
            for rank, launch in self._over(state):
                yield from self._end(state, rank, launch)
        if self.s.ends == "dead" and state.dead < 0:
            for rank in {self.actors[who].rank for who in self._present(state)}:
                yield state._replace(dead=rank)
                yield state._replace(dead=rank, memory=tuple(dropped(cell, rank) for cell in state.memory))
        for who in self._present(state):
            actor = self.actors[who]
            op = actor.program[state.pcs[who]]
            if op.kind in ("count", "see"):
                (key,) = self._keys(op, actor.rank, 0)
                for value, cell in outcomes(state.memory[self.cells[key]]):
                    yield self._read(state, who, value, cell[1], cell)
            elif op.kind == "poll":
                yield from self._polled(state, who, op)

    def _read(self, state: State, who: int, value: Any, queues: Any, cell: Cell | None = None) -> State:
        actor, memory, register = self.actors[who], list(state.memory), state.registers[who]
        op, warned = actor.program[state.pcs[who]], state.claims[actor.rank] is not None
        memory[self.cells[self._keys(op, actor.rank, 0)[0]]] = cell or (value, queues)
        if op.kind == "count":
            register = Register(value + 1, warned)
        elif value != op.step and not warned:
            raise Violation(f"rank {actor.rank} read the activation of step {value} in step {op.step}")
        return self._gone_on(state, who, register, memory)

    def _passes(self, key: tuple[Any, ...], value: Any, epoch: int) -> bool:
        """Whether a word lets a wait end."""
        fault = self.s.fault
        if key[1].startswith("row"):
            return value[0] == epoch or (fault == "scalars without an epoch" and value != NEVER)
        if self.s.form == "flag":
            return value != SENTINEL or (fault == "only the first word checked" and key[-1] > 0)
        if self.s.form == "pairs":
            return bool(value[0] == self._tag(epoch)) or (fault == "only the first access checked" and key[-1] > 0)
        if key[-1] < self.s.words - 1:
            return True  # the epoch comes with the last access
        return bool(value[0] == self._tag(epoch)) or (fault == "no epoch check" and value != NEVER)

    def _polled(self, state: State, who: int, op: Op) -> Iterator[State]:
        """One round of polls that sees what it waits for; or a store that takes it away before it was seen.

        Other rounds leave all as it is, or deliver what could as well come later.
        """
        actor, register = self.actors[who], state.registers[who]
        assert register is not None
        warned = state.claims[actor.rank] is not None
        places = [(key, self.cells[key]) for key in self._keys(op, actor.rank, register.epoch)]
        good = []
        for key, at in places:
            found = outcomes(state.memory[at])
            good.append([one for one in found if self._passes(key, one[0], register.epoch)])
            if good[-1]:
                for _, cell in found:
                    if not any(self._passes(key, value, register.epoch) for value, _ in outcomes(cell)):
                        yield state._replace(memory=(*state.memory[:at], cell, *state.memory[at + 1 :]))
        for seen in itertools.product(*good):
            memory = list(state.memory)
            for (key, at), (value, cell) in zip(places, seen, strict=True):
                memory[at] = cell
                if value[1:] != (actor.step, key[2], True) and not warned and not register.silent:
                    raise Violation(f"rank {actor.rank}, step {actor.step}: {op.box} of {key[2]} holds {value}")
            heard = register
            if op.phase is None and not all(value[3] for value, _ in seen):
                told = self.s.fault != "lateness is not told in the cluster"
                heard = register._replace(silent=register.silent or told, tainted=True)
            yield self._gone_on(state, who, heard, memory)
        if (warned or state.early) and op.phase is not None:
            yield self._given_up(state._replace(early=False), who, op, register)

    # the end

    def _expired(self, state: State) -> Iterator[State]:
        """Nothing goes on by itself: waits come to their limit, if they have one."""
        if not self.s.ends or self.s.fault == "waits without a limit":
            return
        for who in self._present(state):
            op, register = self.actors[who].program[state.pcs[who]], state.registers[who]
            if op.kind == "poll" and op.phase is not None and register is not None:
                yield self._given_up(state, who, op, register)

    def _given_up(self, state: State, who: int, op: Op, register: Register) -> State:
        """As ``look`` of the kernels: claim the record, or see the claim; say whom this wait missed."""
        actor = self.actors[who]
        assert op.phase is not None
        missed = 0
        for key in self._keys(op, actor.rank, register.epoch):
            found = outcomes(state.memory[self.cells[key]])
            if op.phase is not Phase.ROW and not any(self._passes(key, value, register.epoch) for value, _ in found):
                missed |= 1 << key[2]
        slot = max(missed & -missed, 1).bit_length() - 1
        words = list(state.claims[actor.rank] or (register.epoch, op.phase, slot, actor.place, *([0] * (WORDS - 4))))
        # later launches miss those that know of it, too
        if words[0] == register.epoch or self.s.fault == "later launches add to the ranks that were missed":
            words[MISSED + op.phase - 1] |= missed
        claims = (*state.claims[: actor.rank], tuple(words), *state.claims[actor.rank + 1 :])
        following = actor.program[state.pcs[who] + 1 :]
        skipped = 2 if following and following[0].kind == "rearm" else 1
        state = state._replace(claims=claims)
        return self._gone_on(state, who, register._replace(silent=True), list(state.memory), skipped)

    def _judge(self, state: State) -> None:
        """Nothing is left to happen."""
        for who in self._present(state):
            actor = self.actors[who]
            op = actor.program[state.pcs[who]]
            raise Violation(f"rank {actor.rank}, step {actor.step} waits for ever: {op.kind} {op.box}")
        if state.dead < 0:
            return
        reports = {
            rank: report
            for rank, words in enumerate(state.claims)
            if rank != state.dead and words is not None and (report := read(words)) is not None
        }
        for rank, report in reports.items():
            named = (report.slot,) if self.s.fault == "the first to give up names the rank" else report.late
            if any(report.missed.values()) and state.dead not in named:
                raise Violation(f"rank {state.dead} died, and rank {rank} names {named}")
        if reports and culprits(reports) != (state.dead,):
            raise Violation(f"rank {state.dead} died, and all together name {culprits(reports)}")
