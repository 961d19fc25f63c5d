"""Large traces: within the bars where asked (slow), and a twentieth of them without blowing up on every run."""

from __future__ import annotations

import pytest
import speed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", list(speed.BARS))
def test_the_bars_of_large_files(tmp_path, kind):
    found = speed.measure(speed.write(kind, tmp_path))
    seconds, memory = speed.BARS[kind]
    assert found["verdict"] == "pass"
    assert found["layers"] == 93
    assert seconds is None or found["seconds"] < seconds
    assert memory is None or found["peak_rss_mb"] < memory


@pytest.mark.parametrize("kind", list(speed.BARS))
def test_a_twentieth_of_a_large_file(tmp_path, kind):
    """The answer, and processor time with room for a slow machine: what is quadratic takes minutes."""
    found = speed.measure(speed.write(kind, tmp_path, 0.05))
    assert (found["verdict"], found["layers"]) == ("pass", 93)
    assert found["method"].startswith("recurring" if kind == "torch_json" else "NVTX")
    assert found["cpu_seconds"] < 6
    assert found["peak_rss_mb"] < 300
