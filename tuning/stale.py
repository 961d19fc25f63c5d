"""Result files against the kernels as they are: which were measured or predicted with another source, and whether they say so.

A file says so with ``stale``: a reason for all of it, or an object from engine to reason.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels.contract import Family
from ..kernels.errors import InputError
from ..kernels.whole_file import write_whole


@dataclass(frozen=True)
class Outdated:
    """An engine's figures in a result file rest on another kernel source than its own."""

    path: Path
    family: str
    engine: str
    was: str
    now: str
    """Source digests; ``none`` where the engine is no more."""
    marked: str | None
    """The reason that the file gives, or None where it says nothing."""

    def __str__(self) -> str:
        return f"{self.path}: {self.family}/{self.engine} had the source {self.was}, has {self.now}"


def stale_reason(data: Mapping[str, Any], engine: str | None = None) -> str | None:
    """Why a result file's figures, or those of one engine in it, are stale; None where they are not said to be."""
    mark = data.get("stale")
    if isinstance(mark, Mapping):
        reasons = [str(reason) for name, reason in mark.items() if engine in (None, name)]
        return "; ".join(reasons) or None
    return str(mark) if mark else None


def word_of(data: Mapping[str, Any], engine: str | None = None) -> str:
    """The evidence word of a result file, which says ``stale`` where the file does."""
    word = str(data["evidence"])
    return f"stale {word}" if stale_reason(data, engine) else word


def sources_of(data: Mapping[str, Any]) -> dict[str, str]:
    """Engine to the source digest that a result file's figures rest on; empty for files that name none."""
    identity = data.get("identity")
    if isinstance(identity, Mapping) and isinstance(identity.get("source_digest"), str):
        return {str(identity.get("engine")): identity["source_digest"]}
    sources = data.get("sources")
    if not isinstance(sources, Mapping):
        return {}
    return {
        str(name): one["source"]
        for name, one in sources.items()
        if isinstance(one, Mapping) and isinstance(one.get("source"), str)
    }


def outdated(folder: Path, families: Sequence[Family]) -> list[Outdated]:
    """Every engine in a result file of ``<folder>/<gpu>/`` whose source has changed since, marked or not."""
    known = {family.name: family for family in families}
    found = []
    for path in sorted([*folder.glob("*/*.json"), *folder.glob("*/*.json.gz")]):
        data = _load(path)
        identity = data.get("identity")
        name = data.get("family") or (identity.get("family") if isinstance(identity, Mapping) else None)
        family = known.get(str(name))
        if family is None:
            continue
        engines = {engine.name: engine for engine in family.engines}
        for engine, was in sources_of(data).items():
            now = engines[engine].source_digest() if engine in engines else "none"
            if now != was:
                found.append(Outdated(path, family.name, engine, was, now, stale_reason(data, engine)))
    return found


def mark(path: Path, engines: Sequence[str], reason: str) -> None:
    """Write into a result file that engines' figures are stale; the rest of its text stays as it is.

    Raises:
        InputError: it is compressed, is no JSON object, or has a mark of another kind already.
    """
    if path.suffix != ".json":
        raise InputError(f"{path} is compressed: a recorded space is kept under earlier/ once its kernel has changed")
    text, data = path.read_text(), _load(path)
    if not text.lstrip().startswith("{") or not data:
        raise InputError(f"{path} is no result file")
    there = data.get("stale", {})
    if not isinstance(there, Mapping):
        raise InputError(f"{path} is marked stale as a whole already")
    line = f'"stale": {json.dumps({**there, **dict.fromkeys(engines, reason)})}'
    if "stale" in data:
        text, count = re.subn(r'"stale": \{[^{}]*\}', lambda _: line, text, count=1)
        if not count:
            raise InputError(f"{path} has a mark that cannot be read; edit it by hand")
    else:
        text = text.replace("{", "{\n " + line + ",", 1)
    if json.loads(text) != {**data, "stale": {**there, **dict.fromkeys(engines, reason)}}:
        raise InputError(f"{path} cannot be marked; edit it by hand")
    write_whole(path, text)


def _load(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError, zlib.error):
        return {}
    return data if isinstance(data, dict) else {}
