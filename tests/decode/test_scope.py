"""What the specialised path serves: verdicts, agreement of ranks, counts, workloads."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.cli.main import COMMANDS
from k3lab.cli.main import run as command
from k3lab.decode.scope import (
    REASONS,
    Scope,
    StepShape,
    Tally,
    agree,
    digest,
    entry_rows,
    group_scope,
    here,
)  # fmt: skip
from k3lab.decode.workload import judge_workload
from k3lab.kernels import K3, InputError
from k3lab.kernels.bundle.reader import Bundle
from k3lab.kernels.collectives import CollectiveError, Collectives, SingleRank, run_virtual_ranks
from k3lab.kernels.device import Device, nvlink_domain
from k3lab.kernels.gpu_cards import gpu_card

from .scope_case import RANK, scope

EXACT = 1e-9


def code(judged: Any) -> str | None:
    return judged.code if judged else None


@pytest.mark.parametrize(("shape", "expected"), [
    (StepShape((0,)), None),
    (StepShape((0,) * 64), None),
    (StepShape((0,) * 65), "rows"),
    (StepShape((7,) * 8), None),
    (StepShape((7,) * 9), "rows"),
    (StepShape((3,) * 16), None),
    (StepShape((3,) * 17), "rows"),
    (StepShape((8,)), "drafts"),
    (StepShape((7, 6)), "ragged"),
    (StepShape((0, 3)), "ragged"),
    (StepShape((), 500), "prefill"),
    (StepShape((7,), 1), "mixed"),
    (StepShape((7, 6), 1), "mixed"),
])  # fmt: skip
def test_a_step_is_judged_by_its_shape(shape: StepShape, expected: str | None) -> None:
    assert code(scope().judge(shape)) == expected


@pytest.mark.parametrize(("changes", "rows", "expected"), [
    ({"graph_rows": 0}, 1, "no_graph"),
    ({"graph_rows": 16}, 16, None),
    ({"graph_rows": 16}, 17, "no_graph"),
    ({"entry_rows": 8}, 8, None),
    ({"entry_rows": 8}, 9, "no_rows"),
    ({"entry_rows": 0}, 1, "no_tp"),
    ({"entry_rows": 0, "bundle": ""}, 1, "no_tp"),
    ({"ssm_dtype": "bfloat16"}, 1, "ssm_dtype"),
    ({"kv_dtype": "float16"}, 1, "kv_dtype"),
    ({"kv_dtype": "float8_e4m3fn"}, 1, None),
    ({"sms": 78}, 1, "sms"),
])  # fmt: skip
def test_a_session_decides_over_its_steps(changes: dict[str, Any], rows: int, expected: str | None) -> None:
    assert code(scope(**changes).judge(StepShape((0,) * rows))) == expected


@pytest.mark.parametrize(("rank", "changes", "expected", "words"), [
    (2, {"domain": "b"}, "nvlink", "rank 2 is in NVLink domain 'b', rank 0 in 'a'"),
    (3, {"sms": 130}, "sms", "rank 3 has 130 SMs, its kernels are for 132"),
    (1, {"bundle": "34cd"}, "differ", "rank 1 has bundle '34cd', rank 0 has '12ab'"),
    (1, {"entry_rows": 8}, "differ", "rank 1 has entry_rows 8, rank 0 has 64"),
    (1, {"graph_rows": 8}, "differ", "rank 1 has graph_rows 8"),
    (3, {"kv_dtype": "float8_e4m3fn"}, "differ", "rank 3 has kv_dtype"),
    (2, {"ssm_dtype": "bfloat16"}, "ssm_dtype", "KDA states of bfloat16 on rank 2"),
    (0, {"kv_dtype": "int8"}, "kv_dtype", "an MLA cache of int8 on rank 0"),
])  # fmt: skip
def test_one_rank_that_differs_decides_for_all_and_is_named(
    rank: int, changes: dict[str, Any], expected: str, words: str
) -> None:
    def ask(comm: Collectives) -> Scope:
        mine = replace(RANK, **changes) if comm.rank == rank else RANK
        return agree(mine, comm)

    scopes = run_virtual_ranks(4, ask, timeout_s=30)
    assert all(one == scopes[0] for one in scopes)
    reason = scopes[0].judge(StepShape((0,)))
    assert reason
    assert (reason.code, words in reason.text) == (expected, True), reason.text
    assert reason.cure


def test_agreement_is_the_same_as_from_a_list_and_a_late_rank_is_named() -> None:
    whole = run_virtual_ranks(4, lambda comm: agree(replace(RANK, domain=f"é{'x' * 300}"), comm), timeout_s=30)
    assert whole[3] == group_scope([replace(RANK, domain=f"é{'x' * 300}")] * 4)
    assert agree(RANK, SingleRank()).session is None
    with pytest.raises(InputError, match="this rank is takes"):
        agree(replace(RANK, domain="x" * 2000), SingleRank())

    def absent(comm: Collectives) -> Scope | None:
        return agree(RANK, comm) if comm.rank != 2 else None

    with pytest.raises(CollectiveError, match="rank 2"):
        run_virtual_ranks(4, absent, timeout_s=3)
    with pytest.raises(InputError, match="one rank or more"):
        group_scope([])


def test_every_reason_is_reachable_with_a_text_and_a_cure() -> None:
    reached = {
        judged.code: judged
        for changes in ({}, {"ssm_dtype": "x"}, {"kv_dtype": "x"}, {"sms": 1}, {"entry_rows": 0}, {"entry_rows": 4}, {"graph_rows": 0})
        for shape in (StepShape((0,) * 5), StepShape((0,) * 70), StepShape((9,)), StepShape((1, 2)), StepShape((1,), 1), StepShape((), 1))
        if (judged := scope(**changes).judge(shape))
    }  # fmt: skip
    assert set(reached) == set(REASONS) - {"differ", "nvlink"}
    assert all(len(one.text) > 3 and len(one.cure) > 10 and "\n" not in one.text + one.cure for one in reached.values())
    for one in (reached["no_tp"], reached["no_rows"]):
        for line in one.cure.split(" && "):
            words = shlex.split(line)
            assert words[0] == "k3lab" and words[1] in COMMANDS


@pytest.mark.parametrize("shape", [StepShape(), StepShape((-1,)), StepShape((0,), -1)])
def test_a_step_that_is_none_is_refused(shape: StepShape) -> None:
    with pytest.raises(InputError, match="is none"):
        scope().judge(shape)


def test_counts_are_kept_and_the_first_is_told() -> None:
    said: list[str] = []
    tally, own = Tally(said.append), scope()
    for shape, count in ((StepShape((0,)), 6), (StepShape((), 9), 1), (StepShape((), 7), 1), (StepShape((1, 2)), 4)):
        tally.note(own.judge(shape), count)
    assert len(said) == 2
    assert said[0].startswith("backend auto runs this step: prefill; cure: ")
    data = tally.to_json()
    assert (data["steps"], data["served"], data["share"]) == (12, 6, 0.5)
    assert [(one["code"], one["count"]) for one in data["fallbacks"]] == [("ragged", 4), ("prefill", 2)]
    assert data["fallbacks"][0]["share"] == pytest.approx(1 / 3)
    assert Tally().to_json()["share"] == 0.0


def test_rows_of_a_bundle_are_those_of_its_accepted_entries(write_bundle: Callable[..., Path]) -> None:
    path = write_bundle(K3, tp=16, rows=8)
    accepted, strict = Bundle.load(path, accept_predicted=True), Bundle.load(path)
    assert entry_rows(K3, accepted, tp=16, gpu="GB300") == 8
    assert entry_rows(K3, accepted, tp=8, gpu="GB300") == 0
    assert entry_rows(K3, accepted, tp=16, gpu="H200") == 0
    assert entry_rows(K3, strict, tp=16, gpu="GB300") == 0
    assert entry_rows(K3, None, tp=16, gpu="GB300") == 0


def fabric(state: int, uuid: bytes, clique: int, asked: list[str]) -> types.ModuleType:
    """A driver's library whose GPU is in that fabric."""
    import ctypes

    class Info(ctypes.Structure):
        _fields_ = (
            ("clusterUuid", ctypes.c_ubyte * 16), ("status", ctypes.c_uint), ("cliqueId", ctypes.c_uint), ("state", ctypes.c_uint),
        )  # fmt: skip

    def fill(handle: str, pointer: Any) -> None:
        asked.append(handle)
        own = pointer._obj
        own.clusterUuid, own.cliqueId, own.state = (ctypes.c_ubyte * 16)(*uuid), clique, state

    made: Any = types.ModuleType("pynvml")
    made.nvmlInit = lambda: None
    made.nvmlDeviceGetHandleByUUID = lambda name: name
    made.c_nvmlGpuFabricInfo_t, made.nvmlDeviceGetGpuFabricInfo = Info, fill
    made.NVML_GPU_FABRIC_STATE_COMPLETED = 3
    return made


