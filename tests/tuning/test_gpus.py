"""Several GPUs of a host: each has its worker, none has two tuners, and what is compared is timed on one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_family
import pytest
from k3lab.cli.main import run as command
from k3lab.kernels import InputError
from k3lab.kernels.device import Device
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import gpus
from k3lab.tuning import tune as tuning
from k3lab.tuning.gpus import Gpu, GpuLock, take
from k3lab.tuning.jobs import DEFAULT_EVALUATOR
from k3lab.tuning.outcome import Outcome, Status
from k3lab.tuning.propose import Tpe
from k3lab.tuning.study import TuningStudy
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.tune import TuneRequest, tune
from k3lab.tuning.workers import Workers

FOUR = [Gpu(index, f"GPU-{index}", "NVIDIA H200") for index in range(4)]
LIMITS = Limits(compile_s=20, measure_s=20)


def locks(folder: Path, count: int) -> list[GpuLock]:
    return take(count, FOUR, folder)


def request(path: Path, trials: int = 24) -> TuneRequest:
    problem = fake_family.FakeProblem(tp=1, rows=8)
    return TuneRequest(
        fake_family.FAMILY, fake_family.LARGE, problem, gpu_card("h200"), "measured", trials, path, 3, LIMITS, "telling_gpus",
        Tpe(fake_family.LARGE.space(problem, None), 3), jobs=2,
    )  # fmt: skip


@pytest.fixture
def telling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers that say which GPU they see; a host that needs no driver."""
    folder = tmp_path / "evaluators"
    folder.mkdir()
    (folder / "telling_gpus.py").write_text(
        "import json, os, time\n"
        "from fake_evaluator import *\n"
        "import fake_evaluator\n"
        "def told(task):\n"
        "    with open(os.environ['TOLD'], 'a') as file:\n"
        "        file.write(json.dumps([task.job.kind, os.environ.get('CUDA_VISIBLE_DEVICES')]) + '\\n')\n"
        "def measure(task, stage):\n"
        "    told(task)\n"
        "    time.sleep(0.03)\n"
        "    return fake_evaluator.measure(task, stage)\n"
        "def retime(task, stage):\n"
        "    told(task)\n"
        "    return fake_evaluator.retime(task, stage)\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setattr(tuning, "require_gpu", lambda gpu: None)
    return tmp_path / "told"


def test_every_gpu_measures_and_the_finals_are_timed_on_one(telling: Path, tmp_path: Path) -> None:
    with Workers(LIMITS, measured=True, evaluator="telling_gpus", jobs=2, locks=locks(tmp_path, 3)) as workers:
        done = tune(request(tmp_path / "s.sqlite3"), workers=workers)
    assert done.ended == "trials" and done.choice is not None
    seen = [json.loads(line) for line in telling.read_text().splitlines()]
    assert {gpu for kind, gpu in seen if kind == "measure"} == {"GPU-0", "GPU-1", "GPU-2"}
    assert {gpu for kind, gpu in seen if kind == "retime"} == {"GPU-0"}


def test_the_trials_do_not_depend_on_how_many_gpus_measure(telling: Path, tmp_path: Path) -> None:
    found = []
    for count in (1, 3):
        path = tmp_path / f"{count}.sqlite3"
        with Workers(LIMITS, measured=True, evaluator="telling_gpus", jobs=2, locks=locks(tmp_path, count)) as workers:
            tune(request(path), workers=workers)
        with TuningStudy.for_reading(path) as study:
            found.append([(trial.digest, trial.value) for trial in study.trials()])
    assert found[0] == found[1]


def test_a_second_tuner_takes_another_gpu_or_none(tmp_path: Path) -> None:
    first = locks(tmp_path, 2)
    assert [lock.gpu.index for lock in first] == [0, 1]
    second = locks(tmp_path, 1)
    assert second[0].gpu.index == 2
    with pytest.raises(
        InputError, match=rf"measuring on GPU 0 \(process {os.getpid()}\), GPU 1 .*, GPU 2 .*two on one GPU"
    ):
        locks(tmp_path, 2)
    third = locks(tmp_path, 1)  # the refusal kept nothing
    assert third[0].gpu.index == 3
    first[0].release()
    assert locks(tmp_path, 1)[0].gpu.index == 0


def test_the_lock_goes_with_its_holder_however_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from k3lab.tuning.gpus import Gpu, take\n"
        "held = take(1, [Gpu(0, 'GPU-0', 'x')], Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=rf"process {other.pid}\)"):
            take(1, FOUR[:1], tmp_path)
    finally:
        other.kill()
        other.wait(10)
    assert len(take(1, FOUR[:1], tmp_path)) == 1


