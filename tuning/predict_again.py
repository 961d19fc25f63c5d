"""Predicted studies under a newer cost model: what was compiled then is predicted again, nothing is compiled.

``python -m k3lab.tuning.predict_again STUDY... --out FOLDER`` writes a study beside each, of the same configs in the same
order; a study whose kernel, space or compiler is another now is left out, and said to be. `k3lab tune-table --studies FOLDER` makes the
table of them, and tries more where it asks for more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..kernels import InputError, family
from ..kernels.gpu_cards import gpu_card
from .choose import choose
from .cubin import KernelResources
from .identity import StudyIdentity, first_difference
from .model_error import band_source, relative_error
from .predict import predict
from .study import TuningStudy


def predict_again(path: Path, folder: Path) -> int:
    """Write the study as the model sees it now; how many trials it holds.

    Raises:
        InputError: it is no predicted study, it is one of another kernel than the one here, or the file is there.
    """
    with TuningStudy.for_reading(path) as study:
        identity, trials, where = study.identity, study.trials(), study.note("environment")
    owner, gpu = family(identity["family"]), gpu_card(identity["gpu"])
    if identity["objective"] != "predicted":
        raise InputError(f"{path} is {identity['objective']}: only predictions follow the model")
    engine, problem = owner.engine(identity["engine"]), owner.problem_from_json(identity["problem"])
    now = StudyIdentity.of(owner, engine, problem, gpu, "predicted", identity.get("fixed"))
    if differs := first_difference({**identity, "method": now.method}, now.to_json()):
        raise InputError(f"{path} is of another {differs[0]} than is here: tune it again")
    target, space = folder / path.name, engine.space(problem, gpu).restricted(identity.get("fixed") or {})
    if target.exists():
        raise InputError(f"{target} is there already; name another --out folder")
    folder.mkdir(parents=True, exist_ok=True)
    stated: dict[str, Any] = {
        "relative_error": relative_error(owner.name, engine.name, gpu),
        "band_source": band_source(owner.name, engine.name, gpu),
    }
    with TuningStudy.for_tuning(target, now) as again:
        again.set_note("environment", where)
        for trial in trials:
            outcome = trial.outcome
            if outcome is None:
                continue
            if trial.ok:
                found = [KernelResources(**each) for each in outcome.resources]
                answer = predict(owner, engine, problem, trial.config, gpu, None, found=found)
                outcome = replace(outcome, value=answer.microseconds, prediction=answer.to_json() | stated)
            again.finish(again.start(trial.config, space), outcome)
        choice = choose(again, space)
        again.set_note("choice", choice.to_json() if choice else None)
        return len(again.trials())


def run(paths: Sequence[Path], folder: Path, say: Callable[[str], None]) -> tuple[int, int]:
    """All studies of a list; how many were written, and how many left out."""
    done = left = 0
    for path in paths:
        try:
            predict_again(path, folder)
            done += 1
        except InputError as error:
            left += 1
            say(f"left out: {error}")
    return done, left


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m k3lab.tuning.predict_again", description=__doc__)
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the new studies")
    given = parser.parse_args(argv)
    done, left = run(sorted(given.studies), given.out, lambda text: print(text, file=sys.stderr))
    print(f"{done} studies predicted again in {given.out}, {left} left out")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
