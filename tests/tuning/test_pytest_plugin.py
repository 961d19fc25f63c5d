"""The plugin in tests of an author's own: pytest runs them in a folder of theirs, on recorded device times."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from k3lab.kernels import SMALL_K3
from k3lab.kernels import device as devices
from k3lab.kernels.device import Device
from k3lab.kernels.gpu_cards import GPU_CARDS
from k3lab.tuning import pytest_plugin

pytest_plugins = ["pytester"]
RECORD = Path(__file__).resolve().parents[2] / "results" / "h200" / "attention_projection.json"
CHECKS = """
import pytest
from k3lab.kernels import SMALL_K3

@pytest.mark.k3_kernel("attention_projection", tp=4, rows=[1, 3], model=SMALL_K3, engine="triton")
def test_check(k3_kernel):
    assert k3_kernel.check().how == "interpreter"
"""
TIMES = """
import pytest

@pytest.mark.k3_kernel("attention_projection", tp=16, rows=8, engine="triton")
def test_time(k3_kernel, k3_timing):
    k3_timing(k3_kernel)
"""


@pytest.fixture(autouse=True)
def no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """What the inner runs use, once: a run in this process forgets what it was the first to import, and a compiler cannot
    be loaded twice.
    """
    for name in NEEDED:
        importlib.import_module(name)
    from k3lab.kernels import K3, family
    from k3lab.tuning.compiling import compile_config

    owner = family("attention_projection")
    for engine in owner.engines:
        problem = owner.problem(K3, tp=16, rows=1)
        if not engine.refuses(problem, "sm_90a"):
            engine.space(problem, GPU_CARDS["H200"])
    small = owner.problem(SMALL_K3, tp=4, rows=1)
    for name in ("triton", "cute_skinny"):
        engine = owner.engine(name)
        compile_config(engine, small, engine.space(small, GPU_CARDS["GB300"]).default, "sm_103a", cache=False)


@pytest.fixture
def samples() -> list[int]:
    """Nanoseconds of the winner's replays, as the H200 gave them."""
    return list(json.loads(RECORD.read_text())["winner_timing"]["cold"]["samples_ns"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, samples: list[int]) -> SimpleNamespace:
    """An H200 whose rounds are the recorded one, each scaled by the next of ``factors`` (the last is kept)."""
    state = SimpleNamespace(card=GPU_CARDS["H200"], factors=[1.0], rounds=0)

    def discover(index: int = 0) -> Device:
        return Device(0, f"NVIDIA {state.card.name}", state.card.arch, state.card.sms, 1, 1, "580", state.card)

    def take_round(kernel: pytest_plugin.Kernel, device: Device) -> SimpleNamespace:
        factor = state.factors[min(state.rounds, len(state.factors) - 1)]
        state.rounds += 1
        scaled = [round(sample * factor) for sample in samples]
        middle = sorted(scaled)[len(scaled) // 2] / 1000
        return SimpleNamespace(
            cold=SimpleNamespace(samples_ns=scaled), cold_us=middle, to_json=lambda: {"cold_us": middle}
        )

    monkeypatch.setattr(devices, "discover", discover)
    monkeypatch.setattr(pytest_plugin, "take_round", take_round)
    return state


NEEDED = (
    "torch",
    "triton",
    "cutlass",
    *(f"k3lab.tuning.{name}" for name in ("baseline", "benchmark_stats", "check", "environment", "interpret")),
)
PLUGINS = ("-p", "k3lab.tuning.pytest_plugin", "-p", "pytest_benchmark.plugin", "-p", "no:cacheprovider")


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that load no other plugins: a second saved each."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):  # pytest-benchmark would measure nothing
        monkeypatch.delenv(name, raising=False)


def test_the_installation_brings_it_and_a_check_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own=CHECKS.replace("[1, 3]", "[2]"))
    result = pytester.runpytest_inprocess("-v", "--strict-markers", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_check?rows2?*PASSED*"])


@pytest.mark.usefixtures("lean")
def test_a_check_that_fails_says_how_for_each_row_count(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3lab.tuning import check

    wrong = check.CheckResult(False, "interpreter", "rows 1: out: relative error 1.0")
    monkeypatch.setattr(check, "check", lambda *arguments: wrong)
    pytester.makepyfile(test_own=CHECKS)
    result = pytester.runpytest_inprocess(*PLUGINS)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "*test_check?rows1?*",
            "attention_projection/triton kda-tp4-rows1-*: rows 1: out: relative error 1.0",
            "*test_check?rows3?*",
            "attention_projection/triton kda-tp4-rows3-*: rows 1: out: relative error 1.0",
        ]
    )


@pytest.mark.usefixtures("lean")
def test_a_kernel_that_cannot_run_here_is_skipped(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own=CHECKS.replace("triton", "cute_skinny"))
    result = pytester.runpytest_inprocess("-rs", *PLUGINS)
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*built for sm_103a, not run: cute kernels run on a GPU, and none is here"])


@pytest.mark.usefixtures("lean")
def test_wrong_marks_are_told_in_one_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_a=CHECKS.replace('"attention_projection"', '"nope"'), test_b="def test(k3_kernel): pass")
    result = pytester.runpytest_inprocess(*PLUGINS)
    result.assert_outcomes(errors=3)
    result.stdout.fnmatch_lines(["unknown family 'nope'; families: *", "the fixture k3_kernel needs a mark: *"])


