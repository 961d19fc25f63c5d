"""Makes the fakes importable, here and in the worker processes, which get this process's module path; what tables share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session", autouse=True)
def studies(quick_studies: None) -> None:
    """Of all tests here."""


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured studies are allowed: the fake evaluator needs no GPU."""
    from k3lab.tuning import table, tune

    for module in (tune, table):
        monkeypatch.setattr(module, "require_gpu", lambda gpu: None)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gets a line of the fake evaluator an evaluation."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    import postgres

    with postgres.running() as one:
        yield one


@pytest.fixture
def address(server: Any, request: pytest.FixtureRequest) -> str:
    """A database of the test's own."""
    return server.create(request.node.name.split("[")[0][:60])