def test_workers_hold_the_locks_until_they_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible", lambda: FOUR)
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))
    with Workers(LIMITS, measured=True, evaluator=DEFAULT_EVALUATOR, gpus=3):
        with pytest.raises(InputError, match="another process is measuring"):
            Workers(LIMITS, measured=True, evaluator=DEFAULT_EVALUATOR, gpus=2)
        Workers(LIMITS, measured=False, evaluator=DEFAULT_EVALUATOR).close()  # predicting needs none
    Workers(LIMITS, measured=True, evaluator=DEFAULT_EVALUATOR, gpus=4).close()


def test_what_is_asked_for_must_be_there(tmp_path: Path) -> None:
    mixed = [*FOUR[:2], Gpu(2, "GPU-9", "NVIDIA L4")]
    with pytest.raises(InputError, match="3 GPUs were asked for, 2 of one model are here"):
        take(3, mixed, tmp_path)
    for count in (0, 17):
        with pytest.raises(InputError, match="must be 1 to 16"):
            take(count, FOUR, tmp_path)
    assert take(1, [], tmp_path) == []
    with pytest.raises(InputError, match="cannot be locked"):
        take(1, FOUR, tmp_path / "nowhere")


def test_a_job_of_the_finals_is_not_taken_by_another_gpu(telling: Path, tmp_path: Path) -> None:
    ask = request(tmp_path / "s.sqlite3")
    config = ask.space.default
    with Workers(LIMITS, measured=True, evaluator="telling_gpus", jobs=1, locks=locks(tmp_path, 4)) as workers:
        jobs = [dataclasses.replace(ask.job("retime", config, seed=seed), digests=None) for seed in range(6)]
        for job in jobs:
            workers.submit(job)
        got: list[Outcome] = [workers.result(job) for job in jobs]
    assert all(one.status is Status.OK for one in got)
    assert {json.loads(line)[1] for line in telling.read_text().splitlines()} == {"GPU-0"}


def test_what_is_timed_by_hand_keeps_tuners_off_and_is_kept_off_by_them(tmp_path: Path) -> None:
    with gpus.measuring(1, FOUR, tmp_path):
        held = locks(tmp_path, 2)
        assert [lock.gpu.index for lock in held] == [0, 2]
        with pytest.raises(InputError, match="another process is measuring on GPU 1"):
            take(1, FOUR[1:2], tmp_path)
    with pytest.raises(InputError, match="another process is measuring on GPU 0"), gpus.measuring(0, FOUR, tmp_path):
        pytest.fail("a tuner is at work there")
    for lock in [*held, *take(1, FOUR[1:2], tmp_path)]:
        lock.release()
    with gpus.measuring(0, [], tmp_path):  # no driver names it
        pass


@pytest.mark.parametrize("word", ["time", "stages"])
def test_timing_by_hand_is_refused_beside_a_tuner(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Device(0, "NVIDIA H200", "sm_90a", 132, 60 << 20, 140 << 30, "580", gpu_card("h200"))
    monkeypatch.setattr("k3lab.kernels.device.require", lambda _purpose: here)
    monkeypatch.setattr(gpus, "visible", lambda: FOUR)
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))
    held = locks(tmp_path, 1)
    assert command([word, "attn_res", "--kind", "final"]) == 2
    assert "another process is measuring on GPU 0" in capsys.readouterr().err
    held[0].release()


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    """Anybody can lay one in the temporary folder."""
    private = tmp_path / "private"
    private.write_text("what is mine")
    private.chmod(0o600)
    (tmp_path / f"k3lab-{FOUR[0].uuid}.lock").symlink_to(private)
    with pytest.raises(InputError, match="cannot be locked"):
        take(1, FOUR[:1], tmp_path)
    assert private.read_text() == "what is mine" and private.stat().st_mode & 0o777 == 0o600
    (tmp_path / f"k3lab-{FOUR[1].uuid}.lock").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="cannot be locked"):
        take(1, FOUR[1:2], tmp_path)
    assert not (tmp_path / "nowhere").exists()


def test_another_users_lock_is_opened_and_not_asked_to_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the temporary folder Linux refuses that (fs.protected_regular), though the file is open to all."""
    real = os.open

    def protected(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT and not flags & os.O_EXCL and Path(path).exists():
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", protected)
    (first,) = take(1, FOUR[:1], tmp_path)
    assert first.path.stat().st_mode & 0o777 == 0o666
    first.release()
    (again,) = take(1, FOUR[:1], tmp_path)
    again.release()
