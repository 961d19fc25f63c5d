"""The bars: slopes, floors, verdicts, and a measurement whose clock is made up; no kernel is judged here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.cli.decode_bars import render_bars
from k3lab.cli.main import run as command
from k3lab.cli.output import console
from k3lab.decode.auto import AutoOperators
from k3lab.decode.bars import (
    LAYER_BARS,
    Graph,
    Verdict,
    depths,
    layer_floor_us,
    ratio_faults,
    routing_fault,
    slope,
    step_floor_us,
    verdicts,
)
from k3lab.decode.kernel_times import OTHER, REPLAYS, Ran, a_layer, family_floors, family_of, made_of, spent, split
from k3lab.decode.lone import lone_peers
from k3lab.decode.measure_bars import Bench, Counting, Load, measure, some_layers
from k3lab.decode.packing import pack
from k3lab.decode.random_weights import random_rank_weights
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.kernels import K3, SMALL_K3, InputError, ModelCard
from k3lab.kernels.collectives import SingleRank, StandIn
from k3lab.kernels.gpu_cards import GPU_CARDS

from .twin_runner import entry

H200 = GPU_CARDS["H200"]


def test_a_slope_is_what_one_more_layer_costs() -> None:
    few, many = Graph(24, (1000.0, 1010.0, 990.0), 250), Graph(68, (3200.0,), 690)
    one = slope(few, many)
    assert one.us == pytest.approx(50.0)
    assert one.launches == 10
    assert slope(few, Graph(68, (3200.0,), None)).launches is None
    assert few.us == 1000.0
    assert Graph(1, (90.0, 100.0, 100.0, 110.0), None).spread == pytest.approx(0.15)
    with pytest.raises(InputError, match="between 24 and 24 layers"):
        slope(few, few)


def test_graphs_have_the_layers_of_the_bar_where_the_model_has_them(tiny: ModelCard) -> None:
    assert depths(K3, "kda") == (24, 68)
    assert depths(K3, "mla") == (8, 24)
    assert depths(tiny, "kda") == (1, 2)
    with pytest.raises(InputError, match="a slope needs two"):
        depths(some_layers_card(tiny), "kda")


def some_layers_card(card: ModelCard) -> ModelCard:
    from dataclasses import replace

    return replace(card, mla_layers=(1, 2, 3, 4, 5))


def test_floors_are_those_of_the_issue() -> None:
    # 216.6 MB and 99.5 MB at 4.67 TB/s, as the layer skeleton was probed with; here with the state of one verify step
    assert layer_floor_us(K3, 16, 1, 1, "kda", H200) == pytest.approx(21.3, rel=0.02)
    assert layer_floor_us(K3, 16, 8, 8, "kda", H200) == pytest.approx(46.4, rel=0.02)
    assert step_floor_us(K3, 16, 8, 8, H200) == pytest.approx(4300, rel=0.03)
    assert step_floor_us(K3, 16, 1, 1, H200) == pytest.approx(2000, rel=0.03)
    assert layer_floor_us(K3, 16, 1, 1, "kda", H200, stock=True) > 1.8 * layer_floor_us(K3, 16, 1, 1, "kda", H200)


def test_routing_that_is_not_uniform_is_told() -> None:
    assert routing_fault(K3, 8, 120.3) is None
    assert routing_fault(K3, 8, 118.2) is None
    assert "100.0 distinct experts in the mean, 120.3" in (routing_fault(K3, 8, 100.0) or "")


def test_a_layers_time_is_told_kernel_by_kernel() -> None:
    # the second kernel starts while the first runs and waits inside; the third starts 2 us after its end
    replay = [Ran("k3_moe_tail_cute_sum", 23, 30), Ran("k3_router_cute_front", 5, 21), Ran("copy", 0, 20)]
    assert spent(replay) == {
        "copy": (1, 20, 0.0), "k3_router_cute_front": (1, 1, 0.0), "k3_moe_tail_cute_sum": (1, 9, 2.0),
    }  # fmt: skip
    runs = split([*replay, *(Ran(one.name, one.start_us + 100, one.end_us + 100) for one in replay)], 2)
    assert [[one.name for one in run] for run in runs] == [list(spent(replay))] * 2
    for wrong in ([], replay):
        with pytest.raises(RuntimeError, match="some are missing"):
            split(wrong, 2)
    few = [[Ran("copy", 0, 20), Ran("k3_router_cute_front", 5, 21)]] * 3
    late = [Ran("copy", 0, 90), Ran("k3_router_cute_front", 5, 300)]  # one replay was disturbed
    three = [[Ran("copy", 0, 20), *(Ran("k3_router_cute_front", 5, 21 + 6 * at) for at in range(3))], late]
    (added,) = a_layer(few, [three[0], three[0], three[1]], 2)
    assert added == {
        "kernel": "k3_router_cute_front", "family": "router", "launches": 1, "us": pytest.approx(6), "idle_us": 0,
    }  # fmt: skip
    assert [family_of(name) for name in ("k3_attn_res_cute_mix", "k3_attention_projection_x", "k3_new_x", "void k3_mla_")] == [
        "attn_res", "attention_projection", OTHER, OTHER,
    ]  # fmt: skip
    told = made_of([added, {**added, "us": 3.0}, {**added, "family": OTHER, "us": 2.5}], {"router": 7.5, "kda": 1.0})
    assert [(one["family"], one["launches"], one["us"], one["above_floor_us"]) for one in told] == [
        (OTHER, 1, 2.5, 2.5), ("router", 2, pytest.approx(9), pytest.approx(1.5)),
    ]  # fmt: skip


def test_floors_of_families_add_up_to_the_layers() -> None:
    for kind in ("kda", "mla"):
        choices = [entry(K3, name, kind=one, problem_kind=own, tp=16) for name, one, own in (
            ("attention_projection", "kda", None), ("attention_projection", "mla", None), ("output_projection", "kda", None),
            ("output_projection", "mla", None), ("output_projection", "restart", None), ("router", None, None),
            ("experts", None, None), ("kda", None, "plain"), ("mla", None, "bf16"), ("moe_tail", None, None),
            ("attn_res", "blocks", None), ("lm_head", None, None),
        )]  # fmt: skip
        floors = family_floors(choices, kind, 8, H200)
        assert set(floors) == {"attention_projection", "output_projection", "router", "experts", kind, "moe_tail"}
        assert sum(floors.values()) == pytest.approx(layer_floor_us(K3, 16, 8, 1, kind, H200), rel=0.08)


def test_verdicts() -> None:
    bar = LAYER_BARS[8]
    assert [Verdict(bar, got).word for got in (60.0, 65.0, 70.0, 85.0, 85.1)] == [
        "aim",
        "aim",
        "closes",
        "closes",
        "missed",
    ]

    def layers(kda: float, launches: float, mla: float) -> dict[str, Any]:
        return {"kda": {"us": kda, "launches": launches}, "mla": {"us": 80.0, "launches": mla}}

    own = {"layers": layers(70.0, 7, 10), "step_us": 9000.0}
    row = {"rows": 8, "dcp": 1, "backends": {"latency_specialized": own}, "ratios": {"kda layer": 1.5, "step": 2.5}}
    found = {"tp": 16, "rows": [row]}
    assert [(one.bar.what, one.word) for one in verdicts(found, replace(K3, name="a-folder"))] == [
        ("KDA MoE layer, 8 rows", "closes"), ("whole step, 8 rows", "missed"), ("launches of a KDA MoE layer", "aim"),
        ("launches of an MLA MoE layer", "closes"),
    ]  # fmt: skip
    assert ratio_faults(found) == ["8 rows, kda layer: 1.50 times as fast as auto, at least 2 is wanted"]
    # bars of the whole model at TP16 say nothing of a smaller one, of longer slices or of contexts that others hold
    assert verdicts(found, SMALL_K3) == []
    for other in ({"tp": 8}, {"rows": [{**row, "dcp": 16}]}):
        assert verdicts({**found, **other}, K3) == []


def test_a_part_of_the_layers_is_the_same_memory(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    weights = pack(shard(tiny_tensors, tiny, tp=1, rank=0), tiny, tp=1, rank=0)
    part = some_layers(weights, "mla", 2)
    assert part.card.layer_kinds == ("mla", "mla")
    assert part.layers[0] is weights.layers[2]
    assert part.layers[1] is weights.layers[4]
    kda = some_layers(weights, "kda", 2)
    assert kda.card.layer_kinds == ("kda", "kda")
    assert not kda.card.is_dense(0)
    assert [kda.layers[0] is weights.layers[1], kda.layers[1] is weights.layers[3]] == [True, True]


def test_a_measurement_times_both_backends_over_loads(tiny: ModelCard) -> None:
    weights = random_rank_weights(tiny, seed=0, dtype=torch.bfloat16, tp=2, rank=1)
    comm, loads = StandIn(1, 2), [Load(1, 4, 8), Load(2, 1, 0)]
    made: list[tuple[str, Load]] = []

    def backend(name: str) -> Callable[[Load], AutoOperators]:
        def make(load: Load) -> AutoOperators:
            made.append((name, load))
            peers = lone_peers(tiny, tp=2, rows=load.rows, device="cpu")
            return AutoOperators(tiny, dtype=torch.bfloat16, device="cpu", peers=peers)

        return make

    ran: list[int] = []

    def clock(run: Callable[[], None], samples: int) -> list[float]:
        run()  # it works
        ran.append(samples)
        # every graph of auto takes ten us a rank in the queue, the other backend's two
        return [float(len(ran) * (10 if len(ran) <= 10 else 2))] * samples

    traced: list[int] = []

    def trace(run: Callable[[], None], replays: int) -> list[list[Ran]]:
        assert len(ran) == 20  # nobody looks before everything is timed
        traced.append(replays)
        # graphs of 1 and 2, of 1 and 3, and of all 6 layers: a kernel of each layer behind one of the step's own
        layers = (1, 2, 1, 3, 6)[(len(traced) - 1) % 5]
        ends = [Ran("k3_kda_cute_step", 10 + 4 * at, 17 + 4 * at) for at in range(layers)]
        return [[Ran("copy", 0, 9), *ends]] * replays

    both = {"auto": backend("auto"), "latency_specialized": backend("latency_specialized")}
    found = measure(weights, comm, loads, both, H200, timer=clock, samples=5, tracer=trace)
    assert traced == [REPLAYS] * 10
    kernels = found["rows"][0]["backends"]["latency_specialized"]["layers"]["mla"]
    assert "kernel_times" not in found["rows"][0]["backends"]["auto"]["layers"]["mla"]
    assert kernels["kernel_times"] == [
        {"kernel": "k3_kda_cute_step", "family": "kda", "launches": 1, "us": pytest.approx(4), "idle_us": 0}
    ]
    assert kernels["traced_us"] == pytest.approx(4)
    step = {
        one["kernel"]: one["us"] for one in found["rows"][0]["backends"]["latency_specialized"]["step_kernel_times"]
    }
    assert step == {"copy": 9, "k3_kda_cute_step": pytest.approx(28)}
    assert made == [
        (name, load) for name in (*both, "latency_specialized") for load in loads
    ]  # timed, then ours traced
    assert ran == [5] * 20  # two graphs of each kind and one of all layers, twice, for each backend
    first = found["rows"][0]
    assert (first["rows"], first["tokens_a_request"], first["context"]) == (4, 4, 8)
    auto = first["backends"]["auto"]
    assert auto["layers"]["kda"]["us"] == pytest.approx(10.0)  # (20 - 10) / (2 - 1)
    assert [one["layers"] for one in auto["layers"]["mla"]["graphs"]] == [1, 3]
    assert auto["layers"]["mla"]["us"] == pytest.approx((40 - 30) / 2)
    assert auto["step_us"] == 50.0
    assert auto["layers"]["kda"]["launches"] is None
    assert first["ratios"]["kda layer"] == pytest.approx(5.0)
    assert 1 <= auto["distinct_experts"] <= tiny.num_experts

    def blind(_run: Callable[[], None], replays: int) -> list[list[Ran]]:
        return split([Ran("copy", 0, 1)], replays)

    told = Bench(weights, comm, loads[0], seed=0).traced(both["auto"](loads[0]), blind, ["mla"])
    assert told == {"layers": {}, "step": [], "not_traced": "1 kernels were seen in 5 replays: some are missing"}
    assert found["rank"] == 1
    part = {"family": "kda", "us": 4.0, "launches": 1.0, "floor_us": 1.0, "above_floor_us": 3.0}
    verdict = Verdict(LAYER_BARS[8], 70.0, (part,)).to_json()
    assert verdict["made_of"] == [part]
    render_bars(console(), {**found, "notes": ["n"], "verdicts": [verdict], "faults": ["f"]})


def test_distinct_experts_are_counted_layer_by_layer(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    weights = pack(shard(tiny_tensors, tiny, tp=1, rank=0), tiny, tp=1, rank=0)
    counting = Counting(AutoOperators(tiny, dtype=torch.float64, device="cpu"))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).double()
    for layer in weights.layers[1:3]:
        ids, _, _ = counting.router(x, layer.mlp, SingleRank())  # type: ignore[arg-type]
        assert counting.distinct[-1] == len(set(ids.flatten().tolist()))
    assert counting.name == "auto"


def test_another_seed_has_other_ids(tiny: ModelCard) -> None:
    weights = random_rank_weights(tiny, seed=0, dtype=torch.bfloat16, tp=2, rank=1)
    seen: list[list[int]] = []

    class Seen(AutoOperators):
        def embed(self, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(ids.tolist())
            return super().embed(ids, *rest)

    for seed in (0, 1):
        backends = {"auto": lambda _load: Seen(tiny, dtype=torch.bfloat16, device="cpu")}
        measure(
            weights, StandIn(1, 2), [Load(1, 4, 0)], backends, H200, timer=lambda _, n: [1.0] * n, samples=4, seed=seed
        )
    ids = {tuple(one) for one in seen}
    assert len(ids) == 2


def test_the_bars_need_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")
    assert command(["decode", "bars"]) == 2
    assert "GPU" in capsys.readouterr().err
    assert command(["decode", "bars", "--drafts", "9"]) == 2
    assert "a step verifies 0 to 7 drafts" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for words, line in [
        (["--out", str(tmp_path / "no" / "b.json")], f"there is no folder {tmp_path / 'no'}"),
        (["--out", str(tmp_path / "file" / "b.json")], "there is no folder"), (["--out", str(tmp_path)], "it is a folder"),
        (["--out", "/proc/self/b.json"], "cannot write /proc/self/b.json: "),
        (["--rank", "16"], "rank 16 lies outside 0..15"), (["--of", "7"], "TP 7 does not divide"),
        (["--context", "2000000"], "a context of 2000008 tokens"), (["--seed", str(2**64)], "64 bits"),
    ]:  # fmt: skip
        assert command(["decode", "bars", *words]) == 2
        told = capsys.readouterr().err
        assert line in told and told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert command(["decode", "plan", "--rows", "9", "--drafts", "7"]) == 2
    assert "whole requests" in capsys.readouterr().err
    assert command(["decode", "plan", "--rows", "16", "--drafts", "7", "--backend", "latency_specialized"]) == 0
    text = capsys.readouterr().out
    assert "--kind verify8" in text
    assert "--kind bf16_verify8" in text
