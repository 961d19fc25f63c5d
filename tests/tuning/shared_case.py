"""Workers of a shared study as processes, and what the database and their log say of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_family
import optuna
import postgres
import pytest
import shared_worker
from k3lab.tuning.outcome import Outcome, Status
from k3lab.tuning.shared_study import SharedStudy
from k3lab.tuning.tune import identity_of

SCRIPT = str(Path(shared_worker.__file__))
SPACE = fake_family.LARGE.space(fake_family.FakeProblem(1, 8), None)
TRIALS = 24
NAME = "fake-large-tp1-rows8-h200-measured"
without_server = pytest.mark.skipif(bool(postgres.missing()), reason=str(postgres.missing()))


def start(address: str, folder: Path, *, seconds: float = 0.0, slower: Path | None = None, **asked: Any) -> subprocess.Popen[str]:  # fmt: skip
    told = json.dumps({"address": address, "folder": str(folder), **asked})
    environment = {**os.environ, "FAKE_SECONDS": str(seconds), "FAKE_LOG": str(folder / "log"), "OMP_NUM_THREADS": "1"}
    if slower:
        environment["FAKE_SLOWER"] = str(slower)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, SCRIPT, told], env=environment, stdout=pipe, stderr=pipe, text=True)


def result(child: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = child.communicate(timeout=100)
    assert output, errors
    return {**json.loads(output), "said": errors, "code": child.returncode}


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def frozen(address: str, name: str = NAME) -> list[optuna.trial.FrozenTrial]:
    """Every trial as Optuna itself tells it, as its dashboard does."""
    url = address.replace("postgresql:", "postgresql+psycopg:")
    return optuna.load_study(study_name=name, storage=url).get_trials()


def ask(address: str, query: str, *values: object) -> Any:
    """The first value of an SQL query."""
    import psycopg

    with psycopg.connect(address) as connection:
        found = connection.execute(query, values).fetchone()
    return found[0] if found else None


def measured(folder: Path) -> Counter[str]:
    """How often each config was measured."""
    if not (folder / "log").exists():
        return Counter()
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return Counter(digest for kind, digest, _ in lines if kind == "measure")


def joined(address: str, folder: Path, name: str = "s", **asked: Any) -> SharedStudy:
    """This process as a worker."""
    request = shared_worker.request(objective="predicted", **asked)
    return SharedStudy.join(name, identity_of(request), {}, shared_worker.shared(address, str(folder), **asked))


def measuring(folder: Path) -> set[int]:
    """Processes that measured something."""
    return {pid for kind, _, pid in map(json.loads, (folder / "log").read_text().splitlines()) if kind == "measure"}


OK = Outcome(Status.OK, value=3.0)
