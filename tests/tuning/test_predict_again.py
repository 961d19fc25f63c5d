"""Predicted studies under a newer model: the same configs in the same order, none compiled, each with the new time."""

from __future__ import annotations

from pathlib import Path

import pytest
from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import predict_again as module
from k3lab.tuning.cost_model import version_of
from k3lab.tuning.cubin import KernelResources
from k3lab.tuning.identity import StudyIdentity
from k3lab.tuning.outcome import Outcome, Status, failure
from k3lab.tuning.predict import predict
from k3lab.tuning.study import TuningStudy

OWNER, GPU = family("attention_projection"), gpu_card("gb300")
ENGINE = OWNER.engine("triton")
PROBLEM = OWNER.problem(K3, tp=16, rows=8)
KERNEL = KernelResources("k", 128, 1024, 65536, 0, 0, 128, 132, 1, {"HMMA": 64, "LDG": 32})


def old_study(path: Path, **changes: str) -> Path:
    identity = StudyIdentity.of(OWNER, ENGINE, PROBLEM, GPU, "predicted")
    for field, value in {"method": "cost model 1", **changes}.items():
        object.__setattr__(identity, field, value)
    space = ENGINE.space(PROBLEM, GPU)
    with TuningStudy.for_tuning(path, identity) as study:
        study.set_note("environment", {"gpu": None, "commit": "then"})
        for number, config in enumerate((space.default, *space.legal[:3])):
            ended = Outcome(
                Status.OK, value=1.0 + number, resources=(KERNEL.to_json(),), prediction={"microseconds": 1.0}
            )
            study.finish(study.start(config, space), failure(Status.ILLEGAL, "too large") if number == 2 else ended)
    return path


def test_each_trial_has_the_models_time_and_its_own_place(tmp_path: Path) -> None:
    path = old_study(tmp_path / "one.sqlite3")
    assert module.predict_again(path, tmp_path / "new") == 4
    with TuningStudy.for_reading(path) as before, TuningStudy.for_reading(tmp_path / "new/one.sqlite3") as after:
        assert after.identity["method"] == version_of("attention_projection", "triton")
        assert [one.digest for one in after.trials()] == [one.digest for one in before.trials()]
        for was, now in zip(before.trials(), after.trials(), strict=True):
            assert was.outcome is not None and now.outcome is not None and was.outcome.status is now.outcome.status
            if was.ok:
                expected = predict(OWNER, ENGINE, PROBLEM, was.config, GPU, None, found=[KERNEL])
                assert now.value == expected.microseconds
                assert now.outcome.prediction is not None and now.outcome.prediction["error"] == expected.error
        assert after.note("choice")["value_us"] > 1.0 and after.note("environment")["commit"] == "then"


def test_what_is_no_longer_the_same_kernel_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = old_study(tmp_path / "good.sqlite3")
    other = old_study(tmp_path / "other.sqlite3", source_digest="f" * 16)
    measured = old_study(tmp_path / "measured.sqlite3", objective="measured")
    out = tmp_path / "new"
    assert module.main([str(good), str(other), str(measured), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "1 studies predicted again" in said.out and "2 left out" in said.out
    assert "another source_digest" in said.err and "only predictions follow the model" in said.err
    assert [path.name for path in out.glob("*.sqlite3")] == ["good.sqlite3"]
    assert module.main([str(good), "--out", str(out)]) == 1
    assert "is there already" in capsys.readouterr().err
