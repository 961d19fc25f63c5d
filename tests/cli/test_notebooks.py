"""The notebooks run from top to bottom, at a reduced size and without leaving anything behind."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
REDUCED = {"01_attention_projection.ipynb": {"ROWS": 2, "TRIALS": 3}}


def test_every_notebook_is_known_here() -> None:
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(REDUCED)


@pytest.mark.parametrize("name", REDUCED)
def test_notebook_runs(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    changed = "\n".join(f"{key} = {value!r}" for key, value in REDUCED[name].items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(changed))
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    text = str([cell.get("outputs") for cell in notebook.cells])
    assert "Warning" not in text
    assert "pass" in text
    assert "predicted" in text
    assert "application/vnd.plotly" in text


@pytest.mark.parametrize("name", REDUCED)
def test_notebook_is_kept_without_outputs(name: str) -> None:
    for cell in nbformat.read(FOLDER / name, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
