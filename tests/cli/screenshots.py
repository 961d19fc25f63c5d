"""``python tests/cli/screenshots.py``: the README's picture of the report, from the repository's own results."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from k3lab.cli.report import collect, write_report
from k3lab.traces import synthesize
from k3lab.traces.synthetic import Faults

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser, chromium, find_chromium

ROOT = Path(__file__).resolve().parents[2]
WIDTH, HEIGHT = 1160, 1500


def make_report(folder: Path, studies: tuple[Path, ...] = ()) -> tuple[Path, dict]:
    """A report of results/ and a synthetic trace with one slow kernel: the page, and its data."""
    trace = synthesize(folder / "trace.json.gz", layers=8, steps=12, faults=Faults(slow=((2, 20_000),)))
    data = collect(
        studies=studies, bundles=[], trace=trace, budget="gb300-tp16", results=ROOT / "results", tp=16, rows=8, kind="kda",
        gpu="H200",
    )  # fmt: skip
    return write_report(data, folder / "report"), data


def shoot(
    browser: Browser, page: Path, out: Path, *, dark: bool = False, width: int = WIDTH, height: int = HEIGHT
) -> None:
    """Load the page in a window of that size and write a PNG of it."""
    browser.open(page, width=width, height=height, dark=dark)
    out.write_bytes(browser.picture())


def main() -> int:
    """Write ``docs/report.png``."""
    path = find_chromium()
    if path is None:
        print("no Chromium here: apt-get install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, chromium(path, Path(name) / "profile") as browser:
        page, _ = make_report(Path(name))
        shoot(browser, page, ROOT / "docs" / "report.png")
    print("wrote docs/report.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
