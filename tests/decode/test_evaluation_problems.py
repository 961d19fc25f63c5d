"""Problem files, their scores, and the text around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from k3lab.decode.evaluation import scoring
from k3lab.decode.evaluation.problems import LETTERS, Problem, read_problems
from k3lab.decode.evaluation.text import Text
from k3lab.kernels import InputError

AIME = {"id": "a", "problem": "What is 6 times 34?", "answer": "204"}
GPQA = {"id": "g", "question": "Which?", "correct": "this", "incorrect": ["that", "those", "these"]}
PUBLISHED = {
    "id": "h", "Question": "Which?", "Correct Answer": "x", "Incorrect Answer 1": "y", "Incorrect Answer 2": "z",
    "Incorrect Answer 3": "w",
}  # fmt: skip
MRCR = {
    "id": "m", "prompt": json.dumps([{"role": "user", "content": "the second poem, after ab12"}]), "answer": "ab12A poem",
    "random_string_to_prepend": "ab12",
}  # fmt: skip
TOKENS = {"prompt_ids": [1, 2], "answer_ids": [3]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def test_every_form_is_told_by_its_fields(tmp_path: Path) -> None:
    file = read_problems(write(tmp_path / "p.jsonl", AIME, "", GPQA, PUBLISHED, MRCR, TOKENS))
    assert [(one.name, one.form) for one in file.problems] == [
        ("a", "aime"), ("g", "gpqa"), ("h", "gpqa"), ("m", "mrcr"), ("6", "tokens"),
    ]  # fmt: skip
    assert file.forms == ("aime", "gpqa", "mrcr", "tokens") and len(file.digest) == 16
    assert file.problems[0].fields["answer"] == 204
    assert "34" in file.problems[0].messages(0)[0]["content"]
    assert file.problems[3].messages(0) == [{"role": "user", "content": "the second poem, after ab12"}]
    with pytest.raises(InputError, match="token ids"):
        file.problems[4].messages(0)


def test_choices_are_in_an_order_of_the_seed(tmp_path: Path) -> None:
    one = read_problems(write(tmp_path / "p.jsonl", GPQA)).problems[0]
    orders = {tuple(one.choices(seed)) for seed in range(60)}
    assert len(orders) > 12 and all(set(order) == {"this", "that", "those", "these"} for order in orders)
    places = {order.index("this") for order in orders}
    assert places == {0, 1, 2, 3}
    text = one.messages(7)[0]["content"]
    assert all(f"{letter}) {choice}" in text for letter, choice in zip(LETTERS, one.choices(7), strict=True))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 is not JSON"),
        ([1], "line 1 is no object"),
        ({"problem": "x"}, "line 1 is of no form"),
        ({**AIME, **TOKENS}, "line 1 is of several forms"),
        ({**AIME, "answer": 1000}, "whole number 0..999"),
        ({**AIME, "answer": -1}, "whole number 0..999"),
        ({**AIME, "answer": "\u0664"}, "whole number 0..999"),
        ({**AIME, "problem": " "}, "problem is no text"),
        ({**GPQA, "incorrect": ["a", "b"]}, "list of three texts"),
        ({**GPQA, "incorrect": ["this", "b", "c"]}, "two choices are the same"),
        ({**MRCR, "prompt": "hello"}, "prompt is no list of messages"),
        ({**MRCR, "prompt": [{"role": "user"}]}, "with role and content"),
        ({**TOKENS, "prompt_ids": []}, "prompt_ids is no list"),
        ({**TOKENS, "answer_ids": [True]}, "answer_ids is no list"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_problems(write(tmp_path / "p.jsonl", line))


def test_wrong_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no problems"):
        read_problems(write(tmp_path / "p.jsonl", ""))
    with pytest.raises(InputError, match="is there twice"):
        read_problems(write(tmp_path / "p.jsonl", AIME, {**TOKENS, "id": "a"}))
    with pytest.raises(InputError, match="cannot read"):
        read_problems(tmp_path)
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is no text"):
        read_problems(tmp_path / "b")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("so \\boxed{204}", 1.0),
        ("first \\boxed{100}, no: \\boxed{ 204 }", 1.0),
        ("\\boxed{204} then \\boxed{7}", 0.0),
        ("It is 204.", 1.0),
        ("204 of 1000", 0.0),
        ("about 3.204", 0.0),
        ("", 0.0),
        ("\\boxed{}", 0.0),
    ],
)
def test_a_number_is_the_last_that_was_boxed(text: str, score: float) -> None:
    assert scoring.aime(text, 204) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Answer: B", 1.0),
        ("The answer is (B).", 1.0),
        ("**Answer: B**", 1.0),
        ("Answer: A ... no. Answer: B", 1.0),
        ("Answer: B ... no. Answer: A", 0.0),
        ("\\boxed{B}", 1.0),
        ("\\boxed{\\text{B}}", 1.0),
        ("Because of that", 0.0),
        ("answer: Banana", 0.0),
    ],
)
def test_a_letter_is_the_last_that_was_said(text: str, score: float) -> None:
    assert scoring.gpqa(text, "B") == score


def test_a_recalled_text_must_begin_with_the_random_string() -> None:
    assert scoring.mrcr("ab12A poem", "ab12A poem", "ab12") == 1.0
    assert scoring.mrcr("A poem", "ab12A poem", "ab12") == 0.0
    assert 0.5 < scoring.mrcr("ab12A poet", "ab12A poem", "ab12") < 1.0
    assert scoring.tokens([3, 4, 9], [3, 4]) == 1.0 and scoring.tokens([3], [3, 4]) == 0.0


def test_scores_know_where_the_right_choice_stands() -> None:
    one = Problem("g", "gpqa", {name: GPQA[name] for name in ("question", "correct", "incorrect")})
    for seed in range(8):
        letter = LETTERS[one.choices(seed).index("this")]
        assert [scoring.score(one, seed, [], f"Answer: {other}") for other in LETTERS] == [
            float(other == letter) for other in LETTERS
        ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[UNK]", "<end>", "user", "assistant", ":", "Which", "B"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return tmp_path


def test_text_goes_through_the_models_template_and_ends_at_its_token(folder: Path) -> None:
    text = Text(folder)
    assert text.stops == {1}
    assert text.encode([{"role": "user", "content": "Which"}]) == (2, 4, 5, 3, 4)
    assert text.decode([5, 6, 1]) == "Which B"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert Text(folder).encode([{"role": "user", "content": "Which"}]) == (5,)
    assert Text(folder / "tokenizer.json", stops=["B"]).stops == {6}


def test_wrong_tokenizers_are_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no token of the tokenizer"):
        Text(folder, stops=["<eos>"])
    with pytest.raises(InputError, match="cannot read the tokenizer"):
        Text(tmp_path / "none.json")
    (folder / "bad.jinja").write_text("{% for %}")
    with pytest.raises(InputError, match="is no template"):
        Text(folder, folder / "bad.jinja")
    (folder / "evil.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InputError, match="fails"):
        Text(folder, folder / "evil.jinja").encode([])
