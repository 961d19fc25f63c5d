"""`decode run` with drafts: what it tells, what it loads, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.cli.main import run as command
from k3lab.decode.checkpoint.write import write_shards
from k3lab.decode.demo import demo_card
from k3lab.decode.dspark.card import K3_DSPARK, SMALL_DSPARK, draft_tensors
from k3lab.decode.dspark.weights import random_draft_tensors
from k3lab.decode.run import RunOptions, run
from k3lab.decode.speculate_run import fitted_card
from k3lab.kernels import K3, InputError, ModelCard

PROMPTS = [[17, 400, 3, 17, 99], [256, 8, 8], [511, 0, 44, 301, 12, 77, 5]]
SEEDS = [11, 22, 33]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


def test_a_run_with_drafts_tells_who_accepts_them(
    no_gpu: None, tiny: ModelCard, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(tiny, RunOptions(tp=2, rows=2, tokens=5, drafts=3, acceptance_length=2.5, prompt=3))
    assert any(line.startswith("SYNTHETIC acceptance of mean length 2.5") for line in report.head)
    assert report.speculation
    assert report.speculation["acceptance"].startswith("SYNTHETIC")
    assert [len(tokens) for tokens in report.tokens] == [5, 5]
    assert len(report.step_ns) == len(report.speculation["accepted"][0])
    assert report.speculation["drafter"] == "small-dspark"
    assert report.graph_step_ns is None
    assert report.to_json()["speculation"] == report.speculation
    wanted = [
        "decode",
        "run",
        "--rows",
        "1",
        "--tokens",
        "3",
        "--drafts",
        "2",
        "--fill-context",
        "9",
        "--temperature",
        "0.5",
    ]
    assert command(wanted) == 0
    text = capsys.readouterr().out
    assert (
        "standard acceptance, sampled at temperature 0.5; 2 drafts a step by drafter small-dspark (random weights)"
        in text
    )
    assert "note: a context of 9 tokens is made up" in text
    assert run(tiny, RunOptions(tokens=1, drafts=2)).step_ns == []  # the prompt's own token is all


def test_a_run_loads_its_drafter(no_gpu: None, tiny: ModelCard, tmp_path: Path) -> None:
    whole = random_draft_tensors(SMALL_DSPARK, seed=0, dtype=torch.bfloat16)
    write_shards(tmp_path, [(one.name, whole[one.spec]) for one in draft_tensors(SMALL_DSPARK)])
    options = RunOptions(rows=2, tokens=6, drafts=3, acceptance_length=4)
    loaded = run(tiny, replace(options, draft_checkpoint=tmp_path))
    assert loaded.tokens == run(tiny, options).tokens  # the random drafter of seed 0 is the one that was written
    assert loaded.speculation
    assert loaded.speculation["drafter_weights"] == str(tmp_path)


@pytest.mark.parametrize(("options", "words"), [
    ({"drafts": 8}, "drafts is 8; a step verifies 1 to 7"),
    ({"drafts": -1}, "drafts is -1"),
    ({"drafts": 7, "rows": 9}, "9 requests with 7 drafts are 72 rows"),
    ({"acceptance_length": 3.0}, "speak of drafts; give --drafts"),
    ({"temperature": 0.5}, "speak of drafts"),
    ({"drafts": 3, "acceptance_length": 5.0}, "a synthetic acceptance length of 5 with 3 drafts"),
    ({"drafts": 3, "temperature": -0.5}, "temperature is -0.5"),
])  # fmt: skip
def test_runs_with_drafts_that_cannot_be(options: dict[str, Any], words: str, no_gpu: None, tiny: ModelCard) -> None:
    with pytest.raises(InputError, match=words):
        run(tiny, RunOptions(**options))


@pytest.mark.parametrize(("options", "words"), [
    ({"draft_checkpoint": Path("/no/folder")}, "/no/folder is not a directory"),
    ({"rank": 1, "tp": 2}, "drafts need the whole group"),
])  # fmt: skip
def test_a_drafter_that_cannot_be_is_told_before_weights_are_made(
    options: dict[str, Any], words: str, no_gpu: None, tiny: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr("k3lab.decode.run.run_cpu", made)
    with pytest.raises(InputError, match=words):
        run(tiny, RunOptions(drafts=2, **options))


def test_models_without_a_published_drafter_get_one_that_fits(tiny: ModelCard) -> None:
    assert fitted_card(K3) is K3_DSPARK
    assert fitted_card(tiny) is SMALL_DSPARK
    demo = demo_card()
    card = fitted_card(demo)
    card.check(demo, 16)
    assert card.target_layer_ids == (0, 1, 2, 3, 4)
    assert card.mask_token_id < demo.vocab_size
    with pytest.raises(InputError, match="no drafter for hidden size 512"):
        fitted_card(replace(tiny, hidden_size=512))
