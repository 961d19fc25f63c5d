"""Engines of the output projection: refusals, spaces, who publishes and polls what, machine code, the PyTorch chain."""

import dataclasses
from collections import Counter

import pytest
import torch
from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.output_projection import common
from k3lab.kernels.output_projection.cute_fused_engine import INVARIANT, mixers
from k3lab.tuning.compare import compare
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.sass_order import WAIT, order, places, release_fault, wait_fault

FAMILY = family("output_projection")
FUSED, SPLIT = FAMILY.engine("cute_fused"), FAMILY.engine("cute_split")
CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}
WEIGHTS = r"LDG\.E\.NA\..*128"
SMALL_WEIGHTS = r"LDG\.E\.NA(\.U16)?"


def problem(rows=8, tp=16, kind="kda", **changes):
    return dataclasses.replace(FAMILY.problem(K3, tp=tp, rows=rows, kind=kind), **changes)


def config(one, engine=FUSED, **changes):
    return {**engine.space(one, CARDS["sm_90a"]).default, **changes}


def test_refusals_say_why():
    assert FUSED.refuses(problem(), "sm_103a") is None
    assert "sm_80" in FUSED.refuses(problem(), "sm_80")
    assert "hidden 4096" in FUSED.refuses(problem(hidden=4096), "sm_90a")
    assert "width 100" in FUSED.refuses(problem(width=100), "sm_90a")
    assert "9 saved blocks" in FUSED.refuses(problem(blocks=9), "sm_90a")
    assert "at most 16 ranks" in FUSED.refuses(problem(tp=32, width=384), "sm_90a")
    assert "64 rows" in FUSED.refuses(problem(rows=64), "sm_90a")
    assert SPLIT.refuses(problem(rows=64), "sm_100a") is None
    assert "neither 192 nor 256" in SPLIT.refuses(problem(width=32), "sm_90a")
    assert "hidden 4096" in SPLIT.refuses(problem(hidden=4096), "sm_90a")


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("rows", [1, 3, 8, 12, 16, 24, 33, 48, 64])
def test_defaults_are_legal_on_every_card_and_spaces_can_be_listed(tp, rows):
    from k3lab.tuning.propose import ENUMERABLE

    for engine in (FUSED, SPLIT):
        if engine.refuses(problem(rows, tp), "sm_90a") is None:
            for card in CARDS.values():
                space = engine.space(problem(rows, tp), card)
                assert space.illegal(space.default) is None
                assert space.size <= ENUMERABLE


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"k_order": "invariant", "warps_k": 8, "depth": 3}, "invariant needs run_bytes 64, warps_k 6"),
        ({"depth": 6}, "more steps in flight"),
        ({"warps_k": 16, "depth": 1}, "do not divide width 768"),
        ({"warps_k": 12, "depth": 1}, "a mixer less than"),
        ({"run_bytes": 128, "warps_k": 4, "depth": 3}, "exceed a thread's registers"),
    ],
)
def test_illegal_configs_are_explained(change, why):
    space = FUSED.space(problem(), CARDS["sm_90a"])
    assert why in space.illegal({**space.default, **change})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"depth": 3}, "exceed a thread's registers"),
        ({"warps_k": 16, "depth": 1}, "exceed a thread's registers"),
        ({"mixers": 8}, "more than the 132 SMs"),
        ({"release": "entry", "consumer_wait": "exit"}, "releases after its own"),
        ({"run_bytes": 128, "depth": 1}, "exceed the 16 rows of an MMA"),
    ],
)
def test_illegal_split_configs_are_explained(change, why):
    space = SPLIT.space(problem(64, 8), CARDS["sm_90a"])
    assert why in space.illegal({**space.default, **change})


def test_invariant_configs_share_what_a_partials_sum_depends_on():
    orders = set()
    for rows in (1, 8, 16):
        one = problem(rows)
        chosen = config(one, **INVARIANT, k_order="invariant", depth=2)
        assert FUSED.space(one, CARDS["sm_90a"]).illegal(chosen) is None
        orders.add(FUSED.summation_order(one, chosen))
    assert len(orders) == 1


# -- who publishes and polls what ---------------------------------------------------------------
# The kernels' own functions of indices, run on integers.
def plain(function):
    return function.__wrapped__


