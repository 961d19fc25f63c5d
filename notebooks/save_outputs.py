"""``python notebooks/save_outputs.py [NAME ...]``: run notebooks at their full size on the GPU here and keep their outputs.

A notebook gets GPU, driver, versions and commit of its outputs as metadata; the tests refuse outputs without them. Needs the
packages of ``pip install -e ".[notebooks]"`` and nbclient.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT_S = 1800


def origin(device: Any) -> dict[str, Any]:
    """Where outputs come from, as a notebook's metadata hold it."""
    from k3lab.tuning.environment import environment

    made = environment(device)
    return {"gpu": device.name, "driver": device.driver, "commit": made["commit"], "packages": made["packages"]}


def save(path: Path, device: Any) -> None:
    """Execute one notebook beside its file, and write it with its outputs and their origin."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    notebook.metadata["k3lab"] = origin(device)
    nbformat.write(notebook, path)


def main(names: list[str]) -> int:
    """Entry point; 2 where there is no GPU or no such notebook."""
    from k3lab.kernels.device import discover

    device = discover()
    if device is None:
        print("saved outputs are a GPU's: none is here", file=sys.stderr)
        return 2
    paths = [HERE / name for name in names] or sorted(HERE.glob("*.ipynb"))
    for path in paths:
        if not path.is_file():
            print(f"no notebook {path.name} in {HERE}", file=sys.stderr)
            return 2
        save(path, device)
        print(f"saved {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
