"""Both backends on the same problems, prompts and seeds; every output is kept as it ends, and the rest is derived."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels import InputError
from ..letters import letters
from .outputs import Asked, Output
from .problems import Problem, ProblemFile
from .scoring import score
from .text import Text

if TYPE_CHECKING:
    from ...kernels.collectives import Collectives
    from ..dispatch import Dispatcher

BACKENDS = ("auto", "latency_specialized")
MAX_TOKENS = 1_048_576
Say = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EvalOptions:
    """What is asked for."""

    tokens: int = 4096
    """Of an output at most."""
    rows: int = 8
    """Requests in a step at most."""
    repeats: int = 1
    temperature: float = 0.0
    seed: int = 0
    margin: float = 0.02
    """Loss of mean score that does not matter."""

    def check(self) -> None:
        """Raise InputError for anything that cannot be run."""
        if not 1 <= self.tokens <= MAX_TOKENS or not 1 <= self.rows <= 64 or not 1 <= self.repeats <= 1000:
            raise InputError(
                f"tokens {self.tokens}, rows {self.rows}, repeats {self.repeats}: they lie in 1..{MAX_TOKENS}, 1..64, 1..1000"
            )
        if not 0 <= self.margin < 1:
            raise InputError(f"margin is {self.margin}; a loss of mean score lies in 0..1")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature is {self.temperature}, must be 0 (the likeliest token) or more")
        if self.repeats > 1 and self.temperature == 0:
            raise InputError(
                f"{self.repeats} repeats at temperature 0 are one output {self.repeats} times; give --temperature"
            )
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed is {self.seed}; it is a whole number of 32 bits")


@dataclass(frozen=True)
class Case:
    """A problem at one repeat."""

    problem: Problem
    repeat: int
    seed: int
    """Of the choices' order and of sampling."""


def cases(problems: Sequence[Problem], options: EvalOptions) -> list[Case]:
    """All repeats of all problems, a seed each."""
    return [
        Case(problem, repeat, int(sha256(f"{options.seed} {problem.name} {repeat}".encode()).hexdigest()[:12], 16))
        for repeat in range(options.repeats) for problem in problems
    ]  # fmt: skip


def check_prompts(file: ProblemFile, options: EvalOptions, text: Text | None, *, vocabulary: int, context: int) -> int:
    """Tokens of the longest context, prompt and output.

    Raises:
        InputError: a problem that cannot be asked of a model; told before weights are loaded.
    """
    longest = 0
    for case in cases(file.problems, options):
        ids = prompt_of(case, text)
        if not ids or max(ids) >= vocabulary:
            raise InputError(f"problem {case.problem.name}: the model's token ids lie in 0..{vocabulary - 1}")
        if len(ids) + options.tokens > context:
            raise InputError(
                f"problem {case.problem.name} has {len(ids)} tokens; with --tokens {options.tokens} that is more than the model's {context}"
            )
        longest = max(longest, len(ids) + options.tokens)
    return longest


def prompt_of(case: Case, text: Text | None) -> tuple[int, ...]:
    """Token ids of what is asked.

    Raises:
        InputError: text, and no tokenizer was given.
    """
    if case.problem.form == "tokens":
        return tuple(case.problem.fields["prompt_ids"])
    if text is None:
        raise InputError(f"problem {case.problem.name} is text ({case.problem.form}); give the model's --tokenizer")
    return text.encode(case.problem.messages(case.seed))


def _head(line: str, path: Path | None) -> dict[str, Any]:
    try:
        there = json.loads(line)
    except (ValueError, RecursionError):
        there = None
    if not isinstance(there, dict) or "k3lab_eval" not in there:
        raise InputError(f"{path} is no record of an evaluation; name another file")
    return there


def check_record(path: Path) -> None:
    """Raise InputError for a file that cannot be a record: told before weights are loaded."""
    try:
        with path.open() as file:
            first = file.readline()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise InputError(f"cannot use {path}: there is no folder {path.parent}") from None
        return
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot use {path}: {getattr(error, 'strerror', None) or 'no text'}") from None
    if first:
        _head(first, path)


