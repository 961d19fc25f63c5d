"""What would be shipped: a pure wheel with every package and data file, and nothing of the repository's rest."""

from __future__ import annotations

import os
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


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the wheel alone of k3lab, an empty home and no GPU, to be used outside of the repository."""
    site = tmp_path_factory.mktemp("wheel_site")
    wheel.extractall(site)
    home = tmp_path_factory.mktemp("wheel_home")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("K3LAB", "PYTHON", "XDG"))}
    return {**kept, "PYTHONPATH": str(site), "HOME": str(home), "K3LAB_NO_GPU": "1", "SITE": str(site)}


def in_wheel(installed: dict[str, str], code: str) -> str:
    """What Python code prints with the installed wheel."""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=installed["HOME"], env=installed, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout


WITHOUT_A_GPU = """
import importlib, json, sys
from pathlib import Path
from k3lab.cli.main import run
import k3lab.kernels, k3lab.tuning, k3lab.traces, k3lab.decode
for package in (k3lab.kernels, k3lab.tuning, k3lab.traces, k3lab.decode):
    assert Path(package.__file__).is_relative_to(SITE), package.__file__
problem = "--model small --tp 4 --rows 1"
for line in [
    "--version", "doctor", "kernels", f"check attention_projection {problem} --engine triton",
    f"compile attention_projection {problem} --arch sm_100a", f"predict attention_projection {problem} --gpu GB300",
    f"tune attention_projection {problem} --gpu GB300 --objective predicted --trials 2 --study s.sqlite3", "study show s.sqlite3",
    "export s.sqlite3 --out bundle", "bundle verify bundle", "decode plan --tp 16 --rows 8",
    "trace synthesize t.json.gz --layers 8 --steps 8", "trace check t.json.gz --budget gb300-tp16",
    "trace figure t.json.gz --out t.svg", "trace budget h200-tp8", "report --out report --study s.sqlite3 --bundle bundle --trace t.json.gz",
    "new family wheel_mix --package wheel_mix",
]:
    code = run(line.split())
    assert code == 0, f"{line}: {code}"
assert run(["new", "family", "wheel_mix"]) == 2
from k3lab.cli.lab import open_lab
open_lab("kda", tp=16, rows=8).roofline()
print("all of it")
"""


def test_all_that_needs_no_gpu_works_from_the_wheel(installed: dict[str, str]) -> None:
    assert "all of it" in in_wheel(installed, f"SITE = {installed['SITE']!r}\n{WITHOUT_A_GPU}")
    assert (Path(installed["HOME"]) / "report" / "index.html").stat().st_size > 1_000_000


def test_importing_the_kernels_is_quick_and_brings_no_torch(installed: dict[str, str]) -> None:
    code = (
        "import sys, time\nstart = time.process_time()\nimport k3lab.kernels\nprint(time.process_time() - start)\n"
        "assert not {'torch', 'triton', 'cutlass', 'numpy', 'pydantic'} & set(sys.modules)\n"
    )
    assert min(float(in_wheel(installed, code)) for _ in range(3)) < 0.3


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
