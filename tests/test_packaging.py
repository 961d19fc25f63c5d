"""What would be shipped: a pure wheel with every package and data file, and nothing of the repository's rest."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "tuning", "traces", "decode", "cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that no build folder appears here; installs nothing."""
    source = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(source / "dist"), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", *build], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    (built,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_it_is_pure_python_for_any_machine(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).name.endswith("-py3-none-any.whl")
    assert not [name for name in wheel.namelist() if name.endswith((".so", ".cubin", ".pyd", ".o"))]


def test_it_holds_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    wanted = {
        f"k3lab/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }
    assert wanted <= names, sorted(wanted - names)
    assert {name.split("/")[0] for name in names} == {
        "k3lab",
        next(n for n in names if ".dist-info/" in n).split("/")[0],
    }


def test_its_metadata(wheel: zipfile.ZipFile) -> None:
    metadata = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "Requires-Dist: nvidia-cutlass-dsl==4.8.1" in metadata
    extras = {line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")}
    assert extras >= {"dev", "docs", "notebooks", "postgres", "parquet", "ncu"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_constraints_pin_every_direct_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        name = requirement.replace(">", "=").replace(";", "=").replace("[", "=").split("=")[0].strip().lower()
        assert name in pinned, requirement


def test_make_with_the_systems_python_makes_no_environment() -> None:
    done = subprocess.run(
        ["make", "-n", "-B", "demo", "K3LAB_SYSTEM_PYTHON=1", "PYTHON=python3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "setup_venv" not in done.stdout
    assert "python3 -m k3lab.cli.main demo" in done.stdout
