"""Who publishes and polls what: the kernels' own functions of indices, run on integers over whole grids."""

from collections import Counter

import pytest
import torch
from k3lab.kernels.output_projection import common
from k3lab.kernels.output_projection.cute_fused_engine import mixers
from k3lab.kernels.output_projection.mailbox import PACKETS

from .test_output_projection_engines import problem

FORMS = list(PACKETS)


def plain(function):
    return function.__wrapped__


def test_every_sum_of_a_block_has_a_place_of_its_own_in_its_packet():
    from k3lab.kernels.output_projection.cute_product import ROW_WORDS, place

    assert ROW_WORDS == common.SUM_WORDS
    places_ = [plain(place)(column) for column in range(common.COLUMNS)]
    assert len(set(places_)) == common.COLUMNS and max(places_) < ROW_WORDS
    for index in range(8):
        # the lane of packet p and word e reads the two places 8 p + 2 e and the next
        assert [places_[column] for column in PACKETS["bf16x7e16"].columns(index)] == [8 * index + k for k in range(7)]


@pytest.mark.parametrize("run_bytes", [64, 128])
@pytest.mark.parametrize("rows", [1, 5, 8, 16])
def test_lanes_of_a_warp_hold_each_sum_once(rows, run_bytes):
    """Which (row of x, column) each accumulator of m16n8k16 is, by its documented layout, and that all are kept."""
    if run_bytes == 128 and rows > 8:
        return
    chunks = run_bytes // 64
    n_tiles, m_tiles, halves = common.gemm_tiles(rows, {"run_bytes": run_bytes})
    found = Counter()
    for lane in range(32):
        group, quad = lane // 4, lane % 4
        for m in range(m_tiles):
            for j in range(n_tiles):
                for c, (a, b) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):  # rows g or g + 8, columns 2 q or 2 q + 1
                    n8 = 2 * quad + b
                    if chunks == 2:
                        kept = c in (0, 3)
                        token, x_chunk, column, w_chunk = group, a, j * 4 + n8 // 2, n8 % 2
                        assert (x_chunk == w_chunk) == kept
                    else:
                        kept = a < halves
                        token, column, x_chunk = m * 16 + a * 8 + group, j * 8 + n8, 0
                    if kept and token < rows:
                        found[token, column, x_chunk] += 1
    assert found == Counter({(t, n, k): 1 for t in range(rows) for n in range(common.COLUMNS) for k in range(chunks)})


def accesses(name):
    """(bytes that a lane polls, bytes that it writes) of its packet, from the start of a slot."""
    from k3lab.kernels.cute_packets import offsets, pair_offset

    if name == "bf16x7e16":
        return lambda packet: plain(offsets)(packet, name), lambda packet: [packet * 16]
    return (
        lambda packet: [plain(pair_offset)(packet, word) for word in range(4)],
        lambda packet: [plain(pair_offset)(packet, word) for word in range(3 if packet % 2 else 4)],
    )


