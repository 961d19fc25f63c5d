"""The files whose parts CuTe DSL kernels of several families are made of: an engine's ``sources`` begins with its own."""

from __future__ import annotations

from pathlib import Path

CUTE_PARTS = tuple(Path(__file__).parent / f"cute_{name}.py" for name in ("numbers", "stages", "streaming", "waits"))
CUTE_MIX = (*CUTE_PARTS, *(Path(__file__).parent / f"cute_{name}.py" for name in ("mix", "packets", "polls", "row")))
"""Of kernels that take a row through AttnRes and the norm behind it, or wait for packets."""
CUTE_TILES = (Path(__file__).parent / "cute_tiles.py",)
"""Of kernels whose weights come as tiles."""
