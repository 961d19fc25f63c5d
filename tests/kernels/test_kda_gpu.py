"""KDA's engines on a GPU: the twin, a cache updated in place, padding, graphs, changing rows, the same bits."""

import pytest
import torch
from k3lab.tuning.compare import compare

from .gpu_acts import same
from .kda_case import ENGINE, FAMILY, PASSED, expected_in_place, pool, problem
from .test_kda_engines import drawn

pytestmark = pytest.mark.gpu
TRITON = FAMILY.engine("triton")
STEPS = (
    [(16, rows, "plain") for rows in (1, 2, 3, 5, 8, 16, 33, 64)]
    + [(16, 8, "verify8"), (16, 64, "verify8"), (16, 2, "verify2"), (16, 12, "verify3"), (8, 8, "verify8")]
    + [(8, rows, "plain") for rows in (1, 8, 64)]
    + [(4, 8, "plain")]
)


class Case:
    """A compiled engine, its runner, tensors on the GPU and what they should become."""

    def __init__(self, device, one, changes=None, inputs=None, engine=ENGINE, seed=0):
        from k3lab.kernels.launch import Runner

        self.one, self.inputs = one, inputs or FAMILY.inputs(one, seed)
        chosen = {**engine.space(one, device.need_card()).default, **(changes or {})}
        assert engine.space(one, device.need_card()).illegal(chosen) is None
        self.runner = Runner(engine.compile(one, chosen, device.arch))
        self.outputs = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            for name, (shape, dtype) in FAMILY.output_specs(one).items()
        }
        self.tensors = {**{name: tensor.cuda() for name, tensor in self.inputs.items()}, **self.outputs}

    def poison(self):
        for tensor in self.outputs.values():
            tensor.fill_(float("nan"))

    def run(self, rows=None, pdl=None, dead=False):
        self.poison()
        tensors = dict(self.tensors)
        if dead:
            tensors["proj"] = tensors["proj"].clone()
            tensors["proj"][rows:] = float("nan")
        self.runner.bind(tensors, rows=rows, pdl=pdl)()
        torch.cuda.synchronize()

    def judge(self, wanted, rows=None):
        rows = rows or self.one.rows
        for name, output in self.outputs.items():
            result = compare(name, output[:rows].cpu(), wanted[name][:rows], FAMILY.tolerance(self.one, name))
            assert result.ok, result.message
            assert output[rows:].isnan().all(), f"{name} was written beyond its {rows} rows"

    def bits(self):
        return [tensor.view(torch.uint8).clone() for tensor in self.outputs.values()]


