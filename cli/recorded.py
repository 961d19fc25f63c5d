"""What results/ knows of a family: facts kept as JSON files, ``results/<gpu>/<family>*.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..kernels.evidence import Evidence


def result_files(folder: Path) -> list[Path]:
    """All JSON result files under the folder, in a fixed order; empty if the folder is absent."""
    return sorted(folder.glob("*/*.json")) if folder.is_dir() else []


def load_result(path: Path) -> dict[str, Any] | None:
    """The file's object, or None if it is not one (a results folder may hold other data)."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def evidence_of(family: str, folder: Path) -> list[dict[str, str]]:
    """GPU, evidence word and file of every result recorded for the family.

    A result file names its ``family`` and its ``evidence``; one without an evidence word is left out,
    because a result never loses that word.
    """
    words = {word.value for word in Evidence}
    found = []
    for path in result_files(folder):
        data = load_result(path)
        if data is None or data.get("family") != family or data.get("evidence") not in words:
            continue
        gpu = data.get("gpu")
        name = gpu.get("name") if isinstance(gpu, dict) else gpu
        found.append({"gpu": str(name or path.parent.name), "evidence": data["evidence"], "file": path.as_posix()})
    return found
