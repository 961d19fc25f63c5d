"""Measured trials gathered from studies: all of them, once, with their origin."""

from __future__ import annotations

from pathlib import Path

import fake_family
import pytest
from k3lab.kernels import InputError
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import measurements
from k3lab.tuning.identity import StudyIdentity
from k3lab.tuning.outcome import Outcome, Status, failure
from k3lab.tuning.study import TuningStudy

KERNEL = {
    "kernel": "k", "registers": 32, "static_shared_bytes": 0, "dynamic_shared_bytes": 0, "stack_bytes": 0, "spill_instructions": 0,
    "threads": 128, "blocks": 132, "cluster": 1, "instructions": {"LDG": 4},
}  # fmt: skip


def study(path: Path, rows: int, values: list[float | None], source: str = "a" * 16, objective: str = "measured") -> Path:  # fmt: skip
    problem = fake_family.FakeProblem(tp=1, rows=rows)
    gpu = gpu_card("h200")
    identity = StudyIdentity.of(fake_family.FAMILY, fake_family.SMALL, problem, gpu, objective)  # type: ignore[arg-type]
    object.__setattr__(identity, "source_digest", source)
    space = fake_family.SMALL.space(problem, gpu)
    with TuningStudy.for_tuning(path, identity) as open_study:
        open_study.set_note("environment", {"gpu": {"name": "NVIDIA H200"}, "commit": "c"})
        for config, value in zip(space.legal, values, strict=False):
            trial = open_study.start(config, space)
            ended = (
                failure(Status.WRONG, "no") if value is None else Outcome(Status.OK, value=value, resources=(KERNEL,))
            )
            open_study.finish(trial, ended)
    return path


def test_trials_that_ended_ok_are_gathered_with_their_resources(tmp_path: Path) -> None:
    files = [study(tmp_path / "a.sqlite3", 8, [5.0, None, 6.0]), study(tmp_path / "b.sqlite3", 4, [3.0])]
    files.append(study(tmp_path / "p.sqlite3", 2, [1.0], objective="predicted"))
    data = measurements.gather("fake", files)
    out = tmp_path / "t.json.gz"
    measurements.write(out, data)
    found = list(measurements.measured([out]))
    assert sorted((one.problem["rows"], one.us) for one in found) == [(4, 3.0), (8, 5.0), (8, 6.0)]
    assert all(one.resources[0].instructions == {"LDG": 4} and not one.fair for one in found)
    assert len({one.shape for one in found}) == 2
    assert data["sources"] == {"small": {"source": "a" * 16}} and data["environment"]["commit"] == "c"
    before = out.read_bytes()
    measurements.write(out, measurements.gather("fake", reversed(files)))
    assert out.read_bytes() == before


def test_two_sources_of_one_engine_are_no_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [study(tmp_path / "a.sqlite3", 8, [5.0]), study(tmp_path / "b.sqlite3", 4, [3.0], source="b" * 16)]
    with pytest.raises(InputError, match="another source of small"):
        measurements.gather("fake", files)
    with pytest.raises(InputError, match="none of these is a measured study of router"):
        measurements.gather("router", files)
    out = tmp_path / "t.json.gz"
    assert measurements.main(["fake", str(files[0]), "--out", str(out)]) == 0
    assert "1 measured configs of 1 studies" in capsys.readouterr().out
    assert measurements.main(["router", str(files[0]), "--out", str(tmp_path / "no.json.gz")]) == 2
    assert capsys.readouterr().err.startswith("k3lab: none of these")
