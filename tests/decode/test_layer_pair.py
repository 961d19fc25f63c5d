"""A layer pair on all ranks: what their times come to, what is a fault, the protocol over gloo; no kernel is judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.cli.decode_pair import _trace_faults, render_pair
from k3lab.cli.decode_trace import ranks_together
from k3lab.cli.default_engines import DefaultEngines
from k3lab.cli.main import run as command
from k3lab.cli.output import console
from k3lab.decode import layer_pair
from k3lab.decode.bars import layer_floor_us
from k3lab.decode.layer_pair import by_clock, over_ranks, pair_card
from k3lab.decode.measure_bars import Bench, Load
from k3lab.decode.random_weights import random_rank_weights
from k3lab.decode.run_pair import KIND, untimed
from k3lab.kernels import K3, Evidence, InputError, ModelCard, family
from k3lab.kernels.bundle.keys import another_kernel
from k3lab.kernels.bundle.reader import Miss
from k3lab.kernels.collectives import Collectives, StandIn, run_virtual_ranks
from k3lab.kernels.gpu_cards import GPU_CARDS
from k3lab.traces import synthesize

HERE = Path(__file__).parent
H200 = GPU_CARDS["H200"]


def graph(layers: int, *samples: float) -> dict[str, Any]:
    return {"layers": layers, "launches": 10 + 8 * layers, "spread": 0.01, "samples_us": list(samples)}


def rank(late: float, slow: float = 0.0) -> dict[str, Any]:
    """50 us around layers of 80, and more of a rank's own; its third replay is disturbed."""
    few, many = ([50 + late + at * (80 + slow)] * 4 for at in (1, 3))
    few[2] += 30
    return {
        "digests": ["aa", "aa"], "distinct_experts": 120.0, "off": 0.01, "step": graph(6, *many),
        "launches": {"differences": []},
        "layers": {kind: {"graphs": [graph(1, *few), graph(3, *many)], "kernels": {"k3_x": 2.0}} for kind in ("kda", "mla")},
    }  # fmt: skip


def test_a_layers_time_is_the_slope_of_the_slowest_ranks_and_its_spread_that_of_their_own() -> None:
    made = over_ranks(
        K3, Load(1, 8, 512), "latency_specialized", [rank(0.0), rank(3.0, 2.0), rank(5.0), rank(1.0)], H200
    )
    for layer in made["layers"].values():
        few, many = layer["graphs"]
        assert [one["us"] for one in few["ranks"]] == [130, 135, 135, 131]
        assert (few["us"], many["us"]) == (135, 299)  # of each replay the slowest rank
        assert layer["us"] == (299 - 135) / 2
        assert layer["ranks_us"] == [80, 82, 80, 80]
        assert layer["over_ranks_us"] == 2
        assert layer["launches"] == 8
        assert many["over_ranks_us"] == 9
        assert len(many["ranks"][1]["samples_us"]) == 4
        assert layer["floor_us"] == layer_floor_us(
            K3, 4, 8, 8, "mla" if layer is made["layers"]["mla"] else "kda", H200
        )
    assert made["pair_us"] == 164
    assert made["step"]["us"] == 299
    assert not made["faults"]
    stock = over_ranks(K3, Load(1, 8, 512), "auto", [rank(0.0), rank(0.0)], None)
    assert stock["layers"]["kda"]["floor_us"] is None
    assert set(untimed(made)["layers"]["mla"]) == {"launches", "kernels"}
    assert "step" not in untimed(made) and "pair_us" not in untimed(made)


def test_other_bits_and_other_launches_are_faults_of_their_rank() -> None:
    ranks = [rank(0.0) for _ in range(3)]
    ranks[1]["digests"] = ["aa", "bb"]
    ranks[2] = {
        **deepcopy(ranks[2]),
        "digests": ["cc", "cc"],
        "launches": {"differences": ["k3_x: 5 launches, 6 planned"]},
    }
    made = over_ranks(K3, Load(1, 8, 512), "auto", ranks, None)
    assert made["faults"] == [
        "rank 1 has other logits in a second run", "rank 2 has other logits than rank 0", "rank 2: k3_x: 5 launches, 6 planned",
    ]  # fmt: skip


def test_the_pairs_keep_the_models_widths() -> None:
    card = pair_card(K3, 3)
    assert card.layer_kinds == ("kda", "mla") * 3
    assert not any(card.is_dense(layer) for layer in range(6))
    assert (card.hidden_size, card.num_experts, card.vocab_size) == (K3.hidden_size, K3.num_experts, K3.vocab_size)
    for pairs in (1, 17):
        with pytest.raises(InputError, match=f"pairs is {pairs}; 2 to 16"):
            pair_card(K3, pairs)


def test_ranks_without_a_gpu_meet_before_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    assert len(by_clock(lambda: seen.append("meet"))(lambda: seen.append("run"), 3)) == 3
    assert seen == ["meet", "run"] * 4


