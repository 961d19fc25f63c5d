"""What results/ knows of a family: facts kept as JSON files under ``results/<gpu>/``.

A result file (``.json``, or a recorded space ``.json.gz``) names its family, its GPU and its evidence;
one that lacks a word of evidence is left out, because a result never loses that word. Of a file that is marked
``stale`` the word says so: ``stale measured``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from ..kernels.evidence import Evidence
from ..tuning.stale import word_of


def result_files(folder: Path) -> list[Path]:
    """All result files under the folder, in a fixed order; empty if the folder is absent."""
    return sorted([*folder.glob("*/*.json"), *folder.glob("*/*.json.gz")]) if folder.is_dir() else []


def load_result(path: Path) -> dict[str, Any] | None:
    """The file's object, or None if it is not one (a results folder may hold other data)."""
    try:
        data = path.read_bytes()
        loaded = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    return loaded if isinstance(loaded, dict) else None


def _gpu(data: dict[str, Any]) -> str | None:
    """The GPU's name, wherever the kind of file keeps it."""
    environment = data.get("environment")
    for place in (data, data.get("identity"), environment):
        gpu = place.get("gpu") if isinstance(place, dict) else None
        name = gpu.get("name") if isinstance(gpu, dict) else gpu
        if isinstance(name, str):
            return name.removeprefix("NVIDIA ")
    return None


def _label(identity: Any) -> str | None:
    """The problem of a recorded study in short, as its family names it."""
    from ..kernels import InputError, family

    try:
        return family(identity["family"]).problem_from_json(identity["problem"]).label
    except (InputError, KeyError, TypeError):
        return None


def evidence_of(family: str, folder: Path) -> list[dict[str, Any]]:
    """GPU, evidence word and file of every result recorded for the family.

    Where the result is a study's choice also ``value_us``, the winner's time, and ``label``, its problem.
    """
    words = {word.value for word in Evidence}
    found = []
    for path in result_files(folder):
        data = load_result(path) or {}
        identity = data.get("identity")
        name = data.get("family") or (identity.get("family") if isinstance(identity, dict) else None)
        if name == family and data.get("evidence") in words:
            gpu = _gpu(data) or path.parent.name.upper()
            entry: dict[str, Any] = {"gpu": gpu, "evidence": word_of(data), "file": path.as_posix()}
            choice = data.get("choice")
            value = choice.get("value_us") if isinstance(choice, dict) else None
            if isinstance(value, (int, float)):
                entry |= {"value_us": value, "label": _label(identity)}
            found.append(entry)
    return found
