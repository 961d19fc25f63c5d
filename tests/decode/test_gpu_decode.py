"""On a GPU: captured graphs give the eager tokens, operators give the twins' values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.choices import Tuned
from k3lab.decode.demo import DEMO_TP, demo_card
from k3lab.decode.greedy import GraphDecoder, decode_eager
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.random_weights import random_rank_weights, random_weights
from k3lab.decode.run import RunOptions, run
from k3lab.decode.step import step
from k3lab.decode.tuned import TunedOperators
from k3lab.decode.weights import KdaAttention, Mix, MlaAttention
from k3lab.kernels import K3, SMALL_K3, family
from k3lab.kernels.collectives import SingleRank, StandIn
from k3lab.kernels.device import Device
from k3lab.kernels.gpu_cards import GPU_CARDS
from k3lab.traces.capture import recording

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_demo_model_replays_its_eager_tokens(rows: int) -> None:
    report = run(demo_card(), RunOptions(tp=DEMO_TP, rows=rows, tokens=4))
    assert report.graph_agrees
    assert report.graph_step_ns
    assert len(report.graph_step_ns) == 4
    assert any("stand-ins" in line for line in report.head)


def test_a_graph_can_be_replayed_for_other_requests() -> None:
    card = demo_card()
    weights = random_rank_weights(card, seed=0, dtype=torch.bfloat16, device="cuda", tp=DEMO_TP)
    operators, comm = AutoOperators(card, dtype=torch.bfloat16, device="cuda"), StandIn(0, DEMO_TP)
    sizes = {
        "tp": DEMO_TP,
        "max_requests": 4,
        "max_context": 40,
        "padding": True,
        "dtype": torch.bfloat16,
        "device": "cuda",
    }
    decoder = GraphDecoder(weights, DecodeCache(card, **sizes), 4, operators, comm)  # type: ignore[arg-type]
    cache = DecodeCache(card, **sizes)  # type: ignore[arg-type]
    for first in ([1, 2, 3, 4], [500, 2, 7, 9], [1, 2, 3, 4]):
        ids = torch.tensor(first, device="cuda")
        assert decoder.decode(ids, 20).tokens == decode_eager(weights, cache, ids, 20, operators, comm).tokens
    decoder.close()


def test_fp64_steps_are_the_twins() -> None:
    weights = random_weights(SMALL_K3, seed=0, dtype=torch.float64, device="cuda")
    logits = []
    for operators in (ReferenceOperators(SMALL_K3), AutoOperators(SMALL_K3, dtype=torch.float64, device="cuda")):
        cache = DecodeCache(SMALL_K3, max_requests=2, max_context=20, max_verify=4, dtype=torch.float64, device="cuda")
        slots, rows = [cache.add(), cache.add()], []
        for index in range(4):
            rows.append(
                step(weights, cache, torch.tensor([[3 + index, 7], [11, 12 + index]]), slots, operators, SingleRank())
            )
            cache.accept(slots, [2, 1])
        logits.append(torch.stack(rows))
    assert ((logits[0] - logits[1]).norm() / logits[0].norm()).item() < 1e-11


def test_a_trace_of_the_replay_holds_kernels(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    report = run(SMALL_K3, RunOptions(tokens=3, trace=path), record=recording)
    assert report.trace == path
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert {f"k3lab decode step {index}" for index in range(3)} <= {event.get("name") for event in events}


@pytest.mark.parametrize("engine", ["cute_fused", "cute_apart", "cute_split"])
def test_layers_with_the_output_projections_kernels_are_those_without(device: Device, engine: str) -> None:
    """Fewer rows than compiled for, one to six saved blocks, a restart; eagerly and from a graph."""
    rows, tp = 5, 16
    chosen = []
    for kind in ("kda", "mla", "restart"):
        found = family("output_projection").engine(engine)
        problem = family("output_projection").problem(K3, tp=tp, rows=8, kind=kind)
        config = found.space(problem, GPU_CARDS["H200"]).default
        compiled = replace(found.compile(problem, config, device.arch), problem=replace(problem, rows=rows))
        chosen.append(
            Tuned(
                "output_projection",
                kind,
                engine,
                dict(config),
                "measured",
                compiled,
                ("output_projection", "", kind, 8),
            )
        )
    auto = AutoOperators(K3, dtype=torch.bfloat16, device="cuda")
    used = TunedOperators(K3, chosen, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * std).bfloat16()

    hidden, width = K3.hidden_size, K3.kda_dim // tp
    mix = Mix(1 + draw(hidden, std=0.1), draw(1, hidden, std=hidden**-0.5), 1 + draw(hidden, std=0.1))
    layers = []
    for index in range(12):
        made = (KdaAttention, MlaAttention)[index % 3 == 2](None, None, draw(hidden, width, std=width**-0.5))  # type: ignore[arg-type]
        layers.append((draw(rows, width), made))

    def body(operators: AutoOperators) -> list[torch.Tensor]:
        prefix, blocks, found = first, [], []
        for index, (x, attention) in enumerate(layers):
            restarts = index % 2 == 0
            if restarts:
                blocks.append(prefix)
            before = None if restarts else prefix
            prefix, following = operators.output_projection(x, attention, before, blocks, mix, StandIn(0, tp))
            found += [prefix, following]
        return found

    first = draw(rows, hidden)
    wanted, eager = body(auto), body(used)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        captured = body(used)
    for _ in range(3):
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        used.check()
        assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))
    for got, want in zip(eager, wanted, strict=True):
        assert ((got.double() - want.double()).norm() / want.double().norm()).item() < 2**-6
