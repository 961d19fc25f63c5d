"""On a GPU: a captured layer is timed with one config replaced, and the verdict keeps both numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from k3lab.cli.in_situ import CapturedStep, compiled_for, in_situ, problem_of, short
from k3lab.kernels import K3, family
from k3lab.kernels.device import require
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.table import TableRequest, tune_table

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in_situ")
    owner, gpu = family("attention_projection"), require("the test").need_card()
    for kind in ("kda", "mla"):
        problem = owner.problem(K3, tp=16, rows=8, kind=kind)
        engines = tuple(owner.engine(name) for name in ("triton", "cute_mma"))
        tune_table(TableRequest(owner, (problem,), engines, gpu, "measured", 6, folder=folder, limits=Limits(), jobs=4))
    return folder


def test_the_layer_is_timed_with_each_of_three(studies: Path) -> None:
    gpu = require("the test").need_card()
    found = in_situ(K3, gpu, studies, tp=16, rows=8, only=("attention_projection",))
    assert {verdict["place"] for verdict in found["verdicts"]} == {
        "attention_projection kda",
        "attention_projection mla",
    }
    for verdict in found["verdicts"]:
        assert 2 <= len(verdict["entries"]) <= 3
        for one in verdict["entries"]:
            assert not one["failed"], one
            # a layer takes longer than its projection alone, and less than a millisecond
            assert one["isolated_us"] < one["in_situ_us"] < 1000
            assert one["band"] < 0.2


def test_what_is_captured_is_the_candidates_kernel(studies: Path) -> None:
    from k3lab.decode.graphs import kernel_names
    from k3lab.tuning.in_situ_studies import place_of

    owner, gpu = family("attention_projection"), require("the test").need_card()
    places = {}
    for kind in ("kda", "mla"):
        problem = problem_of(owner, kind, K3, tp=16, rows=8)
        places[f"attention_projection {kind}"] = place_of("p", kind, owner, problem, gpu, studies)
    step = CapturedStep(K3, places, tp=16, rows=8)
    kept: list[object] = []
    for engine in ("triton", "cute_mma"):
        layer = {name: next(one for one in place.candidates if one.engine == engine) for name, place in places.items()}
        replay = step(layer)
        assert replay() > 5
        kept.append(replay)
        assert step.last is not None
        graphs = step.last.capture.graphs
        names = [name for graph in graphs for name in kernel_names(graph)]
        wanted = {
            compiled_for(place, layer[name], problem_of(owner, place.kind, short(K3), tp=16, rows=8)).launches[0].kernel
            for name, place in places.items()
        }
        assert wanted <= set(names)
