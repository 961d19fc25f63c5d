"""Every family's default engine, compiled for a TP16 rank of K3: nothing is asked of a step that it has not; few launches."""

from __future__ import annotations

import pytest
from k3lab.decode.bars import LAUNCH_BARS
from k3lab.decode.bindings import lacking
from k3lab.decode.choices import STEP_FAMILIES
from k3lab.decode.sequence import forms, tuned_launches
from k3lab.decode.stock import stock_layer
from k3lab.kernels import K3, family

from .engines_case import engine_entries, planned


@pytest.mark.parametrize(("rows", "q_len"), [(8, 8)])
def test_a_step_of_default_engines_has_few_launches(rows: int, q_len: int) -> None:
    choices, without = engine_entries(K3, tp=16, rows=rows, q_len=q_len, arch="sm_90a")
    assert not without
    assert {one.family for one in choices} == set(STEP_FAMILIES)
    assert not [text for one in choices if (text := lacking(family(one.family), one.compiled))]
    for form in forms(K3, choices):
        if form.dense or form.head:
            continue
        launches = tuned_launches(stock_layer(form.kind, dense=False, rows=rows), choices, form)
        assert all(one.engine != "torch" for one in launches), [one.kernel for one in launches]
        assert len(launches) <= LAUNCH_BARS[form.kind].close, [one.kernel for one in launches]
    counts = planned(K3, choices, rows)
    assert all(name.startswith("k3_") for name in counts)
    assert sum(counts.values()) < 93 * 9
