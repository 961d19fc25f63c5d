"""A timing as a result that shows itself, fresh from the GPU or from a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .shown import Shown


def shown_timing(title: str, timing: Mapping[str, Any]) -> Shown:
    """Cold and hot time against the floor and PyTorch, with the figures ``times`` and ``samples``.

    Args:
        title: of what, on which GPU.
        timing: as ``Timing.to_json`` gives it.
    """
    from .lab_figures import samples_figure, time_figure

    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} us"

    rows: list[tuple[str, Any]] = [
        ("cold", us(timing["cold_us"])), ("hot", us(timing["hot_us"])), ("floor", us(timing["floor_us"])),
        ("of the read ceiling", f"{timing['percent_of_ceiling']:.1f} %"), ("spread", f"{timing['spread']:.1%}"),
    ]  # fmt: skip
    rows += [(f"{name}, cold", us(value)) for name, value in timing.get("alternatives", {}).items()]
    if chain := timing.get("chain"):
        rows.append(("added in a chain", f"{chain['chain_us']:.2f} us, {chain['hidden_us']:.2f} us of it hidden"))
    rows += [("note", note) for note in timing["notes"]]
    head = f"measured {title}"
    figures = {"times": lambda: time_figure(head, timing), "samples": lambda: samples_figure(head, timing)}
    return Shown(head, timing, rows, figures)
