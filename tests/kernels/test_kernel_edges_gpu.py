"""Programmatic edges of every engine of the cores in captured graphs: none is lost, none is there where none was asked for."""

from __future__ import annotations

import pytest
import torch
from k3lab.kernels import Engine, Problem, family

from .kernel_cases import CORES, case_id, engines_of

pytestmark = pytest.mark.gpu
CALLS = 4
CASES = [(name, *one) for name in CORES for one in engines_of(name, 8, "sm_90a")]


@pytest.mark.parametrize(("name", "engine", "problem"), CASES, ids=case_id)
def test_every_launch_but_the_first_waits_for_the_one_before_by_itself(
    device, name: str, engine: Engine, problem: Problem
) -> None:
    """Also where a stream is forked for one of the calls and joined behind it."""
    from k3lab.kernels.health import check_health
    from k3lab.kernels.launch import Runner
    from k3lab.tuning.compiling import compile_config
    from k3lab.tuning.graphs import captured, edges, programmatic_edges

    found = family(name)
    compiled = compile_config(engine, problem, dict(engine.space(problem, device.need_card()).default), device.arch)
    runner = Runner(compiled)
    outputs = {
        output: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
        for output, (shape, dtype) in found.output_specs(problem).items()
    }
    tensors = {**found.inputs(problem, 0, "cuda"), **outputs}
    call, alone = runner.bind(tensors), runner.bind(tensors, pdl=False)
    call()  # the first launch loads the kernels, which a capture does not allow
    torch.cuda.synchronize()
    launches = len(compiled.launches)
    straight = captured([call] * CALLS)
    assert programmatic_edges(straight) == len(edges(straight.raw_cuda_graph())) == CALLS * launches - 1
    # without one to what runs before, those inside a call stay
    assert programmatic_edges(captured([alone] * CALLS)) == CALLS * (launches - 1)
    side = torch.cuda.Stream()

    def forked() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)

    graph = captured([call, forked, call])
    assert programmatic_edges(graph) == len(edges(graph.raw_cuda_graph()))
    check_health(runner.buffers)
