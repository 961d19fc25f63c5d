"""Where k3lab keeps what may be deleted. Studies, results and bundles are never kept here."""

from __future__ import annotations

import tempfile
from pathlib import Path

from . import env


def cache_root() -> Path:
    """The cache folder, created; a temporary one where the user's cannot be written."""
    root = env.cache_dir()
    if root is None:
        import platformdirs

        root = Path(platformdirs.user_cache_dir("k3lab"))
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / ".writable"
        probe.touch()
    except OSError:
        root = Path(tempfile.gettempdir()) / "k3lab-cache"
        root.mkdir(parents=True, exist_ok=True)
    return root


def compiled_cache() -> Path:
    """Folder of compiled kernels, keyed by digest."""
    folder = cache_root() / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
