"""Several ranks: spread, the set of ranks, clocks hours apart, one slow rank, what must be refused."""

from __future__ import annotations

import json
import random
import re

import pytest
from k3lab.cli.main import run
from k3lab.traces import TraceError, parse_budget
from k3lab.traces.collectives import is_collective
from k3lab.traces.ranks import check_ranks
from k3lab.traces.skew import Collective, compare

BUDGET = {"schema": "k3lab.budget/1", "name": "ranks", "gpu": "H200", "tp": 3,
          "layers": {"kda": {"kernels": 3, "period_ns": 40_000}}}  # fmt: skip
REDUCE = "void cross_device_reduce_1stage<bf16, 8>(RankData*, bf16*)"
TRANSFER = 4.0
HOUR = 3_600_000_000


def files(make, folder, *, ranks=3, steps=5, layers=4, slow=None, slow_us=0.0, jitter=0.0, drop_layer=None, extra=None,
          gpu=None, world=None, name="rank{}.json", names=None, skip_step=None, ahead=0.0):  # fmt: skip
    """A file a rank. Every layer: a GEMM (slow on one rank), an all-reduce that ends for all when the last has come, a GEMM."""
    rng = random.Random(7)
    clocks = [1000.0 + rank * 3 * HOUR for rank in range(ranks)]
    events = [[] for _ in range(ranks)]
    now = [5000.0] * ranks
    for step in range(steps):
        begin = max(now) + 100 + 40 * rng.random()
        now = [begin] * ranks
        for rank in range(ranks):
            if (rank, step) != skip_step:
                events[rank].append(
                    make.host("cuda_runtime", "cudaGraphLaunch", clocks[rank] + begin - 30, 8.0, correlation=10 + step)
                )
        for layer in range(layers):
            arrival = [now[rank] + 10 + (slow_us if rank == slow else 0) for rank in range(ranks)]
            done = max(arrival) + TRANSFER
            for rank in range(ranks):
                late = done + jitter * rng.random()
                rows = [("k3_kda_mix", now[rank], arrival[rank]),
                        ((names or {}).get(rank, REDUCE), arrival[rank] - ahead, late), ("experts_gemm", late, late + 5)]  # fmt: skip
                if extra == (rank, layer):
                    rows.append(("split_k_reduce", late + 5, late + 6))
                now[rank] = rows[-1][2]
                if (rank, layer) == drop_layer or (rank, step) == skip_step:
                    continue
                events[rank] += [
                    make.kernel(title, round(clocks[rank] + a, 3), round(b - a, 3), correlation=10 + step)
                    for title, a, b in rows
                ]
    found = []
    for rank in range(ranks):
        head = {"deviceProperties": [{"id": 0, "name": (gpu or {}).get(rank, "NVIDIA H200")}],
                "distributedInfo": {"rank": rank, "world_size": world or ranks}}  # fmt: skip
        found.append(make.torch(folder / name.format(rank), events[rank], **head))
    return found


def budget(**changes):
    return parse_budget({**BUDGET, **changes})


def waits(report):
    return {item.rank: (item.caused_ns, item.waited_ns, item.last) for item in report.skew.ranks}


def test_a_slow_rank_makes_the_others_wait_whatever_the_clocks_and_the_order_of_the_files(make, tmp_path):
    paths = files(make, tmp_path, slow=1, slow_us=6.0)
    report = check_ranks(reversed(paths), budget())
    assert report.verdict == "pass" and report.doubts == ()
    assert report.to_json() == check_ranks(paths, budget()).to_json()
    assert report.skew.refused is None and report.skew.collectives == 20 and report.skew.residual_ns == 0
    assert waits(report) == {0: (0, 24_000, 0), 1: (24_000, 0, 20), 2: (0, 24_000, 0)}
    offsets = {item.rank: item.offset_ns for item in report.skew.ranks}
    assert offsets[2] - offsets[1] == offsets[1] - offsets[0] == 3 * HOUR * 1000
    assert [(item.each_step, item.shortest_ns) for item in report.skew.transfers] == [(4, 4000)]


def test_alike_ranks_charge_nobody(make, tmp_path):
    report = check_ranks(files(make, tmp_path, jitter=0.8), None)
    assert report.verdict == "not judged"
    assert report.skew.refused is None and 0 < report.skew.residual_ns < 1000
    assert all(item.caused_ns < 1000 for item in report.skew.ranks)  # of four collectives a step
    assert report.skew.undecided_ns > 0


def test_an_all_reduce_launched_ahead_arrives_when_its_predecessor_ends(make, tmp_path):
    straight = check_ranks(files(make, tmp_path, slow=0, slow_us=6.0), None)
    (tmp_path / "pdl").mkdir()
    ahead = check_ranks(files(make, tmp_path / "pdl", slow=0, slow_us=6.0, ahead=9.0), None)
    assert waits(ahead) == waits(straight) == {0: (24_000, 0, 20), 1: (0, 24_000, 0), 2: (0, 24_000, 0)}
    assert ahead.skew.transfers == straight.skew.transfers


