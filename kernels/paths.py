"""Where k3lab keeps what may be deleted. Studies, results and bundles are never kept here."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from . import env


def cache_root() -> Path:
    """The cache folder, created; a temporary one of this user where the usual one cannot be written.

    Cached objects are pickles: a folder in which another user may have put some is never taken.
    """
    root = env.cache_dir()
    if root is None:
        import platformdirs

        root = Path(platformdirs.user_cache_dir("k3lab"))
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / ".writable"
        probe.touch()
    except OSError:
        root = Path(tempfile.gettempdir()) / f"k3lab-cache-{os.getuid()}"
        with contextlib.suppress(OSError):
            root.mkdir(mode=0o700)
        if not _own(root):
            root = Path(tempfile.mkdtemp(prefix="k3lab-cache-"))
    return root


def _own(folder: Path) -> bool:
    """Whether it is a real folder of this user in which nobody else may write."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def compiled_cache() -> Path:
    """Folder of compiled kernels, keyed by digest."""
    folder = cache_root() / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
