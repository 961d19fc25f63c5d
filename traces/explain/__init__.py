"""Why a layer takes what it takes: each observation with its cost and a plain cause, never a guess."""

from __future__ import annotations

from .alignment import median_increments
from .finding import Finding, kernel_label
from .gather import explain

__all__ = ["Finding", "explain", "kernel_label", "median_increments"]
