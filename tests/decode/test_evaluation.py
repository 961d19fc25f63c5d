"""Both backends on one problem file: a sound one is no worse, a fault is found, and nothing that ended is run again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.checkpoint.write import write_checkpoint
from k3lab.decode.evaluation.evaluate import EvalOptions, Record, cases, evaluate
from k3lab.decode.evaluation.generate import generate
from k3lab.decode.evaluation.outputs import Asked
from k3lab.decode.evaluation.places import places, weights_digest
from k3lab.decode.evaluation.problems import ProblemFile, read_problems
from k3lab.decode.group import Group
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.random_weights import random_tensors
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.weights import RankWeights
from k3lab.kernels import InputError, ModelCard
from k3lab.kernels.bundle.reader import Bundle
from k3lab.kernels.collectives import Collectives, SingleRank, run_virtual_ranks

from .evaluation_case import ANSWER, ROWS, Faulty, backends, dispatcher, prompts, weights_of, write_problems

COUNT = 14
ALONE = Group(0, 1, SingleRank(), "one rank", None)


@pytest.fixture(scope="module")
def weights(tiny_tensors: ModelTensors, tiny: ModelCard) -> RankWeights:
    return weights_of(tiny_tensors, tiny)


@pytest.fixture(scope="module")
def file(weights: RankWeights, tmp_path_factory: pytest.TempPathFactory) -> ProblemFile:
    path = tmp_path_factory.mktemp("problems") / "made.jsonl"
    return read_problems(write_problems(path, prompts(COUNT, weights.card.vocab_size), weights))


OPTIONS = EvalOptions(tokens=ANSWER, rows=ROWS, margin=0.3)


def test_a_sound_backend_loses_nothing(weights: RankWeights, file: ProblemFile) -> None:
    report = evaluate(file, OPTIONS, backends(weights))
    told = report["scores"]["tokens"]
    assert report["ok"] and told["verdict"] == "no loss" and told["problems"] == COUNT
    assert told["second"] == 1.0 and told["first"] > 0.9  # FP64: the two differ in the last digits
    assert report["outputs"]["auto"] == {"mean_tokens": ANSWER, "ended_by_length": COUNT}
    assert report["drift"]["verdict"] == "inconclusive"  # outputs too short for two windows


def test_a_fault_in_one_backend_is_found(weights: RankWeights, file: ProblemFile) -> None:
    report = evaluate(file, OPTIONS, backends(weights, Faulty))
    told = report["scores"]["tokens"]
    assert not report["ok"] and told["verdict"] == "worse" and told["interval"][1] < 0


def test_what_is_kept_is_of_one_bundle_whatever_lies_at_its_path_later(
    tiny: ModelCard, write_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")
    told = []
    for rows in (4, 8):  # another one at the same path
        path = write_bundle(tiny, tp=1, rows=rows)
        here = places(
            tiny, ALONE, checkpoint=None, bundle=Bundle.load(path, True), gpu="GB300", rows=1, seed=0, context=8
        )
        assert here.bundle and here.bundle["evidence"] == {"predicted": 2}
        assert here.conditions["bundle"] == f"{here.bundle['digest']} {path}"
        told.append(here.conditions["bundle"])
        shutil.rmtree(path)
    assert told[0] != told[1]


def test_other_weights_of_the_same_names_and_sizes_have_another_digest(tiny: ModelCard, tmp_path: Path) -> None:
    told = []
    for seed in (1, 2, 1):
        folder = tmp_path / str(len(told))
        write_checkpoint(folder, tiny, random_tensors(tiny, seed=seed, dtype=torch.bfloat16), shard_bytes=2**21)
        told.append(weights_digest(folder, 0))
    assert told[0] == told[2] != told[1] and len(told[0]) == 16
    last = max((tmp_path / "2").glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1] + b"\x55")
    assert weights_digest(tmp_path / "2", 0) != told[2]


def test_an_output_depends_on_its_prompt_and_seed_alone(weights: RankWeights) -> None:
    asked = [Asked(tuple(ids), seed) for seed, ids in enumerate(prompts(6, weights.card.vocab_size))]
    together = dict(
        generate(dispatcher(weights, ReferenceOperators(weights.card), 16), asked, rows=4, most=5, temperature=1.0)
    )
    alone = dict(
        generate(dispatcher(weights, ReferenceOperators(weights.card), 16, 1), asked, rows=1, most=5, temperature=1.0)
    )
    assert {n: one.tokens for n, one in together.items()} == {n: one.tokens for n, one in alone.items()}
    torch.testing.assert_close(torch.tensor([one.logprobs for one in map(together.get, range(6))]),
                               torch.tensor([one.logprobs for one in map(alone.get, range(6))]))  # fmt: skip
    assert len({tuple(one.tokens) for one in together.values()}) == 6
    again = dict(generate(dispatcher(weights, ReferenceOperators(weights.card), 16), [Asked(asked[0].ids, 99)], rows=4, most=5, temperature=1.0))  # fmt: skip
    assert again[0].tokens != together[0].tokens


def test_a_stop_token_ends_an_output(weights: RankWeights) -> None:
    asked = [Asked(tuple(ids), 0) for ids in prompts(3, weights.card.vocab_size)]
    free = dict(generate(dispatcher(weights, ReferenceOperators(weights.card), 16), asked, rows=4, most=5))
    stop = free[1].tokens[2]
    held = dict(
        generate(dispatcher(weights, ReferenceOperators(weights.card), 16), asked, rows=4, most=5, stops={stop})
    )
    end = free[1].tokens.index(stop) + 1
    assert held[1].stopped and held[1].tokens == free[1].tokens[:end]
    for n, one in held.items():
        assert one.stopped == (stop in free[n].tokens)


def test_what_ended_before_an_interruption_is_not_run_again(
    weights: RankWeights, file: ProblemFile, tmp_path: Path
) -> None:
    path, settings = tmp_path / "eval.jsonl", {"problems": file.digest, "seed": 0}
    seen = []

    def say(what: str, done: int, of: int) -> None:
        seen.append((what, done))
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(file, OPTIONS, backends(weights), record=Record(path, settings), say=say)
    kept = Record(path, settings).outputs
    assert len(kept) == 5
    with path.open("a") as torn:
        torn.write('\n{"backend": "auto", "pro')
    seen = [(what, done) for what, done in seen[:-1]]
    report = evaluate(
        file, OPTIONS, backends(weights), record=Record(path, settings), say=lambda *told: seen.append(told)
    )
    whole = evaluate(file, OPTIONS, backends(weights))
    assert report["scores"] == whole["scores"] and report["drift"] == whole["drift"]
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:] if line and not line.endswith('"pro')]
    assert len(lines) == 2 * COUNT == len({(one["backend"], one["problem"]) for one in lines})
    with pytest.raises(InputError, match="of another evaluation: its seed is 0, now 1"):
        Record(path, {**settings, "seed": 1})


def of_a_group(comm: Collectives, tensors: ModelTensors, card: ModelCard, second: type = ReferenceOperators) -> Any:
    """Backends of a rank, and how many dispatchers were made."""
    weights = pack(shard(tensors, card, tp=comm.size, rank=comm.rank), card, tp=comm.size, rank=comm.rank)
    made: list[str] = []

    def make(name: str, operators: Any) -> Any:
        made.append(name)
        return dispatcher(weights, operators, 16, comm=comm)

    own = AutoOperators(card, dtype=weights.dtype, device="cpu")
    return {
        "auto": lambda: make("auto", own),
        "latency_specialized": lambda: make("latency_specialized", second(card)),
    }, made


def test_a_group_answers_as_one_rank_and_goes_on_from_what_rank_0_kept(
    tiny: ModelCard, tiny_tensors: ModelTensors, weights: RankWeights, file: ProblemFile, tmp_path: Path
) -> None:
    few = ProblemFile(file.path, file.digest, file.problems[:10])
    options = EvalOptions(tokens=2, rows=ROWS, margin=0.3)
    alone = evaluate(few, options, backends(weights))
    path, settings = tmp_path / "eval.jsonl", {"tokens": 2}

    def ranks(comm: Collectives) -> Any:
        own, made = of_a_group(comm, tiny_tensors, tiny)
        record = Record(path, settings) if comm.rank == 0 else None
        return evaluate(few, options, own, record=record, host=comm), made

    (first, made), (other, others) = run_virtual_ranks(2, ranks)
    assert first["scores"] == alone["scores"] and first["drift"] == alone["drift"] and other == {}
    assert made == others == ["auto", "latency_specialized"]
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join(lines[:-1])
    )  # the last output was not kept: rank 1, which keeps nothing, is told what was
    (again, made), (_, others) = run_virtual_ranks(2, ranks)
    assert made == others == ["latency_specialized"]
    assert again["scores"] == first["scores"] and again["outputs_of_earlier_runs"] == 2 * 10 - 1


def test_ranks_that_were_asked_otherwise_or_answer_otherwise_end(
    tiny: ModelCard, tiny_tensors: ModelTensors, file: ProblemFile
) -> None:
    few = ProblemFile(file.path, file.digest, file.problems[:2])

    def ranks(comm: Collectives, tokens: tuple[int, int], second: tuple[type, type]) -> None:
        own, _ = of_a_group(comm, tiny_tensors, tiny, second[comm.rank])
        evaluate(few, EvalOptions(tokens=tokens[comm.rank], rows=2), own, host=comm)

    class Astray(ReferenceOperators):
        """Its logits are those of another token."""

        def lm_head(self, *given: Any) -> torch.Tensor:
            return super().lm_head(*given).roll(1, dims=-1)

    same = (ReferenceOperators, ReferenceOperators)
    with pytest.raises(InputError, match="ranks have other problems or options"):
        run_virtual_ranks(2, lambda comm: ranks(comm, (2, 3), same))
    with pytest.raises(RuntimeError, match="some put out other tokens than rank 0 with latency_specialized"):
        run_virtual_ranks(2, lambda comm: ranks(comm, (2, 2), (ReferenceOperators, Astray)))


def test_a_kernel_that_gave_up_has_put_out_no_answer(weights: RankWeights) -> None:
    class Late(ReferenceOperators):
        def check(self) -> None:
            raise RuntimeError("rank 3 did not come")

    made = dispatcher(weights, Late(weights.card), 16)
    with pytest.raises(RuntimeError, match="rank 3 did not come"):
        list(generate(made, [Asked((1, 2), 0)], rows=1, most=3))


@pytest.mark.parametrize("text", ["", "[1]\n", "{}\n", "none\n"])
def test_a_file_that_is_no_record_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    if not text:
        Record(path, {})
        return
    with pytest.raises(InputError):
        Record(path, {})
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 0}, "tokens 0"),
        ({"repeats": 3}, "repeats at temperature 0"),
        ({"margin": 1.0}, "margin is 1.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"rows": 65}, "rows 65"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_options_are_one_line(change: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        EvalOptions(**change).check()  # type: ignore[arg-type]


def test_every_repeat_has_a_seed_of_its_own(file: ProblemFile) -> None:
    made = cases(file.problems, EvalOptions(repeats=3, temperature=1.0))
    assert len({one.seed for one in made}) == 3 * COUNT
    assert cases(file.problems, EvalOptions(repeats=3, temperature=1.0)) == made


def test_a_prompt_that_has_no_room_is_refused(weights: RankWeights) -> None:
    with pytest.raises(InputError, match="prompt 1 has 20 tokens"):
        list(generate(dispatcher(weights, ReferenceOperators(weights.card), 16), [Asked((1,), 0), Asked((1,) * 20, 0)], rows=2, most=4))  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": "abc", "logprobs": [-1.0] * 3},
        {"tokens": [], "logprobs": []},
        {"tokens": [1, -5]},
        {"logprobs": []},
        {"logprobs": [float("nan"), -1.0]},
        {"logprobs": [1.0, 1.0]},
        {"tokens": [1] * 50, "logprobs": [-1.0] * 50},
        {"stopped": "maybe"},
        {"repeat": [1]},
        {"backend": "stock"},
        None,
    ],
)
def test_a_kept_output_that_can_be_none_is_named(change: dict[str, object] | None, tmp_path: Path) -> None:
    path, settings = tmp_path / "eval.jsonl", {"tokens": 6}
    Record(path, settings)
    good = {
        "backend": "auto",
        "problem": "a",
        "repeat": 0,
        "tokens": [1, 2],
        "logprobs": [-1.0, -0.5],
        "stopped": False,
    }
    with path.open("a") as file:
        file.write("\n" + json.dumps(good) + "\n" + json.dumps({**good, **change} if change is not None else None))
    with pytest.raises(InputError, match="line 4 is no output of this evaluation"):
        Record(path, settings)
