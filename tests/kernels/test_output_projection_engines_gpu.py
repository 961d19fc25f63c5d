"""Engines of the output projection on a GPU: the twin's bits, epochs, graphs, delays, and a rank that never comes."""

import pytest
import torch
from k3lab.kernels.collectives import CollectiveError
from k3lab.kernels.health import check_health, rearm, set_limit
from k3lab.kernels.output_projection import cute_apart_engine, cute_fused_engine, cute_split_engine
from k3lab.kernels.transports import Loopback

from .gpu_acts import delay_often, early_graph, replay_often, run_often, same, silence
from .output_projection_case import Case, twin
from .test_output_projection_engines import APART, FAMILY, FUSED, SPLIT, config, problem

pytestmark = pytest.mark.gpu
SHAPES = [(16, rows) for rows in (1, 2, 3, 5, 8)] + [(8, rows) for rows in (1, 3, 8)] + [(4, 8), (16, 16)]


@pytest.mark.parametrize(("tp", "rows"), SHAPES)
@pytest.mark.parametrize("kind", ["kda", "restart"])
def test_equals_the_twin_in_many_launches(device, tp, rows, kind):
    one = problem(rows, tp, kind)
    case = Case(device, one, config(one), engine=FUSED)
    run_often(case)


@pytest.mark.parametrize(("tp", "rows"), [(8, 64), (16, 64), (16, 33), (16, 17), (8, 24), (8, 8), (16, 1), (4, 64)])
@pytest.mark.parametrize("wait", ["start", "exit"])
def test_split_equals_the_twin_in_many_launches(device, tp, rows, wait):
    one = problem(rows, tp)
    case = Case(device, one, config(one, SPLIT, consumer_wait=wait), engine=SPLIT)
    run_often(case)
    for fewer in (1, rows // 2 or 1, rows):
        case.run(fewer)
        case.judge(fewer)


@pytest.mark.parametrize(("tp", "rows"), [(8, 64), (16, 64), (16, 17), (4, 8), (16, 1)])
@pytest.mark.parametrize("wait", ["start", "exit"])
def test_two_shot_equals_its_twin_in_many_launches(device, tp, rows, wait):
    one = problem(rows, tp)
    case = Case(device, one, config(one, SPLIT, exchange="two_shot", consumer_wait=wait), engine=SPLIT)
    run_often(case)
    case.run(max(1, rows // 2))
    case.judge(max(1, rows // 2))


@pytest.mark.parametrize(
    ("engine", "change"),
    [(FUSED, {}), (APART, {}), (SPLIT, {"consumer_wait": "start"}), (SPLIT, {"consumer_wait": "exit"})],
)
def test_a_residual_that_is_handed_on_in_place_is_read_anew(device, engine, change):
    """Two launches write each other's prefix: what an SM cached of it before is old in every one."""
    one = problem(8, 16)
    case = Case(device, one, config(one, engine, **change), engine=engine)
    there, back = case.tensors["prefix"].clone(), torch.empty_like(case.tensors["prefix"])
    turns = [{**case.tensors, "prefix": a, "prefix_out": b} for a, b in ((there, back), (back, there))]
    found = []
    for one_by_one in (True, False):
        calls = [case.runner.bind(tensors, pdl=False if one_by_one else None) for tensors in turns]
        there.copy_(case.tensors["prefix"])
        for turn in range(40):
            calls[turn % 2]()
            if one_by_one:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        found.append([one.clone() for one in (there, back, case.outputs["mlp_input"])])
    check_health(case.runner.buffers)
    assert same(*found)


def test_fused_and_split_give_the_same_bits(device):
    one = problem(8, 16)
    fused, split = (
        Case(device, one, config(one, warps_k=8, depth=3), engine=FUSED),
        Case(device, one, config(one, SPLIT), engine=SPLIT),
    )
    fused.run()
    split.run()
    assert same(fused.bits(), split.bits())


@pytest.mark.parametrize("change", [
    {"run_bytes": 128, "depth": 2}, {"warps_k": 8, "depth": 3}, {"warps_k": 4, "depth": 5}, {"backoff": 100, "release": "end"},
    {"release": "entry", "depth": 1}, {"rehearse": 1}, {"rehearse": 1, "packet": "b32e32", "release": "end"},
])  # fmt: skip
def test_other_configs_equal_the_twin(device, change):
    one = problem(8, 16)
    case = Case(device, one, config(one, **change), engine=FUSED)
    case.run()
    case.judge()


@pytest.mark.parametrize(("engine", "tp", "rows", "change"), [
    (FUSED, 16, 8, {}), (FUSED, 8, 1, {}), (APART, 16, 8, {}), (APART, 8, 3, {"rehearse": 0}), (APART, 16, 16, {}), (SPLIT, 8, 64, {}), (SPLIT, 16, 17, {"consumer_wait": "exit"}),
    (SPLIT, 16, 33, {"exchange": "two_shot"}), (SPLIT, 4, 8, {"exchange": "two_shot", "consumer_wait": "exit"}),
])  # fmt: skip
def test_packets_of_two_values_give_the_same_bits(device, engine, tp, rows, change):
    one = problem(rows, tp)
    seven, two = (
        Case(device, one, config(one, engine, packet=form, **change), engine=engine) for form in ("bf16x7e16", "b32e32")
    )
    run_often(two)
    seven.run()
    assert same(seven.bits(), two.bits())
    live = (rows + 1) // 2
    two.run(live, tensors=two.with_dead_rows(live))
    two.judge(live)


@pytest.mark.parametrize("form", ["bf16x7e16", "b32e32"])
@pytest.mark.parametrize(
    ("engine", "rows", "change"),
    [(FUSED, 8, {}), (APART, 8, {}), (SPLIT, 33, {}), (SPLIT, 33, {"exchange": "two_shot"})],
)
def test_any_payload_arrives(device, form, engine, rows, change):
    """Partials of -0, infinities and NaN, in some columns: those columns of the prefix are what the twin has."""
    one = problem(rows, 8, "restart")
    case = Case(device, one, config(one, engine, packet=form, **change), engine=engine)
    special = torch.tensor([-0.0, float("inf"), float("-inf"), float("nan"), 1.0])
    weight = case.inputs["w_o"].clone()
    weight[3::7, 0] = special[torch.arange(weight[3::7].shape[0]) % 5].bfloat16()
    wanted = twin(one, {**case.inputs, "w_o": weight}, case.factors, change.get("exchange"))["prefix_out"]
    for _ in range(3):
        case.run(tensors={"w_o": weight.cuda()})
        got = case.outputs["prefix_out"].cpu()
        assert torch.equal(got.isnan(), wanted.isnan()) and got.isnan().any()
        right = ~wanted.isnan()
        assert torch.equal(got[right].view(torch.int16), wanted[right].view(torch.int16))


@pytest.mark.parametrize("form", ["bf16x7e16", "b32e32"])
@pytest.mark.parametrize(
    ("engine", "rows", "change"),
    [(FUSED, 8, {}), (APART, 8, {}), (SPLIT, 8, {}), (SPLIT, 33, {}), (SPLIT, 8, {"row_sums": "cluster", "mixers": 4})],
)
def test_a_polling_kernel_alone_with_its_inputs_ready(device, form, engine, rows, change):
    """As under a profiler that runs one kernel at a time: no rank publishes, and no wait lasts."""
    from k3lab.kernels.launch import Runner
    from k3lab.kernels.output_projection.ready import make_ready, polling

    one = problem(rows, 8)
    case = Case(device, one, config(one, engine, packet=form, **change), engine=engine)
    case.runner = Runner(polling(case.compiled), transport=case.runner.transport)
    set_limit(case.runner.buffers, 0.2)
    # what the kernels publish themselves goes nowhere
    elsewhere = torch.zeros_like(case.runner.buffers["mailbox"])
    case.runner.buffers["mailbox_targets"][:, 0] = elsewhere.data_ptr()
    partial = case.inputs["x"].float() @ case.inputs["w_o"].float().T
    factors = torch.tensor(case.factors, dtype=torch.bfloat16)[:, None, None]
    partials = (partial.bfloat16() * factors).cuda()
    for _ in range(3):
        make_ready(case.runner, partials)
        case.run()
        case.judge()
    case.runner.bind(case.tensors)()
    with pytest.raises(CollectiveError, match="did not publish its partial sums"):
        check_health(case.runner.buffers)


@pytest.mark.parametrize(("tp", "rows", "mixers", "change"), [
    (8, 64, 16, {}), (16, 8, 4, {"consumer_wait": "exit"}), (16, 17, 8, {"exchange": "two_shot"}), (16, 1, 16, {"packet": "b32e32"}),
])  # fmt: skip
def test_rows_of_a_cluster_give_the_same_bits(device, tp, rows, mixers, change):
    one = problem(rows, tp)
    packets, cluster = (
        Case(device, one, config(one, SPLIT, mixers=mixers, row_sums=way, **change), engine=SPLIT)
        for way in ("packets", "cluster")
    )
    run_often(cluster)
    packets.run()
    assert same(packets.bits(), cluster.bits())
    live = (rows + 1) // 2
    cluster.run(live, tensors=cluster.with_dead_rows(live))
    cluster.judge(live)


@pytest.mark.parametrize("engine", [FUSED, APART])
@pytest.mark.parametrize("slot", [0, 1, 7, 15])
def test_each_slot_counts(device, slot, engine):
    """A sum over all slots hides small ones; here one alone has the partial."""
    one = problem(3, 16)
    case = Case(device, one, config(one, engine), factors=list(Loopback.only(16, slot).factors), engine=engine)
    case.run()
    case.judge()


@pytest.mark.parametrize("engine", [FUSED, APART])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_fewer_saved_blocks(device, blocks, engine):
    one = problem(2, 8, blocks=blocks)
    case = Case(device, one, config(one, engine), engine=engine)
    case.run()
    case.judge()


@pytest.mark.parametrize("engine", [FUSED, APART, SPLIT])
@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_a_launch_may_have_fewer_saved_blocks_than_was_compiled_for(device, engine, blocks):
    big, small = (
        Case(device, one, config(one, engine), engine=engine) for one in (problem(3, 8), problem(3, 8, blocks=blocks))
    )
    inputs = {name: big.tensors[name].clone() for name in big.inputs}
    inputs["blocks"][blocks:] = float("nan")  # nobody reads what is not saved yet
    small.run(tensors={**inputs, "blocks": inputs["blocks"][:blocks].contiguous()})
    big.poison()
    big.runner.bind({**big.tensors, **inputs}, fewer={"blocks": blocks})()
    torch.cuda.synchronize()
    assert same(big.bits(), small.bits())
    for wrong in ({"blocks": 0}, {"blocks": 9}, {"width": 8}, {"rows": 1}):
        with pytest.raises(ValueError, match="the kernels take"):
            big.runner.bind(big.tensors, fewer=wrong)


@pytest.mark.parametrize(
    ("engine", "tp", "counts", "change"),
    [
        (FUSED, 16, (8, 1, 3, 8, 2, 1, 1, 5, 8), {}), (APART, 16, (8, 1, 3, 8, 2, 1, 1, 5, 8), {}),
        (SPLIT, 16, (64, 1, 8, 64, 8, 1, 33), {}), (SPLIT, 8, (64, 1, 8, 64, 8, 1, 33), {"row_sums": "cluster"}),
        (SPLIT, 16, (64, 1, 8, 64, 8, 1, 33), {"exchange": "two_shot"}),
    ],
)  # fmt: skip
def test_row_counts_change_from_launch_to_launch(device, engine, tp, counts, change):
    one = problem(counts[0], tp)
    case = Case(device, one, config(one, engine, **change), engine=engine)
    for rows in counts:
        case.run(rows)
        case.judge(rows)


@pytest.mark.parametrize("engine", [FUSED, APART])
@pytest.mark.parametrize("form", ["bf16x7e16", "b32e32"])
def test_epochs_pass_sixteen_and_thirty_two_bits(device, form, engine):
    one = problem(8, 16)
    case = Case(device, one, config(one, engine, packet=form), engine=engine)
    for start in (65533, 2**31 - 3, 2**32 - 3):
        signed = start - (1 << 32) if start >> 31 else start
        case.runner.buffers["epochs"].fill_(signed)
        case.runner.buffers["mailbox"].zero_()
        for _ in range(6):
            case.run()
            case.judge()


TWO_LAUNCHES = [
    (SPLIT, 33, {}), (SPLIT, 33, {"consumer_wait": "exit"}), (SPLIT, 17, {"exchange": "two_shot"}),
    (SPLIT, 64, {"exchange": "two_shot", "row_sums": "cluster", "consumer_wait": "exit"}),
    (SPLIT, 8, {"row_sums": "cluster", "mixers": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "rows", "change"), [(FUSED, 8, {}), (APART, 8, {}), *TWO_LAUNCHES])
def test_a_graph_of_pdl_launches_gives_the_same_bits_two_hundred_times(device, engine, rows, change):
    one = problem(rows, 16)
    case = Case(device, one, config(one, engine, **change), engine=engine)
    replay_often(case, 200)


@pytest.mark.parametrize("engine", [FUSED, APART])
@pytest.mark.parametrize(
    ("rows", "change"), [(1, {}), (8, {}), (8, {"rehearse": 1}), (5, {"packet": "b32e32", "jitter": 3})]
)
def test_early_launches_read_x_behind_their_wait_and_give_the_same_bits(device, rows, change, engine):
    """The residual and the saved blocks are older than the launch that writes x."""
    one = problem(rows, 16)
    case = Case(device, one, {**config(one, engine), **change}, engine=engine)
    case.run(pdl=False)
    case.judge()
    first = case.bits()
    replay = early_graph(case.runner, case.tensors, "x")
    for _ in range(200):
        case.poison()
        replay()
        torch.cuda.synchronize()
        assert same(first, case.bits())
    check_health(case.runner.buffers)


@pytest.mark.parametrize(("engine", "rows", "change"), [(FUSED, 8, {}), (APART, 8, {}), *TWO_LAUNCHES])
def test_launches_keep_their_programmatic_edges_in_a_graph(device, engine, rows, change):
    from k3lab.tuning.graphs import captured, programmatic_edges

    one = problem(rows, 16)
    case = Case(device, one, config(one, engine, **change), engine=engine)
    case.run()
    call = case.runner.bind(case.tensors)
    assert programmatic_edges(captured([call] * 4)) == 4 * len(case.compiled.launches) - 1


@pytest.mark.parametrize(
    ("engine", "rows", "change"),
    [
        (FUSED, 8, {}), (FUSED, 8, {"packet": "b32e32"}), (APART, 8, {}), (APART, 16, {"packet": "b32e32", "depth": 2}), (SPLIT, 8, {}), (SPLIT, 33, {"consumer_wait": "exit"}),
        (SPLIT, 8, {"row_sums": "cluster", "mixers": 4}), (SPLIT, 17, {"exchange": "two_shot"}), (SPLIT, 17, {"exchange": "two_shot", "packet": "b32e32", "consumer_wait": "exit"}),
    ],
)  # fmt: skip
def test_a_thousand_seeds_of_delays_change_no_bit(device, engine, rows, change):
    """A launch's epoch seeds its delays at every publish, poll and exit, the clock those at releases."""
    one = problem(rows, 16)
    chosen = config(one, engine, **change)
    plain, delayed = (Case(device, one, {**chosen, "jitter": jitter}, engine=engine) for jitter in (0, 1))
    delay_often(plain, delayed, 500)


@pytest.mark.parametrize("dead", [0, 5, 15])
@pytest.mark.parametrize(
    ("engine", "rows", "change"),
    [
        (FUSED, 8, {}),
        (FUSED, 1, {}),
        (APART, 8, {}),
        (APART, 1, {"rehearse": 0, "packet": "b32e32"}),
        (SPLIT, 33, {}),
        (SPLIT, 33, {"exchange": "two_shot"}),
        (SPLIT, 8, {"row_sums": "cluster", "mixers": 8}),
    ],
)
def test_a_rank_that_never_publishes_is_named_within_the_limit(device, dead, engine, rows, change):
    one = problem(rows, 16)
    case = Case(device, one, config(one, engine, **change), engine=engine)
    silence(case, dead, rf"rank {dead} did not publish its partial sums within 0\.2 s")


@pytest.mark.parametrize(("engine", "block"), [(FUSED, 17), (APART, 17), (APART, 8 * 8 + 17)])
def test_a_block_of_this_gpu_that_lags_is_no_ranks_fault(device, engine, block):
    """One block's counter is ahead, a row's or one of the product's: others wait for packets of another epoch, and the step still ends."""
    one = problem(8, 16)
    case = Case(device, one, config(one, engine), engine=engine)
    case.run()
    case.runner.buffers["epochs"][block] += 4
    set_limit(case.runner.buffers, 0.1)
    case.runner.bind(case.tensors)()
    torch.cuda.synchronize()
    with pytest.raises(CollectiveError):
        check_health(case.runner.buffers)
    rearm(case.runner)
    case.run()
    case.judge()


@pytest.mark.parametrize(("engine", "tp", "rows"), [(FUSED, 16, 8), (APART, 16, 8), (SPLIT, 8, 8), (SPLIT, 16, 33)])
def test_dead_rows_of_every_activation_may_be_nan(device, engine, tp, rows):
    """Eight saved blocks beside eight rows: it is their rows that are dead, not a block."""
    one = problem(rows, tp)
    case = Case(device, one, config(one, engine), engine=engine)
    for live in (1, rows // 2, rows - 1):
        case.run(live, tensors=case.with_dead_rows(live))
        case.judge(live)


def test_the_house_check(device):
    from k3lab.tuning.check import check

    for engine, tp, rows in (
        (FUSED, 16, 8), (FUSED, 16, 1), (FUSED, 8, 8), (APART, 16, 8), (APART, 16, 1), (APART, 8, 8), (APART, 16, 16), (SPLIT, 8, 64), (SPLIT, 16, 17),
    ):  # fmt: skip
        one = problem(rows, tp)
        result = check(FAMILY, engine, one, config(one, engine))
        assert result.ok, result.reason


@pytest.mark.parametrize(
    ("engine", "pinned", "counts"),
    [
        (FUSED, cute_fused_engine.INVARIANT, (1, 5, 8, 16)), (APART, cute_apart_engine.INVARIANT, (1, 5, 8, 16)),
        (SPLIT, cute_split_engine.INVARIANT, (1, 8, 17, 64)),
    ],
)  # fmt: skip
def test_invariant_partials_do_not_depend_on_the_rows(device, engine, pinned, counts):
    bits = []
    for rows in counts:
        one = problem(rows, 16)
        depth = 2 if engine is not SPLIT else 1
        case = Case(device, one, config(one, engine, **pinned, k_order="invariant", depth=depth), engine=engine)
        big = FAMILY.inputs(problem(counts[-1], 16), 3)
        tensors = {
            name: (t[:rows] if name in ("x", "prefix") else t[:, :rows] if name == "blocks" else t)
            for name, t in big.items()
        }
        case.tensors = {**{name: t.contiguous().cuda() for name, t in tensors.items()}, **case.outputs}
        case.run()
        bits.append([one_bits[:1] for one_bits in case.bits()])
    assert all(same(bits[0], other) for other in bits[1:])
