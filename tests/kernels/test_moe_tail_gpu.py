"""The tail's engine on a GPU over loopback: the twin's bits, epochs, graphs, delays, and a rank that never comes."""

import pytest
import torch
from k3lab.kernels.collectives import CollectiveError
from k3lab.kernels.health import check_health, rearm, set_limit
from k3lab.kernels.transports import Loopback

from .gpu_acts import delay_often, replay_often, run_often, same, silence
from .moe_tail_case import FAMILY, FUSED, Case, config, problem

pytestmark = pytest.mark.gpu
SHAPES = [(16, rows) for rows in (1, 2, 3, 5, 8, 12, 16, 33, 64)] + [(8, 1), (8, 8), (8, 64), (4, 1), (4, 8), (4, 24)]
BOTH = ["one_shot", "two_shot"]


@pytest.mark.parametrize(("tp", "rows"), SHAPES)
@pytest.mark.parametrize("exchange", BOTH)
def test_equals_the_twin_in_many_launches_and_with_fewer_rows(device, tp, rows, exchange):
    one = problem(rows, tp)
    case = Case(device, one, config(one, exchange=exchange))
    run_often(case)
    for fewer in {1, (rows + 1) // 2, rows - 1} - {0, rows}:
        case.run(fewer)
        case.judge(fewer)
        case.run(fewer, tensors=case.with_dead_rows(fewer))
        case.judge(fewer)


@pytest.mark.parametrize("change", [
    {"split_k": 4, "at_once": 4}, {"rows_each": 2}, {"rows_each": 8}, {"at_once": 4}, {"backoff": 100, "release": "end"},
    {"release": "entry"}, {"split_k": 4, "at_once": 4, "rows_each": 4, "exchange": "one_shot"},
    {"rows_each": 2, "exchange": "one_shot"},
])  # fmt: skip
def test_other_configs_equal_the_twin(device, change):
    one = problem(8, 16)
    chosen = config(one, **change)
    assert FUSED.space(one, device.need_card()).illegal(chosen) is None
    case = Case(device, one, chosen)
    case.run()
    case.judge()


@pytest.mark.parametrize("slot", [0, 1, 7, 15])
def test_each_slot_counts(device, slot):
    """A sum over all slots hides small ones; here one alone has the partials."""
    one = problem(3, 16)
    case = Case(device, one, config(one, exchange="one_shot"), factors=list(Loopback.only(16, slot).factors))
    case.run()
    case.judge()


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_a_launch_may_have_fewer_saved_blocks_than_was_compiled_for(device, blocks):
    big, small = (Case(device, one, config(one)) for one in (problem(3, 8), problem(3, 8, blocks=blocks)))
    inputs = {name: big.tensors[name].clone() for name in big.inputs}
    inputs["blocks"][blocks:] = float("nan")  # nobody reads what is not saved yet
    small.run(tensors={**inputs, "blocks": inputs["blocks"][:blocks].contiguous()})
    big.run(tensors=inputs, fewer={"blocks": blocks})
    assert same(big.bits(), small.bits())


def test_no_saved_blocks_at_all(device):
    one = problem(2, 8, blocks=0)
    case = Case(device, one, config(one))
    case.run()
    case.judge()


def test_row_counts_change_from_launch_to_launch(device):
    one = problem(64, 16)
    case = Case(device, one, config(one))
    for rows in (64, 1, 8, 3, 64, 17, 16, 1, 33):
        case.run(rows)
        case.judge(rows)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 7])
def test_any_number_of_layers_shares_one_set_of_buffers(device, layers):
    """A step of so many layers, replayed as a graph: each launch has the parity of its own number, whatever the step's."""
    one = problem(2, 16)
    case = Case(device, one, config(one))
    sets = [{name: torch.empty_like(tensor) for name, tensor in case.outputs.items()} for _ in range(layers)]
    calls = [case.runner.bind({**case.tensors, **outputs}) for outputs in sets]
    case.run()
    first = case.bits()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(20):
        for outputs in sets:
            for tensor in outputs.values():
                tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for outputs in sets:
            assert same(first, [tensor.view(torch.int16) for tensor in outputs.values()])
    check_health(case.runner.buffers)


