"""The plan: counts of the stock path, tuned kernels in their place, a reason for everything else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from k3lab.decode.choices import STEP_FAMILIES, Fallback, Tuned, choose, without_gpu
from k3lab.decode.plan import TUNED_FAMILIES, plan
from k3lab.kernels import K3, SMALL_K3, Compiled, Evidence, InputError, Launch, family
from k3lab.kernels.bundle.reader import Bundle, Miss


@pytest.mark.parametrize(("kind", "dense", "rows", "count", "target", "layers"), [
    ("kda", False, 8, 21, 13, 68),
    ("kda", False, 14, 21, 13, 68),
    ("kda", False, 15, 20, 13, 68),
    ("mla", False, 8, 26, 15, 24),
    ("kda", True, 8, 12, None, 1),
])  # fmt: skip
def test_counts_of_the_stock_path(
    kind: str, dense: bool, rows: int, count: int, target: int | None, layers: int
) -> None:
    layer = plan(K3, tp=8, rows=rows).layer(kind, dense=dense)
    data = layer.to_json()
    assert len(layer.launches) == data["kernels"] == count
    assert len(layer.layers) == layers
    assert (data["target"] and data["target"]["kernels"]) == target
    assert data["kernels_at_most"] == (count if dense else count + 2)
    assert [launch["position"] for launch in data["launches"]] == list(range(1, count + 1))


def test_the_step_adds_up_and_names_families() -> None:
    made = plan(K3, tp=16, rows=8)
    assert made.total == 2 + 12 + 68 * 21 + 24 * 26 + 3
    families = made.families()
    assert set(families.values()) == set(STEP_FAMILIES)
    assert families["kda_decode"] == "kda"
    assert families["attention_all_reduce"] == "output_projection"
    assert families["latent_down_gemm"] == "router"
    assert made.to_json()["families"] == families
    assert not made.fallbacks
    assert all(launch.fallback is None for layer in made.layers for launch in layer.launches)
    assert json.loads(json.dumps(made.to_json())) == made.to_json()


def test_every_family_of_the_target_is_one_of_ours() -> None:
    for kind in ("kda", "mla"):
        target = plan(K3, tp=16, rows=8).layer(kind).target
        assert target
        assert len(target.sequence) == target.kernels
        assert {launch.family for launch in target.sequence} <= set(STEP_FAMILIES)
        assert "69 us" in target.conditions


def test_without_a_bundle_every_family_falls_back_with_a_reason_and_a_cure() -> None:
    made = plan(K3, tp=16, rows=8, backend="latency_specialized")
    assert not made.tuned
    assert {one.family for one in made.fallbacks} == set(STEP_FAMILIES)
    assert all(one.reason and one.cure for one in made.fallbacks)
    projection = {one.kind: one for one in made.fallbacks if one.family == "attention_projection"}
    assert set(projection) == {"kda", "mla"}
    assert projection["mla"].reason == "no bundle given"
    assert "k3lab tune attention_projection --tp 16 --rows 8 --kind mla --gpu gb300" in projection["mla"].cure
    output = [one.kind for one in made.fallbacks if one.family == "output_projection"]
    assert output == ["kda", "mla", "restart"]  # layers that restart the residual have a kernel of their own
    others = [one for one in made.fallbacks if one.family not in TUNED_FAMILIES]
    for one in others:
        if family(one.family).engines:  # not launched here: tuning it would change nothing
            assert "cannot launch" in one.reason
            assert not one.commands
            assert one.cure == f"extend decode/tuned.py by {one.family}"
        else:
            assert one.reason.startswith("no engine yet")
            assert f"kernels/{one.family}/" in one.cure
    for layer in made.layers:
        assert all(launch.fallback and launch.fallback.family == launch.family for launch in layer.launches)


def test_a_bundle_puts_its_kernels_in_place(write_bundle: Callable[..., Path]) -> None:
    bundle = Bundle.load(write_bundle(K3), accept_predicted=True)
    made = plan(K3, tp=16, rows=5, backend="latency_specialized", bundle=bundle)
    assert [(one.family, one.kind, one.evidence) for one in made.tuned] == [
        ("attention_projection", "kda", "predicted"),
        ("attention_projection", "mla", "predicted"),
    ]
    kda, mla = made.layer("kda"), made.layer("mla")
    assert (len(kda.launches), len(mla.launches)) == (20, 25)
    first = kda.launches[1]
    assert first.kernel == "k3_attention_projection_triton_kda"
    assert (first.engine, first.config, first.evidence, first.fallback) == ("triton", {"split_k": 2}, "predicted", None)
    assert mla.launches[1].kernel == "k3_attention_projection_triton_mla"
    assert made.families()[first.kernel] == "attention_projection"
    assert {launch.family for launch in kda.launches} == {
        launch.family for launch in plan(K3, tp=16, rows=5).layer("kda").launches
    }
    assert {one.family for one in made.fallbacks} == set(STEP_FAMILIES) - {"attention_projection"}
    assert made.to_json()["tuned"][0]["evidence"] == "predicted"


def test_an_entry_of_another_kernel_source_is_refused(
    write_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.load(write_bundle(K3), accept_predicted=True)
    engine = family("attention_projection").engine("triton")
    monkeypatch.setattr(type(engine), "source_digest", lambda self: "f" * 16)
    made = plan(K3, tp=16, rows=8, backend="latency_specialized", bundle=bundle)
    told = [one.reason for one in made.fallbacks if one.family == "attention_projection"]
    assert not made.tuned and told
    assert all("is of another source of triton" in reason and "here ffffffffffffffff" in reason for reason in told)


def test_predicted_entries_are_refused_unless_accepted(write_bundle: Callable[..., Path]) -> None:
    folder = write_bundle(K3)
    made = plan(K3, tp=16, rows=8, backend="latency_specialized", bundle=Bundle.load(folder))
    assert not made.tuned
    reasons = {one.reason for one in made.fallbacks if one.family == "attention_projection"}
    assert len(reasons) == 1
    assert "only predicted" in reasons.pop()
    assert all("--accept predicted" in one.cure for one in made.fallbacks if one.family == "attention_projection")


@pytest.mark.parametrize(("options", "words"), [
    ({"tp": 8}, "for other problems"),
    ({"rows": 9}, "serve at most 8 rows"),
    ({"gpu": "H200"}, "are for GB300, not for H200"),
    ({"gpu": "B300"}, "only compiled for sm_103a, tuned for GB300"),
])  # fmt: skip
def test_what_the_bundle_has_not_is_said(
    write_bundle: Callable[..., Path], options: dict[str, object], words: str
) -> None:
    bundle = Bundle.load(write_bundle(K3), accept_predicted=True)
    arguments = {"tp": 16, "rows": 8, "gpu": "GB300", **options}
    made = plan(K3, backend="latency_specialized", bundle=bundle, **arguments)  # type: ignore[arg-type]
    reasons = [one.reason for one in made.fallbacks if one.family == "attention_projection"]
    assert len(reasons) == 2
    assert all(words in reason for reason in reasons)


def test_another_model_finds_no_entry(write_bundle: Callable[..., Path]) -> None:
    bundle = Bundle.load(write_bundle(K3), accept_predicted=True)
    made = plan(SMALL_K3, tp=16, rows=8, backend="latency_specialized", bundle=bundle)
    reason = next(one.reason for one in made.fallbacks if one.family == "attention_projection")
    assert reason.endswith(
        "for other problems than kda-tp16-rows8-hidden256 with hidden 256, outputs 96 (the nearest has hidden 7168, outputs 3216)"
    )
    assert "{" not in reason


def test_an_entry_of_another_gpu_is_only_compiled(write_bundle: Callable[..., Path]) -> None:
    folder = write_bundle(K3, evidence="measured")
    accepted = Bundle.load(folder, accept_compiled=True)
    there = choose(K3, tp=16, rows=8, gpu="gb300", bundle=accepted)
    here = choose(K3, tp=16, rows=8, gpu="b300", bundle=accepted)
    assert {one.evidence for one in there if isinstance(one, Tuned)} == {"measured"}
    assert {one.evidence for one in here if isinstance(one, Tuned)} == {"compiled"}


def test_the_cure_tunes_as_this_machine_can() -> None:
    for objective in ("predicted", "measured"):
        first = choose(K3, tp=16, rows=8, gpu="H200", objective=objective)[0]
        assert isinstance(first, Fallback)
        assert f"--gpu h200 --objective {objective}" in first.cure
        assert ("--accept predicted" in first.commands[-1]) == (objective == "predicted")
        assert first.cure == " && ".join(first.commands)


def test_the_cure_names_the_model_its_problem_comes_from() -> None:
    small = choose(SMALL_K3, tp=4, rows=8, gpu="GB300")[0]
    other = choose(replace(K3, name="own k3", hidden_size=4096), tp=4, rows=8, gpu="GB300", model="its/config.json")[0]
    demo = choose(replace(K3, name="demo-k3-5l-32e", vocab_size=16384), tp=16, rows=8, gpu="GB300")[0]
    assert isinstance(small, Fallback)
    assert isinstance(other, Fallback)
    assert isinstance(demo, Fallback)
    assert "--model small" in small.commands[0]
    assert "-small-k3-gb300" in small.commands[0]
    assert "--model its/config.json" in other.commands[0]
    assert "-own_k3-gb300" in other.commands[0]
    assert "--model" not in demo.commands[0]  # its projections are K3's
    assert "--model demo" in demo.commands[-1]


def test_a_problem_no_engine_serves_says_why_in_place_of_commands() -> None:
    first = choose(replace(K3, hidden_size=7200), tp=16, rows=8, gpu="GB300")[0]
    assert isinstance(first, Fallback)
    assert first.commands == ()
    assert (
        "no engine serves kda-tp16-rows8-hidden7200 on GB300 (triton: hidden 7200 is not a multiple of 64"
        in first.reason
    )


def test_accepting_is_the_cure_where_that_is_enough(write_bundle: Callable[..., Path]) -> None:
    folder = write_bundle(K3)
    for gpu, words in (("GB300", "--accept predicted"), ("B300", "--accept compiled --accept predicted")):
        first = choose(K3, tp=16, rows=8, gpu=gpu, bundle=Bundle.load(folder))[0]
        assert isinstance(first, Fallback)
        assert first.cure == (f"k3lab decode plan --model k3 --tp 16 --rows 8 --gpu {gpu} --bundle {folder} {words}")


def test_entries_that_nothing_launches_are_listed(write_bundle: Callable[..., Path]) -> None:
    bundle = Bundle.load(write_bundle(K3), accept_predicted=True)
    kda, mla = bundle.body.entries
    own = kda.model_copy(update={"family": "probe_of_nobody", "key": {"tp": 16, "width": 7168}})
    small = mla.model_copy(update={"rows": 4})
    tp8 = mla.model_copy(update={"key": {**mla.key, "tp": 8}})
    h200 = mla.model_copy(update={"gpu": "H200"})
    embed = small.model_copy(
        update={"family": "lm_head", "key": family("lm_head").problem(K3, tp=16, rows=4, kind="embed").key}
    )
    body = bundle.body.model_copy(update={"entries": (kda, own, small, tp8, h200, embed)})
    made = plan(K3, tp=16, rows=8, backend="latency_specialized", bundle=replace(bundle, body=body))
    assert [(one.family, one.problem, one.reason) for one in made.unused] == [
        ("probe_of_nobody", "tp=16 width=7168 rows=8", "no launch of kimi-k3 uses this family"),
        ("attention_projection", "mla-tp16-rows4", "it serves at most 4 rows, this step has 8"),
        ("attention_projection", "mla-tp8-rows8", "no launch of kimi-k3 at TP 16 has this problem"),
        ("attention_projection", "mla-tp16-rows8", "it was tuned for H200, this step is for GB300"),
        ("lm_head", "embed-tp16-rows4", "it serves at most 4 rows, this step has 8"),
    ]
    assert [one["family"] for one in made.to_json()["unused_entries"]] == [
        "probe_of_nobody",
        *["attention_projection"] * 3,
        "lm_head",
    ]
    assert "probe_of_nobody" not in made.families().values()


class OnlyOutputProjection:
    """A bundle of the output projection's two kernels, and of nothing else."""

    path, accept_predicted, accept_compiled, entries = Path("bundle"), False, False, ()

    def find(self, name: str, problem: Any, gpu_name: str) -> Any:
        if name != "output_projection":
            return Miss("nothing for it", "tune it")
        launches = tuple(
            Launch(f"k3_output_projection_cute_split_{role}", b"", (1, 1, 1), (32, 1, 1), 0, ()) for role in ("producer", "consumer")
        )  # fmt: skip
        compiled = Compiled(name, "cute_split", problem, {"exchange": "one_shot"}, "sm_103a", launches)
        place = (name, gpu_name, problem.kind, problem.rows)
        return SimpleNamespace(
            engine="cute_split", evidence=Evidence.PREDICTED, model=SimpleNamespace(gpu=gpu_name, place=place, source_digest=family("output_projection").engine("cute_split").source_digest()),
            compiled=lambda arch, wanted: compiled,
        )  # fmt: skip


