"""Files that look like all ranks of a world and are not."""

from __future__ import annotations

import json
import time

import pytest
from k3lab.traces.ranks import check_ranks

HEAD = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}


def ranks(make, folder, count, *, info=None, shift=1000.5, steps=3, lost=(), **head):
    """A file a rank, named after it; ``info`` gives its distributedInfo."""
    paths = []
    for rank in range(count):
        events = make.pdl_events(steps=steps, layers=4, slow=None, bubble=None)
        if rank in lost:  # with its launch
            events = [event for event in events if event["args"]["correlation"] != 11]
        for event in events:
            event["ts"] += shift * rank
        told = {"distributedInfo": info(rank)} if info else {}
        paths.append(make.torch(folder / f"rank{rank}.json", events, **HEAD, **told, **head))
    return paths


def test_all_ranks_named_by_their_files_pass(make, tmp_path):
    assert check_ranks(ranks(make, tmp_path, 16), "gb300-tp16").verdict == "pass"


def test_one_file_copied_to_the_names_of_all_ranks_is_no_pass(make, tmp_path):
    report = check_ranks(ranks(make, tmp_path, 16, shift=0.0), "gb300-tp16")
    assert report.verdict == "inconclusive"
    assert report.doubts[0].startswith("the same kernel times to the nanosecond")
    assert check_ranks(ranks(make, tmp_path, 16, shift=0.0, k3lab_synthetic=True), "gb300-tp16").doubts == ()


def test_a_rank_that_lost_a_step_is_no_pass(make, tmp_path):
    report = check_ranks(ranks(make, tmp_path, 16, steps=5, lost=(3, 4)), "gb300-tp16")
    assert report.verdict == "inconclusive"
    assert report.doubts == ("the ranks have different numbers of steps: 5, and 4 on ranks 3-4",)


@pytest.mark.parametrize("count", [1, 2, 24])
def test_a_world_that_holds_no_whole_groups_is_no_pass(make, tmp_path, count):
    report = check_ranks(ranks(make, tmp_path, count), "gb300-tp16", world=count)
    assert report.verdict == "inconclusive"
    assert report.doubts == (f"a world of {count} ranks is not of whole groups of TP16",)


def test_a_world_of_a_million_is_told_at_once(make, tmp_path):
    paths = ranks(make, tmp_path, 2, info=lambda rank: {"rank": rank, "world_size": 1 << 20})
    began = time.monotonic()
    report = check_ranks(paths, "gb300-tp16", world=10**12)
    assert time.monotonic() - began < 5
    assert report.verdict == "inconclusive"
    assert len(json.dumps(report.to_json())) < 100_000
