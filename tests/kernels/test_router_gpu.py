"""The router's engines on a GPU: the twin's bits, epochs, graphs, delays, ties, and a rank that never comes."""

import pytest
import torch
from k3lab.kernels.health import check_health
from k3lab.kernels.router.exact import choose

from .gpu_acts import delay_often, replay_often, same, silence
from .router_case import FAMILY, FUSED, MMA, problem, same_weights, whole_numbers
from .router_hard import adversarial, near_ties
from .test_router_engines import drawn

pytestmark = pytest.mark.gpu
STEPS = (
    [(16, rows) for rows in (1, 2, 3, 5, 8, 16, 17, 33, 64)]
    + [(8, rows) for rows in (1, 8, 24, 64)]
    + [(4, 8), (4, 64)]
)


class Case:
    """A compiled engine, its runner over loopback, tensors on the GPU and what they should become."""

    def __init__(self, device, one, changes=None, engine=None, seed=0, inputs=None):
        from k3lab.kernels.launch import Runner

        self.one = one
        self.engine = engine or (MMA if one.kind in ("front", "choice") else FUSED)
        chosen = {**self.engine.space(one, device.need_card()).default, **(changes or {})}
        self.inputs = inputs or whole_numbers(one, seed)
        self.wanted = FAMILY.twin(one, self.inputs)
        self.runner = Runner(self.engine.compile(one, chosen, device.arch))
        self.outputs = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            for name, (shape, dtype) in FAMILY.output_specs(one).items()
        }
        self.tensors = {**{name: tensor.cuda() for name, tensor in self.inputs.items()}, **self.outputs}

    def poison(self):
        held = [self.runner.buffers[name] for name in ("nans",) if name in self.runner.buffers]
        for tensor in (*self.outputs.values(), *held):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    def run(self, rows=None, pdl=None, dead=False):
        self.poison()
        tensors = dict(self.tensors)
        if dead:
            for name in ("x", "all_logits"):
                if name in tensors:
                    tensors[name] = tensors[name].clone()
                    tensors[name][rows:] = float("nan")
        self.runner.bind(tensors, rows=rows, pdl=pdl)()
        torch.cuda.synchronize()
        check_health(self.runner.buffers)

    def judge(self, rows=None):
        rows = rows or self.one.rows
        got = {name: tensor.cpu() for name, tensor in self.outputs.items()}
        if "logits" in got:
            assert torch.equal(got["logits"][:rows], self.wanted["logits"][:rows])
            latent = self.wanted["latent"][:rows].to(torch.bfloat16)
            assert torch.equal(got["latent"][:rows].view(torch.int16), latent.view(torch.int16))
            assert got["logits"][rows:].isnan().all() and got["latent"][rows:].isnan().all()
        if "ids" in got:
            self.judge_choice(rows, got)

    def judge_choice(self, rows, got):
        """Given the same logits: the same experts and weights to the bit."""
        logits = self.inputs["all_logits"] if self.one.kind == "choice" else got["logits"]
        ids, weights = choose(logits[:rows], self.inputs["bias"], self.one.top_k, self.one.scaling)
        nans = self.runner.buffers["nans"].cpu()
        assert torch.equal(got["ids"][:rows], ids)
        assert same_weights(got["weights"][:rows], weights)
        assert nans[:rows].tolist() == (logits[:rows] + self.inputs["bias"]).isnan().sum(-1).tolist()
        assert (got["ids"][rows:] == -7).all() and (nans[rows:] == -7).all()
        assert got["weights"][rows:].isnan().all()

    def bits(self):
        return [tensor.view(torch.uint8).clone() for tensor in self.outputs.values()]


@pytest.mark.parametrize(("tp", "rows"), STEPS)
@pytest.mark.parametrize("kind", ["uniform", "front"])
def test_equals_the_twin_in_many_launches_and_at_fewer_rows(device, tp, rows, kind):
    case = Case(device, problem(rows, kind, tp))
    case.run()
    case.judge()
    first = case.bits()
    for _ in range(20):
        case.run()
        assert same(first, case.bits())
    for fewer in sorted({1, rows // 2 or 1, rows}):
        case.run(fewer, dead=True)
        case.judge(fewer)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 33, 64])
