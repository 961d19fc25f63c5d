"""Runs a notebook's cells in this process and keeps what they show, as a Jupyter kernel does: for hosts without Jupyter.

Kept are standard output, displayed tables and plots, and the value of a cell's last line; standard error goes where it
always goes. The names of IPython that displaying uses are stood in for, whether or not IPython is there, so that a process
runs one notebook and nothing else. Lines of IPython's own, such as ``%time``, are no Python and are refused as such.
"""

from __future__ import annotations

import ast
import io
import json
import pprint
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from types import ModuleType, SimpleNamespace
from typing import Any

PLOT = "application/vnd.plotly.v1+json"
Data = dict[str, Any]


class CellError(RuntimeError):
    """A cell raised; which one, and what."""


def bundle(value: Any) -> Data:
    """MIME type to what a page shows of a value."""
    if hasattr(value, "to_plotly_json"):
        return {PLOT: json.loads(value.to_json())}
    shown = pprint.pformat(value, sort_dicts=False) if isinstance(value, (dict, list, tuple, set)) else repr(value)
    html = {"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else {}
    return {"text/plain": shown, **html}


class Handle:
    """A displayed thing that is written again, such as a search's progress; the page keeps its last state."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def update(self, data: Mapping[str, Any], raw: bool = True) -> None:
        """Show this in its place."""
        self._data.clear()
        self._data.update(data)


class Page(io.TextIOBase):
    """The outputs of one cell in the form of a notebook file; standard output while the cell runs."""

    def __init__(self) -> None:
        self.outputs: list[Data] = []

    def write(self, text: str) -> int:
        """Add to the stream's text, after what was shown before."""
        if not self.outputs or self.outputs[-1]["output_type"] != "stream":
            self.outputs.append({"name": "stdout", "output_type": "stream", "text": ""})
        self.outputs[-1]["text"] += text
        return len(text)

    def display(self, value: Any, *, raw: bool = False, display_id: bool = False) -> Handle:
        """What ``IPython.display.display`` does, for one value."""
        if not raw and hasattr(value, "_ipython_display_") and not hasattr(value, "to_plotly_json"):
            value._ipython_display_()
            return Handle({})
        data = dict(value) if raw else bundle(value)
        self.outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        return Handle(data)

    def result(self, value: Any, count: int) -> None:
        """Show the value of a cell's last line."""
        if value is None:
            return
        if hasattr(value, "_ipython_display_"):
            self.display(value)
            return
        shown = {"data": bundle(value), "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        self.outputs.append(shown)


def stand_in(page: Page) -> None:
    """Make ``IPython.display.display`` write to the page, and ``get_ipython`` tell of a notebook."""
    package, display = ModuleType("IPython"), ModuleType("IPython.display")
    shell = SimpleNamespace(kernel=page, config={})
    package.get_ipython = lambda: shell  # type: ignore[attr-defined]
    package.display = display  # type: ignore[attr-defined]
    display.display = page.display  # type: ignore[attr-defined]
    sys.modules.update({"IPython": package, "IPython.display": display})


def run_cell(source: str, place: int, names: Data, page: Page, count: int) -> None:
    """Execute one cell; its outputs are on the page then."""
    tree = ast.parse(source, f"<cell {place}>")
    last = tree.body[-1] if tree.body and not source.rstrip().endswith(";") else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, f"<cell {place}>", "exec"), names)
    if isinstance(last, ast.Expr):
        page.result(eval(compile(ast.Expression(last.value), f"<cell {place}>", "eval"), names), count)


def lines(text: str) -> list[str]:
    """A text as notebook files hold it."""
    return text.splitlines(keepends=True)


def kept(output: Data) -> Data:
    """An output with its texts in lines."""
    if output["output_type"] == "stream":
        return {**output, "text": lines(output["text"])}
    data = {kind: lines(value) if isinstance(value, str) else value for kind, value in output["data"].items()}
    return {**output, "data": data}


def run_cells(cells: list[Data]) -> None:
    """Execute the code cells in order, in the folder that is current, and put their outputs into them.

    Raises:
        CellError: a cell raised; those before it have their outputs.
    """
    names: Data = {"__name__": "__main__"}
    count = 0
    for place, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        count += 1
        page = Page()
        stand_in(page)
        try:
            with redirect_stdout(page):
                run_cell("".join(cell["source"]), place, names, page, count)
        except Exception as error:
            raise CellError(f"cell {place}: {type(error).__name__}: {error}") from error
        cell["outputs"], cell["execution_count"] = [kept(output) for output in page.outputs], count
