"""Layer times: the identities that must hold for any kernels, and figures worked out by hand."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from k3lab.traces import Kernel
from k3lab.traces.timing import layer_times, median_ns, quantile_ns, union_length


def brute_union(intervals):
    return len({point for start, end in intervals for point in range(start, end)})


small = st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(0, 2))


@st.composite
def steps(draw):
    rows = draw(st.lists(small, min_size=2, max_size=24))
    kernels = [Kernel(f"k{i}", start, start + length, stream=stream) for i, (start, length, stream) in enumerate(rows)]
    cuts = sorted(draw(st.sets(st.integers(0, len(rows)), min_size=2, max_size=6)))
    return kernels, list(pairwise(cuts))


@given(steps())
def test_identities_hold_for_any_step(case):
    kernels, layers = case
    times = layer_times(kernels, layers)
    for (start, end), item in zip(layers, times, strict=True):
        own = kernels[start:end]
        assert item.total - item.overlap + item.gap == item.wall
        assert item.busy == brute_union([(kernel.start, kernel.end) for kernel in own])
        assert sum(share.increment + share.bubble for share in item.shares) == item.completion_period
        assert min(item.gap, item.overlap_same_stream, item.overlap_cross_stream, item.completion_period) >= 0
    first, last = layers[0][0], layers[-1][1]
    before = [kernel.end for kernel in kernels[:first]]
    origin = max(before) if before else min(kernel.start for kernel in kernels[layers[0][0] : layers[0][1]])
    reached = max(kernel.end for kernel in kernels[:last])
    assert sum(item.completion_period for item in times) == reached - origin


@given(steps(), st.integers(-(2**60), 2**60))
def test_a_shift_changes_no_time(case, shift):
    kernels, layers = case
    moved = [Kernel(k.name, k.start + shift, k.end + shift, stream=k.stream) for k in kernels]
    assert layer_times(moved, layers) == layer_times(kernels, layers)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair))), max_size=12)
)
def test_union_counts_every_point_once(intervals):
    assert union_length(intervals) == brute_union(intervals)


def test_two_streams_hide_a_kernel():
    kernels = [Kernel("attn", 0, 10), Kernel("moe", 10, 30), Kernel("shared", 11, 23, stream=20), Kernel("add", 30, 32)]
    (times,) = layer_times(kernels, [(0, 4)])
    assert (times.total, times.busy, times.wall, times.overlap_cross_stream) == (44, 32, 32, 12)
    assert (times.overlap_same_stream, times.gap) == (0, 0)
    assert [share.increment for share in times.shares] == [10, 20, 0, 2]


def test_a_bubble_is_charged_to_the_layer_that_starts_late():
    kernels = [Kernel("a", 0, 10), Kernel("b", 9, 20), Kernel("a", 24, 34), Kernel("b", 33, 44)]
    first, second = layer_times(kernels, [(0, 2), (2, 4)])
    assert (first.completion_period, second.completion_period) == (20, 24)
    assert (first.start_period, second.start_period) == (24, None)
    assert second.shares[0].bubble == 4
    assert first.overlap_same_stream == 1


def test_medians_and_quantiles_are_integers():
    assert median_ns([3, 1, 2]) == 2
    assert median_ns([1, 2]) == 2
    assert quantile_ns(range(1, 11), 10) == 1
    assert quantile_ns(range(1, 11), 90) == 9
    assert quantile_ns([7], 90) == 7