def test_times_of_every_layer_and_class_over_the_ranks(make, tmp_path):
    report = check_ranks(files(make, tmp_path, slow=2, slow_us=6.0), None)
    first, second = report.layers[:2]
    assert (first.number, first.largest_ns, first.smallest_ns, first.spread_ns) == (0, 25_000, 25_000, 0)
    assert (second.spread_ns, second.slowest_rank) == (0, None)  # a collective ends them together: no rank is slowest
    (group,) = report.classes
    assert (group.kind, group.layers, group.largest_ns, group.spread_ns) == ("kda", 4, 25_000, 0)
    alone = check_ranks(files(make, tmp_path, name="b_rank{}.json", jitter=3.0), None).layers[0]
    assert alone.spread_ns == alone.largest_ns - alone.smallest_ns > 0
    assert alone.slowest_rank is not None


def test_the_worst_rank_decides(make, tmp_path):
    paths = files(make, tmp_path, gpu={1: "NVIDIA H200"})
    assert check_ranks(paths, budget()).verdict == "pass"
    tight = budget(layers={"kda": {"kernels": 3, "period_ns": 18_999}})
    failed = check_ranks(paths, tight)
    assert failed.verdict == "fail"
    assert failed.reasons[0].startswith("class A (kda), 4 layers: completion period 19.0 us")  # once: all ranks have it


@pytest.mark.parametrize(("keep", "world", "says"), [
    ((0, 2), 3, "rank 1 of 3 is missing"),
    ((0,), 3, "ranks 1-2 of 3 are missing"),
    ((0, 1, 2), 2, "rank 2 is none of a world of 2"),
    ((0, 1, 1, 2), 3, "rank 1 is there 2 times: "),
    ((0, 1, 2), 5, "ranks 3-4 of 5 are missing"),
])  # fmt: skip
def test_a_set_of_ranks_that_is_not_the_world_is_no_pass(make, tmp_path, keep, world, says):
    paths = files(make, tmp_path, world=world)
    report = check_ranks([paths[rank] for rank in keep], budget(tp=world))
    assert report.verdict == "inconclusive"
    assert report.doubts[0].startswith(says)


def test_a_failing_rank_fails_even_where_others_are_missing(make, tmp_path):
    paths = files(make, tmp_path)
    tight = budget(layers={"kda": {"kernels": 2, "period_ns": None}})
    assert check_ranks(paths[:1], tight).verdict == "fail"


@pytest.mark.parametrize(("change", "says"), [
    ({"drop_layer": (1, 3)}, "the ranks have different numbers of layers: 3 on rank 1; 4 on ranks 0, 2"),
    ({"extra": (1, 2)}, "layer 2: other kernels on rank 1 than on ranks 0, 2: has split_k_reduce"),
    ({"gpu": {2: "NVIDIA GB300"}}, "the ranks ran on different GPUs: NVIDIA H200: ranks 0-1; NVIDIA GB300: rank 2"),
])  # fmt: skip
def test_ranks_that_are_not_alike_are_named_and_no_pass(make, tmp_path, change, says):
    report = check_ranks(files(make, tmp_path, **change), budget(layers={"kda": {"kernels": 4, "period_ns": 40_000}}))
    assert report.verdict == "inconclusive"
    assert says in report.doubts


@pytest.mark.parametrize(("change", "says"), [
    ({"jitter": 9.0}, "clocks cannot be brought together"),
    ({"steps": 1, "layers": 4}, "no steps to compare|too few"),
    ({"names": {1: "ncclDevKernel_AllReduce_Sum_bf16"}}, "they do not correspond"),
    ({"drop_layer": (1, 3)}, "they do not correspond"),
    ({"skip_step": (1, 0)}, "different numbers of steps"),
    ({"ranks": 1}, "one rank alone"),
])  # fmt: skip
def test_what_cannot_be_said_across_ranks_is_refused(make, tmp_path, change, says):
    report = check_ranks(files(make, tmp_path, **change), None)
    assert report.skew.ranks == ()
    assert re.search(says, report.skew.refused)


def test_a_capture_that_began_a_step_later_is_not_compared():
    """Its collectives end less than 2 us off, as the steps are that regular; shifted by a step they fit to the ns."""
    begins = [step * 1_000_000 + off for step, off in enumerate((0, 700, -500, 300, -800, 400, 0))]

    def rank(first, noise):
        return [
            [Collective("reduce", start + at, start + at + 500 + noise * (step % 2)) for at in (0, 20_000, 40_000)]
            for step, start in enumerate(begins[first : first + 6])
        ]

    assert compare({0: rank(0, 0), 1: rank(0, 3)}).refused is None
    assert "the steps of rank 1 seem to be one off" in compare({0: rank(0, 0), 1: rank(1, 3)}).refused


