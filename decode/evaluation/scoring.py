"""The score of an answer, 0 to 1, by the rule of each form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from .problems import LETTERS, Problem

BOX = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{\s*)?([^{}]*)\}")
NUMBER = re.compile(r"(?<![\d.,])\d+(?![\d.,]*\d)")
SAID = re.compile(r"answer\s*(?:is)?\s*[:=]?\s*\**\(?\s*([ABCD])\b", re.IGNORECASE)


def aime(text: str, answer: int) -> float:
    """1 where the last boxed number is the answer; without a box, the last whole number."""
    boxes = BOX.findall(text)
    found = [boxes[-1].strip().replace(",", "")] if boxes else NUMBER.findall(text)[-1:]
    return float(bool(found) and found[0].isascii() and found[0].isdigit() and int(found[0]) == answer)


def gpqa(text: str, letter: str) -> float:
    """1 where the letter that was said last, boxed or after 'answer', is the right one."""
    boxes = [box.strip() for box in BOX.findall(text) if box.strip() in set(LETTERS)]
    said = [match.upper() for match in SAID.findall(text)]
    found = (said or boxes)[-1:]
    return float(found == [letter])


def mrcr(text: str, answer: str, prefix: str) -> float:
    """Likeness of the answers behind the random string, 0 where the text does not begin with it.

    Source of the rule: the description of the public MRCR set (ratio of difflib's SequenceMatcher).
    """
    if not text.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, text.removeprefix(prefix), answer.removeprefix(prefix), autojunk=True).ratio()


def tokens(got: Sequence[int], answer: Sequence[int]) -> float:
    """1 where the output begins with the answer."""
    return float(list(got[: len(answer)]) == list(answer))


def score(problem: Problem, seed: int, ids: Sequence[int], text: str | None) -> float:
    """The score of an output.

    Args:
        problem: what was asked.
        seed: that ordered its choices.
        ids: tokens put out, without the one that ended it.
        text: they as text; None for token ids.
    """
    if problem.form == "tokens":
        return tokens(ids, problem.fields["answer_ids"])
    assert text is not None
    if problem.form == "aime":
        return aime(text, problem.fields["answer"])
    if problem.form == "gpqa":
        return gpqa(text, LETTERS[problem.choices(seed).index(problem.fields["correct"])])
    return mrcr(text, problem.fields["answer"], problem.fields["random_string_to_prepend"])
