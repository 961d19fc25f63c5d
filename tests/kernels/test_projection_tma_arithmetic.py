"""The TMA engines of the attention projection: the index arithmetic of kernel and launch, run as a whole product."""

from __future__ import annotations

import random

import pytest
import torch
from k3lab.kernels.attention_projection.cute_tma_tiles import BOX, GROUP, TmaTiles

from .tma_case import TCGEN05, WGMMA


def odd_tiles(engine, seed: int) -> TmaTiles:
    """A small problem with a short last tile, uneven K ranges and few rows too many."""
    pick = random.Random(seed)
    split, k_tile, stages = pick.choice((1, 2, 3, 5)), pick.choice((64, 128)), pick.choice((2, 3))
    k_tiles = split * stages + pick.randrange(4)
    outputs, tile_rows = 16 * pick.randrange(2, 9), pick.randrange(17, 150)
    rows = pick.randrange(1, 21)
    return TmaTiles(
        outputs, k_tiles * k_tile, rows, tile_rows, split, k_tile, stages, pick.choice((1, 2, 4)),
        pick.choice(("pull", "push")), pick.choice((1, 2)), pick.choice(("first", "spread")),
        engine.mma_rows, engine.n_step, engine.mma_warps,
    )  # fmt: skip


def k_order(tiles: TmaTiles, tile: int, rank: int) -> list[int]:
    """K tiles of a block in the order of its stages, as ``next_tile`` goes on from ``start``."""
    first, last = tiles.first(rank), tiles.first(rank + 1)
    k, order = tiles.start(first, last, tile), []
    for _ in range(first, last):
        order.append(k)
        k = first if k + 1 == last and tiles.k_start == "spread" else k + 1
    return order


