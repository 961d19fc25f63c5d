"""Each test of the command line runs in a folder of its own, with the session's own cache, and sees no GPU unless it is one's test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def studies(quick_studies: None) -> None:
    """Of all tests here."""


@pytest.fixture(scope="session")
def cli_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of a run: what one compiled, no other compiles again."""
    own = tmp_path_factory.getbasetemp()
    cache = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "k3lab-cache"
    cache.mkdir(exist_ok=True)
    return cache


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(
    request: pytest.FixtureRequest, tmp_path: Path, cli_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("K3LAB_CACHE_DIR", str(cli_cache))
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("K3LAB_NO_GPU", "1")
