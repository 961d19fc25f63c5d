"""Every listed one-line fault must make its tests fail: the suite is judged, not the code.

``mutants.json`` holds entries {file, find, replace, why, tests}. The packages are copied to a folder of
their own, the fault is put in, and each named test file runs in a process that imports the copy. Run with
``pytest -m slow tests/mutants``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "tuning", "traces", "decode", "cli")
MUTANTS = json.loads((Path(__file__).parent / "mutants.json").read_text())
SECONDS = 240
"""A fault may make tests hang until their own limits."""


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process that imports k3lab from the copy."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def run_tests(copy: Path, file: str) -> subprocess.CompletedProcess[str]:
    """One test file of the repository against the copy."""
    config = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider")
    return run(copy, "-m", "pytest", "-x", "-q", *config, str(ROOT / file))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages as folders of a package k3lab, importable before the installed ones."""
    home = tmp_path_factory.mktemp("mutants")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, home / "k3lab" / package, ignore=shutil.ignore_patterns("__pycache__"))
    where = run(home, "-c", "import k3lab.kernels; print(k3lab.kernels.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(home), f"the copy is not what is imported: {where}"
    return home


@pytest.fixture
def with_fault(copy: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, dict]]:
    """The copy with one fault in it; taken out again afterwards."""
    mutant = request.param
    path = copy / "k3lab" / mutant["file"]
    text = path.read_text()
    assert text.count(mutant["find"]) == 1, (
        f"{mutant['file']} has {mutant['find']!r} {text.count(mutant['find'])} times"
    )
    path.write_text(text.replace(mutant["find"], mutant["replace"]))
    try:
        yield copy, mutant
    finally:
        path.write_text(text)


def test_the_list_is_well_formed() -> None:
    assert len(MUTANTS) >= 24
    for mutant in MUTANTS:
        assert set(mutant) == {"file", "find", "replace", "why", "tests"}
        assert mutant["find"] != mutant["replace"]
        assert mutant["why"]
        assert mutant["tests"]
        assert (ROOT / mutant["file"]).read_text().count(mutant["find"]) == 1, mutant
        assert all((ROOT / file).is_file() for file in mutant["tests"]), mutant
    faults = [(mutant["file"], mutant["find"], mutant["replace"]) for mutant in MUTANTS]
    assert len(set(faults)) == len(faults)


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("file", sorted({file for mutant in MUTANTS for file in mutant["tests"]}))
def test_without_a_fault_the_tests_pass(copy: Path, file: str) -> None:
    result = run_tests(copy, file)
    assert result.returncode == 0, result.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("with_fault", MUTANTS, ids=lambda mutant: f"{mutant['file']}: {mutant['why']}", indirect=True)
def test_the_fault_is_found(with_fault: tuple[Path, dict]) -> None:
    copy, mutant = with_fault
    for file in mutant["tests"]:
        result = run_tests(copy, file)
        # 1: a test failed. 2 would be a fault that does not even import, which proves nothing
        assert result.returncode == 1, f"{file} does not notice: {mutant['why']}\n{result.stdout[-2000:]}"
