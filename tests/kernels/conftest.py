"""Fixtures of the kernel tests; and scripts that stand beside them can be imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from k3lab.kernels.bundle.schema import EntryModel
from k3lab.kernels.bundle.writer import write_bundle

from .bundle_case import Written

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits look at the clock every 64 polls: a machine that interprets them does not reach 1024 soon."""
    for module in ("cute_polls", "router.cute_words"):
        monkeypatch.setattr(f"k3lab.kernels.{module}.POLLS_A_LOOK", 64)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Writes a bundle of entries."""

    def write(*made: tuple[EntryModel, dict[str, bytes]], name: str = "bundle", **options: Any) -> Path:
        cubins = {path: data for _, some in made for path, data in some.items()}
        write_bundle(tmp_path / name, [one for one, _ in made], cubins, **options)
        return tmp_path / name

    return write
