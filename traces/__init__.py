"""Traces of decode steps: readers, layers, times, budgets and verdicts. Standard library only, no torch."""

from __future__ import annotations

from .budget import Budget, Limit, budget_names, load_budget, parse_budget
from .check import check_trace, inspect_trace
from .diff import TraceDiff, diff_traces
from .errors import TraceError
from .explain import Finding
from .model import ApiCall, CopyTime, HostRange, Kernel, NodeOrigin, RejectedRow, Trace
from .ranks import RanksReport, check_ranks
from .readers.opening import read_trace
from .report import DeviceReport, Report
from .synthetic import synthesize
from .verdict import Judgement

__all__ = [
    "ApiCall",
    "Budget",
    "CopyTime",
    "DeviceReport",
    "Finding",
    "HostRange",
    "Judgement",
    "Kernel",
    "Limit",
    "NodeOrigin",
    "RanksReport",
    "RejectedRow",
    "Report",
    "Trace",
    "TraceDiff",
    "TraceError",
    "budget_names",
    "check_ranks",
    "check_trace",
    "diff_traces",
    "inspect_trace",
    "load_budget",
    "parse_budget",
    "read_trace",
    "synthesize",
]
