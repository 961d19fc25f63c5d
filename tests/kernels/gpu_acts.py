"""What the GPU tests of several families do with a case: many launches, graphs, delays, a rank that never comes.

A case has ``run(pdl=...)``, ``judge()``, ``poison()``, ``bits()``, ``runner`` and ``tensors``.
"""

from __future__ import annotations

import time

import pytest
import torch
from k3lab.kernels.collectives import CollectiveError
from k3lab.kernels.health import check_health, culprits, read, rearm, set_limit


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run_often(case):
    """The twin's numbers, and the same bits in every launch."""
    case.run()
    case.judge()
    first = case.bits()
    for _ in range(20):
        case.run()
        assert same(first, case.bits())


def replay_often(case, times):
    """Eight launches with their programmatic edges in a graph: the bits of a launch without one, in every replay."""
    case.run(pdl=False)
    case.judge()
    first = case.bits()
    call = case.runner.bind(case.tensors)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    for _ in range(times):
        case.poison()
        graph.replay()
        torch.cuda.synchronize()
        assert same(first, case.bits())
    check_health(case.runner.buffers)


def early_graph(runner, tensors, late):
    """Replays eight early launches, each behind one that lets go at once and writes input ``late`` at its end: NaN until then."""
    from k3lab.tuning.chain import predecessor

    x = tensors[late]
    before, call = predecessor(x.clone(), x, 3.0, runner.carveout), runner.bind(tensors, early=True)
    before()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            x.fill_(float("nan"))
            before()
            call()

    def replay():
        graph.replay()

    replay.kept = before, call  # what the predecessor copies is its own
    return replay


def delay_often(plain, delayed, times):
    """A build with random delays, two launches at a time: the bits of the one without."""
    plain.run()
    call = delayed.runner.bind(delayed.tensors)
    for _ in range(times):
        delayed.poison()
        call()
        call()
        torch.cuda.synchronize()
        assert same(plain.bits(), delayed.bits())
    check_health(delayed.runner.buffers)


def silence(case, dead, match, table="mailbox", at_most_s=1.0):
    """One rank's packets go elsewhere: two launches end within the limit and name it, and after re-arming all is well."""
    for _ in range(3):
        case.run()
    lines = case.runner.buffers[f"{table}_targets"]
    elsewhere = torch.zeros_like(case.runner.buffers[table][0])
    right = int(lines[dead, 0])
    lines[dead, 0] = elsewhere.data_ptr()
    set_limit(case.runner.buffers, 0.2)
    torch.cuda.synchronize()
    start = time.perf_counter()
    case.runner.bind(case.tensors)()
    case.runner.bind(case.tensors)()  # a step does not end with the one that gave up
    torch.cuda.synchronize()
    assert 0.1 < time.perf_counter() - start < at_most_s
    with pytest.raises(CollectiveError, match=match):
        check_health(case.runner.buffers, 0)
    lines[dead, 0] = right
    rearm(case.runner)
    for _ in range(3):
        case.run()
        case.judge()


def burst_often(ranks, bursts):
    """Ranks side by side: the twin's numbers, and the same bits on all of them in every burst of launches."""
    ranks.burst()
    ranks.judge()
    first = ranks.same_everywhere()
    for _ in range(bursts):
        ranks.burst()
        ranks.same_everywhere(first)


def delay_bursts(plain, delayed, bursts):
    """Ranks with delays in every hand-over, other ones in each launch: the bits of those without."""
    plain.burst()
    wanted = plain.same_everywhere()
    for _ in range(bursts):
        delayed.burst()
        delayed.same_everywhere(wanted)


def leave_out(ranks, dead=1):
    """One of several ranks launches nothing: all others name it within the limit, and go on after re-arming."""
    ranks.burst()
    wanted = ranks.same_everywhere()
    living = [rank for rank in range(ranks.one.tp) if rank != dead]
    for runner in ranks.runners:
        set_limit(runner.buffers, 0.5)
    torch.cuda.synchronize()
    started = time.perf_counter()
    ranks.launch(0, living)
    ranks.launch(1, living)
    torch.cuda.synchronize()
    assert 0.4 < time.perf_counter() - started < 9.0
    reports = {}
    for rank in living:
        buffers = ranks.runners[rank].buffers
        with pytest.raises(CollectiveError, match=r"rank .* within 0\.5 s"):
            check_health(buffers, rank)
        reports[rank] = read(buffers["health"].tolist())
    assert culprits(reports) == (dead,)
    for runner in ranks.runners:
        rearm(runner)
    ranks.burst()
    ranks.same_everywhere(wanted)
