"""On a GPU: the experts' chain with a prefetch from every fork has the bits and the edges of the chain without."""

from __future__ import annotations

import pytest
from k3lab.kernels import K3

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[1, 8])
def chain(request, device):
    from k3lab.tuning.compiling import compile_config
    from k3lab.tuning.policy import QUICK
    from k3lab.tuning.prefetch_chain import Chain, links

    found = links(K3, 16, request.param, "kda", device.need_card(), {})
    return Chain(found, [compile_config(one.engine, one.problem, one.config, device.arch) for one in found], QUICK, 0)


@pytest.mark.parametrize("fork", ["ahead", "beside", "before", "behind"])
def test_bits_and_edges_are_those_without(chain, device, fork):
    import torch
    from k3lab.kernels.experts.prefetch import OFF

    off = chain.passes(OFF, device.arch)
    wanted, edges = chain.outputs(off), chain.require_edges(off, OFF)
    assert not any(one.isnan().any() for one in wanted)
    for more in ({}, {"order": "reverse"}, {"reach": 1, "kept": False}):
        config = {**OFF, "cap_mb": 32, "fork": fork, **more}
        passes = chain.passes(config, device.arch)
        for _ in range(3):
            found = chain.outputs(passes)
            assert all(
                torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, wanted, strict=True)
            )
        assert chain.require_edges(passes, config) >= edges
    chain.check_health()


def test_every_pass_reads_cold_weights(chain):
    """No weights of the projections are read again before the policy's bytes of experts have gone by."""
    from k3lab.tuning.policy import QUICK

    experts = chain.chain[0]
    read = experts.family.traffic(experts.problem).weight_bytes * (len(chain.copies[0]) - 1)
    assert read >= QUICK.rotate_bytes
    for link, tensors in zip(chain.chain[1:], chain.copies[1:], strict=True):
        for name in link.family.rotated:
            assert len({one[name].data_ptr() for one in tensors}) == len(tensors)


def test_one_config_is_timed(device):
    from k3lab.kernels.experts.prefetch import space
    from k3lab.tuning.prefetch_tune import tune_prefetch

    row = tune_prefetch(device, K3, 16, 2, "kda", {}, space().default, lambda text: None)
    assert 30 < row["off_us"] < 200 and 30 < row["on_us"] < 200
    assert row["worth_it"] == (row["gain_us"] > row["band_us"]) and row["timed"] == 1
