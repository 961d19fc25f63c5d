"""``python tests/cli/notebook_pictures.py [NOTEBOOK ...]``: a picture beside each plot of the saved notebooks.

Jupyter draws the plots; a repository's web page runs no scripts and shows the picture.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser, chromium, find_chromium

ROOT = Path(__file__).resolve().parents[2]
PLOT, PICTURE = "application/vnd.plotly.v1+json", "image/png"
WIDTH, HEIGHT, COLOURS = 760, 340, 64


def plots(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of every output that is a plot."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return [output["data"] for output in outputs if PLOT in output.get("data", {})]


def open_plotly(browser: Browser, folder: Path) -> None:
    """Load a page that holds plotly and nothing else."""
    from plotly.offline import get_plotlyjs

    page = folder / "plotly.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><script>{get_plotlyjs()}</script>")
    browser.open(page)


def small(picture: str) -> str:
    """A PNG in base64 on white, of few colours: a third of its size, with no difference that a reader sees."""
    from PIL import Image

    drawn = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGBA")
    page = Image.new("RGBA", drawn.size, "white")
    page.alpha_composite(drawn)
    made = io.BytesIO()
    page.convert("RGB").quantize(COLOURS).save(made, "PNG", optimize=True)
    return base64.b64encode(made.getvalue()).decode()


def add_pictures(browser: Browser, notebook: dict[str, Any]) -> int:
    """Put a PNG beside each plot, in place of one that is there; how many."""
    found = plots(notebook)
    for data in found:
        figure = data[PLOT]
        size = {"format": "png", "width": WIDTH, "height": figure["layout"].get("height", HEIGHT)}
        shown = json.dumps({"data": figure["data"], "layout": figure["layout"]})
        data[PICTURE] = small(browser.value(f"Plotly.toImage({shown}, {json.dumps(size)})").partition(",")[2])
    return len(found)


def main(names: list[str]) -> int:
    """Entry point; 2 where there is no browser."""
    path = find_chromium()
    if path is None:
        print("no Chromium here: apt-get install chromium", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT / "notebooks"))
    from save_outputs import write_notebook

    with tempfile.TemporaryDirectory() as folder, chromium(path, Path(folder) / "profile") as browser:
        open_plotly(browser, Path(folder))
        for file in map(Path, names) if names else sorted((ROOT / "notebooks").glob("*.ipynb")):
            notebook = json.loads(file.read_text())
            if count := add_pictures(browser, notebook):
                write_notebook(file, notebook)
            print(f"{file.name}: {count} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
