"""Bytes and text of a file, plain or gzip, by its content and not its name; and what an archive of one file holds."""

from __future__ import annotations

import gzip
import io
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import TraceError

GZIP = b"\x1f\x8b"
HEAD = 4096
"""Bytes that are enough to tell every kind of file."""
MAX_BYTES = 8 << 30
"""A file that unpacks to more is refused."""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class _Limited(io.RawIOBase):
    """The unpacked bytes, up to the limit."""

    def __init__(self, source: gzip.GzipFile, name: str) -> None:
        self._source, self._name, self._left = source, name, MAX_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        try:
            data = self._source.read(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{self._name}: damaged gzip file ({error}); copy or capture it again") from None
        self._left -= len(data)
        if self._left < 0:
            raise TraceError(f"{self._name}: unpacks to over {MAX_BYTES >> 30} GiB; profile fewer steps")
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where it is gzip.

    Raises:
        TraceError: damaged gzip, or over the limit; while reading.
    """
    with path.open("rb") as file:
        packed = file.read(2) == GZIP
        file.seek(0)
        if not packed:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked, io.BufferedReader(_Limited(unpacked, path.name)) as limited:
            yield limited


def head_of(path: Path) -> bytes:
    """The first bytes of a file, of what it unpacks to where it is gzip."""
    with open_bytes(path) as file:
        return file.read(HEAD)


def encoding_of(head: bytes) -> str:
    """The encoding of a text: UTF-16 where it begins with its mark (what a shell of Windows writes), else UTF-8."""
    return "utf-16" if head[:2] in _UTF16 else "utf-8-sig"


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """The lines of a text; bytes that are none of its encoding are replaced."""
    encoding = encoding_of(head_of(path))
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding=encoding, errors="replace", newline="") as text:  # type: ignore[type-var]
        yield text


def is_tar(head: bytes) -> bool:
    """Whether this is the beginning of a tar archive."""
    return head[257:262] == b"ustar"


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The one file inside a gzip file or a tar archive, in a temporary folder that is deleted afterwards.

    Raises:
        TraceError: damaged, too large, or another number of files than one.
    """
    with tempfile.TemporaryDirectory(prefix="k3lab-trace-") as folder, open_bytes(path) as file:
        if not is_tar(head_of(path)):
            inside = Path(folder) / (_UNSAFE.sub("_", path.name.removesuffix(".gz"))[-100:] or "trace")
            with inside.open("wb") as out:
                shutil.copyfileobj(file, out, 1 << 20)
            yield inside
            return
        inside = _only_member(file, path, Path(folder))
        yield inside


def _only_member(file: IO[bytes], path: Path, folder: Path) -> Path:
    """Write the archive's one file into the folder, under a name that cannot lead out of it."""
    found: Path | None = None
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                base = Path(member.name).name
                if not member.isfile() or base.startswith("._"):  # what macOS adds
                    continue
                if found is not None:
                    raise TraceError(f"{path.name}: several files in one archive; unpack it and give one of them")
                if member.size > MAX_BYTES:
                    raise TraceError(f"{path.name}: unpacks to over {MAX_BYTES >> 30} GiB; profile fewer steps")
                content = archive.extractfile(member)
                if content is None:
                    continue
                found = folder / (_UNSAFE.sub("_", base)[-100:] or "trace")
                with found.open("wb") as out:
                    shutil.copyfileobj(content, out, 1 << 20)
        while file.read(1 << 20):  # up to the checksum of the packed file
            pass
    except (tarfile.TarError, EOFError) as error:
        raise TraceError(f"{path.name}: damaged tar archive ({error}); copy or capture it again") from None
    if found is None:
        raise TraceError(f"{path.name}: an archive with no file in it; pack the trace again")
    return found
