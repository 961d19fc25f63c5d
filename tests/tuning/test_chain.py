"""Chains and graphs, as far as no GPU is needed: arithmetic, the order of launches, the predecessor's code."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from k3lab.kernels import Arg, Launch
from k3lab.tuning import chain, graphs
from k3lab.tuning.cubin import kernel_resources, sass
from k3lab.tuning.policy import QUICK
from k3lab.tuning.timing import BrokenMeasurement, Series

X = torch.zeros(8, 16, dtype=torch.bfloat16)
FAMILY = SimpleNamespace(rotated=("w",), constant=(), mutated=("state",), outputs=("out",), older=("prefix",))
PDL = Launch("k3_a_b_main", b"", (1, 1, 1), (32, 1, 1), 0, (), pdl=True)
EARLY = replace(PDL, args=(Arg("int32", "early"),))
PLAIN = Launch("k3_a_b_other", b"", (1, 1, 1), (32, 1, 1), 0, ())


def timing(**changes: object) -> chain.ChainTiming:
    fields = {
        "spin_us": 8.0, "predecessor_us": 9.5, "pair_us": 21.0, "pair_plain_us": 25.0, "pairs": 10,
        "programmatic_edges": 10, "carveout": 75, "spread": 0.004, "stable": True,
    }  # fmt: skip
    return chain.ChainTiming(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_predecessor_alone_is_taken_off_both_pairs():
    found = timing()
    assert (found.chain_us, found.plain_us, found.hidden_us) == (11.5, 15.5, 4.0)
    data = found.to_json()
    assert {name: data[name] for name in ("chain_us", "plain_us", "hidden_us")} == {
        "chain_us": 11.5, "plain_us": 15.5, "hidden_us": 4.0,
    }  # fmt: skip
    assert data["programmatic_edges"] == 10


@pytest.fixture
def launched(monkeypatch):
    """Runs time_chain with Python functions in place of launches; gives back what each series was made of."""
    seen: list[str] = []
    series: list[list[str]] = []
    sources = []

    def predecessor(source, result, microseconds, carveout):
        sources.append((source, result, microseconds, carveout))
        return lambda: seen.append("predecessor")

    def steady(calls, policy, restore=None):
        seen.clear()
        for call in calls:
            call()
        series.append(list(seen))
        return Series([1000 * len(series)], 1, 1, {}, {}), True

    class Runner:
        carveout = 75

        def __init__(self, compiled):
            self.compiled = compiled

        def bind(self, tensors, *, pdl=None, early=False):
            return lambda: seen.append(
                f"{tensors['w']}{'' if pdl is None else f' pdl={pdl}'}{' early' if early else ''}"
            )

    def run(launches=(PDL,), edges=None):
        copies = [{"prefix": X.clone(), "x": X, "w": name, "state": X, "out": X} for name in ("w0", "w1")]
        for one in copies:
            one["w"] = Weight(one["w"])
        monkeypatch.setattr(chain, "predecessor", predecessor)
        monkeypatch.setattr(chain, "steady", steady)
        monkeypatch.setattr(chain, "captured", lambda calls: list(calls))
        found = sum(launch.pdl for launch in launches) * len(copies) if edges is None else edges
        monkeypatch.setattr(chain, "programmatic_edges", lambda graph: found)
        compiled = SimpleNamespace(launches=launches)
        return chain.time_chain(FAMILY, compiled, Runner(compiled), copies, QUICK), series, sources

    return run


class Weight(str):
    """Stands for a tensor."""

    def is_floating_point(self):
        return True


def test_pairs_are_timed_with_the_edge_and_without(launched):
    found, series, sources = launched()
    assert series == [
        ["predecessor"],
        ["predecessor", "w0", "predecessor", "w1"],
        ["predecessor", "w0 pdl=False", "predecessor", "w1 pdl=False"],
    ]
    assert (found.predecessor_us, found.pair_us, found.pair_plain_us) == (1.0, 2.0, 3.0)
    ((source, result, spin, carveout),) = sources
    assert result is X  # the activation, neither weight nor state
    assert source is not X
    assert (spin, found.programmatic_edges) == (chain.PREDECESSOR_US, 2)
    assert carveout == found.carveout == 75  # it leaves what the kernel takes


def test_kernels_that_can_are_early_behind_the_edge_alone(launched):
    """The predecessor writes nothing that the step has older, so what is older is there."""
    found, series, _ = launched((EARLY,))
    assert series[1:] == [
        ["predecessor", "w0 early", "predecessor", "w1 early"],
        ["predecessor", "w0 pdl=False", "predecessor", "w1 pdl=False"],
    ]
    assert found.early and not launched()[0].early


def test_a_chain_that_lost_edges_is_a_broken_measurement(launched):
    assert launched((PDL, PLAIN))[0].programmatic_edges == 2
    with pytest.raises(BrokenMeasurement, match="1 programmatic edges in the graph of 2 pairs, not 2"):
        launched(edges=1)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_the_predecessor_lets_go_waits_spins_and_is_small(arch):
    compiled = chain.compile_predecessor(arch, 132, 8000, 4096)
    (launch,) = compiled.launches
    assert (launch.kernel, launch.grid, launch.block) == ("k3lab_chain_predecessor", (132, 1, 1), (32, 1, 1))
    assert not launch.pdl  # its spin begins where its own predecessor has ended
    assert compiled.problem.to_json() == {"tp": 1, "rows": 1, "nanoseconds": 8000, "words": 4096}
    found = kernel_resources(launch)
    assert found.dynamic_shared_bytes == 0
    assert found.registers <= 96
    code = sass(launch.cubin)
    order = [code.index(word) for word in ("PREEXIT", "ACQBULK", "GLOBALTIMER", "LDG", "STG")]
    assert order == sorted(order)


class Driver:
    """The driver's graph call: lists that many edges, some of them programmatic."""

    def __init__(self, types: list[int], code: int = 0) -> None:
        self.types, self.code, self.rooms = types, code, []

    def cuGraphGetEdges_v2(self, handle, ends, others, data, count):
        room = count._obj.value
        self.rooms.append(room)
        for place, kind in enumerate(self.types[:room]):
            data[place].type = kind
        count._obj.value = min(room, len(self.types))
        return self.code


def test_edges_are_counted_by_their_type(monkeypatch):
    assert ctypes.sizeof(graphs.EdgeData) == 8
    driver = Driver([0, 1, 1, 0, 1])
    assert [edge.type for edge in graphs.edges(7, driver)] == [0, 1, 1, 0, 1]
    monkeypatch.setattr(graphs, "edges", lambda handle: graphs_edges(handle, driver))
    assert graphs.programmatic_edges(SimpleNamespace(raw_cuda_graph=lambda: 7)) == 3


graphs_edges = graphs.edges


def test_a_large_graph_gets_more_room():
    driver = Driver([1] * 5000)
    assert len(graphs.edges(7, driver)) == 5000
    assert driver.rooms == [1024, 8192]
    assert len(graphs.edges(7, Driver([1] * 1024))) == 1024


def test_a_driver_that_refuses_says_so():
    with pytest.raises(RuntimeError, match="does not list the graph's edges: error 1"):
        graphs.edges(7, Driver([], code=1))
