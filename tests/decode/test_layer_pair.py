"""A layer pair on all ranks: what their times come to, what is a fault, the protocol over gloo; no kernel is judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from k3lab.cli import decode_pair
from k3lab.cli.decode_pair import _side_by_side, _trace_faults, render_pair
from k3lab.cli.decode_trace import ranks_together
from k3lab.cli.default_engines import DefaultEngines
from k3lab.cli.main import run as command
from k3lab.cli.output import console
from k3lab.decode import layer_pair, run_pair
from k3lab.decode.bars import layer_floor_us
from k3lab.decode.layer_pair import by_clock, over_ranks, pair_card
from k3lab.decode.measure_bars import Bench, Load
from k3lab.decode.pair_rank import STEPS, PairRank
from k3lab.decode.random_weights import random_rank_weights
from k3lab.decode.run_pair import KIND, untimed
from k3lab.kernels import K3, Evidence, InputError, ModelCard, family
from k3lab.kernels.bundle.keys import another_kernel
from k3lab.kernels.bundle.reader import Miss
from k3lab.kernels.collectives import CollectiveError, Collectives, SingleRank, StandIn, run_virtual_ranks
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
        "digests": ["aa", "aa"], "distinct_experts": 120.0, "finite": True, "off": 0.01, "step": graph(6, *many),
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


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ({"finite": False, "off": float("nan")}, "rank 0 has logits that are no finite numbers"),
        ({"off": 1.0}, "rank 0 has logits 1 from auto's, relatively: no rounding"),
        ({"off": float("nan")}, "rank 0 has logits nan from auto's, relatively: no rounding"),
    ],
)
def test_logits_that_all_ranks_share_and_that_mean_nothing_are_a_fault(told: dict[str, Any], fault: str) -> None:
    ranks = [{**rank(0.0), **told} for _ in range(2)]
    found = over_ranks(K3, Load(1, 8, 512), "latency_specialized", ranks, None)["faults"]
    assert found == [fault, fault.replace("rank 0", "rank 1")]


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
    assert (
        "mla runs untuned: none" in text
        and "fault: rank 1 is odd" in text
        and "the tuned path is its twins, and times say nothing about kernels" in text
    )
    assert "traced, class A (kda): 81.5 us on the slowest rank, 0.9 apart" in text
    assert "nothing can be said of the traces: odd" in text
    assert "medians of 2 replays, by the host's clock" in text and "spread" in text
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
        (["--time-sliced", "--traces", ".", "--budget", "h200-tp8"], "ranks that are time-sliced have none"),
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


@pytest.mark.parametrize("when", ["begins", "ends", "is read", "never"])
def test_a_rank_that_cannot_write_its_trace_takes_part_and_says_so(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for it, and what all had measured before stands."""
    seen: list[str] = []

    @contextmanager
    def record(path: Path) -> Iterator[None]:
        if when == "begins":
            raise InputError("no room for it")
        yield
        if when == "ends":
            raise OSError(28, "No space left on device")

    def differences(path: Path, planned: Any, steps: int) -> list[str]:
        if when == "is read":
            raise InputError("no trace at all")
        return []

    class Rank(PairRank):
        def __post_init__(self) -> None:
            self.names = ("auto",)

        def operators(self, name: str, load: Load) -> Any:
            return SimpleNamespace(check=lambda: None)

        def _bench(self, load: Load) -> Any:
            return SimpleNamespace(captured=lambda operators: ([], lambda: seen.append("step")))

        def planned(self, name: str, load: Load) -> Any:
            return None

    def together(what: str, body: Any) -> Any:
        return body()

    group: Any = SimpleNamespace(
        device=SimpleNamespace(index=0), rank=0, meet=lambda: seen.append("meet"), host=SingleRank(), together=together
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _index: None)
    every: list[dict[str, Any]] = [{"rows": 1}]
    own = Rank(K3, group, None, {}, 0, lambda _what, _done, _of: None)
    assert run_pair._add_traces(every, own, Load(1, 8, 0), run_pair.Traces(tmp_path, record, differences)) == []
    assert seen == ["meet"] + ["step"] * STEPS
    lost = {"begins": "no room for it", "ends": "[Errno 28] No space left on device", "is read": "no trace at all"}
    trace = every[0]["trace"]
    assert trace["lost"] == lost.get(when) and trace["differences"] == ([] if when == "never" else [lost[when]])
    if when != "never":
        assert _side_by_side({"each": every}, tmp_path, None) == {"error": "rank 0 has none"}

    def gone(what: str, body: Any) -> Any:
        raise CollectiveError("rank 3 is gone")

    group.together = gone
    assert run_pair._add_traces(every, own, Load(1, 8, 0), run_pair.Traces(tmp_path, record, differences)) == [
        "tracing: rank 3 is gone"
    ]


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("full", [False, True])
def test_all_ranks_stay_until_rank_0_has_told(
    own: int, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the first that exits with 1 torchrun ends the others."""
    monkeypatch.setenv("K3LAB_NO_GPU", "1")
    for name, value in {**RANKS, "RANK": str(own)}.items():
        monkeypatch.setenv(name, value)
    seen: list[str] = []
    group = SimpleNamespace(rank=own, device=None, meet=lambda: seen.append("meet"), close=lambda: seen.append("close"))
    monkeypatch.setattr(decode_pair, "_group", lambda *_args: group)
    record = {"faults": ["rank 1 is odd"], "evidence": None, "off": float("nan")}
    monkeypatch.setattr(run_pair, "run_pair", lambda *_args, **_more: dict(record))
    monkeypatch.setattr(decode_pair, "emit", lambda *_args: seen.append("told"))
    if full:

        def refused(path: Path, data: str) -> None:
            raise InputError("cannot write it")

        monkeypatch.setattr(decode_pair, "write_file", refused)
    out = tmp_path / "pair.json"
    code = command(["decode", "pair", "--model", "small", "--out", str(out)])
    assert code == (2 if full and own == 0 else 1)
    assert seen == [*(["told"] if own == 0 else []), "meet", "close"]
    if own == 0 and not full:  # NaN is no JSON
        assert json.loads(out.read_text(), parse_constant=pytest.fail)["off"] is None


def test_a_rank_that_is_gone_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def gone(*_args: Any) -> Any:
        raise CollectiveError("rank 3 did not come within 300 s")

    monkeypatch.setenv("K3LAB_NO_GPU", "1")
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(decode_pair, "_group", gone)
    assert command(["decode", "pair", "--model", "small"]) == 1
    assert capsys.readouterr().err == "k3lab: rank 3 did not come within 300 s\n"


@pytest.mark.parametrize("sliced", [True, False])
def test_no_times_are_read_from_traces_of_ranks_that_took_turns(
    sliced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**RANKS, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    here = SimpleNamespace(card=None, to_json=lambda: {})
    monkeypatch.setattr("k3lab.kernels.device.discover", lambda: here)
    monkeypatch.setattr("k3lab.kernels.device.gpu_count", lambda: 1)
    monkeypatch.setattr("k3lab.tuning.environment.environment", lambda _device: {})
    group = SimpleNamespace(rank=0, device=here, meet=lambda: None, close=lambda: None)
    monkeypatch.setattr(decode_pair, "_group", lambda *_args: group)
    monkeypatch.setattr(run_pair, "run_pair", lambda *_args, **_more: {"faults": [], "evidence": None})
    monkeypatch.setattr(decode_pair, "_side_by_side", lambda *_args: {"classes": []})
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(decode_pair, "emit", lambda data, *_rest: shown.append(data))
    more = ["--time-sliced"] if sliced else []
    assert command(["decode", "pair", "--model", "small", "--traces", str(tmp_path), *more]) == 0
    assert ("trace" in shown[0]) is not sliced
