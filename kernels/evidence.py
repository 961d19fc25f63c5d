"""What a result rests on. A result never loses its evidence word."""

from __future__ import annotations

from enum import StrEnum


class Evidence(StrEnum):
    """How much is known of a config on a GPU."""

    MEASURED = "measured"
    """It ran on that GPU, was checked against the twin and timed there."""
    PREDICTED = "predicted"
    """It was compiled for that GPU and ranked by a cost model with a stated error."""
    COMPILED = "compiled"
    """It was only built."""
