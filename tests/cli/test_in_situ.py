"""The captured layer's verdict reaches the studies, the export's choice and the table; a new contest forgets it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli import in_situ as module
from k3lab.kernels import K3, InputError, config_digest
from k3lab.kernels.bundle.reader import Bundle
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.between import decide
from k3lab.tuning.choose import choose
from k3lab.tuning.export import export
from k3lab.tuning.in_situ import Candidate, Layer
from k3lab.tuning.in_situ_studies import Place, held_over, place_of, profile_problems
from k3lab.tuning.study import TuningStudy

sys.path.insert(0, str(Path(__file__).parents[1] / "tuning"))
import fake_family
import table_case
from k3lab.tuning import between, table, tune

H200 = gpu_card("h200")
PROBLEM = fake_family.FakeProblem(1, 8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measured studies of two engines that were in one contest."""
    for where in (between, table, tune):
        monkeypatch.setattr(where, "require_gpu", lambda gpu: None, raising=False)
    monkeypatch.setattr(fake_family.FakeFamily, "engines", table_case.ENGINES)
    monkeypatch.setattr(module, "family", lambda name: fake_family.FAMILY)
    monkeypatch.setattr("k3lab.decode.choices.model_families", lambda card: (("fake", None),))
    monkeypatch.setattr("k3lab.decode.choices.step_kind", lambda *_, **__: None)
    table.tune_table(table_case.request(tmp_path, 8, trials=12))
    return tmp_path


class Rig:
    """A layer whose time is what it is told of its one place."""

    def __init__(self, of: Callable[[Candidate], float]) -> None:
        self.of = of
        self.tried: list[tuple[str, str]] = []

    def __call__(self, places: Mapping[str, Place]) -> Callable[[Layer], Callable[[], float]]:
        def capture(layer: Layer) -> Callable[[], float]:
            one = layer["fake"]
            self.tried.append((one.engine, one.digest))
            return lambda: self.of(one)

        return capture


def fine(places: Mapping[str, Place]) -> Callable[[str, Layer], str]:
    return lambda name, layer: ""


def held(folder: Path) -> Place:
    return place_of("fake", None, fake_family.FAMILY, PROBLEM, H200, folder)


def test_the_layers_winner_is_what_is_exported_with_both_numbers(folder: Path) -> None:
    before = held(folder)
    other = next(one for one in before.candidates if one.digest != before.chosen.digest)
    rig = Rig(lambda one: 5.0 if one.digest == other.digest else 9.0)
    found = module.in_situ(K3, H200, folder, tp=1, rows=8, capture_of=rig, check_of=fine)
    (verdict,) = found["verdicts"]
    assert (verdict["engine"], verdict["digest"], verdict["changed"]) == (other.engine, other.digest, True)
    assert 2 <= len(rig.tried) <= 3 and rig.tried[0] == (before.chosen.engine, before.chosen.digest)
    winners = {}
    for ask in before.requests:
        with TuningStudy.for_reading(ask.path) as study:
            choice = choose(study, ask.space)
            assert choice is not None and study.note("choice")["digest"] == choice.digest
            winners[ask.engine.name], contest = choice.digest, study.note("contest")
            if ask.engine.name == other.engine:
                assert choice.digest == other.digest and "in the captured layer" in choice.reason
                assert choice.in_situ is not None and choice.value_us == pytest.approx(other.isolated_us, abs=1e-3)
                assert any(one["in_situ_us"] == 5.0 for one in choice.in_situ["entries"])
            else:
                assert choice.in_situ is None
    decision = decide(contest, winners, ["small", "large"])
    assert decision.engine == other.engine and "in the captured layer" in decision.reason
    assert held(folder).chosen == before.chosen  # asked again it begins with the isolated winner
    (row,) = table.tune_table(table_case.request(folder, 8, trials=12)).rows
    written = row.to_json()["in_situ"]
    studies = [ask.path for ask in before.requests]
    export(studies, folder / "bundle", family=fake_family.FAMILY, evaluator="fake_evaluator")
    (entry,) = Bundle.load(folder / "bundle").entries
    assert (row.engine, config_digest(row.config)) == (other.engine, other.digest)
    assert (entry.model.engine, entry.model.config_digest) == (other.engine, other.digest)
    assert entry.model.timing is not None and entry.model.timing["in_situ"] == written
    assert 0 <= entry.model.timing["flip_rate"] <= 1
    figures = {one["digest"]: (one["isolated_us"], one["in_situ_us"]) for one in written["entries"]}
    assert figures[other.digest] == (pytest.approx(other.isolated_us), 5.0)
    assert figures[before.chosen.digest] == (pytest.approx(before.chosen.isolated_us), 9.0)


def test_a_new_contest_forgets_the_verdict(folder: Path) -> None:
    module.in_situ(K3, H200, folder, tp=1, rows=8, capture_of=Rig(lambda one: one.isolated_us), check_of=fine)
    table.tune_table(table_case.request(folder, 8, trials=14))
    for ask in held(folder).requests:
        with TuningStudy.for_reading(ask.path) as study:
            assert "in_situ" not in study.note("contest")


def test_who_does_not_hold_over_the_profiles_is_not_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_family.FakeFamily, "kinds", property(lambda self: ("uniform", "hot")))
    first = held(folder).chosen

    def times(owner: Any, problem: Any, candidates: Any) -> dict[str, tuple[float, float]]:
        return {one.digest: (one.isolated_us * (3 if one.digest == first.digest else 1), 0.01) for one in candidates}

    rig = Rig(lambda one: 9.0)
    found = module.in_situ(K3, H200, folder, tp=1, rows=8, capture_of=rig, times=times, check_of=fine)
    (verdict,) = found["verdicts"]
    assert verdict["digest"] != first.digest and first.digest not in {digest for _, digest in rig.tried}
    assert max(verdict["profiles"].values()) <= 0.05


def test_profile_kinds_are_found_whatever_they_are_called(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = held(folder)
    for kinds, wanted in (
        (("uniform", "zipf", "hot", "front"), {"uniform", "zipf", "hot"}),
        (("bf16", "routed", "routed_zipf", "routed_hot"), {"routed", "routed_zipf", "routed_hot"}),
        (("kda", "mla"), set()),
    ):
        monkeypatch.setattr(fake_family.FakeFamily, "kinds", property(lambda self, kinds=kinds: kinds))
        found = profile_problems(place, K3, ("uniform", "zipf", "hot"))
        assert set(found) == wanted
    assert held_over(place, {}, lambda *_: {}) is place


def test_what_never_competed_is_told(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    empty = tmp_path / "none"
    empty.mkdir()
    with pytest.raises(InputError, match="no family has measured studies"):
        module.in_situ(K3, H200, empty, tp=1, rows=8, say=said.append)
    assert "tune-table" in said[0]
    with pytest.raises(InputError, match="no family has measured studies"):
        module.in_situ(K3, H200, folder, tp=1, rows=8, only=("router",), capture_of=Rig(lambda one: 1.0), check_of=fine)


def test_the_short_model_keeps_the_widths() -> None:
    card = module.short(K3)
    assert (card.num_hidden_layers, card.hidden_size, card.num_experts) == (5, K3.hidden_size, K3.num_experts)
    assert {"kda", "mla"} <= set(card.layer_kinds)