def test_the_nvlink_domain_is_the_fabric_or_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host = f"host {socket.gethostname()}"
    assert nvlink_domain() == host  # no GPU
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=f"abc-{index}"))
    for state, uuid, want in (
        (3, bytes(range(16)), f"fabric {bytes(range(16)).hex()} clique 7"), (2, bytes(range(16)), host), (3, bytes(16), host),
    ):  # fmt: skip
        asked: list[str] = []
        monkeypatch.setitem(sys.modules, "pynvml", fabric(state, uuid, 7, asked))
        assert nvlink_domain(1) == want
        assert asked == ["GPU-abc-1"]


def test_a_rank_says_what_is_here(write_bundle: Callable[..., Path]) -> None:
    chip = gpu_card("GB300")
    device = Device(0, "NVIDIA GB300", "sm_103a", chip.sms, 1, 1, "1", chip)
    path = write_bundle(K3, tp=16, rows=8)
    bundle = Bundle.load(path, accept_predicted=True)
    got = here(K3, device, bundle, tp=16)
    assert (got.gpu, got.sms, got.tuned_sms, got.entry_rows, got.tp) == ("GB300", chip.sms, chip.sms, 8, 16)
    assert got.domain.startswith("host ")
    assert code(group_scope([got] * 16).judge(StepShape((7,)))) is None
    part = here(K3, replace(device, sms=chip.sms - 20, card=chip), bundle, tp=16)
    assert code(group_scope([part]).judge(StepShape((7,)))) == "sms"
    unknown = here(K3, replace(device, card=None), bundle, tp=16)
    assert code(group_scope([unknown]).judge(StepShape((7,)))) == "no_tp"
    # the digest is of what a bundle holds, not of where it lies or what is accepted
    elsewhere = path.rename(path.parent / "other")
    assert digest(Bundle.load(elsewhere)) == got.bundle != digest(None)
    assert digest(Bundle.load(write_bundle(K3, tp=16, rows=4))) != got.bundle