def test_columns_of_a_packet_are_those_of_the_mailbox():
    from k3lab.kernels.output_projection.cute_parts import columns_of

    for index in range(1024):
        pair, last = plain(columns_of)(index)
        mine = (*(pair + 16 * word + half for word in range(3) for half in range(2)), last)
        assert mine == common.PACKET.columns(index)


def test_every_sum_of_a_block_has_a_place_of_its_own_in_its_packet():
    from k3lab.kernels.output_projection.cute_product import ROW_WORDS, place

    assert ROW_WORDS == common.SUM_WORDS
    places_ = [plain(place)(column) for column in range(common.COLUMNS)]
    assert len(set(places_)) == common.COLUMNS and max(places_) < ROW_WORDS
    for index in range(8):
        # the lane of packet p and word e reads the two places 8 p + 2 e and the next
        assert [places_[column] for column in common.PACKET.columns(index)] == [8 * index + k for k in range(7)]


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


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("rows", [1, 3, 8, 16])
def test_every_packet_that_is_polled_is_published_once(tp, rows):
    one = problem(rows, tp)
    (mail,), warps = common.mail(one, {}), 6
    for epoch in (1, 2, 65536):
        written, polled = Counter(), Counter()
        for block in range(128):
            for warp in range(warps):
                for turn in range(-(-rows // warps)):
                    row = turn * warps + warp
                    for lane in range(32):
                        group, quad = lane // 4, lane % 4
                        for i in range(-(-tp // 4)):
                            rank = quad + 4 * i
                            if row < rows and rank < tp:
                                line = ((epoch % 2 * rows + row) * 1024 + block * 8 + group) * 16
                                written[rank * mail.slot_bytes + line] += 1
            for mixer in range(mixers(rows)):
                number = block * mixers(rows) + mixer
                row, unit = number // common.UNITS, number % common.UNITS
                for lane in range(32):
                    if row < rows:
                        at = ((epoch % 2 * rows + row) * 1024 + unit * 32 + lane) * 16
                        for rank in range(tp):
                            polled[at + rank * 2 * rows * 1024 * 16] += 1
                            assert at + rank * 2 * rows * 1024 * 16 == mail.offset(rank, epoch, row, unit * 32 + lane)
        assert written == polled
        assert set(written.values()) == {1} and len(written) == tp * rows * 1024


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize(("rows", "mixers_"), [(1, 1), (8, 2), (17, 8), (64, 16)])
def test_two_shot_packets_are_published_once_and_polled_where_they_lie(tp, rows, mixers_):
    """Over loopback: what goes to owner p lies in slot p of this GPU's mailbox."""
    one = problem(rows, tp)
    parts, totals = common.mail(one, {"exchange": "two_shot"})
    shard, epoch, grid = common.shard(one, {"exchange": "two_shot"}), 3, rows * common.UNITS // mixers_
    assert parts.packets == shard == 1024 // tp
    written, polled, sent, wanted = Counter(), Counter(), Counter(), Counter()
    for block in range(128):
        for row in range(rows):
            for group in range(8):
                line = ((epoch % 2 * rows + row) * shard + block * 8 % shard + group) * 16
                owner = block * 8 // shard
                written[owner * parts.slot_bytes + line] += 1
                assert line == parts.within(epoch, row, block * 8 + group - owner * shard)
    for block in range(grid):
        for warp in range(mixers_):
            number = warp * grid + block
            for lane in range(32 if number < rows * shard // 32 else 0):
                line = (epoch % 2 * rows * shard + number * 32 + lane) * 16
                for rank in range(tp):
                    polled[line + rank * 2 * rows * shard * 16] += 1
                    sent[rank * totals.slot_bytes + line] += 1
            row, unit = divmod(block * mixers_ + warp, common.UNITS)
            for lane in range(32):
                owner, index = divmod(unit * 32 + lane, shard)
                at = (((2 * owner + epoch % 2) * rows + row) * shard + index) * 16
                assert at == totals.offset(owner, epoch, row, index)
                wanted[at] += 1
    assert written == polled and set(written.values()) == {1}
    assert sent == wanted and set(sent.values()) == {1}


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


# -- machine code --------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", CARDS)
@pytest.mark.parametrize(("tp", "rows", "kind", "change"), [
    (16, 8, "kda", {}),
    (16, 1, "restart", {"release": "entry"}),
    (8, 8, "kda", {"depth": 5}),
    (16, 8, "mla", {"run_bytes": 128, "depth": 2, "backoff": 20}),
    (4, 16, "kda", {"release": "end", "depth": 2}),
])  # fmt: skip
def test_machine_code(arch, tp, rows, kind, change):
    """No spills; weights in flight before either wait and nothing else; packets are single accesses; waits look."""
    one = problem(rows, tp, kind)
    chosen = config(one, **change)
    assert FUSED.space(one, CARDS[arch]).illegal(chosen) is None
    (launch,) = FUSED.compile(one, chosen, arch).launches
    found, code = kernel_resources(launch), order(launch.cubin)
    n_tiles, m_tiles, _ = common.gemm_tiles(rows, chosen)
    assert launch.kernel.startswith("k3_output_projection_cute_fused_step")
    assert (launch.blocks, launch.pdl, launch.needs_residency, launch.cluster_blocks) == (128, True, True, 1)
    assert found.spill_instructions == 0 and found.stack_bytes == 0
    assert found.registers <= common.register_limit(launch.threads // 32)
    # one wait for the warps of the product, one for the mixers; each thread passes one
    waits = places(code, WAIT)
    assert len(waits) == 2 and not any(code[wait].predicated for wait in waits)
    loads = places(code, r"LDG\..*|LD\..*|LDGSTS.*")
    first = [code[place].mnemonic for place in loads if place < waits[0]]
    assert len(first) == chosen["depth"] * n_tiles and {name.split(".")[2] for name in first} == {"NA"}
    exits = [place for place in places(code, "EXIT") if place < waits[1]]
    between = [code[place].mnemonic for place in loads if exits[-1] < place < waits[1]]
    assert len(between) == 12 and all(name in ("LDG.E.NA", "LDG.E.NA.U16") for name in between)
    assert not [
        place
        for place in places(code, r"STG\..*|ATOM.*|RED\..*|REDG.*")
        if place < waits[0] or exits[-1] < place < waits[1]
    ]
    # PDL
    releases = places(code, "PREEXIT")
    assert len(releases) == (0 if chosen["release"] == "end" else 1)
    weights = places(code, WEIGHTS)
    if chosen["release"] == "entry":
        assert releases[0] < weights[0]
    if chosen["release"] == "loads":
        assert releases[0] > weights[-1]
    # packets: whole, to and from the other ranks at system scope, scalars at the GPU's; no fence, no acquire
    turns = -(-rows // chosen["warps_k"])
    assert len(places(code, r"STG\.E\.128\.STRONG\.SYS")) == turns * (tp // 4)
    assert len(places(code, r"LDG\.E\.128\.STRONG\.SYS")) == 2 * tp
    assert places(code, r"LDG\.E\.128\.STRONG\.GPU") and not places(
        code, r"LDG\.E\.(64\.)?STRONG\.SYS|LDG\.E\.64\.STRONG.*"
    )
    assert not places(code, r"MEMBAR.*|CCTL.*|ERRBAR.*")
    # each wait looks at the clock and can claim the record
    exchanges = 1 + 1 + 1  # saved blocks, partials, the row's sums
    assert len(places(code, r"ATOMG\.E\.CAS\.STRONG\.GPU")) == exchanges
    assert bool(places(code, "NANOSLEEP")) == (chosen["backoff"] > 0)
    steps = len(weights) // n_tiles
    assert len(places(code, r"HMMA\.16816\.F32\.BF16")) == 2 * n_tiles * m_tiles * steps


@pytest.mark.parametrize("arch", CARDS)
@pytest.mark.parametrize(("tp", "rows", "change"), [
    (8, 64, {}), (16, 64, {"release": "end", "consumer_wait": "exit"}), (16, 33, {"backoff": 20}), (8, 8, {"mixers": 4, "consumer_wait": "exit"}),
    (4, 24, {"release": "entry"}), (16, 64, {"exchange": "two_shot"}), (8, 17, {"exchange": "two_shot", "consumer_wait": "exit"}),
])  # fmt: skip
def test_machine_code_of_producer_and_consumer(arch, tp, rows, change):
    one = problem(rows, tp)
    chosen = config(one, SPLIT, **change)
    assert SPLIT.space(one, CARDS[arch]).illegal(chosen) is None
    producer, consumer = SPLIT.compile(one, chosen, arch).launches
    assert producer.kernel.startswith("k3_output_projection_cute_split_producer")
    assert consumer.kernel.startswith("k3_output_projection_cute_split_consumer")
    assert (producer.needs_residency, consumer.needs_residency) == (False, True) and producer.pdl and consumer.pdl
    assert consumer.blocks <= 128 and consumer.blocks * consumer.threads == rows * common.UNITS * 32
    for launch in (producer, consumer):
        found = kernel_resources(launch)
        assert found.spill_instructions == 0 and found.stack_bytes == 0
        assert found.registers <= common.register_limit(launch.threads // 32)
    code, n_tiles = order(producer.cubin), common.gemm_tiles(rows, chosen)[0]
    assert wait_fault(code, WEIGHTS, ahead=chosen["depth"] * n_tiles) is None
    assert release_fault(code, WEIGHTS, chosen["release"]) is None
    two = chosen["exchange"] == "two_shot"
    sends = -(-rows // chosen["warps_k"]) * (1 if two else tp // 4)
    assert len(places(code, r"STG\.E\.128\.STRONG\.SYS")) == sends
    assert not places(code, r"LDG\.E\.128\.STRONG.*|MEMBAR.*|CCTL.*|ATOM.*")
    code = order(consumer.cubin)
    (wait,) = places(code, WAIT)
    assert not code[wait].predicated
    assert len(places(code, r"LDG\.E\.128\.STRONG\.SYS")) == 2 * (tp + two)
    assert len(places(code, r"STG\.E\.128\.STRONG\.SYS")) == tp * two
    assert not places(code, r"MEMBAR.*|CCTL.*")
    stores = places(code, r"STG\..*")
    if chosen["consumer_wait"] == "start":
        assert wait_fault(code, SMALL_WEIGHTS, ahead=12) is None
    else:  # all is stored before, but the counter that the next launch reads
        assert [code[place].mnemonic for place in stores if place > wait] == ["STG.E.STRONG.GPU"]


@pytest.mark.parametrize("blocks", [0, 1, 3, 8])
def test_any_number_of_saved_blocks_compiles(blocks):
    one = problem(2, 8, blocks=blocks)
    (launch,) = FUSED.compile(one, config(one), "sm_90a").launches
    assert kernel_resources(launch).spill_instructions == 0
    assert len(launch.args) == 15


def test_delays_are_compiled_in_only_when_asked_for():
    one = problem()
    for jitter, there in ((0, False), (7, True)):
        (launch,) = FUSED.compile(one, {**config(one), "jitter": jitter}, "sm_90a").launches
        assert bool(places(order(launch.cubin), "NANOSLEEP")) == there


def test_buffers_are_kept_and_the_record_is_among_them():
    one = problem()
    made = FUSED.compile(one, config(one), "sm_90a")
    names = {buffer.name: buffer for buffer in made.buffers}
    assert set(names) == {"mailbox", "mailbox_targets", "scalars", "epochs", "health"}
    two = SPLIT.compile(one, config(one, SPLIT, exchange="two_shot"), "sm_90a")
    assert {buffer.name for buffer in two.buffers} == {*names, "totals", "totals_targets"}
    assert all(buffer.persistent or buffer.targets_of for buffer in made.buffers)
    assert {arg.name for arg in made.launches[0].args} >= set(names)


# -- the PyTorch chain ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["kda", "restart"])
@pytest.mark.parametrize("tp", [4, 16])
def test_the_chain_of_operators_equals_the_twin(tp, kind):
    from k3lab.kernels import SMALL_K3

    one = FAMILY.problem(SMALL_K3, tp=4, rows=3, kind=kind)
    one = dataclasses.replace(one, tp=tp)
    inputs = FAMILY.inputs(one, 1)
    outputs = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in FAMILY.output_specs(one).items()
    }
    twin = FAMILY.expected(one, {}, inputs)
    FAMILY.alternative(one, {**inputs, **outputs})()
    for found in (outputs, FAMILY.operators(one)(inputs)):
        for name in FAMILY.outputs:
            result = compare(name, found[name], twin[name], FAMILY.tolerance(one, name))
            assert result.ok, result.message
