"""The prefetch of weights into the L2: which bytes, in which order, and the kernel's machine code."""

from __future__ import annotations

import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.experts.prefetch import OFF, capped, compile_prefetch, in_order, space, table
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.sass_order import order, places, unwaited


def test_ranges_are_cut_at_the_cap_and_to_whole_sixteens():
    ranges = [(4096, 1000), (8200, 64), (20000, 5), (32768, 100000)]
    assert capped(ranges, 10**6) == [(4096, 992), (8208, 48), (32768, 100000)]
    assert capped(ranges, 1010) == [(4096, 992), (8208, 16)]
    assert capped(ranges, 15) == []
    for found in (capped(ranges, cap) for cap in range(0, 3000, 7)):
        assert all(address % 16 == size % 16 == 0 and size > 0 for address, size in found)
        for address, size in found:
            assert any(first <= address and address + size <= first + length for first, length in ranges)


def test_what_cannot_be_prefetched_is_said():
    weights = [torch.zeros(1024), torch.zeros(64)]
    config = space().default
    made = table(weights, config)
    assert made.tolist() == [[weights[0].data_ptr(), 4096], [weights[1].data_ptr(), 256]] and made.dtype == torch.int64
    with pytest.raises(InputError, match="a cap of 0 MB"):
        table(weights, {**config, "cap_mb": 0})
    with pytest.raises(InputError, match="must be contiguous"):
        table([torch.zeros(8, 8).T], config)
    with pytest.raises(InputError, match="65 ranges"):
        table([weights[0]] * 65, config)
    with pytest.raises(InputError, match="bytes to prefetch"):
        capped([(0, 1 << 31)], 5)
    assert space().illegal({**config, "cap_mb": 0, "blocks": 1}) == "off is one config"
    assert space().illegal(OFF) is None and OFF["cap_mb"] == 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize("kept", [False, True])
def test_the_kernel_asks_before_it_waits_and_holds_next_to_nothing(arch, kept):
    (launch,) = compile_prefetch(5, {**space().default, "kept": kept}, arch).launches
    code, found = order(launch.cubin), kernel_resources(launch)
    asks = places(code, r"UBLKPF.*")
    assert asks and set(asks) <= set(unwaited(code))
    assert len(places(code, "ACQBULK")) == 1 and not places(code, r"ST[GL].*|STS.*")
    assert places(code, "PREEXIT")[0] < asks[0]
    assert found.registers <= 40 and found.spill_instructions == 0 and launch.threads == 32 and launch.pdl
    assert found.kernel.startswith("k3_experts_cute_prefetch")


def test_the_order_and_the_reach_say_which_weights_come_first():
    config, kernels = space().default, [["q", "k"], ["o"]]
    assert in_order(kernels, config) == ["q", "k", "o"]
    assert in_order(kernels, {**config, "order": "reverse"}) == ["o", "q", "k"]
    assert in_order(kernels, {**config, "reach": 1}) == ["q", "k"]
    assert space().illegal({**config, "reach": 1, "order": "reverse"}) == "one kernel has no order"
    assert (
        space().illegal({**config, "fork": "behind", "priority": "high"})
        == "a launch in line has no priority of its own"
    )
    assert space().illegal({**config, "fork": "ahead", "priority": "high"}) is None
