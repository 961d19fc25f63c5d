"""The experts' engines on a GPU: the twin's bits, launch after launch, any rows, any routing; and a block that never publishes."""

import random

import pytest
import torch
from k3lab.kernels.collectives import CollectiveError
from k3lab.kernels.health import check_health, rearm, set_limit

from .experts_case import FAMILY, Case, exact_problem
from .gpu_acts import early_graph

pytestmark = pytest.mark.gpu
CUTE, TRITON = FAMILY.engine("cute"), FAMILY.engine("triton")
SHAPES = [(16, rows, kind) for kind in ("routed", "bf16") for rows in (1, 2, 3, 8, 9, 33, 64)] + [
    (8, 8, "bf16"),
    (4, 3, "bf16"),
    (8, 64, "routed"),
    (16, 1, "mxfp8_ceil_floor"),
    (16, 8, "mxfp8_ceil"),
    (16, 33, "mxfp8_floor"),
]


def bits(case):
    return [tensor.view(torch.int16).clone() for tensor in case.outputs.values()]


@pytest.mark.parametrize(("tp", "rows", "kind"), SHAPES)
def test_equals_the_twin_in_many_launches(device, tp, rows, kind):
    case = Case(device, exact_problem(rows, kind, tp), CUTE)
    for seed in range(2):
        case.give(seed)
        for _ in range(10):
            case.run()
            case.judge()


@pytest.mark.parametrize("kind", ["routed", "bf16"])
def test_fewer_rows_than_compiled_for_and_dead_ones_of_nan(device, kind):
    case = Case(device, exact_problem(17, kind), CUTE)
    for rows in (17, 1, 8, 16, 9, 17, 2):
        for name in ("latent", "x", "weights"):
            if name in case.inputs:
                case.inputs[name] = case.inputs[name].clone()
        kept = dict(case.inputs)
        for name in ("latent", "x", "weights"):
            if name in case.inputs:
                case.inputs[name] = case.inputs[name].clone()
                case.inputs[name][rows:] = float("nan")
        case.inputs["ids"] = case.inputs["ids"].clone()
        case.inputs["ids"][rows:] = -1
        case.run(rows)
        case.judge(rows)
        case.inputs = kept


def test_a_graph_may_be_replayed_with_other_inputs(device):
    case = Case(device, exact_problem(8, "bf16"), CUTE)
    call = case.runner.bind({**case.inputs, **case.outputs})
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call()
    held = case.inputs
    for seed in (3, 4, 5):
        case.give(seed)
        for name, tensor in case.inputs.items():
            held[name].copy_(tensor)
        for tensor in case.outputs.values():
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check_health(case.runner.buffers)
        case.judge()
        case.inputs = held


@pytest.mark.parametrize("how", ["one expert for all", "the same experts", "the last experts", "an expert twice"])
def test_any_routing(device, how):
    """More rows than an item has, all rows alike, and a row that names an expert twice, which a router never does."""
    problem = exact_problem(64, "routed")
    case = Case(device, problem, CUTE)
    ids = case.inputs["ids"].cpu().clone()
    if how == "one expert for all":
        ids[:, 3] = 5
    if how == "the same experts":
        ids = (torch.arange(16) * 55).expand(64, 16).contiguous()
    if how == "the last experts":
        ids = (895 - torch.arange(16)).expand(64, 16).contiguous()
    if how == "an expert twice":
        ids[:, 7] = ids[:, 2]
    case.give(1, ids)
    for rows in (64, 7):
        case.run(rows)
        case.judge(rows)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_configs_of_the_whole_space_equal_the_twin(device, rows):
    problem = exact_problem(rows, "routed")
    space = CUTE.space(problem, device.need_card())
    rng = random.Random(rows)
    legal = [one for one in space.legal if one["k_order"] == "free"]
    for config in rng.sample(legal, 3):
        case = Case(device, problem, CUTE, **config)
        for _ in range(3):
            case.run()
            case.judge()


@pytest.mark.parametrize("rows", [1, 3, 8, 33])
@pytest.mark.parametrize("reserved", [4, 16, 64])
def test_blocks_for_the_shared_expert_alone_change_no_bit(device, rows, reserved):
    case = Case(device, exact_problem(rows, "bf16"), CUTE, reserved=reserved)
    for seed in range(2):
        case.give(seed)
        for live in (rows, 1, rows):
            case.run(live)
            case.judge(live)


@pytest.mark.parametrize("rows", [1, 8, 33])
def test_the_shared_expert_may_begin_before_what_it_does_not_need_is_there(device, rows):
    """The input of the shared expert is older than the launch that writes the latents."""
    case = Case(device, exact_problem(rows, "bf16"), CUTE, early="shared")
    case.run(pdl=False)
    case.judge()
    replay = early_graph(case.runner, {**case.inputs, **case.outputs}, "latent")
    for turn in range(100):
        replay()
        torch.cuda.synchronize()
        if turn % 20 == 0:
            case.judge()
    check_health(case.runner.buffers)