def _is_output(entry: Any, most: int) -> bool:
    """Whether it has the fields that :meth:`Record.add` writes, with values that an output can have."""
    if not isinstance(entry, dict) or not isinstance(entry.get("problem"), str):
        return False
    tokens, logprobs = entry.get("tokens"), entry.get("logprobs")
    return (
        entry.get("backend") in BACKENDS and type(entry.get("repeat")) is int and type(entry.get("stopped")) is bool
        and isinstance(tokens, list) and 1 <= len(tokens) <= most and all(type(one) is int and 0 <= one < 2**31 for one in tokens)
        and isinstance(logprobs, list) and len(logprobs) == len(tokens)
        and all(type(one) is float and -1e6 < one <= 1e-6 for one in logprobs)
    )  # fmt: skip


class Record:
    """Outputs on the disk, a line each: what is there is not made again."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        """Open, and read what an earlier run with the same settings left.

        Raises:
            InputError: it cannot be read or written, or is of other settings; the field is named.
        """
        self.earlier = 0
        """Outputs that earlier runs left: what those left to ``auto`` is not known any more."""
        self._path, self.outputs = path, {}  # type: ignore[var-annotated]
        if path is None:
            return
        head = json.dumps({"k3lab_eval": 1, **settings}, sort_keys=True)
        try:
            lines = path.read_text().splitlines() if path.exists() else []
            if not lines:
                path.write_text(head + "\n")
                return
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot use {path}: {getattr(error, 'strerror', None) or 'no text'}") from None
        self._read(lines, json.loads(head))

    def _read(self, lines: list[str], wanted: dict[str, Any]) -> None:
        there = _head(lines[0], self._path)
        for name in sorted({*there, *wanted}):
            if there.get(name) != wanted.get(name):
                raise InputError(f"{self._path} is of another evaluation: its {name} is {there.get(name)!r}, now {wanted.get(name)!r}")  # fmt: skip
        for number, line in enumerate(lines[1:], 2):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):  # the machine stopped while it was written
                continue
            if not _is_output(entry, wanted.get("tokens", MAX_TOKENS)):
                raise InputError(
                    f"{self._path} line {number} is no output of this evaluation; remove the line or the file"
                )
            key = (entry["backend"], entry["problem"], entry["repeat"])
            self.outputs[key] = Output(entry["tokens"], entry["logprobs"], entry["stopped"])
        self.earlier = len(self.outputs)

    def add(self, backend: str, case: Case, output: Output) -> None:
        """Keep one.

        Raises:
            InputError: it cannot be written.
        """
        self.outputs[backend, case.problem.name, case.repeat] = output
        if self._path is None:
            return
        entry = {"backend": backend, "problem": case.problem.name, "repeat": case.repeat, **asdict(output)}
        try:
            with self._path.open("a") as file:
                file.write("\n" + json.dumps(entry))  # a line cut short before does not take this one with it
        except OSError as error:
            raise InputError(f"cannot write {self._path} ({error.strerror})") from None


def evaluate(
    file: ProblemFile, options: EvalOptions, backends: Mapping[str, Callable[[], Dispatcher]], *,
    text: Text | None = None, record: Record | None = None, say: Say | None = None, host: Collectives | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run and judge.

    Args:
        file: the problems.
        options: how.
        backends: each of :data:`BACKENDS` to what makes its dispatcher.
        text: of problems that are text.
        record: where outputs are kept; what is in it already is not run. Of a group rank 0 has one.
        say: is told how far it is.
        host: of a group whose ranks answer together, each calling this; None: one rank.

    Returns:
        The report as data: per form and over all the paired scores, the drift, and counts. On ranks beside 0 nothing.

    Raises:
        InputError: ranks that were not asked the same.
        RuntimeError: ranks that put out other tokens than rank 0.
    """
    from .generate import generate

    options.check()
    kept = record or Record(None, {})
    todo = cases(file.problems, options)
    prompts = {(one.problem.name, one.repeat): prompt_of(one, text) for one in todo}
    stops = text.stops if text else frozenset()
    if host:
        asked_of_all = sha256(repr((asdict(options), sorted(prompts.items()), sorted(stops))).encode())
        _alike(asked_of_all, host, InputError("ranks have other problems or options; start every rank with the same"))
    there = _kept_by_all(kept, todo, host)
    notes = {}
    for backend in BACKENDS:
        left = [one for one in todo if (backend, one.problem.name, one.repeat) not in there]
        if not left:
            continue
        dispatcher, made = backends[backend](), sha256()
        asked = [Asked(prompts[one.problem.name, one.repeat], one.seed) for one in left]
        done = len(todo) - len(left)
        for number, output in generate(
            dispatcher, asked, rows=options.rows, most=options.tokens, temperature=options.temperature, stops=stops
        ):
            made.update(f"{number} {output.tokens}\n".encode())
            kept.add(backend, left[number], output)
            done += 1
            if say:
                say(f"{backend} outputs", done, len(todo))
        if host:
            _alike(made, host, RuntimeError(f"ranks disagree: some put out other tokens than rank 0 with {backend}"))
        notes[backend] = dispatcher.tally.to_json() if dispatcher.backend != "auto" else None
        del dispatcher
    if host and host.rank:
        return {}
    return judge(file, options, kept, text) | {"steps": notes, "outputs_of_earlier_runs": kept.earlier}