def run_block(tiles: TmaTiles, x: torch.Tensor, w: torch.Tensor, tile: int, rank: int) -> torch.Tensor:
    """One block as the kernels run it, on a flat ring: [n, mma_tile] sums; what no copy wrote is NaN."""
    ring = torch.full((tiles.ring_bytes // 2,), float("nan"))
    acc = torch.zeros(tiles.n, tiles.mma_tile)
    w_box, x_box = tiles.w_rows * BOX, tiles.n * BOX
    steps = k_order(tiles, tile, rank)
    assert len(steps) >= tiles.stages and sorted(steps) == list(range(tiles.first(rank), tiles.first(rank + 1)))
    for turn, step in enumerate(steps):
        stage = turn % tiles.stages
        arrived = 0
        for box in range(tiles.boxes):
            column = (step * tiles.boxes + box) * BOX
            place = (stage * tiles.boxes + box) * w_box
            live = w[tile * tiles.tile_rows : (tile + 1) * tiles.tile_rows, column : column + BOX]
            rows = torch.nn.functional.pad(live, (0, 0, 0, tiles.tile_rows - len(live)))
            ring[place : place + rows.numel()] = rows.flatten()
            place = tiles.x_offset + (stage * tiles.boxes + box) * x_box
            tokens = torch.nn.functional.pad(x[:, column : column + BOX], (0, 0, 0, tiles.n - len(x)))
            ring[place : place + x_box] = tokens.flatten()
            arrived += (rows.numel() + x_box) * 2
        assert arrived == tiles.expected_bytes
        for box in range(tiles.boxes):
            place = (stage * tiles.boxes + box) * w_box
            a = ring[place : place + tiles.mma_tile * BOX]
            assert a.numel() == tiles.mma_tile * BOX, "the MMA reads beyond the shared memory of the block"
            place = tiles.x_offset + (stage * tiles.boxes + box) * x_box
            acc += ring[place : place + x_box].view(tiles.n, BOX) @ a.view(tiles.mma_tile, BOX).T
    return acc


def register_places(tiles: TmaTiles) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight row, token row) of each sum in the consumers' registers, [32 x consumers, registers]."""
    thread = torch.arange(32 * tiles.consumers)[:, None]
    i = torch.arange(GROUP * tiles.register_groups)[None, :]
    if tiles.mma_rows == 64:  # wgmma: rows 8 apart and neighbouring columns
        return thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
    return thread + 0 * i, i + 0 * thread  # a lane of tensor memory


Stored = list[tuple[int, int, float]]


def pulled(tiles: TmaTiles, blocks: list[torch.Tensor], rank: int) -> Stored:
    """(token row, weight row, sum) that a rank stores: sums in shared memory, read from all ranks."""
    assert tiles.n * tiles.pitch * 4 <= tiles.ring_bytes
    sums = [torch.nn.functional.pad(acc, (0, tiles.pitch - tiles.mma_tile), value=float("nan")) for acc in blocks]
    found: Stored = []
    for turn in range(tiles.turns):
        for thread in range(tiles.threads):
            row, within = tiles.at(tiles.group(turn, rank, thread))
            for i in range(GROUP):
                if row < tiles.n and within + i < tiles.tile_rows:
                    found.append((row, within + i, float(sum(block[row, within + i] for block in sums))))
    return found


def pushed(tiles: TmaTiles, blocks: list[torch.Tensor], rank: int) -> Stored:
    """The same by writes into the owner's shared memory: flat, what nobody wrote is NaN."""
    within, row = register_places(tiles)
    live, every = 32 * tiles.live_warps, range(tiles.register_groups)
    assert tiles.incoming_bytes % 16 == 0 and live <= 32 * tiles.consumers
    incoming, sent = torch.full((tiles.incoming_bytes // 4,), float("nan")), 0
    registers = [acc[row, within].view(32 * tiles.consumers, -1, GROUP) for acc in blocks]
    for source in range(tiles.split):
        for group in (g for g in every if source != rank == tiles.owner(g)):
            for thread in range(live):
                slot = tiles.slot(group, source, thread)
                assert slot % GROUP == 0 and bool(incoming[slot : slot + GROUP].isnan().all()), "two sums in one place"
                incoming[slot : slot + GROUP] = registers[source][thread, group]
                sent += 4 * GROUP
    assert sent == tiles.pushed_bytes(rank) <= tiles.incoming_bytes
    found: Stored = []
    for group in (g for g in every if tiles.owner(g) == rank):
        for thread in range(live):
            total = torch.zeros(GROUP)
            for source in range(tiles.split):
                slot = tiles.slot(group, source, thread)
                total += registers[source][thread, group] if source == rank else incoming[slot : slot + GROUP]
            for i, j in enumerate(range(GROUP * group, GROUP * group + GROUP)):
                if within[thread, j] < tiles.tile_rows:
                    found.append((int(row[thread, j]), int(within[thread, j]), float(total[i])))
    return found


@pytest.mark.parametrize("engine", [WGMMA, TCGEN05], ids=lambda engine: engine.name)
@pytest.mark.parametrize("seed", range(16))
def test_the_index_arithmetic_computes_the_product(engine, seed):
    """Every output once, from every K tile once, whatever tile, split and row count; leftovers never reach an output."""
    tiles = odd_tiles(engine, seed)
    generator = torch.Generator().manual_seed(seed)
    live = random.Random(seed).randrange(1, tiles.rows + 1)
    x = torch.randint(-4, 5, (live, tiles.hidden), generator=generator).float()
    w = torch.randint(-4, 5, (tiles.outputs, tiles.hidden), generator=generator).float()
    out = torch.full((tiles.rows, tiles.outputs), float("nan"))
    stored = torch.zeros(tiles.rows, tiles.outputs, dtype=torch.int)
    assert tiles.grid_tiles % tiles.multicast == 0 and tiles.tiles <= tiles.grid_tiles < tiles.tiles + tiles.multicast
    for tile in range(tiles.grid_tiles):
        for rank in range(tiles.split):  # what the tiles of a cluster share comes at the same time
            assert k_order(tiles, tile, rank) == k_order(tiles, tile - tiles.place(tile), rank)
        blocks = [run_block(tiles, x, w, tile, rank) for rank in range(tiles.split)]
        for rank in range(tiles.split):
            for row, within, total in (pushed if tiles.reduce == "push" else pulled)(tiles, blocks, rank):
                output = tile * tiles.tile_rows + within
                if row < live and output < tiles.outputs:
                    out[row, output] = total
                    stored[row, output] += 1
    assert torch.equal(out[:live], x @ w.T)  # small integers: exact in any order
    assert bool((stored[:live] == 1).all()) and not bool(stored[live:].any())


def test_the_arithmetic_meets_odd_cases():
    """What the test above draws includes what can go wrong: else it could not fail."""
    drawn = [odd_tiles(WGMMA, seed) for seed in range(16)]
    assert any(tiles.k_tiles % tiles.split for tiles in drawn)
    assert any(tiles.outputs % tiles.tile_rows for tiles in drawn)
    assert any(tiles.tile_rows % 8 and tiles.mma_tile > tiles.w_rows for tiles in drawn)
    assert any(tiles.tile_rows % GROUP for tiles in drawn)
    assert any(tiles.boxes == 2 for tiles in drawn) and any(tiles.rows % 8 for tiles in drawn)
    assert any(tiles.grid_tiles > tiles.tiles for tiles in drawn)
    pushing = [tiles for tiles in drawn if tiles.reduce == "push" and tiles.split > 1]
    assert any(tiles.register_groups % tiles.split for tiles in pushing)
    assert any(tiles.live_warps < tiles.consumers for tiles in pushing)
    assert any(tiles.k_start == "spread" and tiles.grid_tiles > tiles.multicast for tiles in drawn)


@pytest.mark.parametrize("engine", [WGMMA, TCGEN05], ids=lambda engine: engine.name)
def test_layout_rules_of_the_hardware(engine):
    for seed in range(40):
        tiles = odd_tiles(engine, seed)
        assert tiles.w_rows * BOX * 2 % 1024 == 0 and tiles.x_offset * 2 % 1024 == 0, "swizzle atoms of 1024 bytes"
        assert tiles.n * BOX * 2 % 1024 == 0
        assert tiles.pitch % 16 == 4, "16-byte reads, stores of a warp in 32 banks"
        assert tiles.ring_bytes % 1024 == 0
        assert tiles.consumers % 4 == 0
        assert tiles.pushed_bytes(0) < 2**20 and tiles.expected_bytes < 2**20, "bytes that a barrier counts"
        barriers = {stage + first for first in (0, tiles.stages, tiles.x_empty) for stage in range(tiles.stages)}
        own = 2 if tiles.multicast == 1 else 3
        assert len(barriers | {tiles.finished, tiles.arrived}) == own * tiles.stages + 2
        assert max(barriers | {tiles.finished, tiles.arrived}) < tiles.barriers
        columns = tiles.tmem_columns
        assert columns & (columns - 1) == 0 and 32 <= columns <= 512
        assert columns >= tiles.mma_tile // tiles.mma_rows * tiles.n
