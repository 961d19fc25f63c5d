"""The notebooks run from top to bottom on the CPU, at a reduced size and without leaving anything behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
RESULTS = str(ROOT / "results")
REDUCED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "1_write_and_check.ipynb": ({"ROWS": 2}, ("fail", "imported again: toy_kernel.py", "pass", "k3_toy_triton_rows", "spills")),
    "2_time_it_honestly.ipynb": ({"RESULTS": RESULTS}, ("measured winner of a study on NVIDIA H200", "timed twice: measured on H200", "needs an NVIDIA GPU")),
    "3_tune.ipynb": ({"RESULTS": RESULTS, "TRIALS": 2, "ROWS": 2}, ("2 of 2", "predicted", "what decided", "configs on H200: measured")),
    "4_read_a_trace.ipynb": ({"LAYERS": 8, "STEPS": 12}, ("fail (synthetic)", "k3_experts_synthetic_routed", "<svg ", "pass (synthetic)")),
    "5_export_and_run.ipynb": ({"TRIALS": 2, "ROWS": 2, "TOKENS": 2}, ("1 entry is only predicted", "every checksum holds", "k3_attention_projection_triton")),
    "6_predict_gb300.ipynb": ({"RESULTS": RESULTS, "SHOWN": 20}, ("error of the model", "GB300, predicted", "partly predicted: floors plus 1 predicted winner")),
}  # fmt: skip
"""Notebook to what its parameters are here, and what its output must hold."""
PICTURES = {"1_write_and_check.ipynb": 2, "2_time_it_honestly.ipynb": 5, "3_tune.ipynb": 5, "6_predict_gb300.ipynb": 3}
"""Notebook to its fewest plots."""


def test_every_notebook_is_known_here() -> None:
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(REDUCED)
    assert [int(name[0]) for name in sorted(REDUCED)] == list(range(1, len(REDUCED) + 1))


@pytest.mark.parametrize("name", REDUCED)
def test_notebook_runs(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    values, wanted = REDUCED[name]
    place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    changed = "\n".join(f"{key} = {value!r}" for key, value in values.items())
    assert all(key in notebook.cells[place].source for key in values)
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(changed))
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "\n".join(str(output) for output in outputs)
    assert "Warning" not in text
    for needle in wanted:
        assert needle in text, needle
    plots = sum("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs)
    assert plots >= PICTURES.get(name, 0)


@pytest.mark.parametrize("name", REDUCED)
def test_saved_outputs_say_which_gpu_made_them(name: str) -> None:
    """A notebook is kept without outputs, or its metadata name GPU, driver and commit of those it has."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    made_on = notebook.metadata.get("k3lab", {})
    if made_on:
        assert set(made_on) >= {"gpu", "driver", "commit"}, f"{name}: its outputs have no origin"
        return
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_outputs_are_saved_with_their_origin_and_never_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util
    from types import SimpleNamespace

    from k3lab.kernels import device as devices

    spec = importlib.util.spec_from_file_location("save_outputs", FOLDER / "save_outputs.py")
    assert spec and spec.loader
    saver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(saver)
    assert saver.main([]) == 2
    assert capsys.readouterr().err == "saved outputs are a GPU's: none is here\n"
    monkeypatch.setattr(saver, "HERE", tmp_path)
    here = SimpleNamespace(name="NVIDIA H200", driver="580", to_json=lambda: {"name": "NVIDIA H200"})
    monkeypatch.setattr(devices, "discover", lambda: here)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("6 * 7")]), tmp_path / "a.ipynb")
    assert saver.main([]) == 0
    saved = nbformat.read(tmp_path / "a.ipynb", as_version=4)
    assert saved.cells[0].outputs[0].data["text/plain"] == "42"
    assert saved.metadata.k3lab.gpu == "NVIDIA H200" and saved.metadata.k3lab.commit
    assert saver.main(["none.ipynb"]) == 2