@pytest.mark.parametrize("name", FORMS)
def test_what_a_lane_holds_is_what_its_packets_carry(name):
    """Value by value: the columns of a lane's words, and of the packets that it polls, in either form."""
    from k3lab.kernels.output_projection.cute_parts import columns_of

    form, (polls, _) = PACKETS[name], accesses(name)
    for index in range(1024):
        pair, last = plain(columns_of)(index)
        words = [(pair + 16 * word, pair + 16 * word + 1) for word in range(3)]
        found = [form.columns(at // form.bytes) for at in polls(index)]
        if name == "bf16x7e16":
            assert found == [(*words[0], *words[1], *words[2], last)]
        else:  # of the seventh values' word an odd lane has the upper half
            assert found[:3] == words and found[3][index % 2] == last


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_block_of_a_row_finds_the_columns_of_its_units_in_its_slices(rows, size):
    """Where rows have blocks of their own: every unit of a row has one warp, and what it reads of a slice is what its packets carry."""
    from k3lab.kernels.output_projection.cute_parts import columns_of

    units, found = common.UNITS // size, Counter()
    for block in range(rows * size):
        row, first = block // size, block % size * units
        start, columns = first * 224, common.HIDDEN // size  # of the slice: 448 bytes a unit
        assert columns == 224 * units
        for warp in range(units):
            for lane in range(32):
                # of the row, and of the block's own packets
                pair, last = plain(columns_of)((first + warp) * 32 + lane)
                in_slice, last_in_slice = plain(columns_of)(warp * 32 + lane)
                assert (pair, last) == (start + in_slice, start + last_in_slice)
                read = [in_slice + 16 * word + half for word in range(3) for half in range(2)] + [last_in_slice]
                assert max(read) < columns
                found.update((row, start + column) for column in read)
    assert found == Counter({(row, column): 1 for row in range(rows) for column in range(common.HIDDEN)})


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("tp", "rows"), [(4, 8), (8, 3), (16, 1), (16, 3)])
def test_every_packet_that_is_polled_is_published_once(tp, rows, name):
    one = problem(rows, tp)
    (mail,), warps, (polls, writes) = common.mail(one, {"packet": name}), 6, accesses(name)
    for epoch in (1, 2):
        written, polled = Counter(), Counter()
        for block in range(128):
            for warp in range(warps):
                for row in range(warp, rows, warps):
                    for lane in range(32):
                        group, quad = lane // 4, lane % 4
                        packet = (epoch % 2 * rows + row) * 1024 + block * 8 % 1024 + group
                        for rank in range(quad, tp, 4):
                            written.update(rank * mail.slot_bytes + at for at in writes(packet))
            for mixer in range(mixers(rows)):
                number = block * mixers(rows) + mixer
                row, unit = number // common.UNITS, number % common.UNITS
                for lane in range(32 if row < rows else 0):
                    packet = (epoch % 2 * rows + row) * 1024 + unit * 32 + lane
                    for rank in range(tp):
                        polled.update(rank * mail.slot_bytes + at for at in polls(packet))
        expected = {
            mail.offset(rank, epoch, row, index)
            for rank in range(tp)
            for row in range(rows)
            for index in range(mail.packets)
        }
        assert set(written) == set(polled) == expected
        assert set(written.values()) == {1} and len(written) == tp * rows * mail.packets


def test_one_multicast_store_a_packet_reaches_what_all_ranks_poll():
    """The switch writes at the same offset of every rank's slot."""
    from k3lab.kernels.cute_packets import pair_offset

    (mail,) = common.mail(problem(3, 8), {"packet": "b32e32"})
    for epoch, row in ((1, 0), (2, 2)):
        written = Counter(
            plain(pair_offset)((epoch % 2 * 3 + row) * 1024 + block * 8 + lane // 4, lane % 4)
            for block in range(128)
            for lane in range(32)
            if lane % 4 < 3 or lane // 4 % 2 == 0
        )
        assert set(written.values()) == {1}
        assert set(written) == {mail.within(epoch, row, index) for index in range(mail.packets)}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize(("rows", "mixers_"), [(1, 1), (17, 8)])
def test_two_shot_packets_are_published_once_and_polled_where_they_lie(tp, rows, mixers_, name):
    """Over loopback: what goes to owner p lies in slot p of this GPU's mailbox."""
    one, chosen = problem(rows, tp), {"exchange": "two_shot", "packet": name}
    (parts, totals), (polls, writes) = common.mail(one, chosen), accesses(name)
    shard, epoch, grid = common.shard(one, chosen), 3, rows * common.UNITS // mixers_
    assert parts.parity_bytes == rows * shard // 8 * {"bf16x7e16": 128, "b32e32": 224}[name]
    written, polled, sent, wanted = Counter(), Counter(), Counter(), Counter()
    for block in range(128):
        for row in range(rows):
            for group in range(8):
                packet = (epoch % 2 * rows + row) * shard + block * 8 % shard + group
                written.update(block * 8 // shard * parts.slot_bytes + at for at in writes(packet))
    for block in range(grid):
        for warp in range(mixers_):
            number = warp * grid + block
            for lane in range(32 if number < rows * shard // 32 else 0):
                packet = epoch % 2 * rows * shard + number * 32 + lane
                for rank in range(tp):
                    polled.update(rank * parts.slot_bytes + at for at in polls(packet))
                    sent.update(rank * totals.slot_bytes + at for at in writes(packet))
            row, unit = divmod(block * mixers_ + warp, common.UNITS)
            for lane in range(32):
                owner, index = divmod(unit * 32 + lane, shard)
                wanted.update(polls(((2 * owner + epoch % 2) * rows + row) * shard + index))
    expected = {
        totals.offset(owner, epoch, row, index)
        for owner in range(tp)
        for row in range(rows)
        for index in range(totals.packets)
    }
    assert set(written) == set(polled) == set(sent) == set(wanted) == expected
    assert set(written.values()) == set(sent.values()) == {1}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8])
def test_scalars_of_saved_blocks_reach_every_lane(count):
    """The butterfly that halves what it sends leaves value i in lanes 2 i and 2 i + 1; three of them make a packet."""
    lanes = torch.arange(32)
    values = torch.randint(0, 1000, (32, 16))
    left = [values[:, i] for i in range(16)]
    for step in range(4):
        distance, half = 16 >> step, 8 >> step
        upper = (lanes & distance) != 0
        kept = [torch.where(upper, left[half + i], left[i]) for i in range(half)]
        sent = [torch.where(upper, left[i], left[half + i]) for i in range(half)]
        left = [mine + other[lanes ^ distance] for mine, other in zip(kept, sent, strict=True)]
    total = left[0] + left[0][lanes ^ 1]
    assert torch.equal(total, values.sum(0)[lanes // 2])
    packets = -(-2 * count // 3)
    assert packets <= common.SCALAR_PACKETS - 2
    for index in range(2 * count):
        assert total[(index // 3 * 6 + 2 * (index % 3)) & 31] == values.sum(0)[index]
