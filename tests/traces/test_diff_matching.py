"""Which kernel is which in two layers, which class is which in two traces, and when a change is beyond the spread."""

from __future__ import annotations

import random

import pytest
from k3lab.traces.diff import matching
from k3lab.traces.diff.matching import align_kernels, match_classes
from k3lab.traces.diff.spread import change
from k3lab.traces.layers import LayerClass


def aligned(a, b, families=()):
    known = dict(families)
    pairs = align_kernels(a, b, [known.get(name) for name in a], [known.get(name) for name in b])
    return [(a[pair.a] if pair.a is not None else None, b[pair.b] if pair.b is not None else None, pair.state)
            for pair in pairs]  # fmt: skip


def test_a_kernel_that_is_gone_shifts_no_other():
    names = [f"k{index:02}" for index in range(13)]
    for gone in range(13):
        rest = names[:gone] + names[gone + 1 :]
        assert aligned(names, rest) == [(name, None if name == names[gone] else name,
                                         "removed" if name == names[gone] else "same") for name in names]  # fmt: skip
        assert [state for *_, state in aligned(rest, names)].count("added") == 1


def test_other_instances_of_a_template_are_the_same_kernel_and_exact_ones_go_first():
    assert aligned(["gemm<128>(int)", "norm"], ["gemm<64>(int)", "norm"]) == [
        ("gemm<128>(int)", "gemm<64>(int)", "same"), ("norm", "norm", "same")]  # fmt: skip
    assert aligned(["gemm<64>"], ["gemm<128>", "gemm<64>"]) == [
        (None, "gemm<128>", "added"),
        ("gemm<64>", "gemm<64>", "same"),
    ]


def test_likeness_and_family_tell_a_renamed_kernel_from_a_replaced_one():
    assert aligned(["a", "routed_experts_v1", "z"], ["a", "routed_experts_v2", "z"])[1][2] == "renamed"
    assert aligned(["a", "cutlass_gemm", "z"], ["a", "nvjet_tst", "z"])[1][2] == "replaced"
    families = {"cutlass_gemm": "experts", "nvjet_tst": "experts"}
    assert aligned(["a", "cutlass_gemm", "z"], ["a", "nvjet_tst", "z"], families.items())[1][2] == "renamed"
    unlike = {"routed_experts_v1": "experts", "routed_experts_v2": "router"}
    assert aligned(["a", "routed_experts_v1", "z"], ["a", "routed_experts_v2", "z"], unlike.items())[1][2] == "replaced"


def test_two_for_one_are_removed_and_added():
    states = [state for *_, state in aligned(["a", "cutlass_gemm", "z"], ["a", "nvjet_tst", "quant", "z"])]
    assert states == ["same", "removed", "added", "added", "same"]


def test_every_kernel_is_in_one_pair(monkeypatch):
    rng = random.Random(5)
    for limit in (matching._LARGEST_TABLE, 0):
        monkeypatch.setattr(matching, "_LARGEST_TABLE", limit)
        for _ in range(60):
            a, b = ([rng.choice("pqrstu") for _ in range(rng.randrange(0, 15))] for _ in range(2))
            pairs = align_kernels(a, b, [None] * len(a), [None] * len(b))
            assert [pair.a for pair in pairs if pair.a is not None] == list(range(len(a)))
            assert sorted(pair.b for pair in pairs if pair.b is not None) == list(range(len(b)))
            for pair in pairs:
                if pair.state == "same":
                    assert a[pair.a] == b[pair.b]
            removed = {a[pair.a] for pair in pairs if pair.state == "removed"}
            assert not removed & {b[pair.b] for pair in pairs if pair.state == "added"}  # else it was only moved


def group(name, kind, names, members):
    return LayerClass(name, kind, tuple(names), tuple(members))


def test_classes_are_paired_by_kind_and_likeness_not_by_letter():
    kda, mla, dense = [f"k{n}" for n in range(13)], [f"m{n}" for n in range(15)], ["d0", "k1", "k2", "k3"]
    a = [group("A", "kda", kda, range(9)), group("B", "mla", mla, range(9, 12))]
    b = [group("A", None, dense, [0]), group("B", "mla", mla, range(9, 12)), group("C", "kda", kda[:-1], range(1, 9))]
    assert [(pair.a, pair.b, pair.second) for pair in match_classes(a, b)] == [
        (0, 2, False),
        (1, 1, False),
        (0, 0, True),
    ]
    assert match_classes([a[0]], [group("A", "mla", kda, [0])]) == []  # another kind is another thing
    assert match_classes([group("A", None, kda, [0])], [group("A", None, mla, [0])]) == []


@pytest.mark.parametrize(("a", "b", "beyond"), [
    ([100_000] * 10, [102_000] * 10, True),
    ([100_000] * 10, [100_400] * 10, False),  # under half a percent
    ([99_000, 101_000] * 5, [100_500, 103_000] * 5, False),  # the ranges overlap
    ([99_000, 100_000] * 5, [100_500, 103_000] * 5, True),
    ([100_000] * 19 + [200_000], [102_000] * 20, True),  # one odd step is not the spread
    ([100_000] * 7, [200_000] * 20, None),
    ([100_000] * 8, [200_000] * 8, True),
    (None, [200_000] * 5, None),
])  # fmt: skip
def test_beyond_the_spread(a, b, beyond):
    found = change(a, b)
    assert found.beyond is beyond
    if a:
        back = change(b, a)
        assert back.beyond is beyond
        assert back.delta == -found.delta


def test_what_is_on_one_side_only_has_no_difference_but_a_worth():
    found = change(None, [2_000] * 5)
    assert (found.a, found.b, found.delta, found.worth) == (None, 2_000, None, 2_000)
    assert found.to_json()["a_ns"] is None
    assert change([0] * 5, [0] * 5).a == 0  # measured, and nothing


def test_less_than_the_file_can_count_is_no_change():
    assert change([100_000] * 9, [101_000] * 9, resolution=1000).beyond is False
    assert change([100_000] * 9, [102_000] * 9, resolution=1000).beyond is True
