"""Engines of the output projection: refusals, spaces, machine code, the PyTorch chain."""

import dataclasses
import re

import pytest
import torch
from k3lab.kernels import K3, InputError, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.output_projection import common, cute_apart_engine, cute_fused_engine, cute_split_engine
from k3lab.kernels.residency import register_limit
from k3lab.tuning.compare import compare
from k3lab.tuning.cubin import kernel_resources, sass
from k3lab.tuning.sass_order import WAIT, order, places, release_fault, wait_fault

FAMILY = family("output_projection")
FUSED, SPLIT = FAMILY.engine("cute_fused"), FAMILY.engine("cute_split")
APART = FAMILY.engine("cute_apart")
CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}
WEIGHTS = r"LDG\.E\.NA\..*128"
SMALL_WEIGHTS = r"LDG\.E\.NA(\.U16)?"
# where the compiler cannot prove that a warp is together, as behind polls that end lane by lane, shuffles and votes get a
# second form that first brings the warp together: out of line, so cold, and about a microsecond where it is taken
SLOW_PATHS = re.compile(r"BRA\.DIV|ENDCOLLECTIVE")


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

    for engine in (FUSED, APART, SPLIT):
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


@pytest.mark.parametrize("mixers", [1, 2, 12])
def test_a_row_is_a_cluster_of_two_to_eight_blocks(mixers):
    space = SPLIT.space(problem(3, 16), CARDS["sm_90a"])
    assert space.illegal({**space.default, "row_sums": "cluster", "mixers": 4}) is None
    why = space.illegal({**space.default, "row_sums": "cluster", "mixers": mixers})
    assert f"{mixers} warps a block do not make a row of 32 a cluster" in why


def test_invariant_configs_share_what_a_partials_sum_depends_on():
    """Of one another, too: both engines with one launch add in the same order."""
    orders = set()
    for engine, pinned in ((FUSED, cute_fused_engine.INVARIANT), (APART, cute_apart_engine.INVARIANT)):
        for rows in (1, 8, 16):
            one = problem(rows)
            chosen = config(one, engine, **pinned, k_order="invariant", depth=2)
            assert engine.space(one, CARDS["sm_90a"]).illegal(chosen) is None
            orders.add(engine.summation_order(one, chosen))
    assert len(orders) == 1


def test_an_invariant_order_for_all_rows_and_tp_sizes_is_that_of_two_launches():
    """One launch serves 16 rows at most, and shares K among six warps in place of eight: to mix engines is to mix orders."""
    orders = set()
    for tp in (4, 8, 16):
        for rows in (1, 8, 16, 17, 33, 64):
            one = problem(rows, tp)
            chosen = config(one, SPLIT, **cute_split_engine.INVARIANT, k_order="invariant", depth=1)
            assert all(SPLIT.space(one, card).illegal(chosen) is None for card in CARDS.values())
            orders.add(SPLIT.summation_order(one, chosen))
    few = config(problem(), k_order="invariant", **cute_fused_engine.INVARIANT)
    assert len(orders) == 1 and FUSED.summation_order(problem(), few) not in orders


# -- machine code --------------------------------------------------------------------------------
def stores_and_loads(code):
    """(stores, loads) at system scope by their bytes: those of packets."""
    return tuple(
        {size: len(found) for size in (64, 128) if (found := places(code, rf"{kind}\.E\.{size}\.STRONG\.SYS"))}
        for kind in ("STG", "LDG")
    )