@pytest.mark.parametrize("exchange", BOTH)
def test_epochs_pass_thirty_two_bits(device, exchange):
    one = problem(8, 16)
    case = Case(device, one, config(one, exchange=exchange))
    for start in (65533, 2**31 - 3, 2**32 - 3):
        case.runner.buffers["epochs"].fill_(start - (1 << 32) if start >> 31 else start)
        for _ in range(6):
            case.run()
            case.judge()


@pytest.mark.parametrize("exchange", BOTH)
def test_a_graph_of_pdl_launches_gives_the_same_bits_and_keeps_its_edges(device, exchange):
    from k3lab.tuning.graphs import captured, programmatic_edges

    one = problem(8, 16)
    case = Case(device, one, config(one, exchange=exchange))
    assert programmatic_edges(captured([case.runner.bind(case.tensors)] * 4)) == 3
    replay_often(case, 100)


@pytest.mark.parametrize(("tp", "rows", "exchange"), [(16, 1, "one_shot"), (16, 8, "two_shot"), (8, 33, "two_shot")])
def test_hundreds_of_seeds_of_delays_change_no_bit(device, tp, rows, exchange):
    """A launch's epoch seeds its delays at every send, poll and exit, the clock those at releases."""
    one = problem(rows, tp)
    chosen = config(one, exchange=exchange)
    plain, delayed = (Case(device, one, {**chosen, "jitter": jitter}) for jitter in (0, 1))
    delay_often(plain, delayed, 250)


@pytest.mark.parametrize("dead", [0, 15])
@pytest.mark.parametrize(
    ("exchange", "table", "says"),
    [
        ("one_shot", "latents", "its partial sums"), ("two_shot", "latents", "its partial sums"),
        ("two_shot", "shares", "its partial sums"), ("two_shot", "totals", "the sums of its columns"),
        ("one_shot", "deltas", "its columns"),
    ],
)  # fmt: skip
def test_a_rank_that_never_publishes_is_named_within_the_limit(device, dead, exchange, table, says):
    one = problem(8, 16)
    case = Case(device, one, config(one, exchange=exchange))
    silence(case, dead, rf"rank {dead} did not publish {says} within 0\.2 s", table, at_most_s=1.5)


def test_a_block_of_this_gpu_that_lags_ends_the_step_too(device):
    """One block's counter is ahead: others wait for packets of another epoch."""
    one = problem(8, 16)
    case = Case(device, one, config(one))
    case.run()
    case.runner.buffers["epochs"][17] += 4
    set_limit(case.runner.buffers, 0.1)
    case.runner.bind(case.tensors)()
    torch.cuda.synchronize()
    with pytest.raises(CollectiveError):
        check_health(case.runner.buffers)
    rearm(case.runner)
    case.run()
    case.judge()


def test_the_house_check(device):
    from k3lab.tuning.check import check

    for tp, rows in ((16, 1), (16, 8), (8, 8), (16, 64), (4, 3)):
        one = problem(rows, tp)
        for exchange in BOTH:
            result = check(FAMILY, FUSED, one, config(one, exchange=exchange))
            assert result.ok, f"TP {tp}, {rows} rows, {exchange}: {result.reason}"


def test_invariant_results_do_not_depend_on_the_rows(device):
    bits = []
    for rows in (1, 5, 8, 16, 33):
        one = problem(rows, 16)
        case = Case(device, one, config(one, k_order="invariant", exchange="two_shot"))
        big = FAMILY.inputs(problem(33, 16), 3)
        axes = FAMILY.row_axes(problem(33, 16))
        tensors = {name: t.narrow(axes[name], 0, rows) if name in axes else t for name, t in big.items()}
        case.tensors = {**{name: t.contiguous().cuda() for name, t in tensors.items()}, **case.outputs}
        case.run()
        bits.append([one_bits[:1] for one_bits in case.bits()])
    assert all(same(bits[0], other) for other in bits[1:])
