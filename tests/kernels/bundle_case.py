"""What the tests of bundles share: an entry, a problem, and ways to change a bundle that was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from k3lab.kernels import Evidence, InputError, Problem
from k3lab.kernels.bundle.reader import Bundle
from k3lab.kernels.bundle.schema import (
    ArgModel,
    BufferModel,
    BuildModel,
    ChoiceModel,
    EntryModel,
    LaunchModel,
    canonical,
)
from k3lab.kernels.bundle.writer import cubin_path

CUBIN = b"\x7fELF\x02\x01\x01\x33" + bytes(8) + b"\x02\x00" + (190).to_bytes(2, "little") + b"code"


@dataclass(frozen=True)
class AProblem(Problem):
    kind: str = "kda"


def entry(rows: int = 8, **changes: Any) -> tuple[EntryModel, dict[str, bytes]]:
    cubins = {cubin_path(CUBIN + arch + bytes([rows])): CUBIN + arch + bytes([rows]) for arch in (b"103", b"90")}
    builds = tuple(
        BuildModel(
            arch=arch,
            evidence=evidence,
            launches=(
                LaunchModel(
                    kernel="k3_a_b_main", cubin=name, grid=(4, 2, 1), block=(128, 1, 1), cluster=(2, 1, 1), shared_bytes=2048, pdl=True,
                    args=(ArgModel(kind="tensor", name="x"), ArgModel(kind="int32", name="rows"), ArgModel(kind="null", name="")),
                ),
            ),
            buffers=(BufferModel(name="partial", shape=(2, 64), dtype="float32", zeroed=True),),
            resources=({"registers": 32},),
        )
        for arch, evidence, name in zip(("sm_103a", "sm_90a"), (changes.get("evidence", Evidence.PREDICTED), Evidence.COMPILED), cubins, strict=True)
    )  # fmt: skip
    fields: dict[str, Any] = {
        "family": "a",
        "engine": "b",
        "key": {"tp": 16, "kind": "kda"},
        "rows": rows,
        "gpu": "GB300",
        "arch": "sm_103a",
        "config": {"tile": 8, "deep": True, "mode": "x"},
        "config_digest": "0123456789abcdef",
        "evidence": Evidence.PREDICTED,
        "source_digest": "0" * 16,
        "compilers": {"triton": "3.9.0"},
        "summation_order": "ascending",
        "choice": ChoiceModel(
            reason="fastest",
            value_us=1.5,
            default_us=2.0,
            margin_over_default=0.25,
            tie_band=0.01,
            runner_up=None,
            trials={"ok": 3},
        ),
        "timing": None,
        "prediction": {"microseconds": 1.5},
        "environment": None,
        "builds": builds,
    }
    return EntryModel(**{**fields, **changes}), cubins


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        Bundle.load(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the body and make its checksum right again: what a forger would do, or another version."""
    body = json.loads((path / "bundle.json").read_text())["body"]
    change(body)
    data = {"body": body, "sha256": hashlib.sha256(canonical(body).encode()).hexdigest()}
    (path / "bundle.json").write_text(canonical(data) + "\n")


Written = Callable[..., Path]
