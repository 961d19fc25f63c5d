"""Writing a bundle: whole or not at all, and the same bytes for the same content."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import InputError
from .reader import is_gpu_code
from .schema import CUBINS, MANIFEST, BodyModel, EntryModel, manifest_text

AT_FDCWD = -100
RENAME_EXCHANGE = 2


def cubin_path(cubin: bytes) -> str:
    """Path of a cubin inside a bundle: named by its content.

    Raises:
        InputError: the bytes are not GPU code.
    """
    if not is_gpu_code(cubin):
        raise InputError("a kernel's binary is not a cubin; a bundle holds GPU code only")
    return f"{CUBINS}/{hashlib.sha256(cubin).hexdigest()}.cubin"


def check_target(path: Path, force: bool) -> None:
    """Make sure a bundle may be written at the path.

    Raises:
        InputError: a bundle is there and ``force`` is not set, or something that is no bundle is there.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise InputError(f"{path} exists and is no directory; name another one for the bundle")
    if path.is_dir() and any(path.iterdir()):
        if not (path / MANIFEST).is_file():
            raise InputError(f"{path} holds files that are no bundle; name an empty or a new directory")
        if not force:
            raise InputError(f"bundle {path} exists; replace it with --force, or name another directory")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise InputError(
            f"bundle {path} cannot be written ({error.strerror}): name a directory you can write"
        ) from error


def write_bundle(
    path: str | Path, entries: Sequence[EntryModel], cubins: Mapping[str, bytes], *, force: bool = False
) -> BodyModel:
    """Write a bundle.

    Args:
        path: its directory; made, or replaced as a whole.
        entries: in any order.
        cubins: path (of :func:`cubin_path`) to content.
        force: replace a bundle that is there.

    Raises:
        InputError: see :func:`check_target`; no entries; or two entries for the same problem.
    """
    path = Path(path)
    check_target(path, force)
    if not entries:
        raise InputError("a bundle needs at least one entry")
    ordered = sorted(entries, key=lambda entry: entry.place)
    for one, two in itertools.pairwise(ordered):
        if one.place == two.place:
            raise InputError(
                f"two entries for {one.label()}: export one study for each problem and GPU, or let export choose"
            )
    files = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(cubins.items())}
    body = BodyModel(schema_version=1, k3lab=_own_version(), entries=tuple(ordered), files=files)
    place = Path(os.path.abspath(path))
    temporary: Path | None = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".new", dir=place.parent))
        (temporary / CUBINS).mkdir()
        for name, data in cubins.items():
            _write(temporary / name, data)
        _write(temporary / MANIFEST, manifest_text(body).encode())
        os.chmod(temporary, 0o755)
        _put(temporary, place)
    except OSError as error:
        raise InputError(f"bundle {path} cannot be written ({error.strerror}); nothing was changed there") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return body


def _own_version() -> str:
    try:
        return version("k3lab")
    except PackageNotFoundError:
        return "unknown"


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _put(temporary: Path, place: Path) -> None:
    """Move the finished directory to its place; afterwards ``temporary`` holds what was there, or nothing."""
    if not place.exists():
        os.rename(temporary, place)
        return
    if _exchange(temporary, place):
        return
    with contextlib.suppress(OSError):  # an empty directory is replaced by rename itself
        os.rename(temporary, place)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".old", dir=place.parent))
    os.rename(place, old)
    os.rename(temporary, place)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, two: Path) -> bool:
    """Swap two directories in one step where the system can (Linux)."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(two), RENAME_EXCHANGE) == 0
