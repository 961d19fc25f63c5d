"""A machine for PTX text: blocks of one cluster after the other, or a whole grid at once, every thread's registers in NumPy.

It runs what the compiler made of a kernel, before the assembler, on the CPU: addresses, masks, conversions, divergence,
barriers, shuffles, MMAs, asynchronous stores to a peer's shared memory. It knows no time: threads that wait let the others
go on. An instruction that it does not know is an error.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from .ptx_arithmetic import Arithmetic
from .ptx_text import CARRIERS, DTYPES, SHARED, WIDTHS, Memory, Step, constant, parse

__all__ = ["Barrier", "Machine", "Memory", "Step", "parse"]

PEER = 24
"""Bits below a peer's number in a cluster address."""


@dataclass
class Barrier:
    """An mbarrier of one phase: an arrival, and bytes that are expected."""

    arrived: bool = False
    bytes: int = 0

    @property
    def done(self) -> bool:
        """Whether waits of phase 0 end."""
        return self.arrived and self.bytes == 0


@dataclass
class Machine(Arithmetic):
    """Runs a kernel on ``memory``; addresses of global memory are offsets in it."""

    ptx: str
    memory: np.ndarray
    """uint8; a kernel that reads or writes beyond its end fails."""
    values: list[int]
    """Of the parameters."""
    block: int
    cluster: int
    shared_bytes: int
    seed: int = 0
    time: int = 1
    """What both clocks show, in nanoseconds."""
    tick: int = 0
    """Nanoseconds a step."""
    limit: int = 400_000
    """Steps, after which a kernel that does not end is an error."""
    fair: int = 16
    """Every so many turns somebody's turn is drawn; else it is theirs who are first in the text, which polls may be."""
    waited: np.ndarray = field(init=False)
    before_wait: list[str] = field(default_factory=list)
    """Memory instructions that some thread did before its dependency wait."""

    def run(self, first: int, blocks: int) -> None:
        """Run ``blocks`` blocks from block ``first`` on, all at once."""
        self.steps, self.labels, names = parse(self.ptx)
        self.parameters = dict(zip(names, self.values, strict=True))
        self.count, self.blocks, self.first = blocks * self.block, blocks, first
        index = np.arange(self.count)
        self.tid, self.lane = index % self.block, index % 32
        self.local = index // self.block
        self.ctaid = first + self.local
        nothing = np.zeros(self.count, dtype=np.int64)
        self.special = {
            "%tid.x": self.tid, "%ctaid.x": self.ctaid, "%laneid": self.lane, "%ctaid.y": nothing, "%ctaid.z": nothing,
            "%nctaid.x": nothing + 1 + self.ctaid.max(), "%nctaid.y": nothing + 1,
        }  # fmt: skip
        self.rank = self.ctaid % self.cluster
        self.home = self.local - self.rank
        self.registers: dict[str, np.ndarray] = {}
        self.pc = np.zeros(self.count, dtype=np.int64)
        self.waited = np.zeros(self.count, dtype=bool)
        self.alive = np.ones(self.count, dtype=bool)
        self.stopped = np.zeros(self.count, dtype=bool)
        self.shared = np.full((blocks, SHARED + self.shared_bytes), 0xA5, dtype=np.uint8)
        self.barriers: dict[tuple[int, int], Barrier] = defaultdict(Barrier)
        self.met: dict[tuple, set[int]] = defaultdict(set)
        dice = random.Random(self.seed)
        for turn in range(self.limit):
            ready = self.alive & ~self.stopped
            self.time += self.tick
            if not ready.any():
                if self.alive.any() and self.stirred():
                    continue
                assert not self.alive.any(), f"threads wait for ever at {self.held_at()}"
                return
            place = int(self.pc[ready].min() if turn % self.fair else dice.choice(np.unique(self.pc[ready]).tolist()))
            self.execute(place, np.flatnonzero(ready & (self.pc == place)))
        raise AssertionError(f"not done after {self.limit} steps, at {self.held_at()}")

    def held_at(self) -> list[str]:
        """Where threads are that have not ended."""
        return sorted({self.text(place) for place in self.pc[self.alive]})

    def stirred(self) -> bool:
        """Whether something that was under way let a thread go on, where none can."""
        return False

    def text(self, place: int) -> str:
        """An instruction, for messages."""
        step = self.steps[int(place)]
        return f"{int(place)}: {'.'.join(step.name)} {', '.join(step.args)}"

    # -- operands
    def get(self, name: str, who: np.ndarray, kind: str) -> np.ndarray:
        """Values of an operand, as a type."""
        dtype = DTYPES[kind]
        stored = self.registers.get(name)
        if stored is not None:
            return stored[who].astype(CARRIERS[WIDTHS[kind]]).view(dtype)
        if name in self.special:
            return self.special[name][who].astype(dtype)
        if name in ("%globaltimer", "%clock64"):
            return np.full(len(who), self.time, dtype=dtype)
        value = constant(name, kind)
        assert value is not None, f"{name} is read before it is written"
        return value.repeat(len(who))

    def put(self, name: str, who: np.ndarray, value: np.ndarray) -> None:
        """Write a register."""
        if name == "_":
            return
        if name not in self.registers:
            self.registers[name] = np.zeros(self.count, dtype=np.uint64)
        value = np.asarray(value)
        if value.dtype == bool:
            self.registers[name][who] = value
            return
        self.registers[name][who] = np.ascontiguousarray(value).view(CARRIERS[value.dtype.itemsize]).astype(np.uint64)

    def flag(self, name: str, who: np.ndarray) -> np.ndarray:
        """A predicate."""
        if name.startswith("!"):
            return ~self.flag(name[1:], who)
        if name in ("0", "1", "-1"):
            return np.full(len(who), name != "0")
        return self.registers[name][who] != 0

    def address(self, arg: str, who: np.ndarray, kind: str) -> np.ndarray:
        """Byte addresses of an operand in brackets."""
        base, _, offset = arg.strip("[]").replace(" ", "").partition("+")
        at = self.get(base, who, kind).astype(np.int64)
        return at + (int(offset, 0) if offset else 0)

    # -- control
    def execute(self, place: int, who: np.ndarray) -> None:
        """One instruction for the threads that stand at it."""
        step = self.steps[place]
        if step.guard:
            holds = self.flag(step.guard, who)
            self.pc[who[~holds]] = place + 1
            who = who[holds]
            if not len(who):
                return
        handler = getattr(self, f"do_{step.name[0]}", None)
        assert handler is not None, f"unknown instruction {self.text(place)}"
        if step.name[0] in ("bra", "ret", "bar", "barrier", "shfl", "vote", "mma", "mbarrier", "redux"):
            handler(step, who, place)
        else:
            handler(step, who)
            self.pc[who] = place + 1

    def together(self, who: np.ndarray, place: int, groups: np.ndarray, size: int) -> np.ndarray:
        """Threads whose whole group stands here now; the others stop until it does."""
        found, counts = np.unique(groups, return_counts=True)
        if (counts == size).all():  # nobody has to be waited for
            self.pc[who] = place + 1
            return who
        released = []
        for group in found:
            met = self.met[(place, int(group))]
            met.update(who[groups == group].tolist())
            if len(met) == size:
                released += sorted(met)
                met.clear()
            else:
                self.stopped[list(met)] = True
        done = np.array(released, dtype=np.int64)
        self.stopped[done] = False
        self.pc[done] = place + 1
        return done

    def do_bra(self, step: Step, who: np.ndarray, place: int) -> None:
        self.pc[who] = self.labels[step.args[0]]

    def do_ret(self, step: Step, who: np.ndarray, place: int) -> None:
        assert self.waited[who].all(), "a thread ends without the dependency wait"
        self.alive[who] = False

    def do_bar(self, step: Step, who: np.ndarray, place: int) -> None:
        if step.name[1] == "warp":
            self.together(who, place, who // 32, 32)
            return
        number = self.get(step.args[0], who, "u32").astype(np.int64)
        size = int(self.get(step.args[1], who[:1], "u32")[0]) if len(step.args) > 1 else self.block
        # one barrier whatever the instruction it is met at
        for key in np.unique(self.local[who] * 16 + number):
            met = self.met[("bar", int(key))]
            mine = who[self.local[who] * 16 + number == key]
            met.update(mine.tolist())
            self.stopped[mine] = True
            if len(met) == size:
                done = np.array(sorted(met))
                self.stopped[done] = False
                self.pc[done] += 1
                met.clear()
            assert len(met) <= size

    def do_barrier(self, step: Step, who: np.ndarray, place: int) -> None:
        if "arrive" in step.name:
            self.pc[who] = place + 1
            return
        self.together(who, place, self.home[who] * 10_000 + self.first, self.cluster * self.block)

    def do_griddepcontrol(self, step: Step, who: np.ndarray) -> None:
        if step.name[1] == "wait":
            self.waited[who] = True

    # -- warps
    def whole_warps(self, who: np.ndarray, place: int) -> np.ndarray:
        return self.together(who, place, who // 32, 32).reshape(-1, 32)

    def do_shfl(self, step: Step, who: np.ndarray, place: int) -> None:
        who = self.whole_warps(who, place).ravel()
        value, by = self.get(step.args[1], who, "b32"), self.get(step.args[2], who, "u32").astype(int)
        lane = np.arange(len(who)) % 32
        source = {"bfly": lane ^ by, "idx": by & 31, "up": np.where(lane >= by, lane - by, lane)}[step.name[2]]
        self.put(step.args[0].split("|")[0], who, value[np.arange(len(who)) - lane + source])

    def do_vote(self, step: Step, who: np.ndarray, place: int) -> None:
        who = self.whole_warps(who, place).ravel()
        bits = self.flag(step.args[1], who).reshape(-1, 32).astype(np.uint32) << np.arange(32, dtype=np.uint32)
        self.put(step.args[0], who, bits.sum(1, dtype=np.uint32).repeat(32))

    def do_redux(self, step: Step, who: np.ndarray, place: int) -> None:
        who = self.whole_warps(who, place).ravel()
        value = self.get(step.args[1], who, "u32").reshape(-1, 32)
        assert step.name[2] in ("add", "max", "min")
        result = {"add": np.sum, "max": np.max, "min": np.min}[step.name[2]](value.astype(np.uint64), axis=1)
        self.put(step.args[0], who, result.astype(np.uint32).repeat(32))

    def do_mma(self, step: Step, who: np.ndarray, place: int) -> None:
        who = self.whole_warps(who, place).ravel()
        d, a, b, c = (self.words(arg) for arg in step.args)
        warps = len(who) // 32
        left, right, sums = (np.zeros((warps, 16, columns)) for columns in (16, 8, 8))
        group, pair = np.arange(32) // 4, np.arange(32) % 4 * 2
        for part, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            for half, value in enumerate(self.bf16(a[part], who)):
                left[:, group + row, pair + column + half] = value.reshape(-1, 32)
        for part in range(2):
            for half, value in enumerate(self.bf16(b[part], who)):
                right[:, pair + part * 8 + half, group] = value.reshape(-1, 32)
        for part in range(4):
            sums[:, group + part // 2 * 8, pair + part % 2] = self.get(c[part], who, "f32").reshape(-1, 32)
        with np.errstate(invalid="ignore"):  # infinity times zero is NaN, as on a GPU
            result = (left @ right + sums).astype(np.float32)
        for part in range(4):
            self.put(d[part], who, result[:, group + part // 2 * 8, pair + part % 2].ravel())

    def bf16(self, name: str, who: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Two BF16 values of a word."""
        word = self.get(name, who, "u32")
        return (word << np.uint32(16)).view(np.float32), (word & np.uint32(0xFFFF0000)).view(np.float32)

    # -- memory
    def do_ld(self, step: Step, who: np.ndarray) -> None:
        names, kind = self.words(step.args[0]), step.name[-1]
        size = np.dtype(DTYPES[kind]).itemsize
        if step.name[1] == "param":
            value = self.parameters[step.args[1].strip("[]")]
            self.put(names[0], who, np.full(len(who), value, dtype=np.uint64).astype(CARRIERS[size]))
            return
        if "shared" in step.name:
            at = self.address(step.args[1], who, "u32")
            found = self.shared[self.local[who][:, None], at[:, None] + np.arange(size * len(names))]
        else:
            self.note(step, who)
            at = self.address(step.args[1], who, "u64")
            assert (at % (size * len(names)) == 0).all(), "misaligned load"
            found = self.memory[at[:, None] + np.arange(size * len(names))]
        values = np.ascontiguousarray(found).view(CARRIERS[size])
        for place, name in enumerate(names):
            self.put(name, who, values[:, place])

    def do_st(self, step: Step, who: np.ndarray) -> None:
        kind, names = step.name[-1], self.words(step.args[1])
        size = np.dtype(DTYPES[kind]).itemsize
        values = np.stack([self.get(name, who, kind) for name in names], axis=1)
        data = np.ascontiguousarray(values).view(np.uint8).reshape(len(who), -1)
        span = np.arange(size * len(names))
        if "async" in step.name:
            at, bar = (self.address(step.args[place], who, "u32") for place in (0, 2))
            for thread, to, meet, one in zip(who, at, bar, data, strict=True):
                block = self.home[thread] + (to >> PEER)
                assert to % len(span) == 0, "misaligned asynchronous store"
                self.shared[block, (to & ((1 << PEER) - 1)) + span] = one
                self.barriers[int(block), int(meet & ((1 << PEER) - 1))].bytes -= len(span)
                assert meet >> PEER == to >> PEER
            self.wake()
        elif "shared" in step.name:
            at = self.address(step.args[0], who, "u32")
            self.shared[self.local[who][:, None], at[:, None] + span] = data
        else:
            self.note(step, who)
            at = self.address(step.args[0], who, "u64")
            assert (at % len(span) == 0).all(), "misaligned store"
            assert (at >= 0).all()
            self.memory[at[:, None] + span] = data

    def note(self, step: Step, who: np.ndarray) -> None:
        """Remember what touches global memory before the dependency wait."""
        if not self.waited[who].all():
            self.before_wait.append(".".join(step.name))

    def do_atom(self, step: Step, who: np.ndarray) -> None:
        before = np.zeros(len(who), dtype=np.uint32)
        if "global" in step.name:
            assert "cas" in step.name
            self.note(step, who)
            wanted, value = (self.get(arg, who, "u32") for arg in step.args[2:4])
            for place, one in enumerate(self.address(step.args[1], who, "u64")):
                cell = self.memory[one : one + 4].view(np.uint32)
                before[place] = cell[0]
                cell[0] = value[place] if cell[0] == wanted[place] else cell[0]
            self.put(step.args[0], who, before)
            return
        at, value = self.address(step.args[1], who, "u32"), self.get(step.args[2], who, "u32")
        for place, thread in enumerate(who):
            cell = self.shared[self.local[thread], at[place] : at[place] + 4].view(np.uint32)
            before[place] = cell[0]
            cell[0] = cell[0] + value[place] if step.name[3] == "add" else cell[0] | value[place]
        self.put(step.args[0], who, before)

    def do_red(self, step: Step, who: np.ndarray) -> None:
        assert "or" in step.name
        self.note(step, who)
        for one, value in zip(self.address(step.args[0], who, "u64"), self.get(step.args[1], who, "u32"), strict=True):
            self.memory[one : one + 4].view(np.uint32)[0] |= value

    def do_mapa(self, step: Step, who: np.ndarray) -> None:
        at, peer = self.get(step.args[1], who, "u32"), self.get(step.args[2], who, "u32")
        assert (peer < self.cluster).all()
        self.put(step.args[0], who, peer << np.uint32(PEER) | at)

    def do_mbarrier(self, step: Step, who: np.ndarray, place: int) -> None:
        at = self.address(step.args[1 if step.name[1] in ("try_wait", "arrive") else 0], who, "u32")
        if step.name[1] == "init":
            for thread, one in zip(who, at, strict=True):
                self.barriers[int(self.local[thread]), int(one)] = Barrier()
        elif step.name[1] == "arrive":
            more = self.get(step.args[2], who, "u32")
            for thread, one, count in zip(who, at, more, strict=True):
                barrier = self.barriers[int(self.local[thread]), int(one)]
                barrier.arrived, barrier.bytes = True, barrier.bytes + int(count)
            self.wake()
        else:
            ends = np.array([self.barriers[int(self.local[t]), int(one)].done for t, one in zip(who, at, strict=True)])
            self.put(step.args[0], who[ends], np.ones(int(ends.sum()), dtype=bool))
            self.pc[who[ends]] = place + 1
            self.stopped[who[~ends]] = True
            return
        self.pc[who] = place + 1

    def wake(self) -> None:
        """Threads that wait for an mbarrier look again."""
        waits = [place for place, step in enumerate(self.steps) if step.name[:2] == ("mbarrier", "try_wait")]
        self.stopped[np.isin(self.pc, waits)] = False

    def do_fence(self, step: Step, who: np.ndarray) -> None:
        pass

    def do_nanosleep(self, step: Step, who: np.ndarray) -> None:
        pass
