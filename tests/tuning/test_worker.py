"""A worker process: what a config does to it costs that config only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import fake_family
import pytest
from k3lab.kernels import InputError
from k3lab.tuning.compiling import digests
from k3lab.tuning.jobs import Job, location_of
from k3lab.tuning.outcome import Outcome, SetupError, Status
from k3lab.tuning.supervisor import Limits, Supervisor


def job(fault: str = "none", n: int = 0, **changes: object) -> Job:
    fields = {
        "kind": "predict",
        "family": "fake",
        "location": location_of(fake_family.FAMILY),
        "engine": "faulty",
        "problem": {"tp": 1, "rows": 8, "width": 64},
        "config": {"fault": fault, "n": n},
        "arch": "sm_103a",
        "gpu": "GB300",
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def worker() -> Iterator[Supervisor]:
    with Supervisor(Limits(compile_s=1.5, measure_s=1.5), gpu=False, evaluator="fake_evaluator") as made:
        yield made


def pid_of(worker: Supervisor) -> int:
    assert worker._process is not None
    return worker._process.pid


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("exit", Status.CRASHED, "exited with code 3 while compiling: last words"),
        ("check_exit", Status.CRASHED, "exited with code 3 while checking: last words"),
        ("segv", Status.CRASHED, "died with SIGSEGV while compiling"),
        ("hang", Status.COMPILE_TIMEOUT, "compiling took longer than 1.5 s"),
        ("check_hang", Status.TIMEOUT, "checking took longer than 1.5 s"),
        ("raise", Status.COMPILE_ERROR, "ValueError: no such instruction"),
        ("check_raise", Status.CRASHED, "ValueError: no such instruction in check"),
        ("wrong", Status.WRONG, "out differs by 0.5"),
        ("oom", Status.OOM, "tried to allocate 80 GiB"),
        ("memory", Status.OOM, "MemoryError: host"),
        ("unstable", Status.UNSTABLE, "spread 40%"),
        ("nan", Status.UNSTABLE, "the objective is nan"),
        ("illegal", Status.ILLEGAL, "needs 1 MB of shared memory"),
    ],
)
def test_every_fault_has_its_status_and_the_next_config_is_fine(
    worker: Supervisor, fault: str, status: Status, words: str
) -> None:
    outcome = worker.run(job(fault))
    assert (outcome.status, outcome.value) == (status, None)
    assert words in outcome.reason
    assert "\n" not in outcome.reason
    after = worker.run(job())
    assert (after.status, after.value) == (Status.OK, 5.0)


def test_prints_of_a_library_do_not_reach_the_protocol(worker: Supervisor) -> None:
    outcome = worker.run(job("prints"))
    assert (outcome.status, outcome.value) == (Status.OK, 5.0)


def test_a_worker_serves_many_jobs_and_a_timed_out_one_is_dead(worker: Supervisor) -> None:
    worker.run(job())
    before, started = pid_of(worker), worker.started
    assert worker.run(job(n=1)).value == 6.0
    assert (pid_of(worker), worker.started) == (before, started)
    worker.run(job("check_hang"))
    assert gone(before)


def test_a_poisoned_worker_is_replaced(worker: Supervisor) -> None:
    worker.run(job())
    before = pid_of(worker)
    worker.run(job("check_raise"))  # as after an illegal access: the process still answers
    assert worker.run(job()).value == 5.0
    assert pid_of(worker) != before
    assert gone(before)


def test_an_innocent_is_run_again_when_its_worker_was_already_dying(
    worker: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death in a used worker is put to the test in a fresh one before it counts."""
    worker.run(job())
    deaths: list[int] = []
    send = worker._send

    def die_once(message: dict[str, object]) -> None:
        if not deaths:
            deaths.append(pid_of(worker))
            os.kill(pid_of(worker), 9)
            time.sleep(0.2)
        send(message)

    monkeypatch.setattr(worker, "_send", die_once)
    outcome = worker.run(job(n=1))
    assert (outcome.status, outcome.value) == (Status.OK, 6.0)
    assert deaths


