"""A rank of a group that the specialised path serves, for the tests of scope and dispatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3lab.decode.scope import RankSituation, Scope, group_scope

RANK = RankSituation(tp=4, gpu="H200", sms=132, tuned_sms=132, domain="a", entry_rows=64, bundle="12ab")


def scope(**changes: Any) -> Scope:
    """What a group of four such ranks serves, each with these changes."""
    return group_scope([replace(RANK, **changes)] * 4)
