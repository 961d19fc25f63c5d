"""Weights of a small model that keeps every structural feature, and bundles without a compiler."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.decode.random_weights import random_tensors
from k3lab.decode.sharding import ModelTensors
from k3lab.kernels import SMALL_K3, ModelCard, family


@pytest.fixture(scope="session")
def tiny() -> ModelCard:
    """Six layers: dense KDA, MLA among KDA, two MLA at the end, an AttnRes block every two layers; 16 experts."""
    return replace(
        SMALL_K3, name="tiny-k3", num_hidden_layers=6, mla_layers=(2, 4, 5), attn_res_block_size=2, num_experts=16
    )


@pytest.fixture(scope="session")
def tiny_tensors(tiny: ModelCard) -> ModelTensors:
    return random_tensors(tiny, seed=5, dtype=torch.float64)


def manifest(
    card: ModelCard, *, tp: int, rows: int, gpu: str, arch: str, evidence: str
) -> tuple[Any, dict[str, bytes]]:
    """A bundle's body with both attention projections, and its files."""
    from k3lab.kernels.bundle.schema import BodyModel

    cubin = b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little") + b"code"
    name = f"cubins/{hashlib.sha256(cubin).hexdigest()}.cubin"
    entries = []
    for kind in ("kda", "mla"):
        problem = family("attention_projection").problem(card, tp=tp, rows=rows, kind=kind)
        launch = {
            "kernel": f"k3_attention_projection_triton_{kind}", "cubin": name, "grid": (8, 1, 1), "block": (128, 1, 1),
            "cluster": (1, 1, 1), "shared_bytes": 0, "pdl": False, "args": ({"kind": "tensor", "name": "x"},),
        }  # fmt: skip
        build = {"arch": arch, "evidence": evidence, "launches": (launch,), "buffers": (), "resources": ({},)}
        choice = {
            "reason": "best", "value_us": 9.0, "default_us": 10.0, "margin_over_default": 0.1, "tie_band": 0.01,
            "runner_up": None, "trials": {"complete": 1},
        }  # fmt: skip
        entries.append({
            "family": "attention_projection", "engine": "triton", "key": problem.key, "rows": rows, "gpu": gpu, "arch": arch,
            "config": {"split_k": 2}, "config_digest": "0" * 16, "evidence": evidence, "source_digest": family("attention_projection").engine("triton").source_digest(),
            "compilers": {}, "summation_order": "in order", "choice": choice, "timing": None, "prediction": None,
            "environment": None, "builds": (build,),
        })  # fmt: skip
    body = {
        "schema_version": 1,
        "k3lab": "test",
        "entries": tuple(entries),
        "files": {name: hashlib.sha256(cubin).hexdigest()},
    }
    from k3lab.kernels import Evidence

    for entry in entries:
        entry["evidence"] = Evidence(evidence)
        entry["builds"][0]["evidence"] = Evidence(evidence)
    return BodyModel.model_validate(body), {name: cubin}


@pytest.fixture
def write_bundle(tmp_path: Path) -> Callable[..., Path]:
    """Writes a bundle with an entry for both projection kinds; returns its folder."""

    def write(
        card: ModelCard,
        *,
        tp: int = 16,
        rows: int = 8,
        gpu: str = "GB300",
        arch: str = "sm_103a",
        evidence: str = "predicted",
    ) -> Path:
        from k3lab.kernels.bundle.schema import manifest_text

        body, files = manifest(card, tp=tp, rows=rows, gpu=gpu, arch=arch, evidence=evidence)
        folder = tmp_path / "bundle"
        (folder / "cubins").mkdir(parents=True)
        (folder / "bundle.json").write_text(manifest_text(body))
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return folder

    return write