def test_the_output_projections_two_kernels_take_the_place_of_three_launches() -> None:
    made = plan(K3, tp=16, rows=8, backend="latency_specialized", bundle=OnlyOutputProjection())
    assert [(one.family, one.kind) for one in made.tuned] == [
        ("output_projection", kind) for kind in ("kda", "mla", "restart")
    ]
    for kind in ("kda", "mla"):
        launches = made.layer(kind).launches
        stock = plan(K3, tp=16, rows=8).layer(kind).launches
        assert len(launches) == len(stock) - 1
        ours = [one for one in launches if one.family == "output_projection"]
        assert [one.kernel for one in ours] == [
            f"k3_output_projection_cute_split_{role}" for role in ("producer", "consumer")
        ]
        assert {(one.engine, one.evidence, one.fallback) for one in ours} == {("cute_split", "predicted", None)}
        assert ours[0].what == f"output_projection {kind}-tp16-rows8"


def test_tuned_families_fall_back_where_nothing_can_be_launched(write_bundle: Callable[..., Path]) -> None:
    bundle = Bundle.load(write_bundle(K3), accept_predicted=True)
    choices = choose(K3, tp=16, rows=8, gpu="GB300", bundle=bundle)
    fallen = without_gpu(choices, "no GPU", "get one")
    assert len(fallen) == len(choices)
    tuned = [one for one in fallen if one.family == "attention_projection"]
    assert all(
        one.reason == "no GPU; the bundle has a predicted triton kernel" and one.cure == "get one" for one in tuned
    )
    limited = choose(K3, tp=16, rows=8, gpu="GB300", bundle=bundle, only=())
    assert all(isinstance(one, Fallback) for one in limited)
    assert "cannot launch" in limited[0].reason
    assert "attention_projection" in TUNED_FAMILIES