# -- workloads ---------------------------------------------------------------------------------------
WORKLOAD = """
{"count": 900, "requests": 1, "drafts": 7}
{"count": 50, "requests": 2, "drafts": 7}

{"prefill": 4096, "count": 30}
{"drafts": [7, 3], "count": 15}
{"drafts": 3, "prefill": 512, "requests": 2, "count": 5}
"""


def test_a_workload_is_told_by_shares(
    tmp_path: Path, write_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path, bundle = tmp_path / "steps.jsonl", write_bundle(K3, tp=16, rows=8)
    path.write_text(WORKLOAD)
    asked = ["decode", "scope", "--workload", str(path), "--tp", "16"]
    assert command([*asked, "--bundle", str(bundle), "--accept", "predicted", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["steps"], data["served"], data["entry_rows"]) == (1000, 900, 8)
    assert [(one["code"], one["count"]) for one in data["fallbacks"]] == [
        ("no_rows", 50), ("prefill", 30), ("ragged", 15), ("mixed", 5),
    ]  # fmt: skip
    assert command([*asked, "--bundle", str(bundle), "--accept", "predicted"]) == 0
    text = capsys.readouterr().out
    assert "latency_specialized serves 900 of 1000 steps (90.0%)" in text
    assert "  50 steps (5.0%): the bundle's entries at TP 16 serve at most 8 rows\n" in text
    for options, first in (
        ([], "no_tp"), (["--bundle", str(bundle), "--accept", "predicted", "--sms", "100"], "sms"),
        (["--nvlink-ranks", "8"], "nvlink"), (["--ssm-dtype", "bfloat16"], "ssm_dtype"), (["--kv-dtype", "int8"], "kv_dtype"),
    ):  # fmt: skip
        assert command([*asked, *options, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["served"], [one["code"] for one in data["fallbacks"]]) == (0, [first]), options


@pytest.mark.parametrize(("text", "words"), [
    ("", "has no steps"),
    ("nonsense", "line 1 is not JSON"),
    ("\n[1]", "line 2 is no object"),
    ('{"rows": 3}', "line 1 has a field 'rows'"),
    ('{"count": 0}', "line 1: count is 0, must be a whole number from 1 on"),
    ('{"count": true}', "count is True"),
    ('{"drafts": -1}', "drafts is -1"),
    ('{"drafts": [1, "a"]}', "drafts \\[1, 'a'\\] are not all whole numbers"),
    ('{"drafts": [1], "requests": 2}', "2 requests, but drafts of 1"),
    ('{"requests": 0}', "a step in which nothing runs"),
    ('{"requests": 1000000}', "1000000 requests in one step"),
    ('{"prefill": 1e30}', "prefill is 1e\\+30"),
])  # fmt: skip
def test_a_workload_that_is_none_is_refused_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        judge_workload(path, scope())
    with pytest.raises(InputError, match="cannot read"):
        judge_workload(tmp_path, scope())


# -- steps on either path ----------------------------------------------------------------------------
