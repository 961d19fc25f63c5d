"""Benches: rounds whose clock is made up, loops that put out what plain decoding does, measures, presets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.bench import loops
from k3lab.decode.bench.batches import Finished, Timing, rounds, seen
from k3lab.decode.bench.layers import by_kind, load_of
from k3lab.decode.bench.loops import cache_of, loop_of, prompts_of
from k3lab.decode.bench.measures import absent, measures
from k3lab.decode.bench.places import Wanted, run_here
from k3lab.decode.bench.presets import PRESETS, preset_of
from k3lab.decode.bench.reports import between, conditions, drafting
from k3lab.decode.bench.run import names_of, run_bench
from k3lab.decode.dispatch import Dispatcher
from k3lab.decode.greedy import decode_dispatched
from k3lab.decode.group import Group
from k3lab.decode.measure_bars import Bench
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.random_weights import random_rank_weights
from k3lab.decode.run_options import RunOptions
from k3lab.decode.sharding import ModelTensors
from k3lab.decode.weights import RankWeights
from k3lab.kernels import K3, SMALL_K3, InputError, ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, StandIn, run_virtual_ranks
from k3lab.kernels.gpu_cards import GPU_CARDS

from .evaluation_case import dispatcher, weights_of

H200 = GPU_CARDS["H200"]


@pytest.fixture(scope="module")
def weights(tiny_tensors: ModelTensors, tiny: ModelCard) -> RankWeights:
    return weights_of(tiny_tensors, tiny)


class Made:
    """A loop whose calls take known seconds and whose requests get known counts of tokens."""

    def __init__(self, counts: Sequence[Sequence[int]], drafting: Sequence[float] = ()) -> None:
        self.counts, self._drafting, self.at = [list(one) for one in counts], [*drafting], 0.0
        self.cache = SimpleNamespace(release=lambda slot: self.ran.append(("release", slot)))
        self.capture: Any = None
        self.ran: list[Any] = []
        self._next, self._held = 0, list[int]()

    def open(self) -> int:
        self.at += 1000  # a made-up context is nobody's time
        self._next += 1
        return self._next - 1

    def first(self, slot: int, ids: Sequence[int], seed: int) -> int:
        self.ran.append(("first", slot, len(ids), seed))
        self.at += len(ids)
        return 7

    def begin(self, slots: Sequence[int], last: Sequence[int], seeds: Sequence[int]) -> None:
        self.ran.append(("begin", tuple(slots), tuple(last), tuple(seeds)))
        self._held = list(slots)
        self.at += 500

    def step(self) -> list[list[int]]:
        self.at += 10
        return [[20 + n for n in range(self.counts[slot].pop(0))] for slot in self._held]

    def drafting_s(self) -> list[float]:
        return self._drafting


def run_made(
    loop: Made, tokens: int, prompts: list[list[int]], count: int = 1
) -> tuple[list[Finished], Timing, list[int]]:
    timing, served = Timing(), list[int]()
    made = rounds(
        loop,
        lambda _number: prompts,
        tokens,
        count,
        timing=timing,
        seed=40,
        served=served.append,
        clock=lambda: loop.at,
    )
    return list(made), timing, served


def test_times_are_those_of_prompts_and_steps_alone() -> None:
    # slot 0 warms up; of the two requests one gets three tokens a step, the other one
    loop = Made([[1], [3, 3], [1, 1, 1, 1, 1]], drafting=[0.25, 0.5, 0.125])
    ended, timing, served = run_made(loop, 5, [[1, 2, 3], [4, 5]])
    fast, slow = ended
    assert (fast.request, fast.first_s, fast.latency_s, fast.steps, fast.output) == (0, 3, 25, 2, 5)
    assert (slow.request, slow.first_s, slow.latency_s, slow.steps, slow.output) == (1, 5, 45, 4, 5)
    assert served == [2, 2, 1, 1]
    assert timing.prefill_s == [3, 2] and timing.prefilled == 5 and timing.drafting_s == [0.25, 0.5, 0.125]
    assert timing.decoded == 8 and timing.accepted == [3, 1, 3, 1, 1, 1]
    began = [one for one in loop.ran if one[0] == "begin"]
    assert began[1:] == [("begin", (1, 2), (7, 7), (40, 41)), ("begin", (2,), (20,), (41,))]
    data = seen(ended, timing)
    assert data["decode_tokens_a_s"] == 8 / 40  # no prefill in it
    assert data["output_tokens_a_s"] == 10 / 45 and data["prefill_tokens_a_s"] == 1
    assert data["user_tokens_a_s"]["p50"] == pytest.approx((4 / 22 + 4 / 40) / 2)
    assert data["mean_tokens_a_step"] == 10 / 6 and data["drafting_s"]["p50"] == 0.25


def test_each_round_has_its_own_beginning_and_seeds() -> None:
    loop = Made([[1]] * 4)
    ended, timing, _ = run_made(loop, 2, [[1, 2]], count=3)
    assert [(one.round, one.first_s, one.latency_s) for one in ended] == [(0, 2, 12), (1, 2, 12), (2, 2, 12)]
    assert [one[3] for one in loop.ran if one[0] == "first"] == [40, 40, 41, 42]
    assert [one[1] for one in loop.ran if one[0] == "release"] == [0, 1, 2, 3]
    assert timing.drafting_s == [] and seen(ended, timing)["drafting_s"]["samples"] == 0


def test_requests_that_ended_are_there_when_the_rest_fails() -> None:
    loop, kept = Made([[1], [9], []]), list[Finished]()
    ran = rounds(loop, lambda _n: [[1]], 3, 2, timing=Timing(), clock=lambda: loop.at)
    with pytest.raises(IndexError):
        kept += ran
    assert [one.output for one in kept] == [3]


def options_of(**changes: Any) -> RunOptions:
    return replace(RunOptions(rows=2, prompt=4, tokens=6, seed=3), **changes)


def loop_tokens(weights: RankWeights, options: RunOptions, prompts: list[list[int]]) -> list[list[int]]:
    cache, operators = cache_of(weights, options), ReferenceOperators(weights.card)
    loop = loop_of(Dispatcher(weights, cache, SingleRank(), auto=operators), operators, options)
    slots = [loop.open() for _ in prompts]
    out = [[loop.first(slot, ids, 5 + n)] for n, (slot, ids) in enumerate(zip(slots, prompts, strict=True))]
    loop.begin(slots, [one[-1] for one in out], [5, 6])
    while min(map(len, out)) < options.tokens:
        for own, more in zip(out, loop.step(), strict=True):
            own += more
    return [own[: options.tokens] for own in out]


def test_loops_put_out_what_plain_decoding_does(weights: RankWeights) -> None:
    """Drafts that the target verifies change no token; a captured step's choice is the eager one's."""
    options = options_of(tokens=4)
    prompts = prompts_of(options, weights.card.vocab_size, SingleRank(), part=None, number=0)
    made = dispatcher(weights, ReferenceOperators(weights.card), 40, 2)
    eager = decode_dispatched(made, torch.tensor(prompts), 4, lambda: None).tokens
    assert loop_tokens(weights, options, prompts) == eager
    assert loop_tokens(weights, replace(options, drafts=2), prompts) == eager


def test_prompts_are_the_rounds_and_a_lone_ranks_part() -> None:
    options = options_of(rows=3)
    one, other = (prompts_of(options, 512, SingleRank(), part=None, number=n) for n in (0, 1))
    assert one != other and one == prompts_of(options, 512, SingleRank(), part=None, number=0)
    assert [len(ids) for ids in one] == [4, 4, 4]
    part = prompts_of(options, 512, StandIn(2, 4), part=128, number=0)
    assert all(256 <= token < 384 for ids in part for token in ids)


def test_what_is_not_measured_is_absent_and_said_to_be() -> None:
    nothing = seen([], Timing())
    assert measures(nothing, None) == {}
    told = absent(nothing, None, drafts=0)
    assert {"time a layer by kind", "launches a layer", "share of the byte floor", "drafter time"} <= set(told)
    assert told["drafter time"] == "no drafts" and "needs a GPU" in told["launches a layer"]
    layer = {"us": 70.0, "launches": 7.0, "share_of_floor": 0.6}
    layers = {
        "layers": {"kda": layer, "mla": {**layer, "launches": None}}, "step_us": 8000.0, "step_floor_us": 4000.0, "step_launches": 700,
        "absent": {"x": "why"},
    }  # fmt: skip
    made = measures(nothing, layers)
    assert made["kda MoE layer"] == {"value": 70.0, "unit": "us"}
    assert made["kda MoE layer, share of the byte floor"] == {"value": 0.6, "unit": "share"}
    assert made["step alone, share of the byte floor"]["value"] == 0.5
    assert "mla MoE layer, launches" not in made and absent(nothing, layers, drafts=3)["x"] == "why"
    assert "time a layer by kind" not in absent(nothing, layers, drafts=3)


@pytest.mark.parametrize(("steps", "covered"), [(1, ()), (2, ("median",)), (9, ("median",)), (10, ("median", "P90"))])
def test_a_percentile_says_its_samples_and_whether_one_lies_beyond_it(steps: int, covered: tuple[str, ...]) -> None:
    loop = Made([[1], [1] * steps, [1] * steps])
    made = measures(seen(*run_made(loop, steps + 1, [[1], [1]])[:2]), None)
    for word in ("median", "P90"):
        assert made[f"step time, {word}"]["samples"] == steps and made[f"request latency, {word}"]["samples"] == 2
        assert made[f"step time, {word}"]["tail_covered"] is (word in covered)
    assert "samples" not in made["prefill rate"]  # no percentile


def test_layers_are_those_of_the_bars(tiny: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_rank_weights(tiny, seed=0, dtype=torch.bfloat16, tp=2, rank=1)
    operators, ran = AutoOperators(tiny, dtype=torch.bfloat16, device="cpu"), list[int]()

    def clock(_run: Callable[[], None], samples: int) -> list[float]:
        ran.append(samples)
        return [10.0 * len(ran)] * samples

    options = options_of(tp=2, rows=1, drafts=1, prompt=3, tokens=8, fill=2)
    assert (load_of(options).rows, load_of(options).q_len, load_of(options).context) == (2, 2, 9)
    for kept, dtype in (("bfloat16", torch.bfloat16), ("float8_e4m3fn", torch.float8_e4m3fn)):
        load = load_of(replace(options, kv_dtype=kept))
        cache, _ = Bench(weights, StandIn(1, 2), load, seed=0)._cache(weights)
        assert load.form.cache_dtype == kept and {pages.dtype for pages in cache.mla.values()} == {dtype}
    made = by_kind(weights, StandIn(1, 2), operators, options, "auto", H200, samples=5, timer=clock)
    assert made["layers"]["kda"]["us"] == pytest.approx(10.0) and made["step_us"] == 50.0 and ran == [5] * 5
    assert made["absent"] == {} and made["context"] == 9
    lone = replace(weights, card=replace(tiny, mla_layers=(2,)))
    monkeypatch.setattr(Bench, "table", lambda _self, *more: {"kinds": more[5]})
    told = by_kind(lone, StandIn(1, 2), operators, options, "auto", H200, samples=5, timer=clock)
    assert told["kinds"] == ["kda"] and "a slope needs two" in told["absent"]["time of a layer, mla"]


def test_ranks_that_put_out_other_tokens_end_a_bench(tiny: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(comm: Collectives) -> str:
        group = Group(comm.rank, comm.size, comm, "threads", None, host=comm)
        options = options_of(tp=2, rows=1, prompt=2, tokens=2)
        wanted = Wanted(tiny, options, ("auto",), 1, 4, lambda _name, _one: None, lambda _what, _done, _of: None)
        return str(run_here(wanted, group, None, (), {})["auto"]["seen"]["tokens_digest"])

    first, second = run_virtual_ranks(2, rank)
    assert first == second
    inner = loops.next_tokens
    monkeypatch.setattr(loops, "next_tokens", lambda logits, weights, comm: inner(logits, weights, comm) + comm.rank)
    with pytest.raises(RuntimeError, match="another rank chose other tokens than rank 0 on auto"):
        run_virtual_ranks(2, rank)


def test_figures_stand_beside_their_conditions_and_only_where_they_were_published() -> None:
    told = {name: [one.line for one in preset.published] for name, preset in PRESETS.items()}
    assert all(
        len(told[name]) == count for name, count in {"headline": 3, "plain-1": 1, "plain-64": 1, "agentx-1": 1}.items()
    )
    assert not any(told[name] for name in ("plain-8", "drafts-3", "headline-tp8", "plain-1-tp8"))
    assert "842 against 488" in told["headline"][0] and "838 against 489" in told["headline"][1]
    assert all("SYNTHETIC acceptance length 6" in line and "without prefill" in line for line in told["headline"][:2])
    assert "69 us" in told["headline"][2] and "rows not stated; not application latency" in told["headline"][2]
    assert "256.4" in told["plain-1"][0] and "3606.1" in told["plain-64"][0] and "not per user" in told["plain-64"][0]
    assert "16 GPUs against 8" in told["agentx-1"][0] and "does not isolate" in told["agentx-1"][0]
    assert all(
        "16 GB300" in line or "16 GPUs" in line or "GPUs of the trace not stated" in line
        for lines in told.values()
        for line in lines
    )
    assert all(preset.drafts or preset.acceptance_length is None for preset in PRESETS.values())
    with pytest.raises(InputError, match="unknown preset 'best'; presets: headline"):
        preset_of("best")


def test_what_of_a_preset_was_changed() -> None:
    point = preset_of("headline")
    asked = RunOptions(tp=16, rows=1, prompt=1, tokens=1000, drafts=7, acceptance_length=6.0)
    assert point.changed(K3, asked) == []
    assert point.changed(SMALL_K3, replace(asked, fill=50, drafts=3)) == [
        "model small-k3 for kimi-k3", "drafts 3 for 7", "context filled 50 for 0",
    ]  # fmt: skip
    assert (
        preset_of("agentx-1").changed(K3, replace(asked, drafts=0, acceptance_length=None)) == []
    )  # lengths are a file's


def test_conditions_hold_all_that_decides_a_number(tiny: ModelCard) -> None:
    def made(**changes: Any) -> Any:
        return conditions(tiny, options_of(**changes), gpu="H200", gpus=1, transport="none", workload="w")

    plain, drafted = made(), made(drafts=3, acceptance_length=2.5)
    assert plain.acceptance == "none" and drafting(tiny, options_of()) is None
    assert (
        "SYNTHETIC acceptance of mean length 2.5" in drafted.acceptance
        and "small-dspark, random, seed 3" in drafted.acceptance
    )
    assert made(drafts=3) != drafted and made(seed=4).weights != plain.weights
    alike = {"conditions": plain.to_json(), "measures": {"step": {"value": 4.0, "unit": "ms"}}}
    faster = {**alike, "measures": {"step": {"value": 2.0, "unit": "ms"}}}
    assert between({"auto": alike}) is None
    told = between({"auto": alike, "latency_specialized": faster})
    assert told and told["ratios"]["step"]["times_better"] == 2.0
    refused = between({"auto": alike, "latency_specialized": {**faster, "conditions": drafted.to_json()}})
    assert refused and not refused["comparable"] and not refused["ratios"]


@pytest.mark.parametrize(("changes", "more", "words"), [
    ({"tokens": 1}, {}, "a bench decodes 2 or more"), ({}, {"rounds": 0}, "1 to 10000 rounds"), ({}, {"samples": 3}, "4 to 10000 samples"),
    ({}, {"samples": 10_001}, "4 to 10000 samples"),
    ({"drafts": 3, "acceptance_length": 0.5}, {}, "it lies in 1..4"), ({"drafts": 3, "acceptance_length": 4.5}, {}, "it lies in 1..4"),
    ({"fill": 5000}, {}, "a context of 50"), ({"rows": 9, "drafts": 7}, {}, "72 rows"),
])  # fmt: skip
def test_benches_that_cannot_be_are_told_before_anything_is_made(
    changes: dict[str, Any], more: dict[str, Any], words: str, tiny: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")
    monkeypatch.setattr("k3lab.decode.bench.places.run_here", lambda *_: pytest.fail("something was run"))
    with pytest.raises(InputError, match=words):
        run_bench(tiny, options_of(**changes), **more)
    with pytest.raises(InputError, match="unknown backend 'stock'"):
        names_of("stock")
    with pytest.raises(InputError, match="kimi-k3 at TP 1 needs"):
        run_bench(K3, options_of())
