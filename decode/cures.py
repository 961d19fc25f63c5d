"""The commands that change a fallback: complete, so that they work where and when they are printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..kernels import K3, SMALL_K3, Family, InputError, ModelCard, Problem
from ..kernels.gpu_cards import GpuCard

NEW_BUNDLE = "out/bundle"
"""Where a cure exports to if no bundle was given."""

Objective = Literal["measured", "predicted"]


def model_word(card: ModelCard) -> str:
    """What ``--model`` takes for a card that came from no file the caller named."""
    if card == K3:
        return "k3"
    if card == SMALL_K3:
        return "small"
    return "demo" if card.name.startswith("demo-k3-") else "config.json"


@dataclass(frozen=True)
class Cures:
    """What the printed commands repeat of the call that printed them."""

    card: ModelCard
    gpu: GpuCard
    command: tuple[str, ...]
    """The decode command with its own options, without those of the bundle: ``("plan", "--model", "k3", ...)``."""
    objective: Objective = "predicted"
    """``measured`` where that GPU is here."""
    model: str = ""
    """What ``--model`` was; empty: :func:`model_word`."""
    bundle: Path | None = None
    """The bundle that was given."""
    accept: tuple[str, ...] = ()
    """Evidence words that were accepted."""

    def again(self, *accept: str) -> str:
        """The decode command with the bundle, and more accepted."""
        words = [*self.accept, *(word for word in accept if word not in self.accept)]
        options = [option for word in words for option in ("--accept", word)]
        return _line("decode", *self.command, "--bundle", self._bundle, *options)

    def engine(self, found: Family, problem: Problem) -> str | None:
        """The engine to tune: the family's default, or the first that serves the problem on the GPU."""
        names = sorted((one.name for one in found.engines), key=lambda name: name != found.default_engine)
        return next((name for name in names if not found.engine(name).refuses(problem, self.gpu.arch)), None)

    def refusals(self, found: Family, problem: Problem) -> str:
        """Why no engine serves the problem."""
        said = (f"{one.name}: {one.refuses(problem, self.gpu.arch)}" for one in found.engines)
        return f"no engine serves {problem.label} on {self.gpu.name} ({'; '.join(said)})"

    def tune(self, found: Family, problem: Problem, kind: str | None) -> tuple[str, ...]:
        """Tune, export beside what the bundle already has, look again; empty where no engine serves the problem."""
        engine = self.engine(found, problem)
        if engine is None:
            return ()
        gpu = self.gpu.name.lower()
        like_k3 = self._is_k3(found, problem, kind)
        model = () if like_k3 else ("--model", self.model or model_word(self.card))
        # the name a study has by default, which tells TP, rows and kind apart but no models
        whose = "" if like_k3 else f"-{re.sub(r'[^A-Za-z0-9_.-]+', '_', self.card.name)}"
        study = f"studies/{found.name}-{engine}-{problem.label}{whose}-{gpu}-{self.objective}.sqlite3"
        options = ("--tp", str(problem.tp), "--rows", str(problem.rows), *(("--kind", kind) if kind else ()), *model)
        named = ("--engine", engine) if engine != found.default_engine else ()
        return (
            _line("tune", found.name, *options, *named, "--gpu", gpu, "--objective", self.objective, "--study", study),
            _line("export", study, "--out", self._bundle, "--add"),
            self.again(*(("predicted",) if self.objective == "predicted" else ())),
        )

    @property
    def _bundle(self) -> str:
        return str(self.bundle or NEW_BUNDLE)

    def _is_k3(self, found: Family, problem: Problem, kind: str | None) -> bool:
        """Whether K3, the model that is tuned for by default, has the same problem, as its demo model does."""
        try:
            return found.problem(K3, tp=problem.tp, rows=problem.rows, kind=kind) == problem
        except InputError:  # its sizes are not divided by this TP
            return False


def _line(*words: str) -> str:
    return shlex.join(("k3lab", *words))


def joined(commands: Iterable[str]) -> str:
    """One line for a shell."""
    return " && ".join(commands)
