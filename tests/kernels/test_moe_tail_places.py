"""Who sends, sums, multiplies and finishes what: the kernel's index arithmetic, run on integers over whole grids."""

from collections import Counter

import pytest
from k3lab.kernels.moe_tail import common
from k3lab.kernels.moe_tail.layout import MMA_WARPS, SUM_WORDS, WARPS, Cut

from .moe_tail_case import config, problem

SHAPES = [
    (16, 1, {}), (16, 8, {"exchange": "two_shot"}), (16, 12, {"exchange": "one_shot"}), (8, 3, {"exchange": "two_shot"}),
    (8, 24, {"exchange": "two_shot"}), (4, 5, {"exchange": "one_shot"}), (4, 9, {"exchange": "two_shot"}),
]  # fmt: skip


def cut_of(tp, rows, change) -> Cut:
    one = problem(rows, tp)
    return common.cut(one, config(one, **change))


def sent(shape: Cut, rows: int, epoch: int):
    """(mailbox, receiving rank, byte in its slot) of each access that rank 0 sends before any sum, as ``asked`` has it."""
    live = shape.live_passes(rows) * shape.pass_rows
    width = shape.shard_latents if shape.two_shot else shape.latent
    for number in range(shape.making * WARPS):
        for turn in range(shape.turns):
            task = number + turn * shape.making * WARPS
            if task >= shape.tasks(live):
                continue
            latents = task < shape.latent_tasks(live)
            row, column, group = (
                shape.latent_task(task) if latents else (*shape.share_task(task - shape.latent_tasks(live)), 0)
            )
            for lane in range(32):
                at = column + 4 * lane
                if latents and not shape.two_shot:
                    for i in range(shape.ranks_each):
                        yield "latents", group + i * shape.rank_groups, shape.within(width, epoch & 1, row, at)
                else:
                    size = width if latents else shape.shard
                    name = "latents" if latents else "shares"
                    yield name, at // size, shape.within(size, epoch & 1, row, at % size)


