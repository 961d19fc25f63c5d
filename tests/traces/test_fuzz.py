"""A slice of the fuzzer on every run; all of it where asked: see fuzz.py."""

from __future__ import annotations

import fuzz
import pytest


def test_a_slice_of_the_fuzzer_finds_nothing(tmp_path, make):
    result = fuzz.fuzz(make, tmp_path, 320, 7)
    assert result["failures"] == 0, result["failed"]
    assert set(result["outcomes"]) >= {"pass", "fail", "inconclusive", "refused"}
    assert len(result["samples"]) == 8
    assert len(result["mutations"]) >= 15


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_inputs_find_nothing(tmp_path, make):
    result = fuzz.fuzz(make, tmp_path, 20_000, 1)
    assert result["failures"] == 0, result["failed"]


def test_the_fuzzer_sees_what_is_wrong(tmp_path, make, monkeypatch):
    """A check that passes everything, one that raises and one that hangs are all found out."""
    good = fuzz.samples(make, tmp_path)[0]
    report = fuzz.check_trace(good.write(tmp_path / "good.json", good.rows), "gb300-tp16", layers=4)
    monkeypatch.setattr(fuzz, "check_trace", lambda *_, **__: report)
    result = fuzz.fuzz(make, tmp_path, 60, 1)
    assert result["failures"] > 0
    assert {item["outcome"] for item in result["failed"]} == {"passed"}

    def raises(*_, **__):
        raise KeyError("x")

    def hangs(*_, **__):
        while True:
            pass

    monkeypatch.setattr(fuzz, "LIMIT_S", 1)
    for wrong, outcome in ((raises, "raised"), (hangs, "slow")):
        monkeypatch.setattr(fuzz, "check_trace", wrong)
        name, found, what = fuzz.one(good, tmp_path, fuzz.random.Random(0))
        assert (found, bool(what)) == (outcome, True), name
