"""Steps over processes and threads: the same bits however ranks come, a rank that dies is named, torchrun's ranks agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3lab.cli.main import run as command
from k3lab.decode.context_parallel import context_group
from k3lab.decode.delays import Delayed
from k3lab.decode.group import join, of_rank
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.run import RunOptions, run
from k3lab.kernels import InputError, ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, StandIn, run_virtual_ranks

from .decode_ranks import CARD, LIMIT_S, logits

HERE = Path(__file__).parent
RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    return logits(SingleRank(), ReferenceOperators(CARD))


def forked(size: int, scenario: str, folder: Path) -> list[dict]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "decode_ranks.py"), str(size), scenario, str(folder)],
        env=environment, timeout=180, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 or scenario == "killed", done.stderr
    return [torch.load(path) for path in sorted(folder.glob("*.pt"))]


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_of_processes_computes_what_one_rank_does(size: int, alone: torch.Tensor, tmp_path: Path) -> None:
    found = forked(size, "plain", tmp_path)
    assert len(found) == size
    for one in found:
        for contexts in ("logits", "shared"):
            assert torch.equal(one[contexts], found[0][contexts])
            assert ((one[contexts] - alone).norm() / alone.norm()).item() < 1e-10


def test_eight_ranks_compute_what_one_does_with_contexts_whole_and_shared(alone: torch.Tensor) -> None:
    def ranks(comm: Collectives, dcp: int) -> torch.Tensor:
        operators = ReferenceOperators(CARD, context_group=context_group(comm, dcp))
        return logits(comm, operators, dcp, steps=1, chunk=7)

    for dcp in (1, 8):
        made = run_virtual_ranks(8, lambda comm, dcp=dcp: ranks(comm, dcp))
        want = alone[: len(made[0])]
        assert all(torch.equal(one, made[0]) for one in made)
        assert ((made[0] - want).norm() / want.norm()).item() < 1e-10


def test_late_ranks_change_no_bit(tmp_path: Path) -> None:
    on_time = run_virtual_ranks(2, lambda comm: logits(comm, ReferenceOperators(CARD)))
    for one in forked(2, "late", tmp_path):
        assert torch.equal(one["logits"], on_time[0])


def test_random_delays_change_no_bit() -> None:
    on_time = run_virtual_ranks(2, lambda comm: logits(comm, ReferenceOperators(CARD)))
    for seed in range(3):
        late = run_virtual_ranks(
            2,
            lambda comm, seed=seed: logits(
                comm, Delayed(ReferenceOperators(CARD), f"{seed}/{comm.rank}", most_us=1000)
            ),
        )
        assert all(torch.equal(one, on_time[0]) for one in late)


def test_a_delay_hook_pauses_some_operators_and_leaves_the_rest() -> None:
    slept: list[int] = []
    late = Delayed(ReferenceOperators(CARD), 1, share=1.0)
    late._pause = lambda us, _args: slept.append(us)  # type: ignore[method-assign]
    assert late.name == "reference"
    late.check()
    assert not slept
    late.lm_head(torch.ones(1, 4), torch.ones(2, 4), SingleRank())
    assert len(slept) == 1
    assert 1 <= slept[0] <= 200


def test_a_killed_rank_ends_every_rank_with_its_name(tmp_path: Path) -> None:
    found = forked(4, "killed", tmp_path)
    assert len(found) == 3  # the dead one wrote nothing
    for one in found:
        assert "rank 1 did not" in one["error"]
        assert one["seconds"] < 60 + 4 * LIMIT_S


def test_ranks_under_torchrun_decode_what_threads_do(tmp_path: Path) -> None:
    want = run(CARD, RunOptions(tp=2, rows=2, tokens=3, prompt=3))
    script = tmp_path / "rank.py"
    script.write_text(
        "import json, sys\n"
        f"sys.path.insert(0, {str(HERE.parents[1])!r})\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from decode_ranks import CARD\n"
        "from k3lab.decode.run import RunOptions, run\n"
        "made = run(CARD, RunOptions(tp=2, rows=2, tokens=3, prompt=3))\n"
        f"open({str(tmp_path)!r} + f'/{{made.rank}}.json', 'w').write(json.dumps(made.to_json()))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "K3LAB_NO_GPU": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env=environment, timeout=180, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["tokens"] for one in both] == [want.tokens] * 2
    assert [one["ranks"] for one in both] == ["2 processes over gloo"] * 2
    assert [one["rank"] for one in both] == [0, 1]


def test_one_rank_alone_says_that_no_link_is_in_its_times(tiny: ModelCard, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(tiny, RunOptions(tp=4, rank=2, rows=2, tokens=4, transport="loopback"))
    assert any(line.startswith("rank 2 of 4 alone") and "no link cost" in line for line in report.head)
    # only its own part of the vocabulary has an embedding here
    assert {token // 128 for tokens in report.tokens for token in tokens} == {2}
    asked = ["decode", "run", "--rank", "1", "--of", "4", "--transport", "loopback", "--tokens", "1", "--json"]
    assert command(asked) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["tp"], data["rank"]) == (4, 1)
    assert "no link cost" in data["ranks"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rank", "4", "--of", "4"], "rank 4 lies outside 0..3"),
        (["--of", "4"], "--of speaks of one rank alone"),
        (["--rank", "0", "--of", "4", "--tp", "2"], "give one of them"),
        (["--transport", "symmetric"], "start them with torchrun --nproc-per-node 1"),
        (["--transport", "smoke"], "unknown transport 'smoke'"),
        (["--tp", "2", "--transport", "loopback"], "say which one with --rank"),
        (["--rank", "0"], "give the group's size with --of"),
        (["--rank", "0", "--of", "0"], "TP 0"),
        (["--rank", "1", "--of", "2", "--drafts", "2"], "drafts need the whole group"),
    ],
)
def test_a_group_that_cannot_be_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["decode", "run", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert line in shown.err
    assert len(shown.err.strip().splitlines()) == 1


def test_torchrun_and_options_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="torchrun started 2 ranks, the run has TP 4"):
        join(4, None)
    with pytest.raises(InputError, match="torchrun starts all of them"):
        join(2, None, rank=0)
    with pytest.raises(InputError, match="loopback is for one rank alone"):
        join(2, None, transport="loopback")
    assert of_rank(Path("out/steps.json.gz")) == Path("out/steps.rank1.json.gz")
    assert of_rank(None) is None
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert of_rank(Path("steps.json")) == Path("steps.json")
    assert join(2, None) is None  # threads of this process
    lone = join(2, None, rank=1)
    assert lone is not None
    assert lone.comm == StandIn(1, 2)
    assert lone.alone
    assert lone.together("x", lambda: 7) == 7