@pytest.mark.parametrize(("tp", "rows", "kind"), STEPS)
def test_agrees_with_the_twin_in_many_launches_and_at_fewer_rows(device, tp, rows, kind):
    one = problem(rows, kind, tp)
    case = Case(device, one)
    wanted = FAMILY.twin(one, case.inputs)
    case.run()
    case.judge(wanted)
    first = case.bits()
    for _ in range(20):
        case.run()
        assert same(first, case.bits())
    for fewer in sorted({1, rows // 2 or 1, max(rows - 1, 1)}):
        case.run(fewer, dead=True)
        case.judge(wanted, fewer)


@pytest.mark.parametrize(("rows", "kind"), [(1, "plain"), (8, "plain"), (64, "plain"), (8, "verify8")])
def test_a_state_that_nothing_changes_is_copied_to_the_bit(device, rows, kind):
    """No decay and a key of zero: what lands in a slot is what was read, wherever in the grid it passed."""
    one = problem(rows, kind)
    inputs = FAMILY.inputs(one, 1)
    inputs["dt_bias"] = torch.full_like(inputs["dt_bias"], -1e4)
    inputs["proj"][:, one.width : 2 * one.width] = 0
    inputs["conv_state"][..., one.width : 2 * one.width] = 0
    case = Case(device, one, inputs=inputs)
    case.run()
    read = inputs["slots"][:, 0].long() - 1
    wanted = inputs["state"][read].repeat_interleave(one.q_len, 0)
    assert torch.equal(case.outputs["states"].cpu(), wanted)


IN_PLACE = [
    (4, 4, "plain", [[2, 2], [0, 4], [5, 0], [3, 3]], {}),
    (4, 3, "plain", [[2, 2], [0, 4], [5, 6], [3, 3]], {"parts": 2, "together": 3, "lanes": 8, "depth": 2, "release": "entry"}),
    (2, 2, "plain", [[3, 3], [1, 1]], {}),
    (8, 8, "verify8", [[3, 1, 2, 3, 4, 5, 6, 7, 8]], {}),
    (8, 6, "verify4", [[4, 1, 2, 3, 4], [6, 5, 0, 7, 8]], {}),
    (8, 6, "verify4", [[4, 1, 2, 3, 4], [6, 5, 0, 7, 8]], {"form": "wy"}),
    (2, 2, "plain", [[3, 3], [1, 1]], {"run": 1}),
    (4, 4, "verify4", [[-7, 1, 2, 3, 4]], {}),
]  # fmt: skip
IN_PLACE = [
    *((ENGINE, *one) for one in IN_PLACE),
    *((TRITON, *one[:4], {}) for one in IN_PLACE if not {"form", "run"} & one[4].keys()),
]


@pytest.mark.parametrize(("engine", "rows", "live", "kind", "slots", "change"), IN_PLACE)
def test_a_cache_updated_in_place_and_padding_never_written(device, engine, rows, live, kind, slots, change):
    one = problem(rows, kind)
    inputs = pool(one, slots, 8)
    case = Case(device, one, change, inputs, engine)
    out, history, state = expected_in_place(one, inputs, live)
    written = {to - 1 for row in slots if row[0] > 0 for to in row[1:] if to > 0}
    for _ in range(20):
        caches = {"conv_state": inputs["conv_state"].cuda(), "state": inputs["state"].cuda()}
        tensors = {**case.tensors, **caches, "conv_states": caches["conv_state"], "states": caches["state"]}
        case.poison()
        case.runner.bind(tensors, rows=live)()
        torch.cuda.synchronize()
        assert torch.equal(caches["conv_state"].cpu().view(torch.int16), history.view(torch.int16))
        found = caches["state"].cpu()
        for entry in set(range(8)) - written:
            assert torch.equal(found[entry], inputs["state"][entry]), f"entry {entry} was written"
        assert float((found - state).norm() / state.norm()) < 2**-9
        got = case.outputs["out"].cpu().float()
        assert got[live:].isnan().all() and not got[:live][out[:live] == 0].any()
        assert float((got[:live] - out[:live]).norm()) <= 2**-7 * float(out[:live].norm())


def test_steps_of_one_token_in_place_end_where_a_verify_step_does(device):
    """Eight launches, each on what the last one left in its one slot."""
    verify, single, many = problem(8, "verify8"), problem(1), {"parts": 4, "warps": 8, "lanes": 8}
    inputs = pool(verify, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], 9)
    whole = Case(device, verify, many, inputs)
    caches = {"conv_states": inputs["conv_state"].cuda(), "states": inputs["state"].cuda()}
    whole.runner.bind({**whole.tensors, **caches})()
    slots = torch.tensor([[1, 1]], dtype=torch.int32)
    step = Case(device, single, many, {**inputs, "proj": inputs["proj"][:1].clone(), "slots": slots})
    own = {"conv_state": inputs["conv_state"].cuda(), "state": inputs["state"].cuda()}
    tensors = {**step.tensors, **own, "conv_states": own["conv_state"], "states": own["state"]}
    call = step.runner.bind(tensors, pdl=False)
    for token in range(8):
        tensors["proj"].copy_(inputs["proj"][token : token + 1])
        call()
        torch.cuda.synchronize()
        assert torch.equal(own["conv_state"][0].view(torch.int16), caches["conv_states"][1 + token].view(torch.int16))
        difference = (own["state"][0] - caches["states"][1 + token]).norm() / own["state"][0].norm()
        assert float(difference) < 2**-20
        torch.testing.assert_close(step.outputs["out"][0], whole.outputs["out"][token], rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize(("rows", "kind"), [(1, "plain"), (8, "plain"), (33, "plain"), (64, "plain"), (8, "verify8"), (24, "verify3")])  # fmt: skip
def test_configs_of_the_whole_space_pass_the_house_check(device, rows, kind):
    """Also behind a predecessor that writes the projection last: what is read before the wait is not it."""
    from k3lab.tuning.check import check

    one = problem(rows, kind)
    for seed, chosen in enumerate(drawn(one, device.need_card(), 3, seed=rows)):
        result = check(FAMILY, ENGINE, one, chosen, seed)
        assert result.ok, f"{chosen}: {result.reason}"


@pytest.mark.parametrize(("rows", "kind"), [(1, "plain"), (8, "plain"), (33, "plain"), (64, "plain"), (8, "verify8"), (24, "verify3")])  # fmt: skip
@pytest.mark.parametrize("num_warps", [8, 16])
def test_triton_passes_the_house_check(device, rows, kind, num_warps):
    """States are read before its wait, too; what spills (NOTES) is spilled right."""
    from k3lab.tuning.check import check

    one = problem(rows, kind)
    config = {"num_warps": num_warps, "release": "entry" if rows == 8 else "loads"}
    assert TRITON.space(one, device.need_card()).illegal(config) is None
    result = check(FAMILY, TRITON, one, config)
    assert result.ok, result.reason


FORMS = [
    (1, "plain", {"parts": 4, "lanes": 8, "run": 1}),
    (1, "plain", {"parts": 1, "warps": 16, "lanes": 8, "run": 1}),
    (1, "plain", {"run": 2}),
    (8, "plain", {"parts": 4, "lanes": 8, "run": 1}),
    (64, "plain", {"parts": 4, "together": 2, "depth": 2, "lanes": 8, "run": 1, "release": "loads"}),
    (8, "verify8", {"form": "rolled"}),
    (8, "verify8", {"form": "wy"}),
    (64, "verify8", {"parts": 4, "warps": 8, "lanes": 16, "form": "wy"}),
    (8, "verify8", {"parts": 16, "warps": 4, "lanes": 32, "form": "wy"}),
    (8, "verify8", {"parts": 16, "warps": 8, "lanes": 32, "form": "wy"}),
    (8, "verify8", {"parts": 16, "warps": 8, "lanes": 32, "form": "rolled"}),
    (12, "verify3", {"parts": 4, "warps": 8, "lanes": 8, "form": "wy"}),
    (2, "verify2", {"parts": 2, "warps": 8, "lanes": 8, "form": "wy"}),
]


@pytest.mark.parametrize(("rows", "kind", "change"), FORMS)
def test_forms_and_runs_agree_with_the_twin_in_many_launches(device, rows, kind, change):
    """The exchange is met by blocks that come late and early: the same bits in every launch."""
    case = Case(device, problem(rows, kind), change)
    wanted = FAMILY.twin(case.one, case.inputs)
    case.run()
    case.judge(wanted)
    first = case.bits()
    for _ in range(50):
        case.run()
        assert same(first, case.bits())
    if rows > 1:
        case.run(rows - 1, dead=True)
        case.judge(wanted, rows - 1)


def test_a_loop_of_one_body_leaves_the_bits_of_all_tokens_written_out(device):
    bits = []
    for form in ("serial", "rolled"):
        case = Case(device, problem(8, "verify8"), {"form": form})
        case.run()
        bits.append(case.bits())
    assert same(*bits)


def test_stages_of_a_launch_lie_in_order(device):
    from k3lab.tuning.policy import QUICK
    from k3lab.tuning.stages import measure_stages

    one = problem(1)
    config = ENGINE.space(one, device.need_card()).default
    (role,) = measure_stages(FAMILY, ENGINE, one, config, device.arch, QUICK, launches=5).roles
    assert [one.stage for one in role.stages] == PASSED


@pytest.mark.parametrize("engine", [ENGINE, TRITON], ids=["cute", "triton"])
def test_row_counts_change_from_launch_to_launch(device, engine):
    one = problem(64)
    case = Case(device, one, engine=engine)
    wanted = FAMILY.twin(one, case.inputs)
    for rows in (64, 1, 8, 64, 33, 32, 1, 64):
        case.run(rows)
        case.judge(wanted, rows)


@pytest.mark.parametrize(("rows", "kind"), [(1, "plain"), (8, "plain"), (8, "verify8")])
def test_a_graph_of_pdl_launches_gives_the_same_bits_two_hundred_times(device, rows, kind):
    case = Case(device, problem(rows, kind))
    case.run(pdl=False)
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


def test_invariant_outputs_have_the_same_bits_at_any_rows_and_requests_a_block(device):
    big = FAMILY.inputs(problem(64), 5)
    bits = {}
    for rows in (1, 3, 8, 64):
        one = problem(rows)
        space = ENGINE.space(one, device.need_card()).restricted({"k_order": "invariant"})
        for together in sorted({1, min(4, rows)}):
            chosen = {**space.default, "together": together, "depth": 1, "release": "entry"}
            if space.illegal(chosen) is not None:
                continue
            slots = torch.tensor([[1 + r, 1 + r] for r in range(rows)], dtype=torch.int32)
            per_row = {name: big[name][:rows].clone() for name in ("proj", "conv_state", "state")}
            case = Case(device, one, chosen, {**big, **per_row, "slots": slots})
            case.run()
            bits[rows, together] = [case.outputs[name].clone() for name in ("out", "states")]
    assert len(bits) > 4
    for (rows, together), found in bits.items():
        for mine, reference in zip(found, bits[64, 1], strict=True):
            assert torch.equal(mine, reference[:rows]), f"rows {rows}, {together} a block: other bits than 64 rows"
