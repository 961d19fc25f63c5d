"""On a GPU: checkpoints, prefill and made-up contexts in front of a captured graph, experts turned in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from k3lab.decode import expert_memory
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.checkpoint.load import load_rank
from k3lab.decode.checkpoint.write import write_checkpoint
from k3lab.decode.demo import DEMO_TP, demo_card
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.prefill import prefill
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.random_weights import random_rank_weights, random_tensors, random_weights
from k3lab.decode.run import RunOptions, run
from k3lab.decode.step import step
from k3lab.decode.teacher_forced import Follower, bits, drift, schedule, widened
from k3lab.decode.weights import MoeMlp
from k3lab.kernels import SMALL_K3
from k3lab.kernels.collectives import SingleRank

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]


def test_a_checkpoint_on_the_gpu_is_the_one_on_the_host(tmp_path: Path) -> None:
    folder = tmp_path / "small-k3"
    write_checkpoint(folder, SMALL_K3, random_tensors(SMALL_K3, seed=1, dtype=torch.bfloat16), shard_bytes=2**22)
    here, there = load_rank(folder, tp=4, rank=3), load_rank(folder, tp=4, rank=3, device="cuda")
    assert there.device.type == "cuda"
    for index, (one, other) in enumerate(zip(here.layers, there.layers, strict=True)):
        assert torch.equal(one.attention.in_proj, other.attention.in_proj.cpu()), index
        if isinstance(one.mlp, MoeMlp) and isinstance(other.mlp, MoeMlp):
            assert torch.equal(one.mlp.experts.w2, other.mlp.experts.w2.cpu()), index
    report = run(SMALL_K3, RunOptions(tokens=4, prompt=5, checkpoint=folder))
    assert report.graph_agrees
    assert report.weight_bytes < report.peak_memory_bytes < 10 * report.weight_bytes + 2**30


def test_prefill_of_n_tokens_is_n_steps_of_the_twins() -> None:
    weights = random_weights(SMALL_K3, seed=0, dtype=torch.float64, device="cuda")
    tokens = torch.randint(0, 512, (70,), generator=torch.Generator().manual_seed(1))
    cache = DecodeCache(SMALL_K3, max_requests=2, max_context=80, dtype=torch.float64, device="cuda")
    slots = cache.add(), cache.add()
    for token in tokens.tolist():
        want = step(weights, cache, torch.tensor([[token]]), [slots[0]], ReferenceOperators(SMALL_K3), SingleRank())
        cache.accept([slots[0]], [1])
    operators = PrefillOperators(SMALL_K3, dtype=torch.float64, device="cuda")
    got = prefill(weights, cache, slots[1], tokens, operators, SingleRank(), chunk=33)
    assert ((got - want[0, 0]).norm() / want.norm()).item() < 1e-9


@pytest.mark.parametrize("options", [{"prompt": 600, "chunk": 256}, {"fill": 1000}, {"fill": 300, "prompt": 40}])
def test_a_graph_starts_from_the_context_that_was_prepared(options: dict[str, int]) -> None:
    report = run(demo_card(), RunOptions(tp=DEMO_TP, rows=3, tokens=5, **options))
    assert report.graph_agrees


def test_full_width_experts_are_held_in_place_with_little_scratch_memory() -> None:
    card = demo_card()
    mlp = random_rank_weights(card, seed=0, dtype=torch.bfloat16, device="cuda", tp=DEMO_TP).layers[1].mlp
    assert isinstance(mlp, MoeMlp)
    before = {name: tensor.clone() for name, tensor in vars(mlp.experts).items()}
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    with expert_memory.held(mlp) as views:
        assert all(view.is_cuda for view in views.values())
    assert torch.cuda.max_memory_allocated() - start < 6e9
    for name, tensor in vars(mlp.experts).items():
        assert torch.equal(tensor, before[name]), name


def test_auto_follows_500_given_steps_as_closely_as_the_twins_do() -> None:
    sizes = {"requests": 6, "context": 200, "max_verify": 8}
    steps = schedule(vocabulary=SMALL_K3.vocab_size, steps=500, **sizes)
    rounded = random_weights(SMALL_K3, seed=1, dtype=torch.bfloat16, device="cuda")
    own = ReferenceOperators(SMALL_K3)
    auto = AutoOperators(SMALL_K3, dtype=torch.bfloat16, device="cuda")
    judge = Follower(widened(rounded), own, SingleRank(), **sizes)
    twins, stock = drift(
        judge, [Follower(rounded, one, SingleRank(), **sizes) for one in (own, auto)], steps, tolerance=1.0
    )
    assert stock.mean < 1.25 * twins.mean
    assert stock.logits[-1] < 3 * twins.mean
    assert stock.states < 1.25 * twins.states
    again = [list(bits(Follower(rounded, auto, SingleRank(), **sizes), steps[:100])) for _ in range(2)]
    assert again[0] == again[1]
