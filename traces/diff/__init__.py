"""What changed between two traces of like layers, and whether by more than the steps vary."""

from __future__ import annotations

from .asking import CHANGED, INCONCLUSIVE, REFUSED, UNCHANGED, TraceDiff, diff_traces
from .words import diff_json

__all__ = ["CHANGED", "INCONCLUSIVE", "REFUSED", "UNCHANGED", "TraceDiff", "diff_json", "diff_traces"]
