"""The blocks of a cluster of the TMA engines, run against each other in any order: no deadlock, no early overwrite, no dead peer.

The producers, consumers and barriers are those of the kernels, step for step; a scheduler picks who goes on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from k3lab.kernels.attention_projection.cute_tma_tiles import TmaTiles

WARPS = 2
"""Consumer warps of the model: each frees a stage by itself."""


class Barrier:
    """An mbarrier: a phase ends when the expected arrivals and bytes are there."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.bytes = self.phases = 0

    def add(self, *, arrivals: int = 0, more: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += more
        assert self.pending >= 0, "an arrival of the next phase counts for this one"
        if self.pending == 0 and self.bytes == 0:
            self.phases += 1
            self.pending = self.arrivals

    def done(self, turn: int) -> bool:
        """Whether phase number ``turn`` has ended, as far as its parity tells."""
        assert self.phases in (turn, turn + 1), "the parity would be misread"
        return self.phases > turn


class Block:
    """Shared memory and barriers of one block; W and X hold (K tile, readers still to come) of each stage."""

    def __init__(self, tiles: TmaTiles, place: int) -> None:
        self.tiles, self.place, self.alive = tiles, place, 0
        self.full = [Barrier(1) for _ in range(tiles.stages)]
        self.empty = [Barrier(WARPS) for _ in range(tiles.stages)]
        self.x_empty = [Barrier(WARPS * tiles.multicast) for _ in range(tiles.stages)]
        self.ring: dict[tuple[str, int], list[int]] = {}

    def write(self, matrix: str, stage: int, k: int) -> None:
        assert self.alive, "a copy into a block that has ended"
        assert self.ring.get((matrix, stage), [0, 0])[1] == 0, "overwritten before all have read it"
        self.ring[matrix, stage] = [k, WARPS]


W_BYTES, X_BYTES = 3, 5
Step = Iterator[bool]
"""An actor: yields whether it may go on; False: it waits."""


def wait(barrier: Barrier, turn: int) -> Step:
    while not barrier.done(turn):
        yield False


def send_x(blocks: list[Block], me: Block, stage: int, k: int) -> Step:
    """One multicast: it arrives at each block at its own time."""
    order = list(blocks if me.tiles.multicast > 1 else [me])
    random.shuffle(order)
    for block in order:
        block.write("x", stage, k)
        block.full[stage].add(more=-X_BYTES)
        yield True


def arm_and_send_w(me: Block, stage: int, k: int) -> Step:
    me.full[stage].add(more=W_BYTES + X_BYTES)
    me.full[stage].add(arrivals=1)
    yield True
    me.write("w", stage, k)
    me.full[stage].add(more=-W_BYTES)
    yield True


def feed(blocks: list[Block], me: Block, first: int, last: int, w: bool, x: bool) -> Step:
    """As ``feed`` of cute_tma_parts; the first weights come with it."""
    tiles = me.tiles
    if w:
        for stage in range(tiles.stages):
            yield from arm_and_send_w(me, stage, first + stage)
    if x:
        for stage in range(tiles.stages):
            if me.place == tiles.sender(stage):
                yield from send_x(blocks, me, stage, first + stage)
    for step in range(first + tiles.stages, last):
        turn, stage = divmod(step - first - tiles.stages, tiles.stages)
        if w:
            yield from wait(me.empty[stage], turn)
            yield from arm_and_send_w(me, stage, step)
        if x:
            if tiles.multicast == 1:
                yield from wait(me.empty[stage], turn)
                yield from send_x(blocks, me, stage, step)
            elif me.place == tiles.sender(stage):
                yield from wait(me.x_empty[stage], turn)
                yield from send_x(blocks, me, stage, step)


def asked_for(tiles: TmaTiles, step: int, last: int) -> bool:
    """Whether a sender waits for the arrival of this step: the guard of the kernels."""
    return step + tiles.stages < last


def consume(blocks: list[Block], me: Block, first: int, last: int) -> Step:
    """One consumer warp."""
    tiles = me.tiles
    for step in range(first, last):
        turn, stage = divmod(step - first, tiles.stages)
        yield from wait(me.full[stage], turn)
        for matrix in ("w", "x"):
            held = me.ring[matrix, stage]
            assert held[0] == step and held[1] > 0, f"{matrix} of K tile {held[0]} in place of {step}"
            yield True
            held[1] -= 1
        me.empty[stage].add(arrivals=1)
        if tiles.multicast > 1 and asked_for(tiles, step, last):
            yield True
            peer = blocks[tiles.sender(stage)]
            assert peer.alive, "an arrival at a block that has ended"
            peer.x_empty[stage].add(arrivals=1)
        yield True


def run(tiles: TmaTiles, seed: int) -> None:
    """One rank of a cluster, all places; a block ends when its own warps have, without the barrier at the end."""
    random.seed(seed)
    first, last = tiles.first(0), tiles.first(1)
    blocks = [Block(tiles, place) for place in range(tiles.multicast)]
    actors: list[tuple[Block, Step]] = []
    for me in blocks:
        mine = [consume(blocks, me, first, last) for _ in range(WARPS)]
        if tiles.producers == 1:
            mine.append(feed(blocks, me, first, last, True, True))
        else:
            mine += [feed(blocks, me, first, last, True, False), feed(blocks, me, first, last, False, True)]
        me.alive = len(mine)
        actors += [(me, actor) for actor in mine]
    # unfair on purpose: some actors rarely get a turn
    weights = {id(actor): random.choice((1, 1, 20)) for _, actor in actors}
    idle = 0
    while actors:
        me, actor = picked = random.choices(actors, [weights[id(a)] for _, a in actors])[0]
        try:
            idle = 0 if next(actor) else idle + 1
        except StopIteration:
            actors.remove(picked)
            me.alive -= 1
        assert idle < 5000, "nobody goes on"


def run_all(tiles: TmaTiles, seeds: int) -> None:
    for seed in range(seeds):
        run(tiles, seed)


def tiles_of(multicast: int, stages: int, producers: int, k_tiles: int) -> TmaTiles:
    return TmaTiles(64, 64 * k_tiles, 16, 32, 1, 64, stages, multicast, "push", producers, "first", 64, 8, 0)


@pytest.mark.parametrize("multicast", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("producers", [1, 2])
def test_blocks_that_share_x_neither_hang_nor_harm_each_other(multicast, stages, producers):
    for k_tiles in range(stages, stages + 9):
        run_all(tiles_of(multicast, stages, producers, k_tiles), 4)


FAULTS = {
    "x sent without asking": (
        "wait",
        lambda barrier, turn: iter(()) if barrier.arrivals > WARPS else WAIT(barrier, turn),
    ),
    "arrivals that nobody waits for": ("asked_for", lambda tiles, step, last: True),
    "arrivals left out": ("asked_for", lambda tiles, step, last: step + tiles.stages + 1 < last),
}
WAIT = wait


@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_sees_faults(monkeypatch, fault):
    """Each of these hangs or harms a peer in some order: else the test above says nothing."""
    import sys

    name, wrong = FAULTS[fault]
    monkeypatch.setattr(sys.modules[__name__], name, wrong)
    with pytest.raises(AssertionError, match=r"overwritten|K tile|misread|next phase|has ended|goes on"):
        run_all(tiles_of(2, 2, 2, 12), 60)