def _alike(made: Any, host: Collectives, error: Exception) -> None:
    """Raise the error unless all ranks have the same digest."""
    if len(set(letters(made.hexdigest(), host, 80, "a digest"))) > 1:
        raise error


def _kept_by_all(kept: Record, todo: Sequence[Case], host: Collectives | None) -> set[tuple[str, str, int]]:
    """What need not be made: of a group what rank 0 has kept."""
    keys = [(backend, one.problem.name, one.repeat) for backend in BACKENDS for one in todo]
    if host is None:
        return {key for key in keys if key in kept.outputs}
    told = letters("".join("01"[key in kept.outputs] for key in keys), host, len(keys) + 2, "what is kept")
    return {key for key, there in zip(keys, told[0], strict=True) if there == "1"}


def judge(file: ProblemFile, options: EvalOptions, kept: Record, text: Text | None) -> dict[str, Any]:
    """The report of outputs that are all there."""
    from .drift import drift
    from .paired import paired

    scores: dict[str, dict[str, list[float]]] = {backend: {} for backend in BACKENDS}
    outputs: dict[str, dict[str, list[Output]]] = {backend: {} for backend in BACKENDS}
    for backend in BACKENDS:
        for one in cases(file.problems, options):
            output = kept.outputs[backend, one.problem.name, one.repeat]
            ids = output.tokens[:-1] if output.stopped else output.tokens
            words = text.decode(ids) if text and one.problem.form != "tokens" else None
            scores[backend].setdefault(one.problem.name, []).append(score(one.problem, one.seed, ids, words))
            outputs[backend].setdefault(one.problem.name, []).append(output)
    forms = {form: [p.name for p in file.problems if p.form == form] for form in file.forms}
    groups = {**forms, **({"all": [p.name for p in file.problems]} if len(forms) > 1 else {})}
    compared = {
        name: paired(
            *({one: scores[backend][one] for one in members} for backend in BACKENDS),
            margin=options.margin, seed=options.seed,
        ).to_json()
        for name, members in groups.items()
    }  # fmt: skip
    followed = drift(outputs["auto"], outputs["latency_specialized"]).to_json()
    lengths = {
        backend: {
            "mean_tokens": sum(len(o.tokens) for o in _flat(outputs[backend])) / (len(file.problems) * options.repeats),
            "ended_by_length": sum(not o.stopped for o in _flat(outputs[backend])),
        }
        for backend in BACKENDS
    }
    return {
        "scores": compared, "drift": followed, "outputs": lengths,
        "ok": all(one["verdict"] != "worse" for one in compared.values()) and followed["verdict"] != "drifts",
    }  # fmt: skip


def _flat(outputs: Mapping[str, Sequence[Output]]) -> Iterator[Output]:
    for several in outputs.values():
        yield from several
