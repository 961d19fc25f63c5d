"""What a study holds, as one JSON-able object."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from .effects import importance
from .study import TuningStudy, best_of


def show(path: Path, top: int = 10) -> dict[str, Any]:
    """Identity, counts, the best trials, each parameter's importance, the stored choice, and the failures by reason.

    Raises:
        InputError: no study at the path.
    """
    with TuningStudy.for_reading(path) as study:
        trials = study.trials()
        best = best_of(trials)
        ranked = sorted((trial for trial in trials if trial.ok), key=lambda trial: (trial.value, trial.digest))
        failed = [trial for trial in trials if trial.outcome and not trial.ok]
        reasons = Counter((str(trial.outcome.status), trial.outcome.reason) for trial in failed if trial.outcome)
        identity = study.identity
        shares = importance([(trial.config, trial.value) for trial in ranked])
        return {
            "study": str(path),
            "evidence": identity["objective"],
            "identity": identity,
            "trials": len(trials),
            "running": sum(not trial.finished for trial in trials),
            "statuses": dict(sorted(Counter(str(trial.outcome.status) for trial in trials if trial.outcome).items())),
            "best": best.to_json() if best else None,
            "choice": study.note("choice"),
            "top": [trial.to_json() for trial in ranked[:top]],
            "importance": {name: round(share, 4) for name, share in shares.items()},
            "failures": [
                {"status": status, "reason": reason, "trials": count}
                for (status, reason), count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
            ],
            "environment": study.note("environment"),
        }
