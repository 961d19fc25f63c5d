"""Engines of the output projection on a GPU: the twin's bits, epochs, graphs, delays, and a rank that never comes."""

import time

import pytest
import torch
from k3lab.kernels.collectives import CollectiveError, LoopbackGroup, TwoShot
from k3lab.kernels.health import check_health, rearm, set_limit
from k3lab.kernels.output_projection.twin import output_projection
from k3lab.kernels.transports import Loopback

from .test_output_projection_engines import FAMILY, FUSED, SPLIT, config, problem

pytestmark = pytest.mark.gpu
SHAPES = [(16, rows) for rows in (1, 2, 3, 5, 8)] + [(8, rows) for rows in (1, 3, 8)] + [(4, 8), (16, 16)]


def whole_numbers(one, seed=0):
    """Inputs whose products and sums are exact in FP32, so that every rounding of the twin is met to the bit."""
    generator = torch.Generator().manual_seed(seed)
    inputs = FAMILY.inputs(one, seed)
    inputs["x"] = torch.randint(-3, 4, inputs["x"].shape, generator=generator).to(torch.bfloat16)
    inputs["w_o"] = (torch.randint(-3, 4, inputs["w_o"].shape, generator=generator) / 64).to(torch.bfloat16)
    return inputs


def twin(one, inputs, factors, exchange):
    """With the twin's roundings, on the CPU."""
    group = LoopbackGroup(tuple(factors))
    prefix, mlp_input = output_projection(
        inputs["x"], inputs["w_o"], inputs.get("prefix"), list(inputs["blocks"]), inputs["res_norm"], inputs["res_proj"],
        inputs["norm_w"], eps=one.eps, comm=TwoShot(group) if exchange == "two_shot" else group,
    )  # fmt: skip
    return {"prefix_out": prefix, "mlp_input": mlp_input}


class Case:
    """A compiled engine, its runner over loopback, tensors on the GPU and what they should become."""

    def __init__(self, device, one, chosen, factors=None, engine=FUSED, seed=0):
        from k3lab.kernels.launch import Runner

        # factors near one, of both signs, so that prefix and blocks count for as much as the sum
        self.factors = factors or [(-1.0) ** rank * 2.0 ** (rank % 3 - 1) for rank in range(one.tp)]
        self.one, inputs = one, whole_numbers(one, seed)
        self.wanted = twin(one, inputs, self.factors, chosen.get("exchange"))
        self.compiled = engine.compile(one, chosen, device.arch)
        self.runner = Runner(self.compiled, transport=Loopback(one.tp, tuple(self.factors)))
        self.outputs = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            for name, (shape, dtype) in FAMILY.output_specs(one).items()
        }
        self.tensors = {**{name: tensor.cuda() for name, tensor in inputs.items()}, **self.outputs}

    def poison(self):
        for tensor in self.outputs.values():
            tensor.fill_(float("nan"))

    def run(self, rows=None, pdl=None):
        self.poison()
        self.runner.bind(self.tensors, rows=rows, pdl=pdl)()
        torch.cuda.synchronize()
        check_health(self.runner.buffers)

    def judge(self, rows=None):
        rows = rows or self.one.rows
        got = {name: tensor.cpu() for name, tensor in self.outputs.items()}
        assert torch.equal(
            got["prefix_out"][:rows].view(torch.int16), self.wanted["prefix_out"][:rows].view(torch.int16)
        )
        found, wanted = got["mlp_input"][:rows].double(), self.wanted["mlp_input"][:rows].double()
        # one rounding, which may fall to the other side where FP32 sums have another order
        assert (found - wanted).norm() / wanted.norm() < 2**-10
        assert ((found - wanted).abs() <= 2**-7 * wanted.abs() + 1e-6).all()
        for tensor in got.values():
            assert tensor[rows:].isnan().all()

    def bits(self):
        return [tensor.view(torch.int16).clone() for tensor in self.outputs.values()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run_often(case):
    """The twin's numbers, and the same bits in every launch."""
    case.run()
    case.judge()
    first = case.bits()
    for _ in range(20):
        case.run()
        assert same(first, case.bits())


@pytest.mark.parametrize(("tp", "rows"), SHAPES)
@pytest.mark.parametrize("kind", ["kda", "restart"])
def test_equals_the_twin_in_many_launches(device, tp, rows, kind):
    one = problem(rows, tp, kind)
    case = Case(device, one, config(one))
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


def test_fused_and_split_give_the_same_bits(device):
    one = problem(8, 16)
    fused, split = (
        Case(device, one, config(one, warps_k=8, depth=3)),
        Case(device, one, config(one, SPLIT), engine=SPLIT),
    )
    fused.run()
    split.run()
    assert same(fused.bits(), split.bits())


@pytest.mark.parametrize("change", [
    {"run_bytes": 128, "depth": 2}, {"warps_k": 8, "depth": 3}, {"warps_k": 4, "depth": 5}, {"backoff": 100, "release": "end"},
    {"release": "entry", "depth": 1},
])  # fmt: skip
def test_other_configs_equal_the_twin(device, change):
    one = problem(8, 16)
    case = Case(device, one, config(one, **change))
    case.run()
    case.judge()


@pytest.mark.parametrize("slot", [0, 1, 7, 15])
def test_each_slot_counts(device, slot):
    """A sum over all slots hides small ones; here one alone has the partial."""
    one = problem(3, 16)
    case = Case(device, one, config(one), factors=list(Loopback.only(16, slot).factors))
    case.run()
    case.judge()


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_fewer_saved_blocks(device, blocks):
    one = problem(2, 8, blocks=blocks)
    case = Case(device, one, config(one))
    case.run()
    case.judge()


def test_row_counts_change_from_launch_to_launch(device):
    one = problem(8, 16)
    case = Case(device, one, config(one))
    for rows in (8, 1, 3, 8, 2, 1, 1, 5, 8):
        case.run(rows)
        case.judge(rows)


def test_epochs_pass_sixteen_and_thirty_two_bits(device):
    one = problem(8, 16)
    case = Case(device, one, config(one))
    for start in (65533, 2**31 - 3, 2**32 - 3):
        signed = start - (1 << 32) if start >> 31 else start
        case.runner.buffers["epochs"].fill_(signed)
        case.runner.buffers["mailbox"].zero_()
        for _ in range(6):
            case.run()
            case.judge()


def test_a_graph_of_pdl_launches_gives_the_same_bits_two_hundred_times(device):
    one = problem(8, 16)
    case = Case(device, one, config(one))
    case.run(pdl=False)
    case.judge()
    first = case.bits()
    call = case.runner.bind(case.tensors)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    for _ in range(200):
        case.poison()
        graph.replay()
        torch.cuda.synchronize()
        assert same(first, case.bits())
    check_health(case.runner.buffers)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("engine", "rows", "change"),
    [(FUSED, 8, {}), (SPLIT, 8, {}), (SPLIT, 33, {"consumer_wait": "exit"}), (SPLIT, 17, {"exchange": "two_shot"})],
)
def test_delays_change_no_bit(device, engine, rows, change, seed):
    """Each launch has delays of its own at every publish, poll and exit: 600 of them."""
    one = problem(rows, 16)
    chosen = config(one, engine, **change)
    plain, delayed = (Case(device, one, {**chosen, "jitter": jitter}, engine=engine) for jitter in (0, seed))
    plain.run()
    call = delayed.runner.bind(delayed.tensors)
    for _ in range(300):
        delayed.poison()
        call()
        call()
        torch.cuda.synchronize()
        assert same(plain.bits(), delayed.bits())
    check_health(delayed.runner.buffers)


