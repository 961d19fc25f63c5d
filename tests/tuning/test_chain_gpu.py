"""On a GPU: programmatic edges in captured graphs, chains, residency, and the readers of the ceiling."""

from __future__ import annotations

import dataclasses

import pytest
from k3lab.kernels import K3, family

pytestmark = pytest.mark.gpu
FAMILY = family("attention_projection")
CALLS = 6


@pytest.fixture(scope="module", params=[engine.name for engine in FAMILY.engines])
def made(request, device):
    """An engine whose launches have PDL: compiled, its runner, and tensors for some calls."""
    import torch
    from k3lab.kernels.launch import Runner
    from k3lab.tuning.compiling import compile_config

    engine = FAMILY.engine(request.param)
    problem = FAMILY.problem(K3, tp=16, rows=2)
    if reason := engine.refuses(problem, device.arch):
        pytest.skip(reason)
    compiled = compile_config(engine, problem, engine.space(problem, device.need_card()).default, device.arch)
    assert all(launch.pdl for launch in compiled.launches), f"{engine.name} has launches without PDL"
    inputs = FAMILY.inputs(problem, 0, "cuda")
    ((shape, dtype),) = FAMILY.output_specs(problem).values()
    tensors = [{**inputs, "out": torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")} for _ in range(CALLS)]
    runner = Runner(compiled)
    runner.bind(tensors[0])()  # the first launch loads the kernel, which a capture does not allow
    torch.cuda.synchronize()
    return compiled, runner, tensors


def test_every_call_but_the_first_has_a_programmatic_edge(made):
    from k3lab.tuning.graphs import captured, edges, programmatic_edges

    compiled, runner, tensors = made
    graph = captured([runner.bind(one) for one in tensors])
    assert programmatic_edges(graph) == CALLS * len(compiled.launches) - 1
    plain = captured([runner.bind(one, pdl=False) for one in tensors])
    assert programmatic_edges(plain) == 0
    assert len(edges(plain.raw_cuda_graph())) == CALLS * len(compiled.launches) - 1


def test_an_ordinary_launch_between_costs_edges(made):
    """What the count is for: whatever waits in full, or is waited for in full, shows in it."""
    import torch
    from k3lab.tuning.graphs import captured, programmatic_edges

    _, runner, tensors = made
    calls = [runner.bind(one) for one in tensors]
    straight = programmatic_edges(captured(calls))
    other = torch.zeros(8, device="cuda")
    # in front of the third call: its edge is programmatic, the one from the second to the ordinary kernel is not
    assert programmatic_edges(captured([*calls[:2], lambda: other.add_(1), *calls[2:]])) == straight
    plain = runner.bind(tensors[2], pdl=False)
    assert programmatic_edges(captured([*calls[:2], plain, *calls[3:]])) == straight - 1


def test_a_fork_and_a_join_keep_them(made):
    """Seen on driver 580 and asserted, because the decode path relies on it: events do not turn them into full edges."""
    import torch
    from k3lab.tuning.graphs import captured, edges, programmatic_edges

    _, runner, tensors = made
    calls = [runner.bind(one) for one in tensors]
    side = torch.cuda.Stream()

    def forked() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            calls[2]()
        torch.cuda.current_stream().wait_stream(side)

    graph = captured([*calls[:2], forked, *calls[3:]])
    assert programmatic_edges(graph) == len(edges(graph.raw_cuda_graph()))


def test_a_chain_is_timed_with_all_its_edges(made, device):
    from k3lab.tuning.policy import QUICK
    from k3lab.tuning.timing import time_compiled

    compiled, _, _ = made
    found = time_compiled(FAMILY, compiled, QUICK, chain=True)
    chain = found.chain
    assert chain is not None
    assert chain.programmatic_edges == chain.pairs * len(compiled.launches)
    assert 8.0 < chain.predecessor_us < 14.0
    assert chain.plain_us == pytest.approx(found.cold_us, rel=0.25)
    assert chain.chain_us < chain.plain_us + 0.5  # the edge never costs anything worth a name
    assert chain.chain_us > found.floor_us - chain.spin_us


def test_blocks_spread_evenly_behind_a_predecessor(device):
    """The ring of this config fits twice on an SM: without padding some SMs got two blocks and some none, and 24 us became 26."""
    from k3lab.kernels.launch import Runner
    from k3lab.tuning.compiling import compile_config
    from k3lab.tuning.policy import QUICK
    from k3lab.tuning.timing import time_compiled

    engine, problem = FAMILY.engine("cute_wgmma"), FAMILY.problem(K3, tp=8, rows=16, kind="kda")
    config = {
        **engine.space(problem, device.need_card()).default,
        "tile_rows": 48,
        "split": 1,
        "k_tile": 128,
        "stages": 5,
    }
    compiled = compile_config(engine, problem, config, device.arch)
    (launch,) = compiled.launches
    (loaded,) = Runner(compiled)._loaded
    assert loaded.config(pdl=False).sharedMemBytes == launch.shared_bytes < 114 * 1024
    assert 113 * 1024 < loaded.config(pdl=True).sharedMemBytes < 115 * 1024
    found = time_compiled(FAMILY, compiled, QUICK, chain=True)
    assert found.chain is not None
    assert found.chain.chain_us < found.chain.plain_us + 0.3


def test_a_ring_is_filled_early_where_the_predecessor_leaves_it_room(device, monkeypatch):
    """One block of 172 KB an SM: behind a predecessor whose SMs are all L1 it begins when that has ended."""
    from k3lab.kernels.launch import Runner
    from k3lab.tuning.compiling import compile_config
    from k3lab.tuning.policy import QUICK
    from k3lab.tuning.timing import time_compiled

    engine, problem = FAMILY.engine("cute_wgmma"), FAMILY.problem(K3, tp=8, rows=64, kind="kda")
    config = {
        **engine.space(problem, device.need_card()).default,
        "tile_rows": 48,
        "split": 1,
        "k_tile": 128,
        "stages": 6,
    }
    compiled = compile_config(engine, problem, config, device.arch)
    roomy = time_compiled(FAMILY, compiled, QUICK, chain=True).chain
    assert roomy is not None
    assert roomy.carveout == 75
    assert roomy.hidden_us > 2
    monkeypatch.setattr(Runner, "carveout", 0)
    cramped = time_compiled(FAMILY, compiled, QUICK, chain=True).chain
    assert cramped is not None
    assert cramped.chain_us > roomy.chain_us + 1


def test_a_contest_of_chains_agrees_with_one_chain_and_is_quick(device):
    """All engines behind one predecessor: as each alone, one without programmatic launches hides nothing, half a second."""
    import time

    from k3lab.tuning.chain_contest import time_chains
    from k3lab.tuning.compiling import compile_config
    from k3lab.tuning.policy import CHAIN, QUICK
    from k3lab.tuning.timing import time_compiled

    problem = FAMILY.problem(K3, tp=8, rows=8)
    engines = [engine for engine in FAMILY.engines if not engine.refuses(problem, device.arch)]
    compiled = [
        compile_config(engine, problem, engine.space(problem, device.need_card()).default, device.arch)
        for engine in engines
    ]
    still = dataclasses.replace(
        compiled[0], launches=tuple(dataclasses.replace(launch, pdl=False) for launch in compiled[0].launches)
    )
    six = ([still, *compiled] * 6)[:6]
    time_chains(FAMILY, problem, six, CHAIN, 0, lambda: None)  # the predecessor is compiled, the clocks are up
    begun = time.perf_counter()
    found = time_chains(FAMILY, problem, six, CHAIN, 0, lambda: None)
    took = time.perf_counter() - begun
    assert took < 1.0, f"{took:.2f} s"
    first, *others = found["results"][: 1 + len(compiled)]
    assert (first["programmatic"], first["hidden_us"]) == (False, 0.0)
    assert first["chain_us"] == pytest.approx(others[0]["plain_us"], rel=0.1)
    for one, result in zip(compiled, others, strict=False):
        alone = time_compiled(FAMILY, one, QUICK, chain=True).chain
        assert alone is not None
        assert result["failed"] == ""
        assert result["chain_us"] == pytest.approx(alone.chain_us, abs=0.7 + result["band_us"])
        assert result["plain_us"] == pytest.approx(alone.plain_us, abs=0.7 + result["band_us"])


@pytest.mark.parametrize("early", [False, True])
def test_what_reads_its_input_before_it_waits_is_told(device, early):
    import reads_early
    from k3lab.kernels import Arg, Compiled
    from k3lab.kernels.triton_compile import TritonKernel, compile_triton
    from k3lab.tuning.check import check_compiled

    problem = FAMILY.problem(K3, tp=16, rows=2)
    args = {f"{name}_ptr": ("*bf16", Arg("tensor", name)) for name in ("x", "w", "out")}
    constants = {"outputs": problem.outputs, "hidden": problem.hidden, "BLOCK": 1024, "EARLY": early}
    kernel = TritonKernel(
        reads_early.k3lab_test_reads_early, {**args, "rows": ("i32", Arg("int32", "rows"))}, constants, 4, 1
    )
    launch = compile_triton(kernel, (problem.outputs, problem.rows, 1), device.arch)
    compiled = Compiled(FAMILY.name, "reads_early", problem, {}, device.arch, (launch,))
    assert check_compiled(FAMILY, compiled, 0).ok
    result = check_compiled(FAMILY, dataclasses.replace(compiled, launches=(dataclasses.replace(launch, pdl=True),)), 0)
    assert result.ok is not early
    if early:
        assert "outputs have other bits" in str(result.reason)


def test_blocks_that_wait_for_each_other_are_counted_before_the_launch(device):
    from k3lab.kernels.launch import ResidencyError, Runner
    from k3lab.tuning.chain import compile_predecessor

    compiled = compile_predecessor(device.arch, device.sms, 1000, 64)
    (launch,) = compiled.launches

    def runner(**changes: object) -> Runner:
        return Runner(dataclasses.replace(compiled, launches=(dataclasses.replace(launch, **changes),)))

    runner(needs_residency=True)
    with pytest.raises(ResidencyError, match="its 1000000 blocks wait for each other"):
        runner(needs_residency=True, grid=(1_000_000, 1, 1))
    runner(grid=(1_000_000, 1, 1))  # blocks that wait for nothing may queue
    with pytest.raises(ResidencyError, match="does not divide into clusters"):
        runner(grid=(7, 1, 1), cluster=(2, 1, 1))
    with pytest.raises(ResidencyError, match="no cluster of 32 blocks"):
        runner(grid=(64, 1, 1), cluster=(32, 1, 1))
    whole = device.need_card().shared_per_block
    one_a_sm = {"shared_bytes": whole, "cluster": (2, 1, 1), "needs_residency": True}
    runner(grid=(2, 1, 1), **one_a_sm)
    with pytest.raises(ResidencyError, match=f"its {2 * device.sms} blocks wait for each other"):
        runner(grid=(2 * device.sms, 1, 1), **one_a_sm)


@pytest.mark.parametrize("size", [2, 4, 5, 8, 16])
def test_the_model_of_the_card_is_on_the_careful_side(device, size):
    import torch
    from k3lab.kernels.launch import _Loaded
    from k3lab.kernels.residency import room_by_card, room_on_gpu
    from k3lab.tuning.chain import compile_predecessor

    torch.zeros(1, device="cuda")  # makes the context
    card = device.need_card()
    (launch,) = compile_predecessor(device.arch, device.sms, 1000, 64).launches
    one = dataclasses.replace(launch, grid=(size, 1, 1), cluster=(size, 1, 1), shared_bytes=card.shared_per_block)
    loaded = _Loaded(one)
    assert room_by_card(one, 1, card).blocks <= room_on_gpu(one, loaded.function, loaded.config(pdl=False)).blocks


def test_readers_agree_on_the_ceiling(device):
    from k3lab.tuning.ceiling import time_readers

    found = time_readers()
    best = max(found.values())
    assert best <= device.need_card().memory_bandwidth
    assert best >= 0.9 * device.need_card().memory_bandwidth
    assert min(found.values()) > 0.5 * best


@pytest.mark.timeout(400)
def test_torch_compile_stands_beside_the_plain_operators(device):
    from k3lab.tuning.alternatives import COMPILED, PYTORCH, time_alternatives
    from k3lab.tuning.policy import QUICK
    from k3lab.tuning.timing import input_copies

    problem = FAMILY.problem(K3, tp=16, rows=8)
    copies = input_copies(FAMILY, problem, QUICK, 0)
    found, missing = time_alternatives(FAMILY, problem, copies, QUICK, compile_s=240)
    assert found[PYTORCH] > 9
    assert COMPILED in found or missing[COMPILED]
    if COMPILED in found:
        assert found[COMPILED] > 9  # the floor of its bytes: the weights were cold