def test_children_of_a_hung_worker_die_with_it(
    tmp_path: Path, worker: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "spawning_evaluator.py"
    module.write_text(
        "import subprocess, time\nfrom fake_evaluator import *\n"
        "def predict(task, stage):\n"
        "    stage('compile')\n"
        f"    child = subprocess.Popen(['sleep', '600'])\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Supervisor(Limits(compile_s=1.0), gpu=False, evaluator="spawning_evaluator") as spawning:
        assert spawning.run(job()).status is Status.COMPILE_TIMEOUT
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_predicting_worker_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looking_evaluator.py").write_text(
        "import os\nfrom k3lab.tuning.outcome import failure\n"
        "def predict(task, stage):\n"
        "    return failure('wrong', [os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('K3LAB_NO_GPU')])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.delenv("K3LAB_NO_GPU", raising=False)
    for gpu, seen in ((False, "['', '1']"), (True, "['5', None]")):
        with Supervisor(gpu=gpu, evaluator="looking_evaluator") as looking:
            assert looking.run(job()).reason == seen


def test_a_worker_without_a_gpu_compiles_without_asking_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The DSL would ask for an architecture to fall back on, though every compilation names its own."""
    (tmp_path / "asking_evaluator.py").write_text(
        "from cutlass.base_dsl import env_manager\nfrom k3lab.tuning.outcome import failure\n"
        "def predict(task, stage):\n"
        "    asked = []\n"
        "    env_manager.detect_gpu_arch = lambda prefix: asked.append(prefix) or 'sm_100a'\n"
        "    from k3lab.kernels import K3, family\n"
        "    from k3lab.kernels.gpu_cards import gpu_card\n"
        "    owner = family('attention_projection')\n"
        "    engine, problem = owner.engine('cute_mma'), owner.problem(K3, tp=16, rows=2)\n"
        "    made = engine.compile(problem, engine.space(problem, gpu_card('h200')).default, 'sm_90a')\n"
        "    return failure('wrong', f'{len(made.launches)} launches, asked {asked}')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    with Supervisor(gpu=False, evaluator="asking_evaluator") as asking:
        assert asking.run(job()).reason == "1 launches, asked []"


def test_a_worker_that_cannot_start_is_the_callers_news(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Supervisor(gpu=False, evaluator="no_such_evaluator") as broken,
        pytest.raises(InputError, match="no_such_evaluator"),
    ):
        broken.run(job())


def test_a_family_that_cannot_be_found_again_is_refused() -> None:
    assert location_of(fake_family.FAMILY) == "fake_family:FAMILY"
    with pytest.raises(InputError, match="cannot be reached from a worker process"):
        location_of(fake_family.FakeFamily())


def test_jobs_and_outcomes_survive_json() -> None:
    outcome = Outcome(Status.OK, "fine", 1.5, ({"registers": 3},), {"a": 1}, {"b": 2}, {"c": 3}, {"compile": 0.1})
    assert Outcome.from_json(outcome.to_json()) == outcome
    assert Job(**job().to_json()) == job()


def test_a_worker_refuses_a_job_of_other_kernel_files(worker: Supervisor) -> None:
    here = digests(fake_family.FAULTY)
    assert worker.run(job(digests=here)).status is Status.OK
    for other in (("0" * 16, here[1]), (here[0], "0" * 16)):
        with pytest.raises(SetupError, match="fake/faulty are others than when this run began"):
            worker.run(job(digests=other))
    assert worker.run(job()).status is Status.OK


@pytest.mark.parametrize(("fault", "words"), [("full", "No space left on device"), ("no_tool", "set K3LAB_CUDA_BIN")])
def test_what_no_config_can_help_is_not_charged_to_a_config(worker: Supervisor, fault: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        worker.run(job(fault))