@pytest.mark.parametrize(("options", "words"), [
    ({"tp": 5}, "TP 5 does not divide"),
    ({"tp": 0}, "TP 0 does not divide"),
    ({"rows": 0}, "rows is 0; the decode path serves 1 to 64"),
    ({"rows": 65}, "rows is 65; the decode path serves 1 to 64"),
    ({"backend": "fast"}, "unknown backend 'fast'; backends: auto, latency_specialized"),
    ({"gpu": "v100"}, "v100"),
])  # fmt: skip
def test_bad_input_is_one_line(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        plan(K3, **{"tp": 16, "rows": 8, **options})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_auto_uses_no_bundle(write_bundle: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="backend auto uses no bundle"):
        plan(K3, tp=16, rows=8, bundle=Bundle.load(write_bundle(K3)))


def test_a_missing_layer_kind_is_named() -> None:
    with pytest.raises(InputError, match="has no mla dense layer; it has: kda dense, kda moe, mla moe"):
        plan(K3, tp=16, rows=8).layer("mla", dense=True)


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys\nfrom k3lab.kernels import K3\nfrom k3lab.decode.plan import plan\n"
        "plan(K3, tp=16, rows=8, backend='latency_specialized').to_json()\n"
        "assert not {'torch', 'triton', 'cutlass', 'optuna'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
