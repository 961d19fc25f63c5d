"""Virtual ranks: the sums' order and rounding, and an error that names the rank at fault."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.collectives import CollectiveError, Collectives, SingleRank, StandIn, run_virtual_ranks

SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_sums_every_rank_and_gives_each_the_same_bits(size: int) -> None:
    torch.manual_seed(0)
    parts = torch.randn(size, 5, 3)
    results = run_virtual_ranks(size, lambda comm: comm.all_reduce(parts[comm.rank]))
    torch.testing.assert_close(results[0], parts.sum(0))
    assert all(torch.equal(result, results[0]) for result in results)


def test_all_reduce_adds_in_rank_order() -> None:
    parts = torch.tensor([[1e8], [-1e8], [1.0]])  # any order that adds the 1 earlier loses it
    assert [r.item() for r in run_virtual_ranks(3, lambda comm: comm.all_reduce(parts[comm.rank]))] == [1.0] * 3


def test_all_reduce_of_bf16_accumulates_in_fp32_and_rounds_once() -> None:
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # BF16 sums would stay at 256
    result = run_virtual_ranks(3, lambda comm: comm.all_reduce(parts[comm.rank]))[2]
    assert result.dtype == torch.bfloat16
    assert result.item() == 258


def test_all_reduce_of_fp64_stays_fp64() -> None:
    result = run_virtual_ranks(2, lambda comm: comm.all_reduce(torch.tensor([1.0 + comm.rank * 1e-13]).double()))[0]
    wanted = torch.tensor([1.0]).double() + torch.tensor([1.0 + 1e-13]).double()
    assert result.dtype == torch.float64
    assert torch.allclose(result, wanted, rtol=0, atol=1e-7)


def test_all_gather_and_reduce_scatter_place_the_shards_in_rank_order() -> None:
    whole = torch.arange(48.0).view(4, 12)

    def body(comm: Collectives) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = whole[:, comm.rank * 3 : comm.rank * 3 + 3]
        return comm.all_gather(mine, dim=-1), comm.reduce_scatter(whole, dim=1), comm.reduce_scatter(whole, dim=0)

    for rank, (gathered, columns, rows) in enumerate(run_virtual_ranks(4, body)):
        assert torch.equal(gathered, whole)
        assert torch.equal(columns, 4 * whole[:, rank * 3 : rank * 3 + 3])
        assert torch.equal(rows, 4 * whole[rank : rank + 1])


def test_a_rank_may_change_its_tensor_as_soon_as_the_collective_returns() -> None:
    def body(comm: Collectives) -> list[float]:
        x, seen = torch.ones(1), []
        for _ in range(20):
            seen.append(comm.all_reduce(x).item())
            x += comm.rank
        return seen

    expected = [4 * 1.0 + 6 * step for step in range(20)]
    assert run_virtual_ranks(4, body) == [expected] * 4


def test_the_first_exception_comes_back_and_names_its_rank() -> None:
    def body(comm: Collectives) -> torch.Tensor:
        if comm.rank == 2:
            raise ZeroDivisionError("expert without tokens")
        return comm.all_reduce(torch.ones(1))

    with pytest.raises(ZeroDivisionError, match="expert without tokens") as caught:
        run_virtual_ranks(4, body)
    assert "virtual rank 2 of 4" in "".join(caught.value.__notes__)


def test_a_late_rank_is_named_and_the_wait_is_bounded() -> None:
    release = threading.Event()

    def body(comm: Collectives) -> torch.Tensor:
        if comm.rank == 1:
            release.wait(20)
        return comm.all_reduce(torch.ones(1))

    started = time.monotonic()
    with pytest.raises(CollectiveError, match=r"^rank 1 did not (reach|finish)"):
        run_virtual_ranks(3, body, timeout_s=0.3)
    assert time.monotonic() - started < 5
    release.set()


def test_a_rank_that_never_ends_is_named() -> None:
    release = threading.Event()
    with pytest.raises(CollectiveError, match=r"rank 1 did not finish within 0\.2 s"):
        run_virtual_ranks(2, lambda comm: comm.rank == 1 and release.wait(20), timeout_s=0.2)
    release.set()


def test_an_interrupted_group_has_ended_when_the_interruption_is_seen() -> None:
    threads, calls = [], [0, 0, 0]

    def rank(comm: Collectives) -> None:
        threads.append(threading.current_thread())
        for _ in range(100_000):
            comm.all_reduce(torch.zeros(1))
            calls[comm.rank] += 1
            if comm.rank == 0 and calls[0] == 20:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_virtual_ranks(3, rank)
    assert len(threads) == 3 and not any(one.is_alive() for one in threads) and max(calls) < 99_999


def test_a_rank_that_returns_early_is_named_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 0 returned before all_gather"):
        run_virtual_ranks(2, lambda comm: comm.rank == 0 or comm.all_gather(torch.ones(1), 0), timeout_s=8)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_reduce(torch.ones(1)) if comm.rank else comm.all_gather(torch.ones(1), 0),
        lambda comm: comm.all_reduce(torch.ones(1 + comm.rank)),
        lambda comm: comm.all_reduce(torch.ones(1, dtype=torch.float64 if comm.rank else torch.float32)),
        lambda comm: comm.all_gather(torch.ones(2, 2), comm.rank),
    ],
)
def test_ranks_that_disagree_on_the_call_are_told(call) -> None:
    with pytest.raises(CollectiveError, match="call 0: rank"):
        run_virtual_ranks(2, call, timeout_s=5)


def test_a_shard_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="does not split over 4 ranks"):
        run_virtual_ranks(4, lambda comm: comm.reduce_scatter(torch.ones(6), 0))
    with pytest.raises(InputError, match="at least one rank"):
        run_virtual_ranks(0, lambda comm: None)


def test_single_rank_returns_what_it_is_given() -> None:
    x, one = torch.ones(2, 3), SingleRank()
    assert one.all_reduce(x) is x
    assert one.all_gather(x, 0) is x
    assert one.reduce_scatter(x, 0) is x
    assert (one.rank, one.size) == (0, 1)


def test_stand_in_has_the_shapes_of_the_group() -> None:
    x = torch.arange(8.0).view(2, 4)
    alone = StandIn(rank=1, size=2)
    assert torch.equal(alone.all_reduce(x), x)
    assert torch.equal(alone.all_gather(x, -1), torch.cat([x, x], dim=-1))
    assert torch.equal(alone.reduce_scatter(x, -1), x[:, 2:])
    with pytest.raises(InputError, match=r"ranks are 0\.\.1"):
        StandIn(rank=2, size=2)
