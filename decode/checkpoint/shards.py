"""The files of a checkpoint: index, shards, and every way in which they can be wrong, one line each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ...kernels import InputError
from .names import StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
"""A checkpoint without an index is this one file."""
COMMAND = "k3lab decode checkpoint"


def _open(path: Path) -> Any:
    """An open shard, a context manager.

    Raises:
        InputError: it cannot be read, or is no whole safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        if not path.is_file():
            raise InputError(f"{path}: no such shard") from None
        size = path.stat().st_size
        raise InputError(f"{path} is truncated or damaged ({size:,} bytes there): {' '.join(why.split())}") from None


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """Tensor name to file name, and the total size it states."""
    try:
        index = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise InputError(f"{path} has no weight_map; an index maps every tensor's name to its shard there")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise InputError(f"{path}: {name} lies in {file!r}, which is no name of a .safetensors file of this folder")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return places, total if isinstance(total, int) else None


@dataclass(frozen=True)
class Checkpoint:
    """A folder with shards; nothing of them is read before it is asked for."""

    folder: Path
    places: dict[str, str]
    """Tensor name to file name."""
    stated_bytes: int | None
    """Of all tensors, as the index says; None if it does not."""

    @classmethod
    def read(cls, folder: str | Path) -> Checkpoint:
        """Read the index.

        Raises:
            InputError: no such folder, no index and no single file, or an index that is none.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"{folder} is not a directory; a checkpoint is a folder with {INDEX} and its shards")
        if (folder / INDEX).exists():
            return cls(folder, *_read_index(folder / INDEX))
        if not (folder / SINGLE).exists():
            raise InputError(f"{folder} has neither {INDEX} nor {SINGLE}")
        with _open(folder / SINGLE) as shard:
            return cls(folder, dict.fromkeys(shard.keys(), SINGLE), None)

    @property
    def files(self) -> tuple[str, ...]:
        """The shards, by name."""
        return tuple(sorted(set(self.places.values())))

    def faults(self, expected: Iterable[StoredTensor], skipped: tuple[str, ...] = ()) -> Iterator[str]:
        """All that is wrong, one line each, by the headers alone.

        Args:
            expected: the tensors there must be.
            skipped: beginnings of names that may be there and are of no interest.
        """
        want = {one.name: one for one in expected}
        for name in want:
            if name not in self.places:
                yield f"{name} is missing: {self._map_name} does not have it"
        found: dict[str, list[str]] = {file: [] for file in self.files}
        for name, file in self.places.items():
            found[file].append(name)
            if name not in want and not name.startswith(skipped or ("\0",)):
                yield f"{name} is no tensor of this model ({file})"
        total, whole = 0, True
        for file in self.files:
            try:
                shard = _open(self.folder / file)
            except InputError as error:
                yield str(error)
                whole = False
                continue
            with shard:
                there = set(shard.keys())
                for name in found[file]:
                    if name not in there:
                        yield f"{name} is missing: the index says {file}, which does not hold it"
                        whole = False
                for name in sorted(there):
                    if self.places.get(name) != file:
                        yield f"{name} in {file} is not in the index{'' if name not in self.places else f', which has it in {self.places[name]}'}"
                        continue
                    held = shard.get_slice(name)
                    shape, dtype = tuple(held.get_shape()), held.get_dtype()
                    total += _bytes(shape, dtype)
                    if name in want and not want[name].fits(shape):
                        yield f"{name} has shape {list(shape)}, the model has {list(want[name].shape)} ({file})"
                    if name in want and dtype != want[name].dtype:
                        yield f"{name} is {dtype}, the model has {want[name].dtype} ({file})"
        strays = {path.name for path in self.folder.glob("*.safetensors")} - set(self.files)
        for file in sorted(strays):
            yield f"{file} is not in the index"
        if whole and self.stated_bytes not in (None, total):
            yield f"{INDEX} says total_size {self.stated_bytes:,}, the tensors have {total:,} bytes"

    @property
    def _map_name(self) -> str:
        return INDEX if (self.folder / INDEX).exists() else SINGLE

    def check(self, expected: Iterable[StoredTensor], skipped: tuple[str, ...] = ()) -> None:
        """Raise InputError with the first fault and the number of others, if there is one."""
        found = list(self.faults(expected, skipped))
        if found:
            more = f" (and {len(found) - 1} more: `{COMMAND} {self.folder}` lists them)" if len(found) > 1 else ""
            raise InputError(f"{self.folder}: {found[0]}{more}")


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    bits = {"BOOL": 8, "BF16": 16, "F16": 16, "F32": 32, "F64": 64}.get(dtype)
    if bits is None:  # I64, U8, F8_E4M3, F4 ...
        bits = int("".join(char for char in dtype.split("_")[0] if char.isdigit()) or 8)
    return math.prod(shape) * bits // 8


class OpenShards:
    """Shards of a checkpoint, opened when one of their tensors is asked for and kept until :meth:`close`.

    A slice is a view of the mapped file: what is copied from it reads only its own pages, which the system takes
    back when it needs them. No tensor of a shard is there whole.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def slice(self, name: str) -> Any:
        """The tensor, to be indexed; valid until :meth:`close`."""
        file = self.checkpoint.places[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(_open(self.checkpoint.folder / file))
        return self._open[file].get_slice(name)

    def close(self) -> None:
        """Let go of all shards; they may be asked for again."""
        self._open.clear()
        self._stack.close()

    def __enter__(self) -> OpenShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
