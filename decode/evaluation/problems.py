"""Problem files: JSON lines in the forms of AIME, GPQA and MRCR, and one of token ids for models without a tokenizer.

| form | fields of a line |
| --- | --- |
| ``aime`` | ``problem``, ``answer``: a whole number 0..999 |
| ``gpqa`` | ``question``, ``correct``, ``incorrect``: a list of three (or the published columns ``Question``, ``Correct Answer``, ``Incorrect Answer 1`` ..) |
| ``mrcr`` | ``prompt``: a list of messages or that list as JSON text, ``answer``, ``random_string_to_prepend`` |
| ``tokens`` | ``prompt_ids``, ``answer_ids``: lists of whole numbers |

Every line may have an ``id``; without one it is the line's number. The form is told by the fields.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels import InputError
from ..json_lines import read_json_lines

LETTERS = "ABCD"
BOXED = "Put the final answer, a whole number from 0 to 999, in \\boxed{}."
LETTER = "End with a line 'Answer: X' where X is one of A, B, C, D."
FORMS = {
    "aime": ("problem", "answer"),
    "gpqa": ("question", "correct", "incorrect"),
    "mrcr": ("prompt", "answer", "random_string_to_prepend"),
    "tokens": ("prompt_ids", "answer_ids"),
}
"""Form to the fields that tell it."""
PUBLISHED_GPQA = {"Question": "question", "Correct Answer": "correct"}
Message = Mapping[str, str]


@dataclass(frozen=True)
class Problem:
    """One line of a file."""

    name: str
    """Its ``id``."""
    form: str
    """A key of :data:`FORMS`."""
    fields: Mapping[str, Any]

    def messages(self, seed: int) -> list[Message]:
        """What the model is asked, as a conversation; choices are in an order of the seed's.

        Raises:
            InputError: of token ids there is no text.
        """
        if self.form == "aime":
            return [{"role": "user", "content": f"{self.fields['problem']}\n\n{BOXED}"}]
        if self.form == "gpqa":
            choices = self.choices(seed)
            listed = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, choices, strict=True))
            return [{"role": "user", "content": f"{self.fields['question']}\n\n{listed}\n\n{LETTER}"}]
        if self.form == "mrcr":
            return list(self.fields["prompt"])
        raise InputError(f"problem {self.name} is of token ids: it has no text")

    def choices(self, seed: int) -> list[str]:
        """The four choices of a ``gpqa`` problem in the seed's order."""
        made = [self.fields["correct"], *self.fields["incorrect"]]
        random.Random(f"{seed} {self.name}").shuffle(made)
        return made


@dataclass(frozen=True)
class ProblemFile:
    """Problems and what identifies them."""

    path: Path
    digest: str
    """SHA-256 of the file, 16 hex digits."""
    problems: tuple[Problem, ...]

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms that are in it."""
        return tuple(sorted({one.form for one in self.problems}))


def read_problems(path: str | Path) -> ProblemFile:
    """Read a file.

    Raises:
        InputError: it cannot be read, has no problems, an id twice, or a line that is none; the line is named.
    """
    path = Path(path)
    data, lines = read_json_lines(path)
    problems: dict[str, Problem] = {}
    for number, given in lines.items():
        where = f"{path} line {number}"
        one = _problem(given, where, str(number))
        if one.name in problems:
            raise InputError(f"{where}: id {one.name!r} is there twice")
        problems[one.name] = one
    if not problems:
        raise InputError(f"{path} has no problems")
    return ProblemFile(path, hashlib.sha256(data).hexdigest()[:16], tuple(problems.values()))


def _problem(given: Any, where: str, number: str) -> Problem:
    if not isinstance(given, dict):
        raise InputError(f"{where} is no object")
    if all(name in given for name in PUBLISHED_GPQA):
        wrong = [given.get(f"Incorrect Answer {index}") for index in (1, 2, 3)]
        given = {**given, **{ours: given[theirs] for theirs, ours in PUBLISHED_GPQA.items()}, "incorrect": wrong}
    forms = [form for form, fields in FORMS.items() if all(name in given for name in fields)]
    if len(forms) != 1:
        known = "; ".join(f"{form}: {', '.join(fields)}" for form, fields in FORMS.items())
        raise InputError(f"{where} is of {'several forms' if forms else 'no form'}; {known}")
    (form,) = forms
    fields = {name: given[name] for name in FORMS[form]}
    _CHECKS[form](fields, where)
    name = str(given.get("id", number))
    if not name.isprintable() or len(name) > 200:
        raise InputError(f"{where}: its id is no printable text of 200 letters or fewer")
    return Problem(name, form, fields)


def _text(fields: Mapping[str, Any], where: str, *names: str) -> None:
    for name in names:
        if not isinstance(fields[name], str) or not fields[name].strip():
            raise InputError(f"{where}: {name} is no text")


def _aime(fields: dict[str, Any], where: str) -> None:
    _text(fields, where, "problem")
    answer = str(fields["answer"]).strip()
    if not (answer.isascii() and answer.isdigit() and len(answer) <= 3):
        raise InputError(f"{where}: answer {answer[:20]!r} is no whole number 0..999")
    fields["answer"] = int(answer)


def _gpqa(fields: dict[str, Any], where: str) -> None:
    _text(fields, where, "question", "correct")
    wrong = fields["incorrect"]
    if not (isinstance(wrong, list) and len(wrong) == 3 and all(isinstance(one, str) and one.strip() for one in wrong)):
        raise InputError(f"{where}: incorrect is no list of three texts")
    if len({*wrong, fields["correct"]}) < 4:
        raise InputError(f"{where}: two choices are the same")


def _mrcr(fields: dict[str, Any], where: str) -> None:
    _text(fields, where, "answer", "random_string_to_prepend")
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        try:
            prompt = json.loads(prompt)
        except (ValueError, RecursionError):
            raise InputError(f"{where}: prompt is no list of messages") from None
    good = isinstance(prompt, list) and prompt and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str) for one in prompt
    )  # fmt: skip
    if not good:
        raise InputError(f"{where}: prompt is no list of messages with role and content")
    fields["prompt"] = prompt


def _tokens(fields: dict[str, Any], where: str) -> None:
    for name in FORMS["tokens"]:
        ids = fields[name]
        if not (isinstance(ids, list) and ids and all(type(one) is int and 0 <= one < 2**31 for one in ids)):
            raise InputError(f"{where}: {name} is no list of whole numbers")


_CHECKS = {"aime": _aime, "gpqa": _gpqa, "mrcr": _mrcr, "tokens": _tokens}
