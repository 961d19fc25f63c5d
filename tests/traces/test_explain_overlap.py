"""What is said of overlap on a stream: by whole steps, across the borders of layers, and apart from pauses."""

from __future__ import annotations

import pytest
from k3lab.traces import inspect_trace


def told(make, path, ahead, length=5.001, pause=0.0, steps=4, layers=6):
    """The findings on overlap of a step whose kernels start ``ahead(place)`` us before the one before ends.

    Every other layer starts ``pause`` us late.
    """
    events, clock = [], 1_000.0
    for step in range(steps):
        events.append(make.host("cuda_runtime", "cudaGraphLaunch", clock - 20, 5, 1 + step))
        for layer in range(layers):
            clock += pause * (layer % 2)
            for place in range(8):
                start = clock - ahead(place) * (layer + place > 0)
                node = 100 + layer * 8 + place
                events.append(make.kernel(f"k{place}", round(start, 3), length, correlation=1 + step, node=node))
                clock = start + length
        clock += 60
    findings = inspect_trace(make.torch(path / "t.json", events), layers=layers).devices[0].findings
    return [item.text for item in findings if item.kind in ("ahead", "pdl")]


def test_overlap_across_the_border_of_layers_alone_is_overlap(tmp_path, make):
    (text,) = told(make, tmp_path, lambda place: 2.0 if place == 0 else -0.2)
    assert text.startswith("kernels overlap on their stream: PDL seen (durations on a stream add up to 1.04 times")
    (text,) = told(make, tmp_path, lambda place: -0.2)
    assert text.startswith("no kernel of the layers starts before the one before it on its stream has ended")


@pytest.mark.parametrize(("pause", "ahead", "says"), [
    (9.0, 0.4, "kernels overlap on their stream: PDL seen (start periods differ"),  # a pause is no launch ahead
    (0.0, 0.4, "kernels overlap on their stream: PDL seen (durations"),
])  # fmt: skip
def test_a_pause_between_layers_is_no_launch_ahead(tmp_path, make, pause, ahead, says):
    (text,) = told(make, tmp_path, lambda place: ahead, pause=pause)
    assert text.startswith(says)


def test_kernels_that_all_run_at_once_are_counted_over_the_step(tmp_path, make):
    """All start as early as they can and wait: layer by layer the time would be counted again and again."""
    events = []
    for step in range(4):
        at = 1_000 + 1_000 * step
        events.append(make.host("cuda_runtime", "cudaGraphLaunch", at - 20, 5, 1 + step))
        events += [
            make.kernel(f"k{n % 8}", at + n, 9.999 + 10 * n, correlation=1 + step, node=100 + n) for n in range(48)
        ]
    findings = inspect_trace(make.torch(tmp_path / "t.json", events), layers=6).devices[0].findings
    (text,) = [item.text for item in findings if item.kind == "ahead"]
    total, busy = sum(9_999 + 10_000 * n for n in range(48)), 47_000 + 479_999
    assert text.startswith("launches run ahead: PDL seen")
    assert f"add up to {total / busy:.2f} times" in text
