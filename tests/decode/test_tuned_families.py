"""A step in which every family runs kernels of its own, a twin in place of each; its plan, and its operators under fakes."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from k3lab.decode import library, tuned
from k3lab.decode.auto import AutoOperators
from k3lab.decode.bindings import GIVEN, lacking, step_kind
from k3lab.decode.caches import DecodeCache
from k3lab.decode.choices import STEP_FAMILIES, Tuned
from k3lab.decode.expert_memory import hold, release
from k3lab.decode.lone import lone_peers
from k3lab.decode.packing import pack
from k3lab.decode.plan import Plan, plan
from k3lab.decode.random_weights import BALANCED, random_tensor
from k3lab.decode.sequence import forms, tuned_launches
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.decode.stock import stock_layer
from k3lab.decode.tensors import layer_specs
from k3lab.decode.weights import MoeMlp, RankWeights
from k3lab.kernels import K3, InputError, ModelCard, family
from k3lab.kernels.accounting import expected_distinct_experts
from k3lab.kernels.collectives import SingleRank

from .twin_runner import ROWS, AnyTwinRunner, entry, every_entry

ROUNDED = 1e-5
"""Some families' twins hand on FP32 whatever they are given."""


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "Runner", AnyTwinRunner)
    AnyTwinRunner.calls = []


@pytest.fixture
def weights(tiny: ModelCard, tiny_tensors: ModelTensors) -> RankWeights:
    return pack(shard(tiny_tensors, tiny, tp=1, rank=0), tiny, tp=1, rank=0)


def steps(weights: RankWeights, used: Any, requests: int, q_len: int) -> torch.Tensor:
    cache = DecodeCache(
        weights.card, max_requests=4, max_context=80, max_verify=4, block_size=64, dtype=torch.float64, padding=True
    )
    slots, found = [cache.add() for _ in range(requests)][::-1], []
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        ids = torch.randint(0, 512, (requests, q_len), generator=generator)
        found.append(step(weights, cache, ids, slots, used, SingleRank()))
        cache.accept(slots, [1 + place % q_len for place in range(requests)])
    return torch.cat(found)


def turn(weights: RankWeights, change: Any) -> None:
    for layer in weights.layers:
        if isinstance(layer.mlp, MoeMlp):
            change(layer.mlp)


@pytest.mark.parametrize(("requests", "q_len"), [(3, 1), (2, 4)])
def test_a_step_of_kernels_alone_is_the_step_without_and_follows_its_plan(
    tiny: ModelCard, weights: RankWeights, twins: None, requests: int, q_len: int
) -> None:
    want = steps(weights, AutoOperators(tiny, dtype=torch.float64, device="cpu"), requests, q_len)
    choices = every_entry(tiny, q_len)
    pool: tuned.KernelPool = {}
    used = tuned.TunedOperators(tiny, choices, dtype=torch.float64, device="cpu", pool=pool)
    assert used.holds_experts
    turn(weights, hold)
    got = steps(weights, used, requests, q_len)
    assert ((got - want).norm() / want.norm()).item() < ROUNDED
    counted = Counter(f"k3_{name}_twin" for name, _, _ in AnyTwinRunner.calls)
    launches = [
        one
        for layer, form in enumerate(forms(tiny, choices))
        for one in tuned_launches(stock_layer(form.kind, dense=form.dense, rows=ROWS), choices, form)
        if one.evidence
    ]
    planned = Counter(one.kernel.rpartition("_")[0] for one in launches)
    # around the layers: the embedding; the first mix stands at layer 0's head, the final one and the head after them
    planned += Counter({"k3_attn_res_twin": 1, "k3_lm_head_twin": 2})
    assert counted == Counter({name: 3 * count for name, count in planned.items()})
    assert all(rows == requests * q_len for _, _, rows in AnyTwinRunner.calls)
    # operators of another row count share what is loaded
    again = tuned.TunedOperators(tiny, choices, dtype=torch.float64, device="cpu", pool=pool)
    assert len(pool) == len(choices)
    assert again._kernels["kda", None] is used._kernels["kda", None]
    turn(weights, release)
    with pytest.raises(InputError, match="read the held layout"):
        steps(weights, used, requests, q_len)


