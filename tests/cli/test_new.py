"""``k3lab new family``: what it writes works, in a checkout and in a package of its own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from k3lab.cli.main import run
from k3lab.cli.new import next_steps, render_files, write_inside
from k3lab.kernels import InputError

NAME = "scaffold_probe_mix"
"""A name that no family installed here has."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which the scaffolded package is installed (without touching ours)."""
    folder = tmp_path_factory.mktemp("scaffold")
    assert run(["new", "family", NAME, "--package", str(folder / "pkg"), "--json"]) == 0
    install = [
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(folder / "site"),
        ".",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *install], cwd=folder / "pkg", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "FOLDER": str(folder),
        "K3LAB_CACHE_DIR": str(folder / "cache"),
        "K3LAB_NO_GPU": "1",
    }


def test_its_own_tests_pass(package: dict[str, str]) -> None:
    tests = Path(package["FOLDER"]) / "pkg" / "tests"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=package["FOLDER"], env=package, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "7 passed, 1 skipped" in done.stdout  # no baseline of a GPU is here


def test_a_family_inside_is_a_folder_and_a_line(tmp_path: Path) -> None:
    registry = Path(__file__).resolve().parents[2] / "kernels" / "registry.py"
    (tmp_path / "tests" / "kernels").mkdir(parents=True)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "registry.py").write_text(registry.read_text())
    written = write_inside(NAME, tmp_path)
    assert {path.parent for path in written} == {tmp_path / "kernels" / NAME, tmp_path / "tests" / "kernels"}
    before, after = registry.read_text().splitlines(), (tmp_path / "kernels" / "registry.py").read_text().splitlines()
    assert [line for line in after if line not in before] == [f'    "{NAME}": "k3lab.kernels.{NAME}:FAMILY",']
    for path in written:
        ast.parse(path.read_text())
    with pytest.raises(InputError, match="exists already"):
        write_inside(NAME, tmp_path)


def test_what_to_do_next_says_all_of_it() -> None:
    outside = next_steps(NAME, Path("a folder"))
    assert outside[-3:] == [
        "pip install --no-deps --no-build-isolation -e 'a folder'",
        f"k3lab check {NAME} --tp 16 --rows 8",
        "python -m pytest 'a folder/tests'",
    ]
    inside = next_steps(NAME, None)
    assert inside[-1].endswith(
        f"README.md:  | `{NAME}` | scaffold probe mix: row-wise scale and add (a skeleton) | `triton` | none |"
    )
    for steps in (outside, inside):
        assert (steps[0] == f"source {sys.prefix}/bin/activate") == (sys.prefix != sys.base_prefix)


def test_inside_and_outside_differ_in_imports_only() -> None:
    inside, outside = render_files(NAME, inside=True), render_files(NAME, inside=False)
    assert "from ..contract import" in inside[f"kernels/{NAME}/family.py"]
    assert "from k3lab.kernels.contract import" in outside[f"k3lab_{NAME}/family.py"]
    kernel = "triton_rows.py"
    assert inside[f"kernels/{NAME}/{kernel}"] == outside[f"k3lab_{NAME}/{kernel}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Token-Mix", "--package", "x"], "cannot be a family's name; use lower case words joined by _"),
        (["class", "--package", "x"], "cannot be a family's name"),
        (["kda", "--package", "x"], "family 'kda' exists already"),
        (["fine", "--package", "taken"], "is not empty; name a new folder"),
    ],
)
def test_bad_calls(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    arguments = [*arguments[:2], str(tmp_path / arguments[2])]
    assert run(["new", "family", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
