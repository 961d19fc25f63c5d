"""Tensor maps as kernel arguments: in launches, in bundles, as the driver wants them."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from k3lab.kernels.bundle.schema import ArgModel
from k3lab.kernels.contract import Arg

from .tma_case import CONFIG, FAMILY, WGMMA, built, problem


def test_the_launch_names_its_tensor_maps():
    launch, tiles, _ = built(WGMMA, "sm_90a", 9)
    w, x, out, rows = launch.args
    assert w == Arg("tensor_map", "w", box=(tiles.tile_rows, 64), swizzle=128)
    assert x == Arg("tensor_map", "x", box=(16, 64), swizzle=128, extent="rows")
    assert (out, rows) == (Arg("tensor", "out"), Arg("int32", "rows"))


def test_a_bundle_carries_tensor_maps(tmp_path):
    from k3lab.kernels import Evidence
    from k3lab.kernels.bundle.reader import Bundle
    from k3lab.kernels.bundle.schema import BuildModel, ChoiceModel, EntryModel, LaunchModel
    from k3lab.kernels.bundle.writer import cubin_path, write_bundle

    launch, _, _ = built(WGMMA, "sm_90a", 9)
    one, name = problem(9), cubin_path(launch.cubin)
    args = tuple(ArgModel(**dataclasses.asdict(arg)) for arg in launch.args)
    model = LaunchModel(
        kernel=launch.kernel, cubin=name, grid=launch.grid, block=launch.block, cluster=launch.cluster,
        shared_bytes=launch.shared_bytes, pdl=launch.pdl, args=args,
    )  # fmt: skip
    entry = EntryModel(
        family=FAMILY.name, engine=WGMMA.name, key=one.key, rows=9, gpu="H200", arch="sm_90a", config=CONFIG,
        config_digest="0123456789abcdef", evidence=Evidence.PREDICTED, source_digest="0" * 16, compilers={},
        summation_order=WGMMA.summation_order(one, CONFIG),
        choice=ChoiceModel(reason="test", value_us=1.0, default_us=None, margin_over_default=None, tie_band=0.01, runner_up=None, trials={}),
        timing=None, prediction=None, environment=None,
        builds=(BuildModel(arch="sm_90a", evidence=Evidence.PREDICTED, launches=(model,), buffers=(), resources=({},)),),
    )  # fmt: skip
    write_bundle(tmp_path / "b", [entry], {name: launch.cubin})
    (read,) = Bundle.load(tmp_path / "b", accept_predicted=True).entries
    (again,) = read.compiled("sm_90a", one).launches
    assert again == launch


def test_arguments_without_a_tensor_map_are_written_as_before():
    assert ArgModel(kind="tensor", name="x").model_dump(mode="json") == {"kind": "tensor", "name": "x"}
    assert ArgModel.model_validate_json('{"kind": "int32", "name": "rows"}') == ArgModel(kind="int32", name="rows")
    for wrong in ({"kind": "tensor", "box": (8, 64)}, {"kind": "tensor_map", "box": (257, 64)}, {"kind": "tensor_map"}):
        with pytest.raises(ValueError, match="box"):
            ArgModel(name="x", **wrong)


def test_descriptors_lie_on_64_bytes():
    from k3lab.kernels.tensor_map import placed

    for seed in range(8):
        words = [random.Random(seed).getrandbits(64) for _ in range(16)]
        made = placed(SimpleNamespace(opaque=words))
        assert ctypes.addressof(made) % 64 == 0 and ctypes.sizeof(made) == 128
        assert list(made.words) == words


def test_a_tensor_map_wants_a_matrix_and_its_live_rows():
    from k3lab.kernels.tensor_map import encode

    arg = Arg("tensor_map", "x", box=(16, 64), swizzle=128, extent="rows")
    matrix = torch.zeros(4, 128, dtype=torch.bfloat16)
    for wrong, rows, why in (
        (matrix.float(), None, "BF16 matrix"),
        (matrix.view(2, 2, 128), None, "BF16 matrix"),
        (matrix, 5, "has 4 rows; a tensor map of 5"),
        (matrix, 0, "has 4 rows; a tensor map of 0"),
    ):
        with pytest.raises(ValueError, match=why):
            encode(arg, wrong, rows)