@pytest.mark.usefixtures("lean")
def test_without_a_gpu_it_is_skipped_with_the_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own=TIMES)
    result = pytester.runpytest_inprocess("-rs", *PLUGINS)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no GPU here; no baseline is stored yet"])


@pytest.mark.usefixtures("lean")
def test_stored_then_held_then_slower(pytester: pytest.Pytester, gpu: SimpleNamespace, samples: list[int]) -> None:
    pytester.makepyfile(test_own=TIMES)

    def run(*options: str) -> pytest.RunResult:
        gpu.rounds = 0
        return pytester.runpytest_inprocess("-rs", *PLUGINS, "--benchmark-json=b.json", *options)

    first = run()
    first.assert_outcomes(skipped=1)
    first.stdout.fnmatch_lines(["*no baseline of test_own::test_time on H200: pytest --k3-store stores one"])
    run("--k3-store").assert_outcomes(passed=1)
    assert gpu.rounds == pytest_plugin.STORED_ROUNDS
    stored = json.loads((pytester.path / "k3_baselines.json").read_text())["entries"]["test_own::test_time"]["H200"]
    middle = sorted(samples)[len(samples) // 2] / 1000
    assert stored["rounds_us"] == [pytest.approx(middle)] * pytest_plugin.STORED_ROUNDS
    assert stored["environment"]["gpu"]["driver"] == "580"

    gpu.factors = [1.02, 0.99, 1.03]  # noise
    run().assert_outcomes(passed=1)
    statistics = json.loads((pytester.path / "b.json").read_text())["benchmarks"][0]
    assert statistics["stats"]["rounds"] == pytest_plugin.ROUNDS * len(samples)  # device time, not the host's
    assert statistics["stats"]["median"] == pytest.approx(1.02e-6 * middle, rel=0.01)
    assert statistics["extra_info"]["rounds_us"] == [pytest.approx(middle * f, rel=1e-3) for f in gpu.factors]

    gpu.factors = [1.10]
    slow = run()
    slow.assert_outcomes(failed=1)
    slow.stdout.fnmatch_lines(
        ["attention_projection/triton kda-tp16-rows8: * us is 10.0% above the baseline of * limit 4.5%*"]
    )

    gpu.factors, gpu.card = [1.0], GPU_CARDS["GB300"]
    other = run()
    other.assert_outcomes(skipped=1)
    other.stdout.fnmatch_lines(["*has no baseline of test_own::test_time on GB300; there is one of H200*"])


@pytest.mark.usefixtures("lean")
def test_a_baseline_of_another_config_or_too_unsteady_is_refused(
    pytester: pytest.Pytester, gpu: SimpleNamespace
) -> None:
    pytester.makepyfile(test_own=TIMES)
    gpu.factors = [1.0, 1.03, 1.0]
    wide = pytester.runpytest_inprocess(*PLUGINS, "--k3-store")
    wide.assert_outcomes(failed=1)
    wide.stdout.fnmatch_lines(["the baseline of test_own::test_time is not stored: its rounds spread by 3.0%*"])
    assert not (pytester.path / "k3_baselines.json").exists()
    gpu.factors = [1.0]
    pytester.runpytest_inprocess(*PLUGINS, "--k3-store").assert_outcomes(passed=1)
    pytester.makepyfile(test_own=TIMES.replace("rows=8", "rows=4"))
    changed = pytester.runpytest_inprocess(*PLUGINS)
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["the baseline of test_own::test_time is of another kernel, problem or config: *"])


@pytest.mark.usefixtures("lean")
def test_where_pytest_benchmark_is_absent_it_holds_all_the_same(
    pytester: pytest.Pytester, gpu: SimpleNamespace
) -> None:
    pytester.makepyfile(test_own=TIMES)
    options = (*PLUGINS[:2], *PLUGINS[-2:])
    pytester.runpytest_inprocess(*options, "--k3-store").assert_outcomes(passed=1)
    gpu.factors = [1.2]
    pytester.runpytest_inprocess(*options).assert_outcomes(failed=1)


@pytest.mark.usefixtures("lean")
def test_no_run_here_forgot_a_compiler(pytester: pytest.Pytester) -> None:
    """Other tests of this process go on after these."""
    before = {name: sys.modules[name] for name in NEEDED}
    pytester.makepyfile(test_own=CHECKS.replace("triton", "cute_skinny"))
    own = {name for name in sys.modules if name.startswith(("triton", "cutlass", "torch", "numpy", "k3lab"))}
    pytester.runpytest_inprocess(*PLUGINS).assert_outcomes(skipped=2)
    assert own <= set(sys.modules)
    assert before == {name: sys.modules[name] for name in NEEDED}