@pytest.mark.parametrize("change", [{"tasks": 7}, {"warps": 8, "depth": 14, "x_depth": 2, "tasks": 7}])
def test_a_unit_of_many_tasks_behind_the_shared_expert(device, change):
    """Its ring holds more steps than the shared expert's unit before it asks ahead for."""
    case = Case(device, exact_problem(8, "bf16"), CUTE, **change)
    for _ in range(3):
        case.run()
        case.judge()


def test_invariant_results_have_the_same_bits_at_any_rows(device):
    """Of random inputs, where the order of a sum shows."""
    from k3lab.kernels import K3
    from k3lab.kernels.launch import Runner

    big = FAMILY.problem(K3, tp=16, rows=32, kind="routed")
    inputs, found = FAMILY.inputs(big, 5, "cuda"), {}
    for rows in (1, 3, 8, 17, 32):
        problem = FAMILY.problem(K3, tp=16, rows=rows, kind="routed")
        for release in ("loads", "end"):
            wanted = {"k_order": "invariant", "release": release}
            config = CUTE.space(problem, device.need_card()).restricted(wanted).default
            out = torch.full((rows, problem.latent), float("nan"), dtype=torch.bfloat16, device="cuda")
            tensors = {**inputs, **{name: inputs[name][:rows].contiguous() for name in ("latent", "ids", "weights")}}
            Runner(CUTE.compile(problem, config, device.arch)).bind({**tensors, "latent_partial": out})()
            torch.cuda.synchronize()
            found[rows, release] = out.view(torch.int16)
    for (rows, release), one in found.items():
        assert torch.equal(one, found[32, "loads"][:rows]), f"{rows} rows, release {release}: other bits than 32 rows"


def test_a_block_that_never_publishes_is_told_and_the_next_step_works(device):
    case = Case(device, exact_problem(3, "routed"), CUTE)
    case.run()
    case.judge()
    set_limit(case.runner.buffers, 0.05)
    case.runner.buffers["epochs"][0] += 7  # block 0 publishes under another epoch
    with pytest.raises(CollectiveError, match="a block of this GPU did not publish its part"):
        case.run()
    rearm(case.runner)
    for _ in range(3):
        case.run()
        case.judge()


def test_epochs_run_through_all_32_bits(device):
    case = Case(device, exact_problem(2, "bf16"), CUTE)
    for start in (-2, 2**31 - 2):
        case.runner.buffers["epochs"].fill_(start)
        for _ in range(4):
            case.run()
            case.judge()


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(
    "kind", ["bf16", "routed", "routed_zipf", "routed_hot", "mxfp8_floor", "mxfp8_ceil", "mxfp8_ceil_floor"]
)
def test_random_inputs_are_within_tolerance(device, rows, kind):
    from k3lab.kernels import K3
    from k3lab.tuning.check import check

    problem = FAMILY.problem(K3, tp=16, rows=rows, kind=kind)
    result = check(FAMILY, CUTE, problem, CUTE.space(problem, device.need_card()).default)
    assert result.ok, result.reason


def test_timed_calls_read_other_experts(device):
    """All experts once before the first ones come again, and as many distinct ones in each call."""
    from k3lab.kernels import K3
    from k3lab.tuning.policy import QUICK
    from k3lab.tuning.timing import input_copies

    problem = FAMILY.problem(K3, tp=16, rows=1, kind="routed")
    copies = input_copies(FAMILY, problem, QUICK, 0)
    seen = torch.cat([one["ids"].flatten() for one in copies[: 896 // 16]])
    assert len(seen.unique()) == len(seen) and len(copies) * 17.5e6 > 400e6
    assert len({one["w13"].data_ptr() for one in copies}) == 1


@pytest.mark.parametrize(("tp", "rows", "kind"), [(16, 1, "routed"), (16, 8, "bf16"), (8, 3, "bf16"), (16, 33, "bf16")])
def test_the_triton_engine_equals_the_twin(device, tp, rows, kind):
    case = Case(device, exact_problem(rows, kind, tp), TRITON)
    for live in dict.fromkeys((rows, 1)):
        case.run(live)
        case.judge(live)


@pytest.mark.parametrize("kept", [False, True])
def test_a_prefetch_of_other_weights_changes_no_bit(device, kept):
    from k3lab.kernels.experts.prefetch import compile_prefetch, space, table
    from k3lab.kernels.launch import Runner

    case = Case(device, exact_problem(8, "bf16"), CUTE)
    weights = [torch.randn(size, device="cuda") for size in (1 << 20, 5, 3 << 20)]
    kept_before = [weight.clone() for weight in weights]
    config = {**space().default, "kept": kept}
    ranges = table(weights, config)
    prefetch = Runner(compile_prefetch(len(ranges), config, device.arch)).bind({"ranges": ranges})
    for _ in range(5):
        prefetch()
        case.run()
        case.judge()
    assert all(torch.equal(a, b) for a, b in zip(weights, kept_before, strict=True))