@pytest.mark.parametrize(("tp", "rows", "change"), SHAPES)
def test_everything_is_sent_once_to_whom_it_belongs(tp, rows, change):
    shape = cut_of(tp, rows, change)
    for epoch in (1, 2):
        found = Counter(sent(shape, rows, epoch))
        assert set(found.values()) == {1}
        for name in ("latents", "shares"):
            box = shape.box(name)
            wanted = {
                (name, rank, box.within(epoch, row, 2 * access))
                for rank in range(tp)
                for row in range(shape.live_passes(rows) * shape.pass_rows)
                for access in range(box.packets // 2)
            }
            assert {one for one in found if one[0] == name} == wanted


def test_fewer_rows_send_whole_passes_alone():
    shape = cut_of(16, 48, {"exchange": "two_shot"})
    assert (shape.pass_rows, shape.passes, shape.live_passes(17)) == (16, 3, 2)
    rows = {at // (4 * shape.shard) for name, _, at in sent(shape, 17, 2) if name == "shares"}
    assert rows == set(range(32))


@pytest.mark.parametrize(("tp", "rows", "change"), SHAPES)
def test_each_latent_of_a_pass_is_summed_once_a_cluster_and_multiplied_once(tp, rows, change):
    shape = cut_of(tp, rows, change)
    summed, rounds = Counter(), shape.rounds
    for turn in range(rounds):
        for warp in range(WARPS):
            for lane in range(32):
                row, quad, there = shape.quad(turn, warp, lane)
                if there:
                    summed[row, quad] += 1
    assert summed == Counter({(row, quad): 1 for row in range(shape.pass_rows) for quad in range(shape.span // 4)})
    # together polled rounds are the same lanes' rows, evenly apart and all there
    if shape.rounds_at_once > 1:
        assert shape.pass_rows % shape.beside == 0 and rounds % shape.rounds_at_once == 0
    runs = Counter(c * shape.warps_k + warp for warp in range(shape.warps_k) for c in range(shape.chunks_each))
    assert runs == Counter(range(shape.chunks)) and shape.warps_k <= MMA_WARPS
    assert shape.split * shape.span == shape.latent and shape.chunks * 32 == shape.span


@pytest.mark.parametrize(("tp", "rows", "change"), SHAPES)
def test_two_shots_sum_each_own_latent_once_for_each_rank(tp, rows, change):
    shape = cut_of(tp, rows, {**change, "exchange": "two_shot"})
    quads, total = shape.shard_latents // 4, shape.padded * (shape.shard_latents // 4)
    tasks, stride = shape.total_tasks(shape.padded), shape.making * WARPS
    found = Counter()
    for number in range(stride):
        for lane in range(32):
            _, mine = shape.total_task(number, lane)
            for task in range(number, tasks, stride):
                place, rank = shape.total_task(task, lane)
                assert rank == mine, "a lane has one rank's target for all its tasks"
                if place < total:
                    found[rank, shape.within(shape.shard_latents, 1, place // quads, place % quads * 4)] += 1
    box = shape.totals
    wanted = {
        (rank, box.within(1, row, 2 * access))
        for rank in range(tp)
        for row in range(shape.padded)
        for access in range(box.packets // 2)
    }
    assert found == Counter(wanted)


@pytest.mark.parametrize(("tp", "rows", "change"), SHAPES)
def test_every_column_is_pushed_to_its_block_published_and_finished_once(tp, rows, change):
    shape = cut_of(tp, rows, change)
    pushed = Counter()
    for part in range(shape.split):
        for t in range(shape.pass_rows * 16):
            row, quad = t // 16, t % 16
            pushed[quad // shape.quads_own, shape.pushed(1, part, row) + quad % shape.quads_own * 4] += 4
        for other in range(shape.pass_rows * shape.split):
            pushed[other % shape.split, shape.pushed(1, part, other // shape.split) + shape.own] += 4
    for block in range(shape.split):
        words = {word: size for (to, word), size in pushed.items() if to == block}
        assert 4 * sum(words.values()) == shape.pushed_bytes and set(words.values()) == {4}
        assert set(words) == set(range(shape.pushed_bytes // 4, shape.pushed_bytes // 2, 4))
    assert shape.pass_rows * 16 <= 256 and shape.pass_rows * shape.split <= 192  # senders are of the first 14 warps
    assert shape.pass_rows * shape.quads_own <= 64 and shape.pass_rows * tp <= 512
    assert shape.publishing <= 512
    published = Counter(
        (rank, row, block // shape.split * 64 + block % shape.split * shape.own + 4 * (first + quad) + column)
        for block in range(shape.making)
        for row, rank, first in map(shape.published, range(shape.publishing))
        for quad in range(shape.quads_each)
        for column in range(4)
    )
    wanted = (
        (rank, row, column) for rank in range(tp) for row in range(shape.pass_rows) for column in range(shape.shard)
    )
    assert published == Counter(wanted)
    finished = Counter(
        row for block in range(shape.finishing) for row in range(block, rows, shape.finishing)
    )  # fmt: skip
    assert finished == Counter(range(rows))
    polled = Counter(unit * 512 + lane * 16 + i for unit in range(shape.units) for lane in range(32) for i in range(16))
    assert polled == Counter(range(shape.hidden)) and shape.units <= WARPS
    assert all((column // shape.shard) == (column + 15) // shape.shard for column in range(0, shape.hidden, 16))


@pytest.mark.parametrize(("tp", "rows", "change"), SHAPES)
def test_lanes_that_read_together_fall_on_other_banks(tp, rows, change):
    """Eight lanes of a 16-byte access are served together: 32 words, each of another bank."""
    shape = cut_of(tp, rows, change)
    for first in range(0, 32, 8):
        latents = {
            ((lane // 4) * shape.x_words + lane % 4 * 4 + word) % 32
            for lane in range(first, first + 8)
            for word in range(4)
        }
        assert len(latents) == 32
        sums = {
            (row * SUM_WORDS + quad * 4 + word) % 32 for row, quad in ((0, q) for q in range(8)) for word in range(4)
        }
        assert len(sums) == 32


@pytest.mark.parametrize(("tp", "rows", "change"), SHAPES)
def test_shared_memory_parts_are_aligned_and_hold_what_they_say(tp, rows, change):
    shape = cut_of(tp, rows, change)
    tiles, x, sums, squares, shares, gamma, pushed, bars = shape.making_bytes
    assert not any(size % 16 for size in shape.making_bytes)
    assert x >= 4 * 8 * shape.halves * shape.x_words and shape.x_words >= shape.span // 2
    assert sums >= 4 * shape.warps_k * shape.pass_rows * SUM_WORDS
    assert squares >= 4 * (shape.pass_rows * shape.row_warps + WARPS)
    assert shares >= 2 * shape.pass_rows * shape.own + 8
    assert (tiles, gamma, pushed) == (64 * shape.span * 2, 512 * 8, 2 * shape.pushed_bytes)
    assert bars >= 8 * (2 + shape.warps_k)
    assert shape.memory_bytes >= max(sum(shape.making_bytes), 512 * 96)
