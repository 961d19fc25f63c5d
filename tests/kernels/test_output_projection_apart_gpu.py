"""The output projection with blocks of their own for rows, on a GPU: the twin's bits, the fused engine's bits, room for all blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from k3lab.kernels.health import check_health
from k3lab.kernels.output_projection.cute_apart_engine import shared

from .gpu_acts import delay_often, early_graph, replay_often, run_often, same
from .output_projection_case import Case
from .test_output_projection_engines import APART, FUSED, config, problem

pytestmark = pytest.mark.gpu
SHAPES = [(16, rows) for rows in (1, 2, 5, 8, 14, 16)] + [(8, rows) for rows in (1, 3, 8, 16)] + [(4, 8)]


def case_of(device, one, **change):
    """A legal config over loopback; ``jitter`` is none of the space."""
    chosen = config(one, APART, **change)
    space = APART.space(one, device.need_card())
    assert space.illegal({name: value for name, value in chosen.items() if name != "jitter"}) is None
    return Case(device, one, chosen, engine=APART)


@pytest.mark.parametrize(("tp", "rows"), SHAPES)
@pytest.mark.parametrize("kind", ["kda", "restart"])
def test_equals_the_twin_in_many_launches(device, tp, rows, kind):
    one = problem(rows, tp, kind)
    case = case_of(device, one)
    run_often(case)
    for fewer in {1, rows // 2 or 1}:
        case.run(fewer)
        case.judge(fewer)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 8])
def test_tiles_come_again_into_places_that_were_read(device, rows, depth):
    """Eight steps through fewer places, launch after launch; with all that follow at once, too."""
    one = problem(rows, 8)
    case = case_of(device, one, depth=depth)
    run_often(case)
    replay_often(case, 50)


@pytest.mark.parametrize(("tp", "rows", "change"), [
    (16, 8, {}), (16, 1, {}), (8, 8, {}), (8, 3, {"packet": "b32e32"}), (16, 16, {}), (16, 8, {"k_order": "invariant"}),
])  # fmt: skip
def test_has_the_bits_of_cute_fused(device, tp, rows, change):
    """Both add in the same order where as many warps share K; how a row's sums travel is no matter of order."""
    one = problem(rows, tp)
    fused, apart = Case(device, one, config(one, **change), engine=FUSED), case_of(device, one, **change)
    assert FUSED.summation_order(one, fused.compiled.config) == APART.summation_order(one, apart.compiled.config)
    for case in (fused, apart):
        case.run()
    assert same(fused.bits(), apart.bits())


@pytest.mark.parametrize("change", [
    {"row_blocks": 4, "rehearse": 0}, {"warps_k": 4, "rehearse": 0, "depth": 3}, {"warps_k": 8, "depth": 3}, {"backoff": 100, "release": "end"},
    {"release": "entry", "depth": 1}, {"rehearse": 0}, {"row_blocks": 4, "rehearse": 0, "packet": "b32e32", "release": "end"},
    {"warps_k": 4, "row_blocks": 4, "rehearse": 0, "depth": 1},
])  # fmt: skip
def test_other_configs_equal_the_twin(device, change):
    """Fewer warps of the product than a row's block has, as many, and more."""
    one = problem(8, 16)
    case = case_of(device, one, **change)
    run_often(case)
    case.run(3, tensors=case.with_dead_rows(3))
    case.judge(3)


@pytest.mark.parametrize("rows", [1, 14, 16])
@pytest.mark.parametrize("size", [4, 8])
def test_what_the_space_calls_legal_has_room(device, rows, size):
    """The driver counts clusters and shared memory anew; the most tiles that the card's numbers allow are there."""
    one, card = problem(rows, 8), device.need_card()
    space = APART.space(one, card)
    found = [
        chosen
        for warps, depth in itertools.product((4, 6, 8), (1, 2, 3, 4, 6, 8))
        if space.illegal(
            chosen := {**space.default, "warps_k": warps, "depth": depth, "row_blocks": size, "rehearse": 0}
        )
        is None
    ]
    if not found:
        pytest.skip(f"{rows} rows in clusters of {size} do not fit on {card.name}")
    case = Case(device, one, max(found, key=lambda chosen: shared(rows, chosen)), engine=APART)
    case.run()
    case.judge()


@pytest.mark.parametrize(("tp", "rows", "depth"), [(8, 8, 2), (8, 1, 3)])
def test_early_launches_at_fewer_places_than_tiles(device, tp, rows, depth):
    one = problem(rows, tp)
    case = case_of(device, one, depth=depth)
    case.run(pdl=False)
    case.judge()
    first, replay = case.bits(), early_graph(case.runner, case.tensors, "x")
    for _ in range(100):
        case.poison()
        replay()
        torch.cuda.synchronize()
        assert same(first, case.bits())
    check_health(case.runner.buffers)


def test_delays_at_fewer_places_than_tiles_change_no_bit(device):
    plain, delayed = (case_of(device, problem(8, 8), depth=2, jitter=jitter) for jitter in (0, 1))
    delay_often(plain, delayed, 300)
