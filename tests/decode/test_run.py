"""Decode runs on the CPU: tokens, ranks, reports, profiler ranges, refusals."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from k3lab.decode import greedy, memory
from k3lab.decode.caches import DecodeCache
from k3lab.decode.choices import STEP_FAMILIES
from k3lab.decode.greedy import decode_eager, next_tokens
from k3lab.decode.memory import memory_needed
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.random_weights import random_weights
from k3lab.decode.report import median
from k3lab.decode.run import RunOptions, run
from k3lab.decode.step import step
from k3lab.decode.tensors import rank_bytes
from k3lab.kernels import K3, InputError, ModelCard
from k3lab.kernels.bundle.reader import Bundle
from k3lab.kernels.collectives import SingleRank, StandIn
from k3lab.traces import TraceError
from k3lab.traces.capture import recording


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


def test_a_run_repeats_and_depends_on_its_seed(tiny: ModelCard) -> None:
    one, same, other = (run(tiny, RunOptions(rows=3, tokens=4, seed=seed)) for seed in (1, 1, 2))
    assert one.tokens == same.tokens != other.tokens
    assert [len(tokens) for tokens in one.tokens] == [4, 4, 4]
    assert all(0 <= token < tiny.vocab_size for tokens in one.tokens for token in tokens)
    assert len(one.step_ns) == 4
    assert all(isinstance(time, int) and time > 0 for time in one.step_ns)
    assert one.graph_step_ns is None
    assert one.ok
    assert (one.device, one.operators, one.fallbacks) == ("cpu", "reference (twins)", ())
    assert any("no GPU" in line for line in one.head)
    assert one.head[0].startswith("backend auto uses no tuned engine, by design")


def test_the_tokens_are_the_greedy_ones(tiny: ModelCard) -> None:
    weights = random_weights(tiny, seed=0, dtype=torch.float64)
    operators, comm = ReferenceOperators(tiny), SingleRank()
    cache = DecodeCache(tiny, max_requests=2, max_context=8, dtype=torch.float64)
    seen = []
    got = decode_eager(weights, cache, torch.tensor([5, 6]), 3, operators, comm, lambda *at: seen.append(at)).tokens
    assert cache.slots == ()
    assert seen == [(1, 3), (2, 3), (3, 3)]
    for request, first in enumerate((5, 6)):
        slot, token = cache.add(), first
        for index in range(3):
            logits = step(weights, cache, torch.tensor([[token]]), [slot], operators, comm)
            cache.accept([slot], [1])
            token = int(logits[0, 0].argmax())
            assert got[request][index] == token
        cache.release(slot)


def test_equal_logits_give_the_lower_token(tiny: ModelCard) -> None:
    weights = random_weights(tiny, seed=0, dtype=torch.bfloat16, tp=4)
    logits = torch.zeros(2, 512)
    logits[0, 7] = logits[0, 300] = 1
    logits[1, 200] = logits[1, 400] = 1
    assert next_tokens(logits, weights, SingleRank()).tolist() == [7, 200]
    assert next_tokens(logits, weights, StandIn(0, 4)).tolist() == [7, 0]  # its own part ends at 128


def test_backends_agree_without_a_gpu_and_ranks_agree_with_each_other(tiny: ModelCard) -> None:
    auto = run(tiny, RunOptions(tp=2, rows=2, tokens=3))
    tuned = run(tiny, RunOptions(tp=2, rows=2, tokens=3, backend="latency_specialized"))
    assert auto.tokens == tuned.tokens
    assert auto.ranks == "2 ranks as threads of this process"
    assert auto.weight_bytes < run(tiny, RunOptions(tokens=1)).weight_bytes * 0.6
    assert {one.family for one in tuned.fallbacks} == set(STEP_FAMILIES)
    assert all(one.reason and one.cure for one in tuned.fallbacks)


def test_a_bundle_without_a_gpu_is_named_and_not_used(tiny: ModelCard, write_bundle: Callable[..., Path]) -> None:
    bundle = Bundle.load(write_bundle(tiny, tp=1, rows=2), accept_predicted=True)
    report = run(tiny, RunOptions(tokens=1, backend="latency_specialized"), bundle=bundle)
    named = [
        line
        for line in report.head
        if line.startswith("predicted only, never measured on a GB300: attention_projection")
    ]
    assert len(named) == 2
    assert not report.tuned
    why = {one.kind: one.reason for one in report.fallbacks if one.family == "attention_projection"}
    assert why["kda"] == why["mla"] == "no GPU here: the twin runs; the bundle has a predicted triton kernel"


def test_an_unaccepted_bundle_is_not_used(tiny: ModelCard, write_bundle: Callable[..., Path]) -> None:
    bundle = Bundle.load(write_bundle(tiny, tp=1, rows=2))
    report = run(tiny, RunOptions(tokens=1, backend="latency_specialized"), bundle=bundle)
    assert not any("predicted" in line for line in report.head)
    told = [one for one in report.fallbacks if one.family == "attention_projection"]
    assert len(told) == 2
    for one in told:
        assert one.reason.endswith("is only predicted, and that was not accepted, and no GPU here: the twin runs")
        assert one.cure.startswith(
            "k3lab decode run --model config.json --tp 1 --rows 2 --tokens 1 --seed 0 --gpu GB300"
        )
        assert one.cure.endswith(" --accept predicted")
    assert not any("backend auto" in line for line in report.head)


def test_the_report_is_data(tiny: ModelCard) -> None:
    data = run(tiny, RunOptions(tokens=2, backend="latency_specialized")).to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["step_ns_median"] == data["step_ns"][1]
    assert data["graph_agrees"] is None
    assert median([9]) == 9
    assert median([100, 1, 3]) == 2


def test_disagreeing_graph_is_not_ok(tiny: ModelCard) -> None:
    report = run(tiny, RunOptions(tokens=1))
    assert replace(report, graph_agrees=True).ok
    assert not replace(report, graph_agrees=False).ok


def test_steps_and_layers_are_marked(tiny: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        opened.append(name)
        yield

    monkeypatch.setattr(greedy, "profiler_range", mark)
    run(tiny, RunOptions(tokens=2))
    layers = [f"layer {layer}" for layer in range(6)]
    assert opened == ["decode step 0", "embed", *layers, "head", "decode step 1", "embed", *layers, "head"]


def test_a_trace_holds_the_marks(tiny: ModelCard, tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    with recording(path):
        run(tiny, RunOptions(tokens=1))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    marks = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"k3lab decode step 0", "k3lab layer 5"} <= marks
    assert [file.name for file in tmp_path.iterdir()] == ["run.json.gz"]


@pytest.mark.parametrize(("options", "words"), [
    ({"tp": 3}, "TP 3 does not divide"),
    ({"rows": 0}, "rows is 0"),
    ({"rows": 65}, "rows is 65; the decode path serves 1 to 64"),
    ({"tokens": 0}, "tokens is 0"),
    ({"tokens": 5000}, "tokens is 5000; a run of tiny-k3 produces 1 to 4096"),
    ({"backend": "stock"}, "unknown backend 'stock'"),
    ({"gpu": "GB301"}, "unknown GPU 'GB301'"),
    ({"seed": 2**63}, "a seed is a whole number of 64 bits"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused(tiny: ModelCard, options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(tiny, RunOptions(**options))  # type: ignore[arg-type]


def test_traces_need_a_gpu_and_a_file(tiny: ModelCard, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--trace records device kernels and needs an NVIDIA GPU"):
        run(tiny, RunOptions(tokens=1, trace=tmp_path / "t.json"), record=recording)
    with pytest.raises(InputError, match="a trace needs what records it"):
        run(tiny, RunOptions(tokens=1, trace=tmp_path / "t.json"))
    for path, words in (
        (tmp_path, "is a folder"),
        (tmp_path / "t.txt", "must end in .json"),
        (tmp_path / "no" / "t.json", "no folder"),
    ):
        with pytest.raises(TraceError, match=words):
            run(tiny, RunOptions(tokens=1, trace=path), record=recording)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_fit_is_refused(tiny: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _device: 10**10)
    with pytest.raises(InputError, match=r"kimi-k3 at TP 1 needs \d+\.\d GB, this machine has 10\.0 GB free"):
        run(K3, RunOptions())
    with pytest.raises(InputError, match="kimi-k3 at TP 16 needs"):  # all ranks of a group are here
        run(K3, RunOptions(tp=16))
    # one rank of the published model fits on one large GPU, the whole model nowhere
    assert rank_bytes(K3, 16) < memory_needed(K3, 16, on_gpu=True) < 120e9
    assert memory_needed(K3, 16, on_gpu=False) > 2 * rank_bytes(K3, 1)


def test_auto_takes_no_bundle(tiny: ModelCard, write_bundle: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="backend auto uses no bundle"):
        run(tiny, RunOptions(), bundle=Bundle.load(write_bundle(tiny, tp=1)))
