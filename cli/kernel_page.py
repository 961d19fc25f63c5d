"""``python -m k3lab.cli.kernel_page FAMILY [--check]``: a kernel's page and figure from its table of results.

The sections of ``docs/<family>.md`` between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` are made from
``results/<gpu>/<family>_table.json`` and the family's bars, the figure ``docs/<family>.svg`` too; the text around
them is kept. A page that is not there is begun. ``--check`` writes nothing and tells what is not as the data says.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels import family as find_family
from ..kernels.errors import InputError
from ..kernels.whole_file import write_whole
from .page_data import load_bars, load_table, sections
from .page_figure import digest, draw


@dataclass(frozen=True)
class Page:
    """Where a family's page, figure and table are, and what the data says."""

    family: str
    title: str
    root: Path
    """The repository's."""
    table: Mapping[str, Any]
    bars: Mapping[str, Any]
    invariant: Mapping[str, Any] | None = None
    """The table with one order of the sum for all problems, if there is one."""

    @property
    def text(self) -> Path:
        """The page."""
        return self.root / "docs" / f"{self.family}.md"

    @property
    def figure(self) -> Path:
        """Its figure."""
        return self.text.with_suffix(".svg")

    @property
    def sections(self) -> dict[str, str]:
        """Name to text of each section that comes from the data."""
        return sections(self.table, self.bars, f"../{table_path(self.family, self.bars).as_posix()}", self.invariant)


def table_path(family: str, bars: Mapping[str, Any]) -> Path:
    """The table a family's page is made of, from the repository's root."""
    return Path("results") / bars["gpu"].lower() / f"{family}_table.json"


def invariant_path(family: str, bars: Mapping[str, Any]) -> Path:
    """The table of the same family with ``k_order`` held at ``invariant``."""
    return table_path(family, bars).with_name(f"{family}_invariant.json")


def read_page(name: str, root: Path) -> Page:
    """A family's page as its data has it.

    Raises:
        InputError: no such family, no bars, or no table.
    """
    owner = find_family(name)
    bars = load_bars(owner.name)
    held = root / invariant_path(owner.name, bars)
    table = load_table(root / table_path(owner.name, bars))
    return Page(owner.name, owner.title, root, table, bars, load_table(held) if held.is_file() else None)


def begun(page: Page) -> str:
    """A new page: headings, the figure, and a place for each section."""
    notes = Path("kernels") / page.family / "NOTES.md"
    told = f"How its engines work, what limits them, what was tried and did not help: [notes](../{notes.as_posix()}).\n"
    place = {name: f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in page.sections}
    return f"""# {page.title[0].upper()}{page.title[1:]}

{told if (page.root / notes).is_file() else ""}The figures of this page are made from its record by `python -m k3lab.cli.kernel_page {page.family}`.

{place["record"]}
![Microseconds against rows, an axis a shape: every engine, {page.bars["beside"]}, the byte floor and the bars]({page.figure.name})

## Bars

{place["bars"]}
{place["mean"]}
## Beyond

{place["aims"]}
## One order of the sum

{place["invariant"]}
## Every problem

{place["tables"]}"""


def filled(text: str, parts: Mapping[str, str], path: Path) -> str:
    """The page with its sections as the data has them.

    Raises:
        InputError: a section's marks are not there once each, or not in order.
    """
    for name, part in parts.items():
        marks = (f"<!-- begin {name} -->\n", f"<!-- end {name} -->")
        if any(text.count(mark) != 1 for mark in marks) or text.index(marks[0]) > text.index(marks[1]):
            raise InputError(f"{path} needs one line '{marks[0].strip()}' and one line '{marks[1]}' after it")
        head, rest = text.split(marks[0])
        text = f"{head}{marks[0]}{part}\n{marks[1]}{rest.split(marks[1])[1]}"
    return text


def differences(page: Page) -> list[str]:
    """What of the page and its figure is not as the data says; empty where all is."""
    if not page.text.is_file():
        return [f"{page.text} is not there"]
    text = page.text.read_text()
    found = [
        f"{page.text}: section {name} is not what the table says"
        for name, part in page.sections.items()
        if filled(text, {name: part}, page.text) != text
    ]
    drawn = page.figure.read_text() if page.figure.is_file() else ""
    shown = re.search(r"data ([0-9a-f]{16})", drawn)
    if shown is None or shown[1] != digest(page.table, page.bars):
        found.append(f"{page.figure} does not show what the table says")
    return found


def write_page(page: Page) -> list[Path]:
    """Write page and figure, each whole or not at all; what was written.

    Raises:
        InputError: the page lacks a section's marks, matplotlib is missing, or a file cannot be written.
    """
    text = page.text.read_text() if page.text.is_file() else begun(page)
    made = {page.figure: draw(page.table, page.bars), page.text: filled(text, page.sections, page.text)}
    for path, content in made.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from error
    return list(made)


def main(argv: Sequence[str]) -> int:
    """Entry point; 0 where all is well, 1 where ``--check`` found a difference, 2 where the call was wrong."""
    parser = argparse.ArgumentParser(prog="python -m k3lab.cli.kernel_page", description="A kernel's page and figure from its table of results.")  # fmt: skip
    parser.add_argument("family")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is not as the table says")  # fmt: skip
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: the current folder)")
    asked = parser.parse_args(argv)
    try:
        page = read_page(asked.family, asked.root)
        if not asked.check:
            for path in write_page(page):
                print(f"wrote {path}")
            return 0
        found = differences(page)
    except InputError as error:
        print(f"k3lab: {error}", file=sys.stderr)
        return 2
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
