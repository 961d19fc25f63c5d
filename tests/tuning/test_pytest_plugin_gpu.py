"""The plugin on a GPU: a baseline is stored, held, and fails a run that is a tenth slower than it."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.gpu
pytest_plugins = ["pytester"]
TIMES = """
import pytest

@pytest.mark.k3_kernel("attention_projection", tp=16, rows=1, engine="triton")
def test_time(k3_kernel, k3_timing):
    k3_kernel.check()
    k3_timing(k3_kernel)
"""


def test_a_baseline_holds_and_a_tenth_fails(device, pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_own=TIMES)
    options = ("-p", "k3lab.tuning.pytest_plugin", "-p", "no:cacheprovider", "-rs")
    pytester.runpytest_subprocess(*options, "--k3-store", timeout=240).assert_outcomes(passed=1)
    pytester.runpytest_subprocess(*options, timeout=240).assert_outcomes(passed=1)
    path = pytester.path / "k3_baselines.json"
    data = json.loads(path.read_text())
    (entry,) = data["entries"].values()
    (stored,) = entry.values()
    stored["rounds_us"] = [us / 1.10 for us in stored["rounds_us"]]
    path.write_text(json.dumps(data))
    slow = pytester.runpytest_subprocess(*options, timeout=240)
    slow.assert_outcomes(failed=1)
    slow.stdout.fnmatch_lines(["attention_projection/triton *above the baseline of *"])