def packets_of(chosen, sends, polls):
    """The same for so many packets of seven values: one access each, or four of two values."""
    times, size = (4, 64) if chosen["packet"] == "b32e32" else (1, 128)
    return tuple({size: times * count} if count else {} for count in (sends, polls))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize(("tp", "rows", "kind", "change"), [
    (16, 8, "kda", {}),
    (16, 1, "restart", {"release": "entry"}),
    (8, 8, "kda", {"depth": 5}),
    (16, 8, "mla", {"run_bytes": 128, "depth": 2, "backoff": 20}),
    (4, 16, "kda", {"release": "end", "depth": 2}),
    (16, 8, "kda", {"packet": "b32e32", "rehearse": 1}),
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
    assert found.registers <= register_limit(launch.threads, CARDS[arch])
    assert not SLOW_PATHS.search(sass(launch.cubin))
    # one wait for the warps of the product; for the mixers one that an early launch goes around, and one that all pass
    waits = places(code, WAIT)
    assert len(waits) == 4 and not any(code[wait].predicated for wait in waits)
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
    # early: nothing is written between the two but scalars, and the record where a wait for them gives up
    ahead = {
        code[place].mnemonic for place in places(code, r"STG\..*|ST\..*|ATOM.*|RED.*") if waits[1] < place < waits[2]
    }
    assert "STG.E.128.STRONG.GPU" in ahead and not any("SYS" in name for name in ahead)
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
    assert stores_and_loads(code) == packets_of(chosen, turns * (tp // 4), tp)
    assert places(code, r"LDG\.E\.128\.STRONG\.GPU") and not places(
        code, r"LDG\.E\.STRONG\.SYS|LDG\.E\.64\.STRONG\.GPU"
    )
    assert not places(code, r"MEMBAR.*|CCTL.*|ERRBAR.*")
    # each wait looks at the clock and can claim the record
    exchanges = 1 + 1 + 1  # saved blocks, partials, the row's sums
    assert len(places(code, r"ATOMG\.E\.CAS\.STRONG\.GPU")) == exchanges
    assert bool(places(code, "NANOSLEEP")) == (chosen["backoff"] > 0)
    steps = len(weights) // n_tiles
    assert len(places(code, r"HMMA\.16816\.F32\.BF16")) == 2 * n_tiles * m_tiles * steps


PAIRS = [
    (8, 64, {}), (16, 64, {"release": "end", "consumer_wait": "exit"}), (16, 33, {"backoff": 20}), (8, 8, {"mixers": 4, "consumer_wait": "exit"}),
    (4, 24, {"release": "entry"}), (16, 64, {"exchange": "two_shot"}), (8, 17, {"exchange": "two_shot", "consumer_wait": "exit"}),
    (8, 64, {"packet": "b32e32"}), (16, 64, {"exchange": "two_shot", "packet": "b32e32"}),
]  # fmt: skip
BLACKWELL = (0, 3, 5, 8)
"""Of the pairs: both exchanges, both packets, both waits, few and many rows."""


@pytest.mark.parametrize(
    ("arch", "tp", "rows", "change"),
    [
        pytest.param(arch, *one, marks=() if arch == "sm_90a" or place in BLACKWELL else pytest.mark.slow)
        for place, one in enumerate(PAIRS)
        for arch in ("sm_90a", "sm_103a")
    ],
)
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
        assert found.registers <= register_limit(launch.threads, CARDS[arch])
        assert not SLOW_PATHS.search(sass(launch.cubin))
    code, n_tiles = order(producer.cubin), common.gemm_tiles(rows, chosen)[0]
    assert wait_fault(code, WEIGHTS, ahead=chosen["depth"] * n_tiles) is None
    assert release_fault(code, WEIGHTS, chosen["release"]) is None
    two = chosen["exchange"] == "two_shot"
    sends = -(-rows // chosen["warps_k"]) * (1 if two else tp // 4)
    assert stores_and_loads(code) == packets_of(chosen, sends, 0)
    assert not places(code, r"MEMBAR.*|CCTL.*|ATOM.*")
    code = order(consumer.cubin)
    (wait,) = places(code, WAIT)
    assert not code[wait].predicated
    assert stores_and_loads(code) == packets_of(chosen, tp * two, tp + two)
    assert not places(code, r"MEMBAR.*|CCTL.*")
    stores = places(code, r"STG\..*")
    if chosen["consumer_wait"] == "start":
        assert wait_fault(code, SMALL_WEIGHTS, ahead=12) is None
    else:  # all is stored before, but the counter that the next launch reads
        assert [code[place].mnemonic for place in stores if place > wait] == ["STG.E.STRONG.GPU"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize(("tp", "rows", "mixers"), [(8, 64, 16), (16, 8, 4)])
def test_rows_of_a_cluster_tell_their_sums_in_shared_memory(arch, tp, rows, mixers):
    """Stores to all blocks that count their bytes there, no fence and nothing of it in memory."""
    one = problem(rows, tp)
    chosen = config(one, SPLIT, row_sums="cluster", mixers=mixers)
    assert SPLIT.space(one, CARDS[arch]).illegal(chosen) is None
    _, consumer = SPLIT.compile(one, chosen, arch).launches
    found, code, blocks = kernel_resources(consumer), order(consumer.cubin), 32 // mixers
    assert (consumer.cluster, consumer.blocks) == ((blocks, 1, 1), rows * blocks)
    # slices of a row with their barrier, and its sums with theirs
    assert consumer.shared_bytes == 12 * 448 * mixers + 16 + 8 * 32 * 16 + 2 * 8
    assert found.spill_instructions == 0 and found.stack_bytes == 0
    assert not SLOW_PATHS.search(sass(consumer.cubin))
    tells, hears, waits = places(code, r"STAS\.128"), places(code, r"LDS.*"), places(code, r"SYNCS.*TRYWAIT")
    # each of three waits once in line, and once more out of it
    assert len(tells) == 3 * blocks and len(waits) == 6
    # the slices; peers have begun before anyone writes to them; the saved blocks' sums; their mix's and the prefix's
    (begun,), (met,) = places(code, r"UCGABAR_ARV.*"), places(code, r"UCGABAR_WAIT.*")
    assert begun < met < waits[0] < hears[0] < tells[0] < tells[blocks - 1] < waits[1]
    after = [place for place in hears if place > waits[1]]
    assert after[5] < tells[blocks] < tells[-1] < waits[2] < after[6]
    assert not places(code, r"(STG|LDG)\.E\.128\.STRONG\.GPU|MEMBAR.*")


@pytest.mark.parametrize(("arch", "engine", "rows", "change"), [
    ("sm_90a", FUSED, 16, {"depth": 2}), ("sm_103a", SPLIT, 3, {"mixers": 12}), ("sm_90a", SPLIT, 8, {"mixers": 4}),
    ("sm_103a", SPLIT, 3, {"mixers": 8, "row_sums": "cluster"}), ("sm_103a", APART, 16, {"row_blocks": 4, "rehearse": 0}),
])  # fmt: skip
def test_packets_of_two_values_leave_registers_at_any_number_of_warps(arch, engine, rows, change):
    one = problem(rows, 16)
    chosen = config(one, engine, packet="b32e32", **change)
    assert engine.space(one, CARDS[arch]).illegal(chosen) is None
    found = kernel_resources(engine.compile(one, chosen, arch).launches[-1])
    assert found.spill_instructions == 0 and found.stack_bytes == 0


@pytest.mark.parametrize("engine", [FUSED, APART, SPLIT])
def test_the_third_architecture_compiles_without_spills(engine):
    one = problem(8, 8)
    for launch in engine.compile(one, config(one, engine), "sm_100a").launches:
        found = kernel_resources(launch)
        assert found.spill_instructions == 0 and found.registers <= register_limit(launch.threads, CARDS["sm_100a"])


@pytest.mark.parametrize("engine", [FUSED, APART])
@pytest.mark.parametrize("blocks", [0, 1, 3, 8])
def test_any_number_of_saved_blocks_compiles(blocks, engine):
    one = problem(2, 8, blocks=blocks)
    (launch,) = engine.compile(one, config(one, engine), "sm_90a").launches
    assert kernel_resources(launch).spill_instructions == 0
    assert len(launch.args) == 17


@pytest.mark.parametrize("engine", [FUSED, APART])
def test_delays_are_compiled_in_only_when_asked_for(engine):
    one = problem()
    for jitter, there in ((0, False), (7, True)):
        (launch,) = engine.compile(one, {**config(one, engine), "jitter": jitter}, "sm_90a").launches
        assert kernel_resources(launch).spill_instructions == 0
        assert bool(places(order(launch.cubin), "NANOSLEEP")) == there


def test_buffers_are_kept_and_the_record_is_among_them():
    one = problem()
    made, apart = (engine.compile(one, config(one, engine), "sm_90a") for engine in (FUSED, APART))
    names = {buffer.name: buffer for buffer in made.buffers}
    assert set(names) == {"mailbox", "mailbox_targets", "scalars", "epochs", "health"}
    of_apart = {buffer.name: buffer for buffer in apart.buffers}
    assert set(of_apart) == set(names) and of_apart["mailbox"] == names["mailbox"]
    assert of_apart["epochs"].shape == (apart.launches[0].blocks,) != names["epochs"].shape
    two = SPLIT.compile(one, config(one, SPLIT, exchange="two_shot"), "sm_90a")
    assert {buffer.name for buffer in two.buffers} == {*names, "totals", "totals_targets"}
    assert all(buffer.persistent or buffer.targets_of for buffer in made.buffers)
    assert all({arg.name for arg in each.launches[0].args} >= set(names) for each in (made, apart))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize(("engine", "rows"), [(FUSED, 8), (APART, 8), (SPLIT, 64)])
def test_multicast_publishes_by_one_store_a_packet(monkeypatch, arch, engine, rows):
    """``multimem.st`` of one 8-byte access to line 0 of the table; how it is polled does not change."""
    from k3lab.kernels import cute_compile

    texts, count = [], cute_compile.parameter_count
    monkeypatch.setattr(cute_compile, "parameter_count", lambda ptx: texts.append(ptx) or count(ptx))
    one = problem(rows, 8)
    chosen = config(one, engine, packet="b32e32", stores="multicast")
    launch = engine.compile(one, chosen, arch).launches[0]
    found, code = kernel_resources(launch), order(launch.cubin)
    assert found.spill_instructions == 0 and found.stack_bytes == 0
    turns = -(-rows // chosen["warps_k"])
    assert texts[0].count("multimem.st.relaxed.sys.global.b64") == turns
    assert "\tst.relaxed.sys" not in texts[0] and " st.relaxed.sys" not in texts[0]
    assert stores_and_loads(code)[0] == {64: turns}
    if engine is SPLIT:
        assert "multimem" not in texts[1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, "multimem.st has no 16 bytes that are one access; packet b32e32 has 8"),
        ({"packet": "b32e32", "exchange": "two_shot"}, "two_shot sends each owner its own columns"),
        ({"stores": "bulk"}, "no stores 'bulk'; there are peer and multicast"),
    ],
)
def test_multicast_stores_that_cannot_be_are_refused(change, why):
    one = problem(8, 8)
    with pytest.raises(InputError, match=why):
        SPLIT.compile(one, config(one, SPLIT, **{"stores": "multicast", **change}), "sm_103a")


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
