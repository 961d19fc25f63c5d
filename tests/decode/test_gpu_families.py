"""On a GPU: steps in which every family runs its default engine, eagerly and captured, padded, verifying, with drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.expert_memory import release
from k3lab.decode.graphs import Capture, StepGraphs, kernel_names
from k3lab.decode.launches import differences
from k3lab.decode.lone import lone_peers
from k3lab.decode.random_weights import random_rank_weights
from k3lab.decode.run import RunOptions, run
from k3lab.decode.step import forward, step
from k3lab.decode.tuned import TunedOperators
from k3lab.decode.weights import MoeMlp, RankWeights
from k3lab.kernels import SMALL_K3, ModelCard
from k3lab.kernels.collectives import LoopbackGroup, StandIn
from k3lab.kernels.device import Device

from .engines_case import engine_entries, far, five_layers, planned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
TP = 16
FAR = 0.1
"""Of logits behind five layers in BF16: a near tie of the router may fall the other way."""


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return five_layers()


@pytest.fixture(scope="module")
def weights(card: ModelCard) -> RankWeights:
    return random_rank_weights(card, seed=0, dtype=torch.bfloat16, device="cuda", tp=TP)


@pytest.fixture
def group() -> LoopbackGroup:
    """What a rank alone computes: the others add zeros."""
    return LoopbackGroup((1.0,) + (0.0,) * (TP - 1))


def released(weights: RankWeights) -> None:
    for layer in weights.layers:
        if isinstance(layer.mlp, MoeMlp):
            release(layer.mlp)


def cache_of(card: ModelCard, requests: int, q_len: int) -> DecodeCache:
    return DecodeCache(
        card, tp=TP, max_requests=requests, max_context=200, max_verify=q_len, dtype=torch.bfloat16, block_size=64, padding=True,
        device="cuda",
    )  # fmt: skip


def logits(
    weights: RankWeights, used: Any, group: LoopbackGroup, requests: int, q_len: int, steps: int = 4
) -> torch.Tensor:
    cache = cache_of(weights.card, requests, q_len)
    slots, found = [cache.add() for _ in range(requests)][::-1], []
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        # ids that this rank's part of the embedding has
        ids = torch.randint(0, weights.embed.shape[0], (requests, q_len), generator=generator)
        found.append(step(weights, cache, ids, slots, used, group))
        used.check()
        cache.accept(slots, [1 + place % q_len for place in range(requests)])
    return torch.cat(found)


@pytest.mark.parametrize(("requests", "q_len", "compiled"), [(1, 1, 1), (5, 1, 8), (1, 8, 8), (2, 4, 8), (20, 1, 24)])
def test_a_step_of_engines_is_autos(
    device: Device,
    card: ModelCard,
    weights: RankWeights,
    group: LoopbackGroup,
    requests: int,
    q_len: int,
    compiled: int,
) -> None:
    rows = requests * q_len
    peers = lone_peers(card, tp=TP, rows=rows, device="cuda")
    auto = AutoOperators(card, dtype=torch.bfloat16, device="cuda", peers=peers)
    released(weights)
    want = logits(weights, auto, group, requests, q_len)
    choices, without = engine_entries(card, tp=TP, rows=compiled, q_len=q_len, arch=device.arch, exchange="one_shot")
    assert not without, without
    off = {}
    for family in sorted({one.family for one in choices}):  # each alone beside auto: which of them is off
        some = [one for one in choices if one.family == family]
        single = TunedOperators(card, some, dtype=torch.bfloat16, device="cuda", peers=peers)
        if not single.holds_experts:
            released(weights)
        single.take(weights)
        off[family] = far(logits(weights, single, group, requests, q_len, steps=2), want[: 2 * requests])
    used = TunedOperators(card, choices, dtype=torch.bfloat16, device="cuda", peers=peers)
    used.take(weights)
    got = logits(weights, used, group, requests, q_len)
    assert got.isfinite().all()
    off["all"] = far(got, want)
    assert max(off.values()) < FAR, off
    # run again: the same bits
    assert torch.equal(got, logits(weights, used, group, requests, q_len))
    released(weights)
    assert torch.equal(want, logits(weights, auto, group, requests, q_len))


@pytest.mark.parametrize(("requests", "q_len"), [(8, 1), (1, 8)])
def test_a_captured_step_is_the_eager_one_and_launches_what_is_planned(
    device: Device, card: ModelCard, weights: RankWeights, group: LoopbackGroup, requests: int, q_len: int
) -> None:
    rows = requests * q_len
    choices, _ = engine_entries(card, tp=TP, rows=rows, q_len=q_len, arch=device.arch)
    used = TunedOperators(
        card, choices, dtype=torch.bfloat16, device="cuda", peers=lone_peers(card, tp=TP, rows=rows, device="cuda")
    )
    used.take(weights)
    cache, other = cache_of(card, requests, q_len), cache_of(card, requests, q_len)
    slots = [cache.add() for _ in range(requests)]
    assert slots == [other.add() for _ in range(requests)]
    ids = torch.randint(0, weights.embed.shape[0], (requests, q_len))
    want = step(weights, other, ids, slots, used, group)
    flat, where = ids.flatten().cuda(), torch.full((requests,), requests, device="cuda")
    assert cache.padding == requests
    out = torch.empty_like(want.flatten(0, 1))
    capture = Capture(weights.device)
    replay = capture(lambda: out.copy_(forward(weights, cache, flat, where, used, group, q_len=q_len)))
    where.copy_(torch.tensor(slots))
    for _ in range(3):  # from an empty context each: a step leaves its first token's state where it began
        for slot in slots:
            cache.forget(slot)
        cache.begin(slots, q_len)
        out.fill_(float("nan"))
        replay()
        torch.cuda.synchronize()
        used.check()
        assert torch.equal(out.view(want.shape), want)
    for layer, states in other.kda_states.items():
        assert torch.equal(states[:requests], cache.kda_states[layer][:requests])
        assert torch.equal(other.kda_convs[layer][:requests], cache.kda_convs[layer][:requests])
    for layer, pages in other.mla.items():  # the blocks behind are the padding slot's
        assert torch.equal(pages[: other.blocks], cache.mla[layer][: other.blocks])
    names = kernel_names(capture.graphs[0])
    assert not differences(planned(card, choices, rows), names), names
    released(weights)


@pytest.mark.parametrize(("requests", "q_len"), [(8, 1), (1, 8), (1, 1)])
def test_tokens_alone_are_those_of_the_logits_in_one_launch(
    device: Device, card: ModelCard, weights: RankWeights, requests: int, q_len: int
) -> None:
    rows, comm, pool = requests * q_len, StandIn(0, TP), {}  # type: ignore[var-annotated]
    peers = lone_peers(card, tp=TP, rows=rows, device="cuda")
    made = {}
    for head in ("logits", "tokens"):
        choices, _ = engine_entries(card, tp=TP, rows=rows, q_len=q_len, arch=device.arch, head=head)
        made[head] = choices, TunedOperators(card, choices, dtype=torch.bfloat16, device="cuda", peers=peers, pool=pool)
    made["tokens"][1].take(weights)
    cache = cache_of(card, requests, q_len)
    slots = [cache.add() for _ in range(requests)]
    cache.begin(slots, q_len)
    flat, where = torch.randint(0, weights.embed.shape[0], (rows,)).cuda(), torch.tensor(slots).cuda()
    with torch.inference_mode():
        scores = forward(weights, cache, flat, where, made["logits"][1], comm, q_len=q_len)[
            :, : weights.lm_head.shape[0]
        ]
    out = torch.empty(rows, dtype=torch.int64, device="cuda")
    choices, used = made["tokens"]
    capture = Capture(weights.device)
    replay = capture(lambda: out.copy_(forward(weights, cache, flat, where, used, comm, q_len=q_len, tokens=True)))
    seen = []
    for _ in range(4):  # from an empty context each, as the logits were made
        for slot in slots:
            cache.forget(slot)
        cache.begin(slots, q_len)
        out.fill_(-1)
        replay()
        torch.cuda.synchronize()
        used.check()
        seen.append(out.tolist())
    assert seen == [seen[0]] * 4
    # two kernels may sum in two orders: the last bit of a BF16 logit
    best = scores.float().amax(-1)
    assert (scores.float().gather(1, out[:, None])[:, 0] >= best - best.abs() / 64).all(), (seen[0], scores.argmax(-1))
    names = kernel_names(capture.graphs[0])
    assert not differences(planned(card, choices, rows), names), names
    assert sum("lm_head" in name for name in names) == 2  # the embedding and the token
    released(weights)


def test_graphs_of_several_row_counts_share_memory_and_disturb_nobody(
    device: Device, card: ModelCard, weights: RankWeights, group: LoopbackGroup
) -> None:
    pool: dict = {}
    peers = lone_peers(card, tp=TP, rows=8, device="cuda")
    choices = {
        rows: engine_entries(card, tp=TP, rows=rows, q_len=1, arch=device.arch, exchange="one_shot")[0]
        for rows in (1, 8)
    }

    def operators(rows: int) -> TunedOperators:
        return TunedOperators(
            card, choices[1 if rows == 1 else 8], dtype=torch.bfloat16, device="cuda", peers=peers, pool=pool
        )

    operators(8).take(weights)
    cache, other = cache_of(card, 8, 1), cache_of(card, 8, 1)
    before = torch.cuda.memory_allocated()
    graphs = StepGraphs(weights, cache, group, operators, sizes=(1, 3, 5, 8))
    one = torch.cuda.memory_allocated() - before
    assert one < 2 * graphs._logits.numel() * 2 + 600 * 2**20
    slots = [cache.add() for _ in range(8)]
    assert slots == [other.add() for _ in range(8)]
    for chosen in ([4, 1], [0], [7, 6, 5, 4], [1, 2, 3, 4, 5, 6, 7, 0], [4]):
        ids = torch.randint(0, weights.embed.shape[0], (len(chosen), 1))
        cache.begin(chosen, 1)
        got = graphs.step(ids, chosen)
        torch.cuda.synchronize()
        want = step(weights, other, ids, chosen, operators(len(chosen)), group)
        assert far(got, want) < FAR
        for each in (cache, other):
            each.accept(chosen, [1] * len(chosen))
    assert int(cache.context[8]) == 0
    for layer, states in other.kda_states.items():
        assert far(states[:8, 0], cache.kda_states[layer][:8, 0]) < FAR
    released(weights)


@pytest.mark.parametrize("drafts", [3, 7])
def test_a_captured_speculative_loop_gives_the_eager_tokens(drafts: int) -> None:
    for length in (None, 2.5):
        report = run(SMALL_K3, RunOptions(rows=3, tokens=12, drafts=drafts, prompt=5, acceptance_length=length))
        assert report.graph_agrees
        assert report.graph_step_ns
        assert report.speculation
        assert report.speculation["drafter_ns"] > 0


def test_the_bars_run_on_a_small_stack(device: Device) -> None:
    from dataclasses import replace

    from k3lab.decode.measure_bars import Load
    from k3lab.decode.run_bars import run_bars

    small = replace(five_layers(128), name="seven-k3", num_hidden_layers=7, mla_layers=(2, 4, 6))
    found = run_bars(small, device, None, [Load(1, 8, 100), Load(1, 1, 100)], samples=5)
    for one in found["rows"]:
        for name, own in one["backends"].items():
            assert own["layers"]["kda"]["launches"] > 5
            assert own["layers"]["kda"]["us"] > 0
            assert own["step_us"] > own["layers"]["kda"]["us"]
            layer = own["layers"]["kda"]
            if name == "auto":  # nobody asks what its hundreds of kernels take
                assert "kernel_times" not in layer
                continue
            # profiled replays see the kernels that the graph launches, and as much time as the slope within noise
            seen = sum(kernel["launches"] for kernel in layer["kernel_times"])
            assert abs(seen - layer["launches"]) <= 0.25 * layer["launches"], layer["kernel_times"]
            assert 0.3 < layer["traced_us"] / layer["us"] < 3
            assert {part["family"] for part in layer["made_of"]} == {"torch"}
    assert found["rows"][0]["planned_tuned_launches"] == 0  # without a bundle nothing is tuned
    assert not found["verdicts"] and any("no bar speaks of this" in line for line in found["notes"])