@pytest.mark.parametrize("dead", [0, 5, 15])
@pytest.mark.parametrize(
    ("engine", "rows", "change"),
    [(FUSED, 8, {}), (FUSED, 1, {}), (SPLIT, 33, {}), (SPLIT, 33, {"exchange": "two_shot"})],
)
def test_a_rank_that_never_publishes_is_named_within_the_limit(device, dead, engine, rows, change):
    one = problem(rows, 16)
    case = Case(device, one, config(one, engine, **change), engine=engine)
    for _ in range(3):
        case.run()
    table = case.runner.buffers["mailbox_targets"]
    elsewhere = torch.zeros_like(case.runner.buffers["mailbox"][0])
    right = int(table[dead, 0])
    table[dead, 0] = elsewhere.data_ptr()
    set_limit(case.runner.buffers, 0.2)
    torch.cuda.synchronize()
    start = time.perf_counter()
    case.runner.bind(case.tensors)()
    case.runner.bind(case.tensors)()  # a step does not end with the one that gave up
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    assert 0.1 < took < 1.0
    with pytest.raises(CollectiveError, match=rf"rank {dead} did not publish its partial sums within 0\.2 s"):
        check_health(case.runner.buffers, 0)
    table[dead, 0] = right
    rearm(case.runner)
    for _ in range(3):
        case.run()
        case.judge()


def test_a_block_of_this_gpu_that_lags_is_no_ranks_fault(device):
    """One block's counter is ahead: the others wait for packets of another epoch, and the step still ends."""
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

    for engine, tp, rows in ((FUSED, 16, 8), (FUSED, 16, 1), (FUSED, 8, 8), (SPLIT, 8, 64), (SPLIT, 16, 17)):
        one = problem(rows, tp)
        result = check(FAMILY, engine, one, config(one, engine))
        assert result.ok, result.reason


def test_invariant_partials_do_not_depend_on_the_rows(device):
    bits = []
    for rows in (1, 5, 8, 16):
        one = problem(rows, 16)
        case = Case(device, one, config(one, k_order="invariant", depth=2))
        big = FAMILY.inputs(problem(16, 16), 3)
        tensors = {
            name: (t[:rows] if name in ("x", "prefix") else t[:, :rows] if name == "blocks" else t)
            for name, t in big.items()
        }
        case.tensors = {**{name: t.contiguous().cuda() for name, t in tensors.items()}, **case.outputs}
        case.run()
        bits.append([one_bits[:1] for one_bits in case.bits()])
    assert all(same(bits[0], other) for other in bits[1:])
