"""Outputs that the notebooks keep: made without Jupyter as Jupyter makes them, with their origin, and of the sources beside them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
PLOT = "application/vnd.plotly.v1+json"
CELLS = [
    "print('one'); print('two')",
    "x = 6 * 7\nx",
    "{'b': 1, 'a': [1.5, None]}",
    "'text'",
    "None",
    "x;",
    "print('before')\nfrom k3lab.cli.shown import Shown, live\nShown('title', {}, [('name', 'value')])",
    "import plotly.graph_objects as go\nfigure = go.Figure().add_scatter(x=[1, 2], y=[3.5, None])\nfigure",
    "Shown('title', {}, [], {'one': lambda: figure}, drawing='<svg></svg>')",
    "from types import SimpleNamespace\nprogress = live()\nprogress.begin('search', [], 2)\n"
    "progress.trial(SimpleNamespace(ok=True), SimpleNamespace(value=1.5, number=0))\nprint('after')",
    "from k3lab.cli.lab import open_lab\nopen_lab('kda')",
    "from k3lab.cli.main import run\nassert run('bundle verify nowhere'.split()) == 2\nrun(['kernels']);",
]
"""Each thing that the notebooks show, in a cell."""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of notebooks/, and the IPython of this process as it was when the test is over."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("IPython", "IPython.display"):
        __import__(name)
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    import cells
    import save_outputs

    yield SimpleNamespace(cells=cells, saver=save_outputs)
    for name in ("cells", "save_outputs"):
        sys.modules.pop(name, None)


def outline(outputs: list[Any]) -> list[Any]:
    """Kind of each output and what it holds; streams of one name that follow one another are one."""
    found: list[Any] = []
    for output in outputs:
        if output["output_type"] == "stream":
            if output["name"] != "stdout":
                continue  # warnings go to the terminal
            text = re.sub("\x1b\\[[0-9;]*m", "", "".join(output["text"]))  # a kernel asks for colours
            if found and found[-1][0] == "stream":
                text = found.pop()[1] + text
            found.append(("stream", text))
        else:
            data = {
                kind: "".join(value) if isinstance(value, list) else value for kind, value in output["data"].items()
            }
            found.append((output["output_type"], data))
    return found


def test_cells_show_what_jupyter_shows(tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    own = json.loads(json.dumps(made))
    nbclient.NotebookClient(
        made, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    monkeypatch.chdir(tmp_path)
    tools.cells.run_cells(own["cells"])
    for source, ours, jupyters in zip(CELLS, own["cells"], made.cells, strict=True):
        assert outline(ours["outputs"]) == outline(jupyters["outputs"]), source
        assert ours["execution_count"] == jupyters["execution_count"]
    nbformat.validate(nbformat.from_dict(own))
    (progress, after) = own["cells"][9]["outputs"]
    assert "1 of 2  best 1.50 us (trial 0)" in progress["data"]["text/plain"][0]  # its last state
    assert after["text"] == ["after\n"]


def test_a_cell_that_raises_is_named_and_nothing_is_written(tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# title"), nbformat.v4.new_code_cell("1 / 0")]
    )
    (tmp_path / "in").mkdir()
    nbformat.write(notebook, tmp_path / "in" / "a.ipynb")
    monkeypatch.setattr(tools.saver, "HERE", tmp_path / "in")
    monkeypatch.setenv("K3LAB_COMMIT", "abc")
    assert tools.saver.main(["a.ipynb", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "a.ipynb is not saved: cell 1: ZeroDivisionError: division by zero\n"
    assert not list((tmp_path / "out").iterdir())
    assert tools.saver.main(["a.ipynb"]) == 2
    assert capsys.readouterr().err == "saved outputs are a GPU's, and none is here: --out DIR writes copies\n"
    assert tools.saver.main(["none.ipynb"]) == 2


def test_outputs_are_saved_with_their_origin(tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3lab.kernels import device as devices

    here = SimpleNamespace(name="NVIDIA H200", driver="580", to_json=lambda: {"name": "NVIDIA H200"})
    monkeypatch.setattr(devices, "discover", lambda: here)
    monkeypatch.setattr(tools.saver, "HERE", tmp_path)
    monkeypatch.setenv("K3LAB_COMMIT", "abc")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("6 * 7")]), tmp_path / "a.ipynb")
    assert tools.saver.main([]) == 0
    saved = json.loads((tmp_path / "a.ipynb").read_text())
    assert saved["cells"][0]["outputs"][0]["data"]["text/plain"] == ["42"]
    origin = saved["metadata"]["k3lab"]
    assert (origin["gpu"], origin["driver"], origin["commit"]) == ("NVIDIA H200", "580", "abc")
    assert origin["sources"] == tools.saver.sources_digest(saved)
    saved["cells"][0]["source"] = ["6 * 8"]
    assert origin["sources"] != tools.saver.sources_digest(saved)


def test_many_are_saved_without_jupyter_and_each_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As on a GPU host without Jupyter: imports of it fail; a study of an earlier run is not gone on with."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("cells.py", "save_outputs.py"):
        shutil.copy(FOLDER / name, folder)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.txt").write_text("fact")
    source = "from pathlib import Path\nprint(Path('../results/a.txt').read_text(), Path('left').exists())\nPath('left').touch()"
    for name in ("a", "b"):
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), folder / f"{name}.ipynb")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nclass No:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('IPython', 'ipykernel', 'nbformat', 'nbclient', 'traitlets', 'zmq'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, No())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "K3LAB_NO_GPU": "1", "K3LAB_COMMIT": "abc"}
    command = [sys.executable, str(folder / "save_outputs.py"), "--out", str(tmp_path / "out")]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.ipynb", "b.ipynb"]
    saved = json.loads((tmp_path / "out" / "b.ipynb").read_text())
    assert saved["cells"][0]["outputs"][0]["text"] == ["fact False\n"]
    assert saved["metadata"]["k3lab"]["gpu"] is None
    assert (
        "outputs" not in (folder / "a.ipynb").read_text()
        or not json.loads((folder / "a.ipynb").read_text())["cells"][0]["outputs"]
    )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_saved_outputs_are_those_of_the_sources_on_a_gpu(tools: Any, name: str) -> None:
    """A notebook is kept without outputs; or whole, of these sources, by a GPU that it names, with a picture of every plot."""
    notebook = json.loads((FOLDER / name).read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    made_on = notebook["metadata"].get("k3lab")
    if made_on is None:
        assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
        return
    assert made_on["gpu"] == "NVIDIA H200" and made_on["driver"] and made_on["commit"]
    assert made_on["sources"] == tools.saver.sources_digest(notebook), "edited since: run save_outputs.py, or clear the outputs and metadata.k3lab"  # fmt: skip
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    for output in outputs:
        if PLOT in output.get("data", {}):
            assert output["data"]["image/png"], "python tests/cli/notebook_pictures.py makes it"