def test_ranks_named_by_the_files_names_or_only_counted(make, tmp_path):
    for rank, path in enumerate(files(make, tmp_path, slow=1, slow_us=6.0)):
        data = json.loads(path.read_text())
        del data["distributedInfo"]
        (tmp_path / f"decode-TP-{rank}.json").write_text(json.dumps(data))
        (tmp_path / f"{'xab'[rank]}.json").write_text(json.dumps(data))
    named = check_ranks(tmp_path.glob("decode-TP-*.json"), budget(), world=3)
    assert named.verdict == "pass" and waits(named)[1][0] == 24_000
    counted = check_ranks([tmp_path / f"{name}.json" for name in "xab"], budget(), world=3)
    assert [(lane.label, lane.number) for lane in counted.ranks] == [("a.json", 0), ("b.json", 1), ("x.json", 2)]
    assert counted.verdict == "pass" and waits(counted)[0][0] == 24_000
    assert any("numbered in the order of their names" in note for note in counted.notes)
    twice = check_ranks([tmp_path / name for name in ("a.json", "a.json", "x.json")], budget(), world=3)
    assert twice.verdict == "inconclusive" and "to the nanosecond" in twice.doubts[0]
    for name, source in (("kimi_tp16_a", 0), ("kimi_tp16_b", 1)):  # the size of a group is no rank
        (tmp_path / f"{name}.json").write_text((tmp_path / f"decode-TP-{source}.json").read_text())
    assert [lane.number for lane in check_ranks(tmp_path.glob("kimi*.json"), None).ranks] == [0, 1]
    unknown = check_ranks(tmp_path.glob("decode-TP-*.json"), None)
    assert unknown.doubts == ("how many ranks there were is not in the files; say it with --world N",)


def test_one_file_of_several_processes_holds_a_rank_each(make, tmp_path):
    file = make.nsys(tmp_path / "node.sqlite")
    processes = [0x1000000_000000 | pid << 24 for pid in (0x70, 0x6F)]
    for step in range(3):
        for rank, process in enumerate(processes):
            file.api(
                "cudaGraphLaunch_v10000", step * 500_000 + 1000, step * 500_000 + 5000, 50 + step, thread=process | 1
            )
            for layer in range(4):
                at = step * 500_000 + 20_000 + layer * 25_000
                arrive = at + 10_000 + 6000 * (rank == 0)
                for name, start, end in (("mix", at, arrive), ("ncclDevKernel_AllGather_RING_LL", arrive, at + 20_000),
                                         ("gemm", at + 20_000, at + 25_000)):  # fmt: skip
                    file.kernel(name, start, end, 50 + step, process=process)
    report = check_ranks([file.write()], None)
    assert [lane.label for lane in report.ranks] == [
        "node.sqlite process 111 device 0",
        "node.sqlite process 112 device 0",
    ]
    assert waits(report) == {0: (0, 24_000, 0), 1: (24_000, 0, 12)}


def test_wrong_calls():
    with pytest.raises(TraceError, match="name the trace files"):
        check_ranks([])
    with pytest.raises(TraceError, match="world must be 1 or more, not 0"):
        check_ranks(["x.json"], world=0)


@pytest.mark.parametrize(("name", "waits"), [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True), ("multimem_all_reduce_kernel", True),
    ("void vllm::cross_device_reduce_2stage<half, 8>(...)", True), ("one_shot_all_reduce_kernel", True),
    ("ncclDevKernel_SendRecv", False), ("ncclDevKernel_Broadcast_RING_LL", False), ("k3_output_projection_cute_fused_step", True),
    ("k3_output_projection_cute_split_consumer", True), ("k3_output_projection_cute_split_producer", False),
    ("splitKreduce_kernel", False), ("void at::native::reduce_kernel<512>", False),
])  # fmt: skip
def test_which_kernels_wait_for_other_ranks(name, waits):
    assert is_collective(name) is waits


def test_the_command_says_who_was_late_and_what_is_missing(make, tmp_path, capsys):
    paths = [str(path) for path in files(make, tmp_path, slow=1, slow_us=6.0)]
    file = tmp_path / "budget.json"
    file.write_text(json.dumps(BUDGET))
    assert run(["trace", "ranks", *paths]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 ranks" in out and "made the others wait" in out
    assert [line.split("│")[1:5] for line in out.splitlines() if "20 of 20" in line] == [[" 1    ", "                 24.0 ", "           0.0 ", "       20 of 20 "]]  # fmt: skip
    assert run(["trace", "ranks", *paths, "--budget", str(file)]) == 0
    assert capsys.readouterr().out.startswith("pass 3 of 3 ranks against ranks")
    assert run(["trace", "ranks", *paths[:2], "--budget", str(file), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "inconclusive" and data["reasons"][0] == "rank 2 of 3 is missing"
    assert run(["trace", "ranks", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
