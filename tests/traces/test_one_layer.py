"""Captures of a single layer: nothing recurs, and the step is the layer where the caller says so."""

from __future__ import annotations

from k3lab.traces import check_trace, inspect_trace, synthesize


def test_a_step_that_is_one_layer(tmp_path, make):
    """Two streams with known times: 44 us of kernels in 32 us, 12 of them hidden on the side stream."""
    rows = [("a", 0, 10, 7), ("b", 10, 12, 7), ("c", 22, 10, 7), ("side", 8, 12, 9)]
    events = []
    for step in range(3):
        events.append(make.host("cuda_runtime", "cudaGraphLaunch", 1_000 + 100 * step - 20, 5, 1 + step))
        events += [make.kernel(name, 1_000.001 + 100 * step + start, length, stream, 1 + step)
                   for name, start, length, stream in rows]  # fmt: skip
    path = make.torch(tmp_path / "t.json", events)
    together = inspect_trace(path)  # as likely: a step of three graphs, a layer each
    assert len(together.devices[0].layers.layers) == 3
    assert (
        "all graph launches were taken for one step; where each is a layer alone, --layers 1 says so" in together.notes
    )
    (layer,) = inspect_trace(path, layers=1).devices[0].layers.layers
    times = layer.typical
    assert (len(layer.kernels), times.wall, times.busy, times.total, times.gap) == (4, 32_000, 32_000, 44_000, 0)
    assert (times.overlap_same_stream, times.overlap_cross_stream, times.completion_period) == (0, 12_000, 32_000)


def test_a_synthetic_layer_alone_is_judged_with_what_stands_around_it(tmp_path):
    report = check_trace(synthesize(tmp_path / "t.json", layers=1, steps=6), "gb300-tp16", layers=1)
    assert report.verdict == "fail"
    assert report.reasons[0].startswith("class A (kda), 1 layers: 15 kernels, budget 13")  # the step's own two count


def test_a_step_of_several_layers_is_not_taken_for_one(tmp_path, make):
    for path in (
        synthesize(tmp_path / "t.json", layers=8, steps=6),
        make.torch(tmp_path / "u.json", make.pdl_events()),
    ):
        assert check_trace(path, "gb300-tp16", layers=1).verdict == "inconclusive"
