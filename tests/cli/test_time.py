"""``k3lab time``: what it asks for and prints, with a measurement in place of a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from k3lab.cli import main
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.chain import ChainTiming
from k3lab.tuning.policy import FULL
from k3lab.tuning.timing import Series, Timing

CHAIN = ChainTiming(8.0, 9.5, 18.0, 21.5, 10, 10, 75, 0.001, True)


@pytest.fixture
def asked(monkeypatch):
    """Runs the command on a measurement with or without a chain; gives back what was asked for."""
    from k3lab.kernels import device
    from k3lab.tuning import check, compiling, environment, timing

    here = SimpleNamespace(index=0, name="NVIDIA H200", arch="sm_90a", need_card=lambda: gpu_card("h200"))
    seen = {}
    monkeypatch.setattr(device, "require", lambda purpose: here)
    monkeypatch.setattr(compiling, "compile_config", lambda *_: None)
    monkeypatch.setattr(environment, "environment", lambda device: {})
    monkeypatch.setattr(check, "check_compiled", lambda *_, **how: SimpleNamespace(ok=True))

    def run(*arguments: str, chain: ChainTiming | None = CHAIN) -> int:
        series = Series([12_000] * 25, 40, 10, {}, {})
        missing = {} if chain else {"torch.compile": "InductorError: no C compiler [gcc]"}
        beside = {"PyTorch": 18.0} | ({} if missing else {"torch.compile": 17.0})
        made = Timing(
            12.0, 7.0, 0.004, True, 9.9, 82.5, 4.66e12, series, series, FULL,
            alternative_us=min(beside.values()), alternatives=beside, not_timed=missing, chain=chain,
        )  # fmt: skip
        monkeypatch.setattr(timing, "time_compiled", lambda *_, **how: seen.update(how) or made)
        return main.run(["time", "attention_projection", *arguments])

    return run, seen


def test_the_chain_and_both_alternatives_stand_beside_the_isolated_figure(asked, capsys):
    run, seen = asked
    assert run() == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "cold 12.00 us" in text
    assert "PyTorch 18.00 us the same work by PyTorch, cold torch.compile 17.00 us the same" in text
    assert "in a chain 8.50 us behind a kernel of 8 us, with PDL; 12.00 without: 3.50 hidden" in text
    assert seen == {"alternative": True, "compile_s": 120.0, "chain": True}


def test_what_could_not_be_timed_keeps_its_reason_and_no_chain_is_no_line(asked, capsys):
    run, seen = asked
    assert run("--quick", chain=None) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "torch.compile - InductorError: no C compiler [gcc]" in text
    assert "chain" not in text
    assert seen["compile_s"] == 0


def test_the_json_has_what_readers_knew_and_the_new_figures_apart(asked, capsys):
    run, _ = asked
    assert run("--json") == 0
    timing = json.loads(capsys.readouterr().out)["timing"]
    assert (timing["cold_us"], timing["alternative_us"]) == (12.0, 17.0)
    assert (timing["chain"]["chain_us"], timing["chain"]["programmatic_edges"]) == (8.5, 10)