@pytest.mark.parametrize("behind", [True, False])
def test_older_inputs_are_read_early_where_the_launch_before_begins_when_all_before_it_has_ended(
    tiny: ModelCard, weights: RankWeights, twins: None, behind: bool
) -> None:
    """Not where that launch may run beside older ones, nor where the saved blocks were copied just before."""
    used = tuned.TunedOperators(tiny, every_entry(tiny), dtype=torch.float64, device="cpu")
    for name in ("kda", "mla", "router"):
        used._kernels[name, None].releases_behind = behind
    turn(weights, hold)
    AnyTwinRunner.early = []
    steps(weights, used, 3, 1)
    turn(weights, release)
    told = {
        name: [(blocks, early) for who, blocks, early in AnyTwinRunner.early if who == name]
        for name in ("output_projection", "experts")
    }
    assert len(told["experts"]) > 3 and all(early == behind for _, early in told["experts"])
    mixed = told["output_projection"]
    assert any(early for _, early in mixed) == behind
    for before, (blocks, early) in itertools.pairwise([(0, False), *mixed]):
        assert early == (behind and blocks == before[0])


def test_nothing_is_read_early_that_is_copied_for_the_call(
    tiny: ModelCard, weights: RankWeights, twins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is the launch before."""
    used = tuned.TunedOperators(
        tiny, [entry(tiny, "router"), entry(tiny, "experts")], dtype=torch.float64, device="cpu"
    )
    used._kernels["router", None].releases_behind = True
    turn(weights, hold)
    mlp, wide = weights.layers[1].mlp, torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).double()
    assert isinstance(mlp, MoeMlp)
    ids, shares, latent = used.router(wide[:, :256].contiguous(), mlp, SingleRank())
    told: list[bool] = []
    monkeypatch.setattr(library, "call", lambda *given: told.append(given[-1]))
    for x in (wide[:, :256], wide[:, :256].contiguous()):
        used.experts(latent, ids, shares, x, mlp)
    turn(weights, release)
    assert told == [False, True]


def test_the_plan_of_k3_with_kernels_of_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = every_entry(K3, 1)
    monkeypatch.setattr("k3lab.decode.plan.choose", lambda *_args, **_more: tuple(choices))
    made: Plan = plan(K3, tp=1, rows=8, backend="latency_specialized")
    layers = {one.label: one for one in made.layers}
    assert [one.kernel for one in made.layer("kda").launches] == [
        "k3_attention_projection_twin_kda", "k3_kda_twin_all", "k3_output_projection_twin_kda", "k3_router_twin_all",
        "k3_experts_twin_all", "k3_moe_tail_twin_all",
    ]  # fmt: skip
    restart = layers["kda moe restart"]
    assert restart.layers == (12, 24, 36, 48, 60, 72, 84)
    assert [one.kernel for one in restart.launches][2:4] == ["saved_block", "k3_output_projection_twin_restart"]
    assert layers["mla moe"].launches[1].kernel == "k3_mla_twin_all"
    first = next(one for one in made.layers if one.dense)
    assert first.launches[0].kernel == "k3_attn_res_twin_first"
    assert {one.engine for one in first.launches if one.kernel.startswith("dense")} == {"torch"}
    # the layer behind the dense one has no tail before it
    behind = next(one for one in made.layers if one.layers == (1,))
    assert behind.launches[0].kernel == "k3_attn_res_twin_blocks"
    assert len(made.layer("kda").layers) == 68 - 7 - 1
    assert [one.kernel for one in made.after] == ["k3_attn_res_twin_final", "k3_lm_head_twin_all", "logits_all_gather"]
    counted = made.tuned_kernels()
    assert counted["k3_moe_tail_twin_all"] == counted["k3_router_twin_all"] == 92
    assert counted["k3_kda_twin_all"] == 69
    assert counted["k3_output_projection_twin_restart"] == 8
    assert counted["k3_output_projection_twin_kda"] == 61
    assert counted["k3_attn_res_twin_blocks"] == 1
    assert [(one.kernel, one.engine) for one in made.before] == [
        ("token_ids", "glue"),
        ("k3_lm_head_twin_embed", "twin"),
    ]
    assert any("dense layer" in note for note in made.notes)
    assert len(made.to_json()["layers"]) == len(made.layers)


@pytest.mark.parametrize(
    "missing", [("moe_tail",), ("output_projection",), ("attn_res",), ("experts", "router", "kda")]
)
def test_a_family_without_kernels_is_computed_by_the_others_way(
    tiny: ModelCard, weights: RankWeights, twins: None, missing: tuple[str, ...]
) -> None:
    want = steps(weights, AutoOperators(tiny, dtype=torch.float64, device="cpu"), 3, 1)
    choices = [one for one in every_entry(tiny) if one.family not in missing]
    used = tuned.TunedOperators(tiny, choices, dtype=torch.float64, device="cpu")
    if used.holds_experts:
        turn(weights, hold)
    got = steps(weights, used, 3, 1)
    turn(weights, release)
    assert ((got - want).norm() / want.norm()).item() < ROUNDED
    mixes = Counter(kind for name, kind, _ in AnyTwinRunner.calls if name == "attn_res")
    planned = Counter()
    for form in forms(tiny, choices):
        frame = tuned_launches(stock_layer(form.kind, dense=form.dense, rows=3), choices, form)
        planned += Counter(one.kernel.rpartition("_")[2] for one in frame if one.evidence and one.family == "attn_res")
    if "attn_res" not in missing:
        assert mixes == Counter({kind: 3 * count for kind, count in (planned + Counter(final=1)).items()})


def test_experts_read_ids_where_the_router_wrote_them(
    tiny: ModelCard, weights: RankWeights, twins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = [entry(tiny, "router"), entry(tiny, "experts")]
    used = tuned.TunedOperators(tiny, choices, dtype=torch.float64, device="cpu")
    turn(weights, hold)
    mlp, x = weights.layers[1].mlp, torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).double()
    assert isinstance(mlp, MoeMlp)
    ids, shares, latent = used.router(x, mlp, SingleRank())
    seen: dict[str, torch.Tensor] = {}

    def call(_loaded: Any, inputs: dict[str, torch.Tensor], *_rest: Any) -> None:
        seen.update(inputs)

    monkeypatch.setattr(library, "call", call)
    used.experts(latent, ids, shares, x, mlp)
    assert seen["ids"].data_ptr() == ids.data_ptr()
    # a router without kernels sorts, and has 64 bits
    used.experts(latent, ids.long(), shares, x, mlp)
    assert seen["ids"].dtype == torch.int32 and torch.equal(seen["ids"], ids)
    turn(weights, release)


def test_an_engine_that_asks_for_what_no_step_has_is_not_chosen() -> None:
    one = entry(K3, "router")
    assert lacking(family("router"), one.compiled) is None
    launch = one.compiled.launches[0]
    odd = replace(launch, args=(*launch.args, replace(launch.args[0], name="secret")))
    assert "reads a tensor 'secret'" in (lacking(family("router"), replace(one.compiled, launches=(odd,))) or "")
    assert set(GIVEN) == set(STEP_FAMILIES)
    long = entry(K3, "mla", problem_kind="bf16")
    assert lacking(family("mla"), long.compiled, 1000) is None
    assert "contexts of 1024 tokens" in (lacking(family("mla"), long.compiled, 4000) or "")


def test_a_step_picks_the_kind_that_fits() -> None:
    def kind(name: str, **form: Any) -> str | None:
        return step_kind(family(name), K3, tp=16, rows=16, **form)

    assert kind("kda") == "plain"
    assert kind("kda", q_len=4) == "verify4"
    assert kind("mla") == "bf16"
    assert kind("mla", q_len=8, cache_dtype="float8_e4m3fn") == "fp8_verify8"
    assert kind("mla", context=5000) == "bf16_8k"
    assert kind("router", q_len=4) is None


def test_operators_have_fakes_that_know_shapes(tiny: ModelCard, weights: RankWeights, twins: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    used = tuned.TunedOperators(tiny, [entry(tiny, "lm_head")], dtype=torch.float64, device="cpu")
    kernels = used._kernels["lm_head", None]
    with FakeTensorMode() as mode:
        h, w = (mode.from_tensor(torch.empty(size).double()) for size in ((3, 256), (512, 256)))
        assert used.lm_head(h, w, SingleRank()).shape == (3, 512)
    assert not AnyTwinRunner.calls  # nothing ran
    h = torch.randn(3, 256).double()
    out = torch.full((3, 512), float("nan")).double()
    args = (kernels.handle, "h,w", [h, weights.lm_head], "logits", [out], 3, "", False)
    torch.library.opcheck(library.operator("lm_head", "twin"), args, test_utils=("test_schema", "test_faketensor"))
    library.operator("lm_head", "twin")(*args)
    assert torch.allclose(out, h @ weights.lm_head.T)
    with pytest.raises(InputError, match="9 rows: compiled for 1 to 8"), FakeTensorMode():
        used.lm_head(torch.empty(9, 256).double(), torch.empty(512, 256).double(), SingleRank())
    handle = kernels.handle
    del used, kernels
    with pytest.raises(InputError, match="not loaded any more"):
        library._of(handle)


def test_a_rank_alone_routes_uniformly() -> None:
    peers = lone_peers(K3, tp=16, rows=8, device="cpu", seed=4)
    generator = torch.Generator().manual_seed(9)
    of_bias = next(one for one in layer_specs(K3, 1) if one.name.endswith("e_score_correction_bias"))

    def bias(layer: int) -> torch.Tensor:
        return BALANCED * random_tensor(of_bias, of_bias.shape, seed=f"{layer}", dtype=torch.bfloat16, device="cpu")

    hit = []
    for _ in range(60):
        logits = peers.logits_around(torch.randn(8, 56, generator=generator))
        assert logits.shape == (8, 896)
        # a rank that hears itself from everybody hits as many, which are no others
        assert torch.equal(logits[:, 56:], peers.logits[:, 56:])
        hit.append(len((logits.sigmoid() + bias(len(hit))).topk(16, dim=-1).indices.unique()))
    assert abs(sum(hit) / 60 - expected_distinct_experts(K3, 8)) < 0.02 * expected_distinct_experts(K3, 8)
    words = peers.words(12)
    assert words.shape == (16, 12, 56 + 112)
    from k3lab.kernels.router.profiles import from_words

    theirs, latents = from_words(words, 56)
    assert torch.equal(theirs[:8], peers.logits)
    assert torch.equal(theirs[8:], peers.logits[:4])
    assert torch.equal(latents[:8], peers.latents)
    own = torch.zeros(2, 224).bfloat16()
    assert torch.equal(peers.latents_around(own)[:, 224:], peers.latents[:2, 224:])
    assert not peers.latents_around(own)[:, :224].any()


def test_auto_reads_the_same_table(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    layer = pack(shard(tiny_tensors, tiny, tp=4, rank=0), tiny, tp=4, rank=0).layers[1].mlp
    assert isinstance(layer, MoeMlp)
    peers = lone_peers(tiny, tp=4, rows=3, device="cpu")
    used = AutoOperators(tiny, dtype=torch.float64, device="cpu", peers=peers)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).double()
    ids, _, latent = used.router(x, layer, SingleRank())
    logits = peers.logits_around(x @ layer.router.T)
    biased = torch.sigmoid(logits) + layer.correction_bias
    assert torch.equal(ids, biased.sort(dim=-1, descending=True, stable=True).indices[:, : ids.shape[1]])
    assert torch.equal(latent[:, 16:], peers.latents[:, 16:].double())


def test_entries_of_the_twins_are_tuned_choices(tiny: ModelCard) -> None:
    assert all(isinstance(one, Tuned) for one in every_entry(tiny))
