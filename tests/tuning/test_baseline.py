"""Baselines: the limit follows from what an H200 was measured to spread; a slowdown of 10 % fails and noise does not."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from k3lab.kernels import InputError
from k3lab.tuning.baseline import BETWEEN, SLOWDOWN, WIDEST, Baseline, BaselineFile, hold, spread

RECORD = Path(__file__).resolve().parents[2] / "results" / "h200" / "timing_noise.json"


@pytest.fixture(scope="module")
def recorded() -> list[tuple[float, list[float]]]:
    """Of each kernel that was timed twice on the H200: the search's median and the rounds of the finals, in us."""
    data = json.loads(RECORD.read_text())
    places = [data["columns"].index(name) for name in ("search_ns", "finals_us")]
    pairs = [[row[place] for place in places] for row in data["rows"]]
    return [(statistics.median(search) / 1000, finals) for search, finals in pairs]


def baseline(rounds: list[float], gpu: str = "H200") -> Baseline:
    return Baseline(gpu, tuple(rounds), {"family": "f"}, {"driver": "1"})


def test_recorded_noise_passes_and_ten_percent_fails(recorded: list[tuple[float, list[float]]]) -> None:
    held, unsteady = 0, 0
    for search, finals in recorded:
        stored = baseline(finals)
        if stored.fault:
            unsteady += 1
            continue
        held += 1
        assert hold(stored, [search]).ok, (search, finals)
        assert not hold(stored, [us * (1 + SLOWDOWN) for us in finals]).ok
        assert not hold(stored, [search * (1 + SLOWDOWN)]).ok, (search, finals)
        other_way = baseline([search])  # which of the two measurements came first does not matter
        assert hold(other_way, finals).ok, (search, finals)
        assert not hold(other_way, [us * (1 + SLOWDOWN) for us in finals]).ok
    assert held > 1300
    assert 0 < unsteady < 0.05 * len(recorded)  # rows that met the power cap


def test_what_two_measurements_differ_by_is_the_records(recorded: list[tuple[float, list[float]]]) -> None:
    steady = [(search, finals) for search, finals in recorded if not baseline(finals).fault]
    ratios = [statistics.median(finals) / search for search, finals in steady]
    most = max(max(ratio, 1 / ratio) - 1 for ratio in ratios)
    assert most == pytest.approx(BETWEEN, abs=0.001)


def test_the_limit_grows_with_the_rounds_and_a_wide_one_is_refused(tmp_path: Path) -> None:
    assert baseline([10.0, 10.0, 10.0]).limit == pytest.approx(BETWEEN)
    assert baseline([10.0, 10.1, 10.0]).limit == pytest.approx(BETWEEN + 0.01)
    assert spread([9.9, 10.0, 10.2]) == pytest.approx(0.03)
    wide = baseline([10.0, 10.3, 10.0])
    assert wide.limit > WIDEST
    with pytest.raises(InputError, match=r"not stored: its rounds spread by 3\.0% \(10\.00, 10\.30, 10\.00 us\)"):
        BaselineFile(tmp_path / "b.json").store("t", wide)
    assert not list(tmp_path.iterdir())


def test_the_line_says_what_was_found() -> None:
    slow = hold(baseline([10.0, 10.1, 10.0]), [11.2, 11.0, 11.1])
    assert (slow.ok, slow.ratio) == (False, pytest.approx(1.11))
    assert slow.line == (
        "11.10 us is 11.0% above the baseline of 10.00 us on H200; limit 5.5% (4.5% between measurements, 1.0% its own rounds)"
    )
    assert "5.0% below the baseline" in hold(baseline([10.0]), [9.5]).line


def test_a_file_keeps_other_names_and_gpus(tmp_path: Path) -> None:
    file = BaselineFile(tmp_path / "sub" / "b.json")
    assert file.gpus("one") == ()
    file.store("one", baseline([10.0, 10.1]))
    file.store("one", baseline([5.0], "GB300"))
    file.store("two", baseline([7.0]))
    file.store("two", baseline([8.0]))
    assert sorted(file.gpus("one")) == ["GB300", "H200"]
    assert file.get("one", "H200") == baseline([10.0, 10.1])
    found = file.get("two", "H200")
    assert found is not None and found.median_us == 8.0
    assert file.get("two", "GB300") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as baselines"),
        ('{"format": "other"}', "holds no baselines of this version"),
        ('{"format": "k3lab-baselines", "schema": 1, "entries": {"t": {"H200": {"rounds_us": []}}}}', "'t' on H200 is damaged"),
        ('{"format": "k3lab-baselines", "schema": 1, "entries": {"t": {"H200": {"rounds_us": [1.0]}}}}', "is damaged: 'what'"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_in_words(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(InputError, match=message):
        BaselineFile(tmp_path / "b.json").get("t", "H200")
