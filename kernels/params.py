"""Parameters that engines of several families have, said once."""

from __future__ import annotations

from .space import Config, Constraint, Param

RELEASE = Param(
    "release",
    ("entry", "loads", "end"),
    "when the next kernel may start: at entry, after the last weight load is issued, at the end",
)
K_ORDER = Param("k_order", ("free", "invariant"), "invariant: one summation order for all rows and outputs")


def pinned(values: Config) -> Constraint:
    """``k_order`` invariant holds the parameters that the order of the sum depends on at these values."""
    return Constraint(
        lambda c: c["k_order"] == "free" or all(c[name] == value for name, value in values.items()),
        "k_order invariant needs " + ", ".join(f"{name} {value}" for name, value in values.items()),
    )
