"""``--dcp`` of the decode commands: contexts over all ranks, told in every report; anything between one and all is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from k3lab.cli.main import run
from k3lab.decode.run_options import RunOptions


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


@pytest.mark.parametrize(
    ("words", "dcp", "ways"),
    [
        (["run", "--model", "small", "--tp", "4"], "2", "at TP 4 decode context parallelism is 1, or 4: all ranks"),
        (["run", "--model", "small", "--rank", "1", "--of", "2"], "0", "at TP 2 decode context parallelism is 1, or 2"),
        (["run", "--model", "small", "--rank", "3", "--of", "4"], "4", None),
        (["bench", "--model", "small", "--rank", "3", "--of", "4", "--prompt", "3"], "4", None),
        (["bars", "--rank", "3", "--of", "4", "--context", "3"], "4", None),
        (["bench", "--workload", "SESSIONS", "--rank", "3", "--of", "4"], "4", None),
        (["run", "--model", "small"], "2", "at TP 1 decode context parallelism is 1"),
        (["plan"], "8", "at TP 16 decode context parallelism is 1, or 16"),
        (["bench", "--tp", "2"], "-2", "at TP 2 decode context parallelism is 1, or 2"),
        (["bars"], "4", "at TP 16 decode context parallelism is 1, or 16"),
    ],
)  # fmt: skip
def test_contexts_lie_on_one_rank_or_on_all(
    words: list[str], dcp: str, ways: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = tmp_path / "sessions.jsonl"
    sessions.write_text('{"session": "a", "turns": [{"prompt": 3, "output": 3}, {"prompt": 9, "output": 2}]}\n')
    words = [str(sessions) if word == "SESSIONS" else word for word in words]
    assert run(["decode", *words, "--dcp", dcp]) == 2
    out, err = capsys.readouterr()
    assert (f"dcp is {dcp}; {ways}" if ways else "rank 3 alone holds no token of a context of") in err
    assert len(err.splitlines()) == 1
    assert not out


def told(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict:
    assert run(["decode", *words, "--json"]) == code
    data: dict = json.loads(capsys.readouterr().out)
    return data


@pytest.mark.parametrize("drafts", ["0", "2"])
def test_a_run_says_over_how_many_ranks_contexts_lie(drafts: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["run", "--model", "small", "--tp", "2", "--rows", "1", "--tokens", "3", "--prompt", "5", "--chunk", "3"]
    data = told([*small, "--drafts", drafts, "--dcp", "2"], capsys)
    assert (data["tp"], data["dcp"]) == (2, 2)
    assert "each context lies over all 2 ranks (decode context parallelism)" in data["head"]
    assert [len(tokens) for tokens in data["tokens"]] == [3]
    again = RunOptions(tp=2, dcp=2).again
    assert again[again.index("--dcp") + 1] == "2" and "--dcp" not in RunOptions(tp=2).again
    assert RunOptions(tp=2, dcp=2, tokens=9).held_context == 5


def test_a_plan_exchanges_queries_and_parts_and_its_cures_are_of_such_kernels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def mla(data: dict) -> list[str]:
        (layer,) = (one for one in data["layers"] if one["kind"] == "mla")
        return [one["kernel"] for one in layer["launches"] if one["family"] == "mla"]

    whole, shared = (told(["plan", "--dcp", dcp], capsys) for dcp in ("1", "16"))
    assert (whole["dcp"], shared["dcp"]) == (1, 16)
    exchanged = ["query_all_gather", "weights_all_gather", "share_multiply", "latent_reduce_scatter"]
    assert [name for name in mla(shared) if name not in mla(whole)] == exchanged
    assert [name for name in mla(shared) if name in mla(whole)] == mla(whole)
    tuned = told(["plan", "--dcp", "16", "--drafts", "3", "--backend", "latency_specialized"], capsys)
    (cure,) = (one["commands"] for one in tuned["fallbacks"] if one["family"] == "mla")
    assert "--kind bf16_verify4_dcp" in cure[0]
    assert "--drafts 3 --dcp 16" in cure[-1]


def test_reports_of_other_context_parallelism_share_no_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = ["bench", "--model", "small", "--tp", "2", "--tokens", "2", "--backend", "auto"]
    for dcp in ("1", "2"):
        (report,) = told([*bench, "--dcp", dcp, "--out", str(tmp_path / dcp)], capsys)["reports"].values()
        assert report["conditions"]["dcp"] == int(dcp)
    assert run(["decode", "compare", *(str(tmp_path / dcp / "auto.json") for dcp in ("1", "2"))]) == 1
    assert "dcp" in capsys.readouterr().out
