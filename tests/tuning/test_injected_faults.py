"""Faults that a real GPU host deals out, injected for real: each costs its own config, and the next one is fine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import fake_family
import pytest
from k3lab.tuning.jobs import Job, location_of
from k3lab.tuning.outcome import SetupError, Status
from k3lab.tuning.supervisor import Limits, Supervisor

EVALUATOR = """
import os, resource, signal, time
from k3lab.tuning.outcome import Outcome, Status, failure

def killed(name):
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(60)

def endless():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass

def no_memory():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, resource.RLIM_INFINITY))
    return bytearray(1 << 40)

def full_disk():
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")

def raising(text):
    raise RuntimeError(text)

FAULTS = {
    "oom killer": lambda: killed("SIGKILL"),
    "terminated": lambda: killed("SIGTERM"),
    "bus error": lambda: killed("SIGBUS"),
    "launch failure": lambda: raising("CUDA error: unspecified launch failure"),
    "illegal address": lambda: raising("CUDA error: an illegal memory access was encountered"),
    "endless": endless,
    "no memory": no_memory,
    "full disk": full_disk,
}

def measure(task, stage):
    where, fault = os.environ["INJECT"].split("/")
    for name in ("compile", "check", "time"):
        stage(name)
        if name == where and task.job.seed == 1:
            FAULTS[fault]()
    return Outcome(Status.OK, value=2.0)
"""


def job(seed: int) -> Job:
    return Job(
        "measure", "fake", location_of(fake_family.FAMILY), "faulty", {"tp": 1, "rows": 8, "width": 64}, {"fault": "none", "n": 0},
        "sm_90a", "H200", seed,
    )  # fmt: skip


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    (tmp_path / "injecting_evaluator.py").write_text(EVALUATOR)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Supervisor(Limits(compile_s=1.5, measure_s=1.5), gpu=False, evaluator="injecting_evaluator") as made:
        yield made


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("where", "fault", "status", "words"),
    [
        ("compile", "oom killer", Status.CRASHED, "died with SIGKILL while compiling"),
        ("time", "oom killer", Status.CRASHED, "died with SIGKILL while timing"),
        ("check", "terminated", Status.CRASHED, "died with SIGTERM while checking"),
        ("time", "bus error", Status.CRASHED, "died with SIGBUS while timing"),
        ("check", "launch failure", Status.CRASHED, "unspecified launch failure in check"),
        ("time", "illegal address", Status.CRASHED, "illegal memory access was encountered in time"),
        ("compile", "endless", Status.COMPILE_TIMEOUT, "compiling took longer than 1.5 s"),
        ("time", "endless", Status.TIMEOUT, "timing took longer than 1.5 s"),
        ("check", "no memory", Status.OOM, "MemoryError"),
    ],
)
def test_a_fault_costs_its_config_and_its_process(
    worker: Supervisor, monkeypatch: pytest.MonkeyPatch, where: str, fault: str, status: Status, words: str
) -> None:
    monkeypatch.setenv("INJECT", f"{where}/{fault}")
    outcome = worker.run(job(1))
    assert (outcome.status, outcome.value) == (status, None)
    assert words in outcome.reason and "\n" not in outcome.reason
    assert worker._process is None  # nothing that it left behind serves another config
    assert worker.run(job(2)).value == 2.0


def test_an_endless_kernel_is_ended_whatever_it_ignores(worker: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INJECT", "time/endless")
    assert worker.run(job(0)).value == 2.0
    assert worker._process is not None
    pid = worker._process.pid
    assert worker.run(job(1)).status is Status.TIMEOUT
    assert gone(pid)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_no_config_s_fault(worker: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INJECT", "check/full disk")
    with pytest.raises(SetupError, match="No space left on device while check"):
        worker.run(job(1))
    assert worker.run(job(2)).value == 2.0
