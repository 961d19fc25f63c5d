"""The MLA core with contexts over ranks as the compiler made it, run on the CPU: all ranks against the twin of all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from k3lab.kernels.health import LIMIT, Phase, culprits, read
from k3lab.tuning.compare import compare

from .mla_dcp_case import FAMILY, small
from .mla_dcp_machine import Case

FEW = {"splits": 1, "tile": 32, "stages": 2, "queries": 8}


@pytest.mark.parametrize(
    ("kind", "tp", "rows", "live", "contexts", "sizes", "change"),
    [
        # shards of one token, of none but the new one's, of none at all
        ("bf16_dcp", 4, 4, 3, [130, 3, 0, 0], {"heads": 2}, {**FEW, "splits": 2, "cluster": 8}),
        pytest.param(
            "bf16_dcp",
            16,
            1,
            1,
            [16],
            {},
            {**FEW, "queries": 16, "cluster": 4, "early": "none"},
            marks=pytest.mark.slow,
        ),
        ("fp8_verify4_dcp", 4, 8, 7, [0, 64], {"heads": 2}, {**FEW, "splits": 2, "queries": 16, "cluster": 4}),
        ("bf16_verify8_dcp", 2, 24, 21, [3, 70, 20], {}, {**FEW, "queries": 16, "cluster": 16}),
    ],
)
def test_every_rank_is_its_twin(monkeypatch, kind, tp, rows, live, contexts, sizes, change):
    """Queries, new rows, attention, both exchanges, merge, values and gate: new rows of the caches are found NaN."""
    case = Case(monkeypatch, small(rows, kind, tp, **sizes), contexts, live, **change)
    case.step()
    case.judge()


@pytest.mark.parametrize("kind", ["bf16_dcp", pytest.param("fp8_verify2_dcp", marks=pytest.mark.slow)])
def test_one_rank_plays_all_over_loopback(monkeypatch, kind):
    """Factors that tell slots apart; with a factor of zero a rank without tokens."""
    factors = (0.5, -2.0, 0.0, 4.0)
    one = small(4, kind, 4, heads=2)
    case = Case(monkeypatch, one, [37] * one.requests, factors=factors, **{**FEW, "splits": 2, "cluster": 8})
    case.step()
    wanted = FAMILY.over_loopback(one, {**case.inputs[0]}, factors)["out"]
    result = compare("out", case.got(0)[0], wanted, FAMILY.tolerance(one, "out"))
    assert result.ok, result.message


def test_rows_come_and_go_and_every_launch_is_counted(monkeypatch):
    case = Case(monkeypatch, small(2, "bf16_dcp", 2), [40, 9], **FEW)
    for turn, live in enumerate((1, 2)):
        for rank in case.ranks:
            at, _, shape = case.memory.places[f"out {rank}"]
            case.memory.data[at : at + int(np.prod(shape))] = 0xFF
        case.step(live, seed=turn)
        assert all((case.memory.get(f"epochs {rank}") == turn + 1).all() for rank in case.ranks)
        assert all(bool(case.got(rank)[0][live:].isnan().all()) for rank in case.ranks)
    case.judge()


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("role", "phase", "says"),
    [
        (0, Phase.QUERIES, "rank 1 did not publish its queries"),
        (2, Phase.PARTIAL, "rank 1 did not publish its partial sums"),
    ],
)
def test_a_rank_that_stops_is_named_and_nobody_sends_garbage_on(monkeypatch, tp, role, phase, says):
    """Rank 1 stops ahead of a launch: all others end, all together name it, and later launches publish nothing."""
    case = Case(monkeypatch, small(2, "bf16_dcp", tp), [9, 8], 1, **FEW)
    for rank in case.ranks:
        limit = case.at[rank]["health"] + 4 * LIMIT
        case.memory.data[limit : limit + 4].view(np.int32)[0] = 1_000_000
    living = [rank for rank in case.ranks if rank != 1]
    for turn in range(role):
        for rank in case.ranks:
            case.launch(turn, rank)
    for turn in range(role, 4):
        for rank in living:
            case.launch(turn, rank, tick=5000)
    reports = {rank: read(case.memory.get(f"health {rank}").tolist()) for rank in living}
    assert all(report.missed[phase] == (1,) and says in report.message() for report in reports.values())
    assert culprits(reports) == (1,)
    queries, rows = ([case.memory.get(f"{box} {rank}") for rank in case.ranks] for box in ("queries", "latents"))
    if phase is Phase.QUERIES:
        assert not any(one.any() for one in rows), "rows were sent that came of a wait that gave up"
    for turn in (0, 2):
        for rank in living:
            case.launch(turn, rank)
    for box, before in (("queries", queries), ("latents", rows)):
        assert all((case.memory.get(f"{box} {rank}") == before[rank]).all() for rank in case.ranks)
