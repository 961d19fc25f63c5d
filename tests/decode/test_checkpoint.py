"""Checkpoints in the published form: names, loading, faults, one copy for both backends."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.cli.main import run as command
from k3lab.decode import expert_memory
from k3lab.decode.checkpoint import load as loading
from k3lab.decode.checkpoint.load import load_rank
from k3lab.decode.checkpoint.names import STORED_BYTES, text_tensors
from k3lab.decode.checkpoint.shards import INDEX, Checkpoint, OpenShards
from k3lab.decode.checkpoint.write import published_config, stored_bytes, write_checkpoint
from k3lab.decode.packing import pack
from k3lab.decode.random_weights import random_rank_weights, random_tensors
from k3lab.decode.run import RunOptions, run
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.tensors import rank_bytes
from k3lab.kernels import K3, SMALL_K3, InputError, ModelCard
from safetensors.torch import load_file, save_file

OTHERS = {
    "vision_tower.encoder.blocks.0.wqkv.weight": torch.ones(4, 2, dtype=torch.bfloat16),
    "mm_projector.proj.0.bias": torch.ones(4, dtype=torch.bfloat16),
}
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"
BIAS = "language_model.model.layers.0.self_attn.dt_bias"
NORM = "language_model.model.norm.weight"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple):
        for index, one in enumerate(value):
            yield from leaves(one, f"{path}.{index}")


@pytest.fixture(scope="module")
def whole(tiny: ModelCard) -> ModelTensors:
    return random_tensors(tiny, seed=5, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def original(tiny: ModelCard, whole: ModelTensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-k3"
    write_checkpoint(folder, tiny, whole, shard_bytes=400_000, others=OTHERS)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny-k3"))


def test_the_published_names_are_all_there_is() -> None:
    stored = list(text_tensors(K3))
    # the index and the header statistics of the published checkpoint
    assert len(stored) == len({one.name for one in stored}) == 497_052
    counts: Counter[str] = Counter()
    for one in stored:
        counts[one.dtype] += stored_bytes([one]) // STORED_BYTES[one.dtype]
    assert counts["BF16"] == 56_732_525_568
    assert counts["F32"] == 11_122_432
    assert counts["U8"] == 1_446_456_066_048
    names = {one.name: one for one in stored}
    assert names["language_model.lm_head.weight"].shape == (163840, 7168)
    assert names["language_model.model.layers.0.self_attn.A_log"].shape == (128,)
    assert names["language_model.model.layers.92.block_sparse_moe.experts.895.w1.weight_packed"].shape == (3072, 1792)
    assert names["language_model.model.layers.1.block_sparse_moe.experts.0.w2.weight_scale"].shape == (3584, 96)
    assert "language_model.model.layers.0.block_sparse_moe.gate.weight" not in names


@pytest.mark.parametrize("card", [K3, SMALL_K3], ids=lambda card: card.name)
def test_a_written_config_is_read_as_the_same_card(card: ModelCard) -> None:
    assert ModelCard.from_config(json.loads(json.dumps(published_config(card))), card.name) == card


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_every_rank_loads_its_slices_bit_for_bit(tiny: ModelCard, whole: ModelTensors, original: Path, tp: int) -> None:
    seen: list[tuple[int, int]] = []
    for rank in {0, tp // 2, tp - 1}:
        seen.clear()
        want = pack(shard(whole, tiny, tp=tp, rank=rank), tiny, tp=tp, rank=rank)
        got = load_rank(original, tp=tp, rank=rank, progress=lambda *at: seen.append(at))
        assert got.card == tiny
        assert (got.tp, got.rank, got.bytes) == (tp, rank, want.bytes)
        for (path, one), (_, other) in zip(leaves(got), leaves(want), strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), path
        assert seen[-1] == (rank_bytes(tiny, tp), rank_bytes(tiny, tp))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_reference_is_loaded_in_fp64_from_the_same_files(
    tiny: ModelCard, whole: ModelTensors, original: Path
) -> None:
    wide = load_rank(original, tp=2, rank=1, dtype=torch.float64)
    assert wide.dtype == wide.layers[0].attention.core.a_log.dtype == torch.float64
    assert wide.layers[1].mlp.experts.w1.dtype == torch.uint8
    assert torch.equal(wide.lm_head, whole.outside["lm_head"][256:].double())


def test_the_host_holds_one_slice_at_a_time(original: Path, tiny: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    closed: list[int] = []
    first, last = OpenShards.__enter__, OpenShards.close
    monkeypatch.setattr(OpenShards, "__enter__", lambda self: opened.append(1) or first(self))
    monkeypatch.setattr(OpenShards, "close", lambda self: closed.append(len(self._open)) or last(self))
    weights = load_rank(original, tp=4, rank=1)
    # shards are let go of after every layer, and no weight keeps one mapped
    assert len(opened) == len(closed) == tiny.num_hidden_layers + 1
    assert max(closed) < len(list(original.glob("*.safetensors")))
    stored = (original / Checkpoint.read(original).files[0]).stat().st_size
    assert all(
        tensor.untyped_storage().nbytes() < stored for path, tensor in leaves(weights) if ".layers.1.mlp_mix" in path
    )


def test_experts_are_loaded_without_a_second_copy(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[int, ...]] = []
    real = expert_memory.side_by_side

    def counted(count: int, first: tuple[int, ...], *rest: Any, **more: Any) -> Any:
        copies.append((count, *first))
        return real(count, first, *rest, **more)

    monkeypatch.setattr(expert_memory, "side_by_side", counted)
    load_rank(original, tp=2, rank=0)
    random_rank_weights(SMALL_K3, seed=1, dtype=torch.bfloat16, tp=16)
    assert not copies


def test_a_filter_may_have_two_axes(folder: Path, tiny: ModelCard, whole: ModelTensors) -> None:
    name = "language_model.model.layers.1.self_attn.k_conv1d.weight"
    rewrite(folder, name, lambda tensors: tensors | {name: tensors[name].squeeze(1)})
    got = load_rank(folder, tp=2, rank=1).layers[1].attention.core.conv_k
    assert torch.equal(got, whole.layers[1]["self_attn.k_conv1d"].squeeze(1)[128:])


def rewrite(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> str:
    """Change the shard of a tensor; returns its file name."""
    file = Checkpoint.read(folder).places[name]
    save_file(change(load_file(folder / file)), folder / file)
    return file


def reindex(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def truncate(folder: Path) -> None:
    path = folder / Checkpoint.read(folder).places[NORM]
    path.write_bytes(path.read_bytes()[:-1])


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


FAULTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a tensor that the index has not": (
        lambda f: reindex(f, lambda index: index["weight_map"].pop(EXPERT)),
        [rf"{EXPERT} is missing: {INDEX} does not have it", f"{EXPERT} in model-.* is not in the index$", "total_size"],
    ),
    "a tensor that its shard has not": (
        lambda f: rewrite(f, EXPERT, without(EXPERT)),
        [rf"{EXPERT} is missing: the index says model-\d+-of-\d+.safetensors, which does not hold it"],
    ),
    "a tensor too many": (
        lambda f: reindex(f, lambda index: index["weight_map"].update({"language_model.model.layers.9.x": index["weight_map"][NORM]})),
        [r"language_model.model.layers.9.x is no tensor of this model", "layers.9.x is missing: the index says"],
    ),
    "another shape": (
        lambda f: rewrite(f, NORM, lambda tensors: tensors | {NORM: tensors[NORM][:-1].clone()}),
        [rf"{NORM} has shape \[255\], the model has \[256\]", "total_size"],
    ),
    "another dtype": (
        lambda f: rewrite(f, NORM, lambda tensors: tensors | {NORM: tensors[NORM].half()}),
        [rf"{NORM} is F16, the model has BF16"],
    ),
    "experts that were unpacked": (
        lambda f: rewrite(f, EXPERT, lambda tensors: tensors | {EXPERT: tensors[EXPERT].float()}),
        [rf"{EXPERT} is F32, the model has U8", "total_size"],
    ),
    "FP32 that became FP16": (
        lambda f: rewrite(f, BIAS, lambda tensors: tensors | {BIAS: tensors[BIAS].half()}),
        [rf"{BIAS} is F16, the model has F32", "total_size"],
    ),
    "a truncated shard": (truncate, [r"model-\d+-of-\d+.safetensors is truncated or damaged \([\d,]+ bytes there\): "]),
    "a shard that is gone": (
        lambda f: (f / Checkpoint.read(f).places[NORM]).unlink(),
        [r"model-\d+-of-\d+.safetensors: no such shard"],
    ),
    "a shard that is no shard": (
        lambda f: (f / Checkpoint.read(f).places[NORM]).write_bytes(b"<html>" * 20),
        [r"model-\d+-of-\d+.safetensors is truncated or damaged \(120 bytes there\): "],
    ),
    "a shard that the index has not": (
        lambda f: save_file({"a": torch.ones(1)}, f / "model-extra.safetensors"),
        ["model-extra.safetensors is not in the index"],
    ),
    "a tensor in two shards": (
        lambda f: rewrite(f, EXPERT, lambda tensors: tensors | {NORM: torch.zeros(256).bfloat16()}),
        [rf"{NORM} in model-\d+-of-\d+.safetensors is not in the index, which has it in model-\d+-of-\d+.safetensors"],
    ),
    "another total": (
        lambda f: reindex(f, lambda index: index["metadata"].update(total_size=5)),
        [rf"{INDEX} says total_size 5, the tensors have [\d,]+ bytes"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named_in_one_line(
    fault: str, folder: Path, tiny: ModelCard, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = FAULTS[fault]
    damage(folder)
    assert command(["decode", "checkpoint", str(folder), "--json"]) == 1
    lines = json.loads(capsys.readouterr().out)["faults"]
    assert len(lines) == len(words)
    for word in words:
        assert [line for line in lines if re.search(word, line)], (word, lines)
    assert all(len(line.splitlines()) == 1 for line in lines)
    with pytest.raises(InputError, match=re.escape(lines[0])) as told:
        load_rank(folder, tp=1, rank=0)
    assert (f"and {len(lines) - 1} more" in str(told.value)) == (len(lines) > 1)


@pytest.mark.parametrize(("index", "words"), [
    ("[1", "is not JSON"),
    ("[]", "has no weight_map"),
    ('{"weight_map": {}}', "has no weight_map"),
    ('{"weight_map": {"a": "../b.safetensors"}}', "a lies in '../b.safetensors', which is no name of a .safetensors file"),
    ('{"weight_map": {"a": 3}}', "a lies in 3"),
])  # fmt: skip
def test_an_index_that_is_none(index: str, words: str, folder: Path) -> None:
    (folder / INDEX).write_text(index)
    with pytest.raises(InputError, match=words):
        load_rank(folder, tp=1, rank=0)


def test_what_is_no_checkpoint_at_all(folder: Path, tiny: ModelCard, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="TP 3 does not divide"):
        load_rank(folder, tp=3, rank=0)
    with pytest.raises(InputError, match=r"rank 4 lies outside 0\.\.3"):
        load_rank(folder, tp=4, rank=4)
    (folder / INDEX).unlink()
    with pytest.raises(InputError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors"):
        load_rank(folder, tp=1, rank=0)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"cannot read .*config\.json"):
        load_rank(folder, tp=1, rank=0)
    with pytest.raises(InputError, match="is not a directory"):
        load_rank(folder / "none", tp=1, rank=0, card=tiny)
    with pytest.raises(InputError, match="is not empty"):
        write_checkpoint(folder, tiny, random_tensors(tiny, seed=1, dtype=torch.bfloat16))


def test_a_single_file_needs_no_index(tmp_path: Path, tiny: ModelCard, original: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for file in Checkpoint.read(original).files:
        tensors |= load_file(original / file)
    save_file(tensors, tmp_path / "model.safetensors")
    got, want = (load_rank(place, tp=2, rank=1, card=tiny) for place in (tmp_path, original))
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(leaves(got), leaves(want), strict=True))
    save_file(without(NORM)(tensors), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"{NORM} is missing: model.safetensors does not have it"):
        load_rank(tmp_path, tp=2, rank=1, card=tiny)


def test_nothing_is_loaded_if_a_later_shard_is_broken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truncate(folder)  # the norm comes last
    monkeypatch.setattr(loading, "pack_layer", lambda *_: pytest.fail("a layer was made"))
    with pytest.raises(InputError, match="truncated"):
        load_rank(folder, tp=1, rank=0)


# -- one copy for both backends ----------------------------------------------------------------------
def test_a_layer_is_held_in_place_and_released_bit_for_bit(
    tiny: ModelCard, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3lab.kernels.experts.layout import load, load_shared

    monkeypatch.setattr(expert_memory, "EXPERTS_AT_A_TIME", 5)  # does not divide 16
    mlp = load_rank(original, tp=4, rank=3).layers[1].mlp
    before = {path: tensor.clone() for path, tensor in leaves(mlp)}
    memory = {path: tensor.data_ptr() for path, tensor in leaves(mlp)}
    want = {**load(mlp.experts), **load_shared(mlp.shared_gate, mlp.shared_up, mlp.shared_down)}
    want = {name: tensor.clone() for name, tensor in want.items()}
    with expert_memory.held(mlp) as views:
        assert set(views) == set(want)
        for name, view in views.items():
            assert view.shape == want[name].shape and torch.equal(view, want[name]), name
            assert view.is_contiguous(), name
        own = {tensor.untyped_storage().data_ptr() for _, tensor in leaves(mlp)}
        assert {view.untyped_storage().data_ptr() for view in views.values()} <= own
        assert not torch.equal(mlp.experts.w1, before[".experts.w1"])
    assert {path: tensor.data_ptr() for path, tensor in leaves(mlp)} == memory
    assert all(torch.equal(tensor, before[path]) for path, tensor in leaves(mlp))


def test_memory_that_is_not_laid_out_for_it_is_refused(tiny: ModelCard, original: Path) -> None:
    from dataclasses import replace

    mlp = load_rank(original, tp=4, rank=3).layers[1].mlp
    apart = replace(mlp, experts=replace(mlp.experts, w3=mlp.experts.w3.clone()))
    with pytest.raises(InputError, match="w1 and w3 do not lie side by side"):
        expert_memory.hold(apart)
    with pytest.raises(InputError, match="gate and up do not lie side by side"):
        expert_memory.hold(replace(mlp, shared_up=mlp.shared_up.clone()))
    narrow = replace(mlp.experts, w2=mlp.experts.w2[:, :16], w2_scale=mlp.experts.w2_scale[:, :16])
    with pytest.raises(InputError, match="experts of 16 x 128: both widths must be multiples of 32"):
        expert_memory.held_experts(narrow)


# -- runs --------------------------------------------------------------------------------------------
def test_a_run_reads_a_checkpoint_on_every_rank(
    original: Path, tiny: ModelCard, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[str, int, int]] = []
    ranks = run(tiny, RunOptions(tp=2, tokens=3, seed=5, checkpoint=original), progress=lambda *at: told.append(at))
    random = run(tiny, RunOptions(tp=2, tokens=3, seed=5))  # the fixture's seed
    assert ranks.tokens == random.tokens
    assert any(what == "weights, MB" and done == of for what, done, of in told)
    assert not any("random weights" in line for line in ranks.head)
    assert ranks.peak_memory_bytes > ranks.weight_bytes
    assert command(["decode", "run", "--checkpoint", str(original), "--tp", "2", "--tokens", "3", "--seed", "5"]) == 0
    text = capsys.readouterr().out
    assert " ".join(map(str, ranks.tokens[0])) in text
    assert "GB; peak memory of the process, its ranks together: " in text


def test_a_cure_names_the_checkpoint(original: Path, tiny: ModelCard) -> None:
    again = RunOptions(checkpoint=original).again
    assert again[-2:] == ("--checkpoint", str(original))


def test_the_command_tells_what_a_rank_would_hold(
    original: Path, tiny: ModelCard, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["decode", "checkpoint", str(original)]) == 0
    text = capsys.readouterr().out
    assert "tiny-k3, " in text and " text tensors in " in text
    assert f"  TP 16: {rank_bytes(tiny, 16) / 1e9:.3f} GB a rank" in text
    assert command(["decode", "run", "--checkpoint", str(original), "--model", "small"]) == 2
    assert "--checkpoint has a model of its own" in capsys.readouterr().err
    assert command(["decode", "checkpoint", str(original / "none")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
