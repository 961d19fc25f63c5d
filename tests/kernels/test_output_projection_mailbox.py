"""Where packets lie: no two share a byte, none is torn, and a slot's bytes are what a transport counts."""

from __future__ import annotations

import pytest
from k3lab.kernels import InputError
from k3lab.kernels.output_projection import mailbox
from k3lab.kernels.output_projection.mailbox import PACKETS, Layout, RowExchange, pack, packet, unpack
from k3lab.kernels.transports import slot_bytes

FORMS = list(PACKETS.values())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(("ranks", "rows", "columns"), [(2, 3, 112), (4, 1, 56), (3, 2, 168)])
def test_packets_of_different_places_share_no_byte_and_are_aligned(form, ranks, rows, columns) -> None:
    layout = Layout(ranks, rows, columns, form)
    taken: set[int] = set()
    for slot in range(ranks):
        for epoch in (1, 2):
            for row in range(rows):
                for index in range(layout.packets):
                    first = layout.offset(slot, epoch, row, index)
                    assert first % form.bytes == 0
                    assert first == slot * layout.slot_bytes + layout.within(epoch, row, index)
                    place = set(range(first, first + form.bytes))
                    assert not place & taken
                    taken |= place
    assert max(taken) < layout.bytes
    assert layout.offset(0, 1, 0, 0) == layout.offset(0, 3, 0, 0) != layout.offset(0, 2, 0, 0)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("columns", [56, 448, 7168])
def test_every_column_is_in_one_packet(form, columns) -> None:
    held = [column for index in range(form.count(columns)) for column in form.columns(index)]
    assert sorted(held) == list(range(columns))
    for index in range(form.count(columns)):
        pairs = form.columns(index)[: form.values // 2 * 2]
        assert all(pairs[i] % 2 == 0 and pairs[i + 1] == pairs[i] + 1 for i in range(0, len(pairs), 2))


def test_seven_values_fill_a_hidden_state_exactly() -> None:
    seven = packet("bf16x7e16")
    assert (seven.count(7168), seven.bytes, seven.columns(0), seven.columns(9)) == (
        1024, 16, (0, 1, 16, 17, 32, 33, 48), (58, 59, 74, 75, 90, 91, 105),
    )  # fmt: skip
    assert mailbox.one_shot(16, 8, 7168, seven).received_bytes == 16 * 8 * 1024 * 16
    with pytest.raises(InputError, match="100 columns are no multiple of 56"):
        seven.count(100)
    with pytest.raises(InputError, match="no packet form 'x'; there are bf16x7e16, b32e32"):
        packet("x")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_any_payload_is_legal_and_only_its_own_epoch_is_read(form) -> None:
    special = [0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0000, 0x3F80][: form.values]  # -0, inf, -inf, NaNs, 0, 1
    for epoch in (1, 2, 65535, 65536, 2**32 - 1):
        data = pack(form, special, epoch)
        assert len(data) == form.bytes
        assert unpack(form, data, epoch) == special
        assert unpack(form, data, epoch + 2) is None  # what comes next in this place
        assert unpack(form, data, epoch - 2) is None
    assert unpack(form, bytes(form.bytes), 1) is None  # memory as it was allocated
    assert unpack(form, bytes(form.bytes), 2) is None


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_two_shot_receives_less_than_one_shot(ranks) -> None:
    form = packet("bf16x7e16")
    one = mailbox.one_shot(ranks, 64, 7168, form)
    parts, totals = mailbox.two_shot(ranks, 64, 7168, form)
    assert parts.received_bytes + totals.received_bytes == 2 * one.received_bytes // ranks
    for layout in (one, parts, totals):
        box, table = layout.buffers("mail")
        assert slot_bytes(box, ranks) == layout.slot_bytes
        assert (box.persistent, table.targets_of, table.shape) == (True, "mail", (ranks, 2))
    with pytest.raises(InputError, match="do not divide over 3 owners"):
        mailbox.two_shot(3, 8, 7168, form)


def test_row_packets_share_no_byte() -> None:
    exchange = RowExchange(rows=3, units=4, packets=2)
    places = [exchange.offset(row, unit, index) for row in range(3) for unit in range(4) for index in range(2)]
    assert sorted(places) == list(range(0, 3 * 4 * 2 * 16, 16))
    assert exchange.buffer("scalars").shape == (max(places) // 4 + 4,)
    assert mailbox.epochs_buffer("epochs", 128).shape == (128,)