def test_choices_are_exact(device, rows):
    one = problem(rows, "choice")
    case = Case(device, one)
    for fewer in sorted({1, rows // 2 or 1, rows}):
        case.run(fewer, dead=True)
        case.judge(fewer)


@pytest.mark.parametrize(("blocks", "warps"), [(8, 14), (8, 4), (4, 7), (2, 16), (1, 32), (1, 8)])
def test_ties_infinities_and_nan(device, blocks, warps):
    inputs = {"all_logits": adversarial(), "bias": torch.zeros(896)}
    case = Case(device, problem(8, "choice"), {"blocks": blocks, "warps": warps}, inputs=inputs)
    case.run()
    case.judge()
    assert case.runner.buffers["nans"].tolist() == [0, 0, 0, 895, 0, 0, 448, 0]


@pytest.mark.parametrize("num_warps", [1, 4, 8])
def test_triton_chooses_the_same_bits(device, num_warps):
    generator = torch.Generator().manual_seed(num_warps)
    for logits in (adversarial(), torch.randn(64, 896, generator=generator) * 3):
        inputs = {"all_logits": logits, "bias": torch.randn(896, generator=generator) * 0.1}
        case = Case(
            device,
            problem(len(logits), "choice"),
            {"num_warps": num_warps},
            engine=FAMILY.engine("triton"),
            inputs=inputs,
        )
        case.run()
        ids, weights = choose(logits, inputs["bias"], 16, 1.0)
        assert torch.equal(case.outputs["ids"].cpu(), ids)
        assert same_weights(case.outputs["weights"], weights)


@pytest.mark.parametrize(
    ("rows", "kind", "change"),
    [
        (1, "front", {"schedule": "fma", "block_n": 2, "block_k": 1024, "split_k": 1, "num_stages": 1}),
        (4, "front", {"schedule": "fma", "block_n": 1, "block_k": 1024, "split_k": 1, "num_stages": 1}),
        (8, "front", {}),
        (64, "front", {"split_k": 4, "block_n": 32}),
        (8, "choice", {}),
    ],
)
def test_triton_passes_the_house_check(device, rows, kind, change):
    from k3lab.tuning.check import check

    one, engine = problem(rows, kind), FAMILY.engine("triton")
    result = check(FAMILY, engine, one, {**engine.space(one, device.need_card()).default, **change})
    assert result.ok, result.reason


def test_random_rows_of_every_magnitude(device):
    generator = torch.Generator().manual_seed(5)
    for scale in (1e-6, 0.1, 1.0, 10.0, 60.0):
        logits = torch.randn(64, 896, generator=generator) * scale
        inputs = {"all_logits": logits, "bias": torch.randn(896, generator=generator) * 0.1}
        case = Case(device, problem(64, "choice"), inputs=inputs)
        case.run()
        case.judge()


@pytest.mark.parametrize("rows", [1, 8, 33, 64])
@pytest.mark.parametrize("kind", ["uniform", "front", "choice"])
def test_configs_of_the_whole_space_pass_the_house_check(device, rows, kind):
    from k3lab.tuning.check import check

    one = problem(rows, kind)
    engine = MMA if kind in ("front", "choice") else FUSED
    for seed, config in enumerate(drawn(one, device.need_card(), 3, seed=rows)):
        result = check(FAMILY, engine, one, config, seed)
        assert result.ok, f"{config}: {result.reason}"


@pytest.mark.parametrize("change", [{"choosers": 1, "tile": 24, "depth": 1}, {"choosers": 2}, {"choosers": 4}], ids=str)
def test_row_counts_change_from_launch_to_launch(device, change):
    case = Case(device, problem(64), change)
    for rows in (64, 1, 8, 64, 33, 32, 1, 64):
        case.run(rows)
        case.judge(rows)


def test_epochs_wrap(device):
    case = Case(device, problem(8))
    for start in (2**31 - 3, 2**32 - 3):
        case.runner.buffers["epochs"].fill_(start - (1 << 32) if start >> 31 else start)
        case.runner.buffers["mailbox"].zero_()
        for _ in range(6):
            case.run()
            case.judge()


@pytest.mark.parametrize("rows", [1, 8])
def test_a_graph_of_pdl_launches_gives_the_same_bits_two_hundred_times(device, rows):
    case = Case(device, problem(rows))
    replay_often(case, 200)


@pytest.mark.parametrize("rows", [1, 8, 33])
@pytest.mark.parametrize("seed", [1, 2])
def test_delays_change_no_bit(device, rows, seed):
    plain, delayed = (Case(device, problem(rows), {"jitter": jitter}) for jitter in (0, seed))
    delay_often(plain, delayed, 200)


@pytest.mark.parametrize("dead", [0, 8, 15])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_a_rank_that_never_publishes_is_named_within_the_limit(device, dead, rows):
    case = Case(device, problem(rows))
    silence(case, dead, rf"rank {dead} did not publish")


def test_invariant_logits_have_the_same_bits_at_any_rows_tp_and_tile(device):
    bits = {}
    big = FAMILY.inputs(problem(64, "front", 8), 5)
    for tp in (8, 16):
        for rows in (1, 3, 8, 16, 64):
            one = problem(rows, "front", tp)
            space = MMA.space(one, device.need_card()).restricted({"k_order": "invariant"})
            for tile in (8, 16):
                config = {**space.default, "tile": tile, "depth": 1, "warps_n": 1}
                assert space.illegal(config) is None
                inputs = {
                    **FAMILY.inputs(one, 5),
                    "x": big["x"][:rows].clone(),
                    "w_router": big["w_router"][: one.experts],
                }
                case = Case(device, one, config, inputs=inputs)
                case.run()
                bits[tp, rows, tile] = case.outputs["logits"][:, :56].clone().view(torch.int32)
    reference = bits[8, 64, 8]
    for key, found in bits.items():
        assert torch.equal(found, reference[: key[1]]), f"tp, rows, tile {key}: other bits than 64 rows at tp 8"


def test_engines_that_choose_otherwise_differ_at_near_ties_only(device):
    """Two orders of the sum: every differing choice lies within a bound of a tie, and such choices are counted."""
    one = problem(64, "front", 8)
    counted, rows_seen = 0, 0
    for seed in range(4):
        logits = []
        for changes in ({}, {"split_k": 8, "chunks": 1, "warps_k": 4, "tile": 16, "depth": 1, "warps_n": 1}):
            case = Case(device, one, changes, inputs=FAMILY.inputs(one, seed))
            case.run()
            logits.append(case.outputs["logits"].cpu())
        assert not torch.equal(*logits), "in these numbers the order shows"
        assert (logits[0] - logits[1]).abs().max() < 2e-5
        found = near_ties(*logits, torch.zeros(one.experts), 16)
        counted, rows_seen = counted + found.differing, rows_seen + found.rows
        assert found.apart < 1e-5
    assert counted <= rows_seen // 50


def test_rejected_profiles_are_no_timing(device):
    from k3lab.tuning.policy import QUICK
    from k3lab.tuning.timing import BrokenMeasurement, time_compiled

    class Wrong(type(FAMILY)):
        def inputs(self, problem, seed, device="cpu"):
            made = super().inputs(problem, seed, device)
            made["peers"][:, 1:] = made["peers"][:, :1]  # every row chooses as the first
            return made

    one = problem(8)
    compiled = FUSED.compile(one, FUSED.space(one, device.need_card()).default, device.arch)
    with pytest.raises(BrokenMeasurement, match="distinct experts in the mean"):
        time_compiled(Wrong(), compiled, QUICK)