def test_a_barrier_of_all_ranks_stands_between_the_clocks_start_and_what_ran_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            seen.append("mark")

        def elapsed_time(self, end: Any) -> float:
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("idle"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    times = layer_pair.together(lambda: seen.append("meet"))(lambda: seen.append("run"), 2)
    assert times == [250.0, 250.0]
    assert seen == ["idle", "meet", "mark", "run", "mark"] * (layer_pair.WARM + 2) + ["wait"]


def test_ranks_of_a_group_run_the_same_ids_and_a_rank_alone_those_of_its_own_part(tiny: ModelCard) -> None:
    load = Load(1, 8, 0)

    def ids(comm: Collectives) -> torch.Tensor:
        weights = random_rank_weights(tiny, seed=0, dtype=torch.bfloat16, tp=2, rank=comm.rank)
        return Bench(weights, comm, load, seed=3)._ids

    first, second = run_virtual_ranks(2, ids)
    assert torch.equal(first, second)
    half = tiny.vocab_size // 2
    assert first.min() < half <= first.max()
    assert ids(StandIn(1, 2)).min() >= half


def test_ranks_over_gloo_make_one_record(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "K3LAB_NO_GPU": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "decode_ranks.py"), "2", "pair", str(tmp_path)],
        env=environment, timeout=180, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(path)["record"] for path in sorted(tmp_path.glob("*.pt")))
    assert first == second
    assert (first["kind"], first["evidence"], first["tp"], first["dcp"], first["faults"]) == (KIND, None, 2, 2, [])
    assert [row["rows"] for row in first["rows"]] == [2, 1]
    assert len(first["each"]) == 2
    for row in first["rows"]:
        assert set(row["backends"]) == {"auto", "latency_specialized"}
        assert row["backends"]["auto"]["off_auto"] is None
        assert 0 < row["backends"]["latency_specialized"]["off_auto"] < 0.1  # twins beside PyTorch, in BF16
        for own in row["backends"].values():
            assert own["launches"] is None
            for layer in own["layers"].values():
                assert [one["layers"] for one in layer["graphs"]] == [1, 2]
                assert [len(one["samples_us"]) for one in layer["graphs"][0]["ranks"]] == [2, 2]
    traced = {"classes": [{"name": "class A (kda)", "largest_ns": 81_500, "spread_ns": 900}], "error": "odd"}
    shown = {
        **first,
        "trace": traced,
        "rows": [{**row, "fallbacks": [{"family": "mla", "reason": "none"}]} for row in first["rows"]],
    }
    out = console()
    with out.capture() as told:
        render_pair(out, {**shown, "faults": ["rank 1 is odd"]})
    text = told.get()
    assert "mla runs untuned: none" in text and "fault: rank 1 is odd" in text and "times say nothing" in text
    assert "traced, class A (kda): 81.5 us on the slowest rank, 0.9 apart" in text
    assert "nothing can be said of the traces: odd" in text
    json.dumps(first)


def test_default_engines_stand_in_place_of_a_bundle() -> None:
    found, attn = DefaultEngines(), family("attn_res")
    problem = attn.problem(K3, tp=8, rows=8, kind="final")
    entry = found.find("attn_res", problem, "H200")
    assert not isinstance(entry, Miss)
    engine = attn.engine(attn.default_engine or attn.engines[0].name)
    assert (entry.engine, entry.evidence, entry.rows) == (engine.name, Evidence.COMPILED, 8)
    assert dict(entry.model.config) == dict(engine.space(problem, H200).default)
    assert another_kernel(entry.model, engine) is None
    assert entry.model.place[:2] == ("attn_res", "H200") and entry.model.place[3] == 8
    other = found.find("attn_res", attn.problem(K3, tp=8, rows=8, kind="blocks"), "H200")
    assert not isinstance(other, Miss) and other.model.place != entry.model.place
    tail = found.find("moe_tail", family("moe_tail").problem(K3, tp=2, rows=8), "H200")
    assert isinstance(tail, Miss) and "no engine serves" in tail.reason


def test_traces_of_all_ranks_stand_side_by_side(tmp_path: Path) -> None:
    for own in range(2):
        where = tmp_path / f"rank{own}.json.gz"
        synthesize(where, seed=own, gpu="NVIDIA H200", tp=2, steps=8, layers=4)
    asked: dict[str, Any] = {"layers": 4, "rows": 8, "plan": None}
    report = ranks_together(tmp_path, ranks=2, budget=None, **asked)
    assert [one["layers"] for one in report["classes"]] == [3, 1]
    assert not _trace_faults(report, None)
    judged = ranks_together(tmp_path, ranks=2, budget="h200-tp8", **asked)
    (fault,) = _trace_faults(judged, "h200-tp8")
    assert "traces against h200-tp8: inconclusive" in fault  # two files of one rank, and another TP
    lost = ranks_together(tmp_path, ranks=3, budget=None, **asked)
    assert "rank2.json.gz" in lost["error"]
    assert not _trace_faults(lost, None)
    assert "no verdict" in _trace_faults(lost, "h200-tp8")[0]
    assert not _trace_faults({"verdict": "pass"}, "h200-tp8")


RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--drafts", "8"], "drafts 8, context 512"),
        (["--limit", "0"], "ranks wait 1 to 600 s"),
        (["--pairs", "1"], "pairs is 1; 2 to 16"),
        (["--dcp", "3"], "dcp is 3; at TP 2"),
        (["--model", "demo"], "model demo is made for"),
        (["--traces", "."], "--traces: needs NVIDIA GPUs"),
        (["--budget", "h200-tp8"], "--budget judges traces"),
        (["--traces", ".", "--budget", "h200"], "h200"),
        (["--time-sliced"], "--time-sliced is for more ranks than GPUs"),
        (["--default-engines", "--bundle", "x", "--drafts", "0"], "give one of them"),
        (["--out", "no/such/folder.json"], "no/such"),
    ],
)
def test_what_no_group_can_measure_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    assert command(["decode", "pair", *words]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert line in shown.err and len(shown.err.splitlines()) == 1


def test_ranks_are_torchruns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert command(["decode", "pair", "--model", "small"]) == 2
    assert "torchrun --nproc-per-node 8 -m k3lab.cli.main decode pair" in capsys.readouterr().err
