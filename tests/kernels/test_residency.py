"""Blocks that must be on the GPU together: the careful model of the cards, and what the driver would be told."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from k3lab.kernels import Launch
from k3lab.kernels.gpu_cards import GPU_CARDS, gpu_card
from k3lab.kernels.residency import (
    carveout,
    concerned,
    even_bytes,
    padded_bytes,
    percent_taken,
    refusal,
    room_by_card,
    room_on_gpu,
)


def launch(blocks: int, cluster: int = 1, *, waits: bool = False) -> Launch:
    return Launch(
        "k3_a_b_main", b"", (cluster, blocks // cluster, 1), (128, 1, 1), 200_000, (), (cluster, 1, 1),
        needs_residency=waits,
    )  # fmt: skip


@pytest.mark.parametrize("card", GPU_CARDS.values(), ids=lambda card: card.name)
def test_the_gpcs_of_a_card_hold_its_sms(card):
    assert sum(card.gpc_sms) == card.sms
    assert all(size % 2 == 0 for size in card.gpc_sms)  # SMs come in pairs
    assert card.sources["gpc_sms"].startswith("assumed")


@pytest.mark.parametrize(
    ("gpu", "cluster", "a_sm", "blocks"),
    [
        ("h200", 1, 1, 132), ("h200", 1, 3, 396),
        ("h200", 2, 1, 132), ("h200", 4, 1, 120), ("h200", 8, 1, 120), ("h200", 16, 1, 112),
        ("h200", 5, 1, 110), ("h200", 5, 2, 220),  # 3 of 5 in a GPC of 16 or 18: 26 clusters of 5 never fit one a SM
        ("h200", 17, 4, 0),
        ("gb300", 2, 1, 152), ("gb300", 4, 1, 144), ("gb300", 16, 1, 128),
    ],
)  # fmt: skip
def test_room_by_card(gpu, cluster, a_sm, blocks):
    assert room_by_card(launch(cluster, cluster), a_sm, gpu_card(gpu)).blocks == blocks


def test_what_waits_for_each_other_must_fit():
    card = gpu_card("h200")
    fits, too_many = launch(132, waits=True), launch(133, waits=True)
    assert concerned(fits)
    assert refusal(fits, room_by_card(fits, 1, card)) is None
    reason = refusal(too_many, room_by_card(too_many, 1, card))
    assert reason == (
        "k3_a_b_main: its 133 blocks wait for each other, and only 132 can be on the GPU at once (1 a SM on H200)"
    )
    clusters = launch(130, 5, waits=True)
    assert "its 130 blocks wait for each other, and only 110" in str(refusal(clusters, room_by_card(clusters, 1, card)))
    assert refusal(dataclasses.replace(clusters, needs_residency=False), room_by_card(clusters, 1, card)) is None


def test_what_waits_for_nothing_is_not_asked_about():
    assert not concerned(launch(10_000))
    assert concerned(launch(10_000, 2))


def test_a_cluster_that_fits_nowhere_is_refused_in_any_case():
    card = gpu_card("h200")
    reason = refusal(launch(34, 17), room_by_card(launch(34, 17), 1, card))
    assert "no cluster of 17 blocks of 128 threads and 200000 bytes of shared memory each can be scheduled" in str(
        reason
    )
    uneven = Launch("k3_a_b_main", b"", (7, 1, 1), (128, 1, 1), 0, (), (2, 1, 1))
    assert "a grid of (7, 1, 1) blocks does not divide into clusters of (2, 1, 1)" in str(
        refusal(uneven, room_by_card(uneven, 1, card))
    )


@pytest.mark.parametrize(("answer", "blocks"), [((0, 24), 120), (("INVALID", 0), 0)])
def test_the_driver_is_asked_for_clusters(monkeypatch, answer, blocks):
    import cuda.bindings.driver as driver

    codes = {0: driver.CUresult.CUDA_SUCCESS, "INVALID": driver.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE}
    asked = []

    def clusters(function, config):
        asked.append((function, config))
        return codes[answer[0]], answer[1]

    monkeypatch.setattr(driver, "cuOccupancyMaxActiveClusters", clusters)
    config = SimpleNamespace()
    assert room_on_gpu(launch(130, 5), "function", config).blocks == blocks
    assert asked == [("function", config)]


def test_a_driver_that_does_not_answer_is_no_yes(monkeypatch):
    import cuda.bindings.driver as driver

    monkeypatch.setattr(
        driver, "cuOccupancyMaxActiveClusters", lambda *_: (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT, 7)
    )
    with pytest.raises(
        RuntimeError, match="k3_a_b_main: the driver does not say what fits: CUDA_ERROR_INVALID_CONTEXT"
    ):
        room_on_gpu(launch(130, 5), "function", SimpleNamespace())


def test_no_driver_is_asked_for_a_cluster_that_no_gpu_has():
    assert room_on_gpu(launch(34, 17), "function", SimpleNamespace()).blocks == 0


PER_SM, PER_BLOCK, RESERVED, SMS = 233_472, 232_448, 1024, 132


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("static", [0, 2048])
def test_padding_is_the_least_that_keeps_one_more_block_off(layers, static):
    size = padded_bytes(layers, PER_SM, PER_BLOCK, RESERVED, static)
    assert PER_SM // (size + static + RESERVED) == layers
    assert PER_SM // (size - 1 + static + RESERVED) == layers + 1


def test_padding_ends_at_what_a_block_may_have():
    assert padded_bytes(0, PER_SM, PER_BLOCK, RESERVED, 100) == PER_BLOCK - 100


class Taken(int):
    """Dynamic shared memory, as a launch configuration tells it."""

    @property
    def sharedMemBytes(self) -> int:
        return int(self)


@pytest.fixture
def driver(monkeypatch):
    """A driver that counts blocks by shared memory and ``by_threads``; clusters of four lose the SMs that no four share."""
    import cuda.bindings.driver as driver

    ok, names = driver.CUresult.CUDA_SUCCESS, driver.CUdevice_attribute
    facts = {
        names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: PER_SM,
        names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: PER_BLOCK,
        names.CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: RESERVED,
        names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: SMS,
    }
    state = SimpleNamespace(by_threads=16)

    def a_sm(size: int) -> int:
        return min(PER_SM // (size + RESERVED), state.by_threads)

    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (ok, 0))
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda name, device: (ok, facts[name]))
    monkeypatch.setattr(driver, "cuFuncGetAttribute", lambda name, function: (ok, 0))
    monkeypatch.setattr(
        driver, "cuOccupancyMaxActiveBlocksPerMultiprocessor", lambda function, threads, size: (ok, a_sm(size))
    )
    monkeypatch.setattr(driver, "cuOccupancyMaxActiveClusters", lambda function, size: (ok, 30 * a_sm(size)))
    return state


@pytest.mark.parametrize(
    ("blocks", "cluster", "needs", "layers"),
    [
        (131, 1, 80_000, 1),  # one an SM, and two would fit
        (132, 1, 80_000, 1),
        (133, 1, 70_000, 2),  # two on some, and three would fit
        (264, 1, 70_000, 2),
        (132, 1, 120_000, None),  # a second one never fits
        (264, 1, 100_000, None),  # nor a third
        (265, 1, 20_000, None),  # three an SM: left alone
        (120, 4, 50_000, 1),  # 30 clusters
        (128, 4, 50_000, 2),  # at one block an SM two clusters would have to wait
        (240, 4, 50_000, 2),
        (244, 4, 50_000, None),
    ],
)
def test_blocks_of_one_or_two_an_sm_are_spread(driver, blocks, cluster, needs, layers):
    one = dataclasses.replace(launch(blocks, cluster), shared_bytes=needs)
    wanted = needs if layers is None else padded_bytes(layers, PER_SM, PER_BLOCK, RESERVED, 0)
    assert even_bytes(one, None, lambda size: size) == wanted


def test_what_other_limits_spread_is_left_alone(driver):
    driver.by_threads = 1
    one = dataclasses.replace(launch(100), shared_bytes=1000)
    assert even_bytes(one, None, lambda size: size) == 1000


def test_a_warp_that_runs_beside_another_kernel_takes_no_shared_memory(driver):
    """The prefetch beside the experts: padded, it would wait for an empty SM, and they for its end."""
    beside = dataclasses.replace(launch(8), block=(32, 1, 1), shared_bytes=0)
    assert even_bytes(beside, None, lambda size: size) == 0
    for other in ({"block": (64, 1, 1)}, {"shared_bytes": 100}, {"needs_residency": True}):
        padded = even_bytes(dataclasses.replace(beside, **other), None, lambda size: size)
        assert padded == padded_bytes(1, PER_SM, PER_BLOCK, RESERVED, 0)


def test_a_driver_that_does_not_say_how_much_there_is(driver, monkeypatch):
    import cuda.bindings.driver as real

    monkeypatch.setattr(real, "cuDeviceGetAttribute", lambda name, device: (real.CUresult.CUDA_ERROR_INVALID_VALUE, 0))
    with pytest.raises(RuntimeError, match="how much shared memory there is"):
        even_bytes(launch(8), None, lambda size: size)


@pytest.mark.parametrize(
    ("blocks", "needs", "percent"),
    [
        (131, 172_208, 75),  # one an SM; the carve-outs are coarser: 196 of 228 KB
        (240, 76_801, 67),  # two an SM
        (10_000, 76_801, 67),  # no more than fit
        (102, 115_713, 51),
        (3216, 16, 12),  # 25 an SM, and the system's kilobyte each
    ],
)
def test_the_carveout_holds_the_blocks_of_an_sm(driver, blocks, needs, percent):
    assert carveout(dataclasses.replace(launch(blocks), shared_bytes=1), None, Taken(needs)) == percent
    beside = min(-(-blocks // SMS), PER_SM // (needs + RESERVED))
    assert PER_SM * (percent - 1) < 100 * beside * (needs + RESERVED) <= PER_SM * percent
    assert percent_taken(blocks, SMS, PER_SM, needs + RESERVED) == percent


@pytest.mark.parametrize(
    ("blocks", "percent"),
    [
        (120, 39),  # one an SM of those that clusters of four come to
        (132, 78),  # as many blocks as SMs, and some of these get two
    ],
)
def test_the_carveout_holds_the_clusters_that_share_an_sm(driver, blocks, percent):
    """A launch that finds less than its blocks need waits until its predecessor has left the SM."""
    assert carveout(launch(blocks, 4), None, Taken(90_000)) == percent
