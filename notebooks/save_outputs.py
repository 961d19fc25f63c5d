"""``python notebooks/save_outputs.py [NAME ...] [--out DIR]``: run notebooks at full size on the GPU here, keep what they show.

Needs what k3lab needs, and no Jupyter. Each runs in a process of its own; its outputs, with GPU, driver, versions and
commit, are written into the notebook, or into a copy in DIR. Without a GPU it writes copies only: saved outputs are a GPU's.
Plots are kept for Jupyter; ``python tests/cli/notebook_pictures.py`` adds pictures of them, for readers that run no scripts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ORIGIN = "k3lab"
"""Key of the notebook's metadata that says where its outputs come from."""


def sources_digest(notebook: dict[str, Any]) -> str:
    """Of all code cells: outputs belong to the sources that made them."""
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


def origin(device: Any) -> dict[str, Any]:
    """Where outputs come from, as a notebook's metadata hold it; None for no GPU.

    Raises:
        SystemExit: the commit is not known.
    """
    from k3lab.tuning.environment import environment

    made = environment(device)
    if made["commit"] == "not a checkout":
        raise SystemExit("no commit is known here: say it, K3LAB_COMMIT=... python notebooks/save_outputs.py")
    gpu = {"gpu": device.name, "driver": device.driver} if device else {"gpu": None, "driver": None}
    return {**gpu, "commit": made["commit"], "packages": made["packages"], "python": made["python"]}


def write_notebook(path: Path, notebook: dict[str, Any]) -> None:
    """As Jupyter writes it, whole or not at all."""
    from k3lab.kernels.whole_file import write_whole

    write_whole(path, json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def save(path: Path, out: Path, device: Any) -> None:
    """Execute one notebook in a folder of its own beside ``results/``, and write it with its outputs and their origin.

    Raises:
        CellError: a cell raised; nothing is written.
    """
    from cells import run_cells

    notebook = json.loads(path.read_text())
    made_on = {**origin(device), "sources": sources_digest(notebook)}
    before, started = Path.cwd(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:  # a study of an earlier run would be gone on with
        (Path(name) / "results").symlink_to(HERE.parent / "results")
        (Path(name) / "notebooks").mkdir()
        os.chdir(Path(name) / "notebooks")
        try:
            run_cells(notebook["cells"])
        finally:
            os.chdir(before)
    notebook["metadata"][ORIGIN] = {**made_on, "seconds": round(time.monotonic() - started, 1)}
    write_notebook(out / path.name, notebook)


def main(arguments: list[str]) -> int:
    """Entry point; 2 where there is no GPU or no such notebook, 1 where one failed."""
    from k3lab.kernels.device import discover

    parser = argparse.ArgumentParser(description="Run notebooks and keep their outputs.")
    parser.add_argument("names", nargs="*", help="notebooks of this folder; all by default")
    parser.add_argument("--out", type=Path, help="folder for copies with outputs; by default the notebooks themselves")
    given = parser.parse_args(arguments)
    paths = [HERE / name for name in given.names] or sorted(HERE.glob("*.ipynb"))
    for path in paths:
        if not path.is_file():
            print(f"no notebook {path.name} in {HERE}", file=sys.stderr)
            return 2
    device = discover()
    if device is None and given.out is None:
        print("saved outputs are a GPU's, and none is here: --out DIR writes copies", file=sys.stderr)
        return 2
    out = given.out.resolve() if given.out else HERE
    out.mkdir(parents=True, exist_ok=True)
    if len(paths) == 1:
        from cells import CellError

        try:
            save(paths[0], out, device)
        except CellError as error:
            print(f"{paths[0].name} is not saved: {error}", file=sys.stderr)
            return 1
        print(f"saved {out / paths[0].name}")
        return 0
    failed = 0
    for path in paths:  # a notebook changes modules, paths and the GPU's memory of its process
        command = [sys.executable, str(Path(__file__).resolve()), path.name, "--out", str(out)]
        failed += bool(subprocess.run(command).returncode)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
