"""The notebooks run from top to bottom on the CPU, at a reduced size and without leaving anything behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
RESULTS = str(ROOT / "results")
REDUCED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "1_write_and_check.ipynb": ({"ROWS": 2}, ("elements off", "imported again: toy_kernel.py", "pass", "k3_toy_triton_rows", "spills")),
    "2_time_it_honestly.ipynb": ({"RESULTS": RESULTS}, ("measured winner of a study on NVIDIA H200", "timed twice: measured on H200", "needs an NVIDIA GPU")),
    "3_tune.ipynb": ({"RESULTS": RESULTS, "TRIALS": 2, "ROWS": 2}, ("2 of 2", "predicted", "what decided", "configs on H200: measured")),
    "4_read_a_trace.ipynb": ({"LAYERS": 8, "STEPS": 12}, ("fail (synthetic)", "k3_experts_synthetic_routed", "<svg ", "pass (synthetic)")),
    "5_export_and_run.ipynb": ({"TRIALS": 2, "ROWS": 2, "TOKENS": 2}, ("1 entry is only predicted", "every checksum holds", "k3_attention_projection_triton", "eager step")),
    "6_predict_gb300.ipynb": ({"RESULTS": RESULTS, "SHOWN": 20}, ("error of the model", "GB300, predicted", "predicted: 6 predicted winners; without gaps")),
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
    assert "\\x1b[2K" not in text  # a terminal's progress bar, which is no terminal's here
    for needle in wanted:
        assert needle in text, needle
    plots = sum("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs)
    assert plots >= PICTURES.get(name, 0)


def test_the_toy_kernel_leaves_dead_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a check on a GPU asks of it and the interpreter cannot: one compiled object is told how many rows live."""
    notebook = nbformat.read(FOLDER / "1_write_and_check.ipynb", as_version=4)
    written = {"toy_kernel.py": "kernel", "toy.py": "family"}
    for file, name in written.items():
        (source,) = (cell.source for cell in notebook.cells if f'"{file}").write_text({name});' in cell.source)
        values: dict[str, Any] = {}
        exec(source.rpartition("(toy /")[0], values)
        (tmp_path / file).write_text(values[name])
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    from k3lab.kernels import K3
    from k3lab.kernels.gpu_cards import gpu_card
    from k3lab.tuning.compiling import compile_config

    try:
        family = importlib.import_module("toy").FAMILY
        problem = family.problem(K3, tp=16, rows=8)
        (engine,) = family.engines
        space = engine.space(problem, gpu_card("H200"))
        (launch,) = compile_config(engine, problem, space.default, "sm_90a", cache=False).launches
    finally:
        for module in ("toy", "toy_kernel"):
            sys.modules.pop(module, None)
    assert [arg.name for arg in launch.args if arg.kind == "int32"] == ["rows"]
