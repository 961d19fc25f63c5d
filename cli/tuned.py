"""The result of a search as it shows itself in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .shown import Shown

if TYPE_CHECKING:
    from ..kernels import Family
    from ..tuning.tune import TuneResult


def shown_study(title: str, owner: Family, result: TuneResult, floor_us: float) -> Shown:
    """Winner, reason and what the parameters did, with the figures ``history``, ``importance`` and ``slices``."""
    from ..tuning.effects import slices
    from .figures import study_figure
    from .lab_figures import importance_figure, slices_figure
    from .study_data import ended, study_data

    data = study_data(result.path, owner)
    rows: list[tuple[str, Any]] = [
        ("trials", ", ".join(f"{count} {status}" for status, count in result.statuses.items()))
    ]
    older = sum(result.statuses.values()) - result.new_trials
    if older and result.new_trials:
        rows.append(("older", f"{older} of them were in the study already, {result.new_trials} are new"))
    elif older:
        rows.append(
            ("older", f"all {older} were in the study already: nothing ran; ask for more trials, or name another study")
        )
    if result.choice:
        chosen = result.choice
        default = "-" if chosen.default_us is None else f"{chosen.default_us:.2f} us"
        rows += [
            ("winner", f"{chosen.value_us:.2f} us, {chosen.evidence}"), ("config", dict(chosen.config)),
            ("why", chosen.reason), ("default config", default), ("floor", f"{floor_us:.2f} us"),
        ]  # fmt: skip
    told = [f"{name} {share:.0%}" for name, share in data["importance"].items() if share >= 0.01]
    rows += [("what decided", ", ".join(told) or "no parameter alone"), ("study", result.path)]
    below = f"{data['family']}/{data['engine']} {data['label']} on {data['gpu']}: {data['evidence']}"
    figures = {
        "history": lambda: study_figure(data),
        "importance": lambda: importance_figure(f"{below}<br>what decided the time", data["importance"]),
        "slices": lambda: slices_figure(f"{below}<br>each parameter", slices(ended(data["trials"]))),
    }
    return Shown(title, data, rows, figures)
