"""Ranks in threads and in processes over gloo: checked against the twin, timed together, and whoever fails is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_player import FakePlayer
from k3lab.kernels import InputError, family
from k3lab.kernels.collectives import run_virtual_ranks
from k3lab.kernels.env import Place
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.policy import TimingPolicy
from k3lab.tuning.ranks.cases import GATHER, cases, rank_inputs, twin
from k3lab.tuning.ranks.group import RankGroup
from k3lab.tuning.ranks.report import cross_overs, load, merge, reduces, table
from k3lab.tuning.ranks.request import FAMILIES, RanksError, RanksRequest
from k3lab.tuning.ranks.run import run_rank
from k3lab.tuning.ranks.start import start
from k3lab.tuning.ranks.torchrun import run as under_torchrun

FEW = TimingPolicy(calls=2, samples=3, warm_ms=0.021, attempts=2)
REQUEST = RanksRequest(2, rows=(1, 3), steps=7, policy=FEW, limit_s=60.0, player="fake_player:FakePlayer")


def virtual(request: RanksRequest, fault: str = "") -> tuple[list[dict[str, Any]], list[FakePlayer]]:
    players: dict[int, FakePlayer] = {}

    def body(comm: Any) -> dict[str, Any]:
        group = RankGroup(comm.rank, comm.size, comm, comm, None)
        players[comm.rank] = FakePlayer(request, group, fault)
        return json.loads(json.dumps(run_rank(request, group, players[comm.rank])))

    return run_virtual_ranks(request.size, body), [players[rank] for rank in sorted(players)]


@pytest.fixture(scope="module")
def both() -> tuple[list[dict[str, Any]], list[FakePlayer]]:
    return virtual(REQUEST)


def test_every_family_and_exchange_is_checked_and_timed_on_all_ranks(both: Any) -> None:
    data = merge(REQUEST, both[0])
    assert len(data["cases"]) == 3 * 2 * 2 and data["evidence"] == "measured"
    assert data["gpu_count"] == 2 and data["environment"]["links"] == {"nvlinks": [18, 18]}
    for case in data["cases"]:
        assert case["check"]["steps"] == 7 and len(case["check"]["digest"]) == 64
        assert all(0 <= error < 0.02 for error in case["check"]["errors"].values())
        assert case["real"]["us"] == 11 and case["real"]["over_ranks_us"] == 1 and case["real"]["stable"]
        assert [one["median_us"] for one in case["loopback"]["ranks"]] == [10, 11]
    assert {one["what"] for one in data["beside"]} == {"nccl", "nccl_chain"}
    assert reduces(data) == [{"rows": 1, "nccl": 11}, {"rows": 3, "nccl": 11}]


def test_what_cannot_be_run_is_listed_with_the_reason() -> None:
    request = replace(REQUEST, families=("output_projection",), rows=(1, 64))
    data = merge(request, virtual(request)[0])
    assert {case["rows"] for case in data["cases"]} == {1}
    told = [one["why"] for one in data["missing"]]
    assert told == ["too many", "too large", "too large", "not here", "not here"]
    lines = table(data)
    assert [(line["rows"], line["wins"]) for line in lines] == [(1, "one_shot"), (64, "nccl_chain")]


def test_all_ranks_replay_equally_often(both: Any) -> None:
    """A kernel that waits for its peers would hang otherwise."""
    first, second = both[1]
    assert first.clock.replays == second.clock.replays > 0


@pytest.mark.parametrize(
    ("fault", "said"), [("wrong", "rank 1: output_projection/fake one_shot at 1 rows: inputs 0: prefix_out"),
                        ("changes", "rank 1: output_projection/fake one_shot at 1 rows: 1 of 7 steps")],
)  # fmt: skip
def test_wrong_results_are_told_of_the_rank_that_has_them_and_nothing_is_timed(fault: str, said: str) -> None:
    request = replace(REQUEST, families=("output_projection",), rows=(1,))
    found, _ = virtual(request, fault)
    assert all("real" not in case and not one["beside"] for one in found for case in one["cases"])
    with pytest.raises(RanksError) as caught:
        merge(request, found)
    assert "rank 1" in str(caught.value) and "output_projection/fake" in str(caught.value)
    told = [fault for case in found[1]["cases"] for fault in case["check"]["faults"]]
    assert any(said.split(": ", 2)[2] in one for one in told)
    if fault == "wrong":
        assert any("rank 1 has other bits than rank 0" in one for one in told)


def test_time_sliced_ranks_keep_no_times(tmp_path: Path) -> None:
    request = replace(REQUEST, rows=(1,), time_sliced=True)
    found, players = virtual(request)
    data = merge(request, found)
    assert "no times were kept" in data["note"] and not data["beside"] and not players[0].clock.replays
    assert not any("real" in case or "loopback" in case for case in data["cases"])
    (tmp_path / "ranks.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="holds no times: ranks shared GPUs"):
        load(tmp_path / "ranks.json")


def started(
    monkeypatch: pytest.MonkeyPatch, request: RanksRequest, fault: str = "", logs: Path | None = None
) -> list[dict[str, Any]]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_RANKS", fault)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return start(request, wall_s=150, logs=logs)


def test_processes_find_what_threads_do(monkeypatch: pytest.MonkeyPatch, both: Any, tmp_path: Path) -> None:
    few = replace(REQUEST, families=("moe_tail",), rows=(1,))
    found = started(monkeypatch, few, logs=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.log", "1.log"]
    digests = [
        [case["check"]["digest"] for case in one["cases"] if (case["family"], case["rows"]) == ("moe_tail", 1)]
        for one in (*found, *both[0])
    ]
    assert len(digests[0]) == 2 and all(one == digests[0] for one in digests)
    assert [case["real"]["us"] for case in merge(few, found)["cases"]] == [11, 11]


@pytest.mark.parametrize(
    ("fault", "said"), [("dies", "rank 1 was killed by SIGKILL"), ("late", "rank 1 did not reach call")]
)
def test_a_rank_that_dies_or_is_late_is_named(monkeypatch: pytest.MonkeyPatch, fault: str, said: str) -> None:
    request = replace(REQUEST, families=("moe_tail",), rows=(1,), limit_s=2.0)
    with pytest.raises(RanksError) as caught:
        started(monkeypatch, request, fault)
    text = str(caught.value)
    assert said in text.split("; ")[0] and "\n" not in text
    if fault == "dies":
        assert "rank 1" in text.split("; ")[1]  # by the one that is left


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_engine_has_its_exchanges_and_says_what_it_cannot_do(size: int) -> None:
    found, missing = cases(FAMILIES, (1, 2, 4, 8, 16, 32, 64), size, gpu_card("H200"))
    have = {(one.family, one.exchange) for one in found}
    assert have == {
        ("output_projection", "one_shot"), ("output_projection", "two_shot"), ("router", GATHER),
        ("moe_tail", "one_shot"), ("moe_tail", "two_shot"),
    }  # fmt: skip
    for one in found:
        engine = family(one.family).engine(one.engine)
        assert one.problem.tp == size and not engine.space(one.problem, gpu_card("H200")).illegal(one.config)
    rows = {(one.family, one.exchange, one.problem.rows) for one in found}
    wanted = {(*pair, count) for pair in have for count in (1, 2, 4, 8, 16, 32, 64)}
    told = {(one["family"], one["rows"]) for one in missing}
    assert all((name, count) in told for name, _, count in wanted - rows)
    assert all(one["why"] for one in missing)
    assert {one.narrow for one in found if one.family == "moe_tail"} == ({3584} if size == 2 else {None})
    assert all(one.narrow in (None, one.problem.hidden) for one in found)  # type: ignore[attr-defined]


def test_a_routers_logits_are_exact_whatever_the_order_of_a_sum() -> None:
    case = next(one for one in cases(("router",), (1,), 8, gpu_card("H200"))[0])
    inputs = rank_inputs(case, 3, 0, "cpu")

    class Alone:
        rank, size = 0, 1

        def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
            return x.repeat(1, 8)

    logits = twin(case, inputs, Alone())["logits"]  # type: ignore[arg-type]
    exact = inputs["x"].double() @ inputs["w_router"].double().T
    assert torch.equal(logits[:, : exact.shape[1]].double(), exact) and exact.std() > 0.3
    assert torch.equal(inputs["x"], rank_inputs(case, 5, 0, "cpu")["x"])
    assert not torch.equal(inputs["w_router"], rank_inputs(case, 5, 0, "cpu")["w_router"])


def test_who_wins_and_where_two_shots_begin_to() -> None:
    def case(rows: int, exchange: str, us: float, engine: str = "a") -> dict[str, Any]:
        return {"family": "f", "engine": engine, "exchange": exchange, "rows": rows, "narrow": None, "real": {"us": us}}

    data = {
        "cases": [
            case(1, "one_shot", 5), case(1, "one_shot", 4, "b"), case(1, "two_shot", 3.0), case(8, "one_shot", 6),
            case(8, "two_shot", 7), case(16, "one_shot", 9), case(16, "two_shot", 8), case(64, "one_shot", 20), case(64, "two_shot", 12),
        ],
        "beside": [{"what": "nccl_chain", "family": "f", "rows": 64, "us": 11}, {"what": "nccl", "rows": 64, "us": 7}],
    }  # fmt: skip
    lines = table(data)
    assert lines[0] == {"family": "f", "rows": 1, "narrow": None, "one_shot": 4, "two_shot": 3.0, "wins": "two_shot"}
    assert [line["wins"] for line in lines[1:]] == ["one_shot", "two_shot", "nccl_chain"]
    assert cross_overs(lines) == {"f": 16}
    assert cross_overs([{"family": "f", "rows": 1, "one_shot": 1, "two_shot": 2}]) == {"f": None}
    assert reduces(data) == [{"rows": 64, "nccl": 7}]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": 1}, "at least 2 ranks"), ({"families": ("kda",)}, "'kda' does not publish"), ({"rows": (65,)}, "1 to 64"),
        ({"rows": ()}, "at least one"), ({"steps": 0}, "steps is 0"), ({"limit_s": float("nan")}, "1 to 600 s"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        replace(REQUEST, **change)


def test_a_request_survives_its_text() -> None:
    assert RanksRequest.from_text(REQUEST.to_text()) == REQUEST


def test_under_torchrun_rank_0_has_what_all_found() -> None:
    here = Path(__file__).parent
    request = replace(REQUEST, families=("router",), rows=(1,), steps=2)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "FAKE_RANKS": "",
    }
    done = subprocess.run(
        [sys.executable, str(here / "torchrun_ranks.py"), request.to_text()],
        capture_output=True, text=True, timeout=150, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 has [0, 1]", "rank 1 has nothing"]


def test_torchrun_must_have_started_as_many_as_were_asked_for() -> None:
    with pytest.raises(InputError, match="torchrun started 4 ranks, 2 were asked for"):
        under_torchrun(REQUEST, Place(0, 4, 0))


def test_chains_over_real_collectives_have_the_twins_outputs() -> None:
    script = Path(__file__).with_name("chain_ranks.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told.values()) == {"ok"} and {name.split()[0] for name in told} == set(FAMILIES), told
