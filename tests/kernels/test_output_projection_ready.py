"""Mailboxes filled from the host: every packet is where a kernel polls it, and says what a rank would have sent."""

from types import SimpleNamespace

import pytest
import torch
from k3lab.kernels import Compiled, Launch
from k3lab.kernels.output_projection import OutputProjection, common
from k3lab.kernels.output_projection.mailbox import PACKETS, packet, unpack
from k3lab.kernels.output_projection.ready import make_ready, packed, polling

TP, ROWS, HIDDEN = 4, 2, 448
ONE = OutputProjection(tp=TP, rows=ROWS, kind="kda", width=32, hidden=HIDDEN, blocks=2, eps=1e-5)


def runner(config, epoch, transport="symmetric", rank=1):
    boxes = common.mail(ONE, config)
    buffers = {
        name: torch.zeros(TP, box.slot_bytes // 4, dtype=torch.int32)
        for name, box in zip(("mailbox", "totals"), boxes, strict=False)
    }
    counter = epoch - 1 - (1 << 32 if epoch - 1 >> 31 else 0)
    buffers["epochs"] = torch.tensor([0, 0, counter], dtype=torch.int32)
    compiled = Compiled("output_projection", "e", ONE, config, "sm_90a", ())
    return SimpleNamespace(compiled=compiled, buffers=buffers, transport=SimpleNamespace(rank=rank, name=transport))


def held(found, box, name, slot, epoch, row, form):
    """The values that a consumer reads there, column by column."""
    values = {}
    memory = found.buffers[name].view(torch.uint8).flatten()
    for index in range(box.packets):
        at = box.offset(slot, epoch, row, index)
        bits = unpack(form, bytes(memory[at : at + form.bytes].tolist()), epoch)
        assert bits is not None, f"{name}: packet {index} of row {row} from rank {slot} is of another epoch"
        values |= dict(zip(form.columns(index), bits, strict=True))
    return torch.tensor([values[column] for column in range(box.columns)])


@pytest.mark.parametrize("name", PACKETS)
@pytest.mark.parametrize("exchange", ["one_shot", "two_shot"])
@pytest.mark.parametrize("epoch", [1, 2, 65536, 2**32 - 1])
def test_the_next_launch_finds_what_all_ranks_would_have_sent(name, exchange, epoch):
    config = {"packet": name, "exchange": exchange}
    partials = torch.randn(TP, ROWS, HIDDEN).bfloat16()
    found = runner(config, epoch)
    make_ready(found, partials)
    form, boxes = packet(name), common.mail(ONE, config)
    bits = partials.view(torch.int16).int() & 0xFFFF
    sums = partials.sum(0, dtype=torch.float32).bfloat16().view(torch.int16).int() & 0xFFFF
    width = HIDDEN // TP
    for rank in range(TP):
        for row in range(ROWS):
            got = held(found, boxes[0], "mailbox", rank, epoch, row, form)
            assert torch.equal(got, bits[rank, row] if exchange == "one_shot" else bits[rank, row, width : 2 * width])
            if exchange == "two_shot":
                got = held(found, boxes[1], "totals", rank, epoch, row, form)
                assert torch.equal(got, sums[row, rank * width : (rank + 1) * width])


def test_over_loopback_a_launch_sends_itself_the_sums():
    found = runner({"exchange": "two_shot"}, 3, "loopback", 0)
    make_ready(found, torch.ones(TP, ROWS, HIDDEN).bfloat16())
    assert found.buffers["mailbox"].any() and not found.buffers["totals"].any()


def test_packets_of_another_launch_do_not_end_a_wait():
    form = packet("bf16x7e16")
    data = packed(torch.ones(56).bfloat16(), form, 5)
    assert data.shape == (8, 8)
    assert unpack(form, data[0].numpy().tobytes(), 5) == [0x3F80] * 7
    assert unpack(form, data[0].numpy().tobytes(), 7) is None


def test_only_launches_that_poll_are_kept():
    make, take = (
        Launch(name, b"", (1, 1, 1), (32, 1, 1), 0, (), needs_residency=waits)
        for name, waits in (("producer", False), ("consumer", True))
    )
    assert polling(Compiled("f", "e", ONE, {}, "sm_90a", (make, take))).launches == (take,)
