"""Transports: tables of targets, factors, and refusals with their reasons."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from k3lab.kernels import Buffer, Compiled, InputError, Problem
from k3lab.kernels import transports as module
from k3lab.kernels.transports import Loopback, Multicast, Symmetric, Transport, factor_word, own_buffers

SIZES = (1, 2, 4, 8, 16)


def mail(size: int, words: int = 8) -> Buffer:
    return Buffer("mail", (size, 2, words), "int32", persistent=True)


def write_through(targets: torch.Tensor, own: torch.Tensor, line: int, values: torch.Tensor) -> None:
    """What a kernel does: BF16 values times the line's factor, to the line's address."""
    address, word = (int(value) for value in targets[line])
    pair = torch.tensor([word - (1 << 32) if word >> 31 else word], dtype=torch.int32).view(torch.bfloat16)
    assert pair[0] == pair[1]
    place = address - own.data_ptr()
    flat = own.view(-1).view(torch.bfloat16)
    flat[place // 2 : place // 2 + values.numel()] = values * pair[0]


@pytest.mark.parametrize("size", SIZES)
def test_loopback_reaches_every_slot_with_a_factor_of_its_own(size: int) -> None:
    transport: Transport = Loopback(size)
    box = transport.mailbox(mail(size), "cpu")
    assert not box.own.any()
    for line in range(size):
        write_through(box.targets, box.own, line, torch.ones(32, dtype=torch.bfloat16))
    slots = box.own.view(size, -1).view(torch.bfloat16)
    assert all(len(set(slot.tolist())) == 1 for slot in slots)
    first = slots[:, 0].double()
    assert len(set(first.tolist())) == size
    assert all(math.log2(value) == int(math.log2(value)) for value in first.tolist())
    assert first.tolist() == [float(factor) for factor in Loopback(size).factors]


def test_factors_are_what_a_caller_says() -> None:
    assert Loopback.alone(4).factors == (1.0, 0.0, 0.0, 0.0)
    assert Loopback.only(4, 2).factors == (0.0, 0.0, 1.0, 0.0)
    assert Loopback(3, (256.0, -256.0, 1.0)).factors == (256.0, -256.0, 1.0)
    with pytest.raises(InputError, match="no BF16 value"):
        Loopback(1, (1 / 3,))
    with pytest.raises(InputError, match="2 slots have 3 factors"):
        Loopback(2, (1.0, 1.0, 1.0))
    with pytest.raises(InputError, match="at least one rank"):
        Loopback(0)


def test_a_factor_is_packed_twice() -> None:
    assert factor_word(1.0) == 0x3F803F80
    assert factor_word(-0.5) == 0xBF00BF00


@pytest.mark.parametrize(
    ("buffer", "says"),
    [
        (Buffer("mail", (3, 4), "int32", persistent=True), "first dimension must be 2 ranks"),
        (Buffer("mail", (), "int32", persistent=True), "first dimension must be 2 ranks"),
        (Buffer("mail", (2, 3), "int32", persistent=True), "has 12 bytes; whole packets of 16"),
    ],
)
def test_a_mailbox_of_another_shape_is_refused(buffer: Buffer, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Loopback(2).mailbox(buffer, "cpu")


def compiled(size: int = 2, **config: str) -> Compiled:
    buffers = (
        mail(size),
        Buffer("mail_targets", (size, 2), "int64", targets_of="mail"),
        Buffer("epochs", (5,), "int32", persistent=True),
        Buffer("arrived", (3,), "int32", zeroed=True),
        Buffer("partial", (3,), "float32"),
    )
    return Compiled("f", "e", Problem(size, 1), config, "sm_90a", (), buffers)


def test_buffers_come_zeroed_and_mailboxes_through_the_transport() -> None:
    held, boxes = own_buffers(compiled(), Loopback(2), "cpu")
    assert set(held) == {"mail", "mail_targets", "epochs", "arrived", "partial"}
    assert not any(held[name].any() for name in ("mail", "epochs", "arrived"))
    assert held["mail"] is boxes[0].own
    assert (held["mail_targets"][:, 0] - held["mail"].data_ptr()).tolist() == [0, 64]


def test_kernels_and_transports_that_do_not_fit_are_told() -> None:
    with pytest.raises(InputError, match="compiled for multicast stores; transport loopback has peer"):
        own_buffers(compiled(stores="multicast"), Loopback(2), "cpu")
    with pytest.raises(InputError, match="TP 2, the transport 4 ranks"):
        own_buffers(compiled(), Loopback(4), "cpu")
    lost = Buffer("t", (2, 2), "int64", targets_of="nothing")
    with pytest.raises(InputError, match="targets of 'nothing'"):
        own_buffers(Compiled("f", "e", Problem(2, 1), {}, "sm_90a", (), (lost,)), Loopback(2), "cpu")


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int32", "shape": (2, 2)},
        {"dtype": "int64", "shape": (4,)},
        {"dtype": "int64", "shape": (2, 3)},
        {"dtype": "int64", "shape": (2, 2), "persistent": True},
    ],
)
def test_a_table_of_targets_has_one_form(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"int64 \[ranks, 2\]"):
        Buffer("t", targets_of="mail", **wrong)
    with pytest.raises(ValueError, match="either"):
        Buffer("t", (1,), "int32", zeroed=True, persistent=True)


def group_of(monkeypatch, kind: type[Symmetric], size: int, rank: int) -> Symmetric:
    """A transport of a group whose memory is faked: rank p's mailbox lies at (p + 1) << 20, in an allocation 64 before."""
    transport = object.__new__(kind)
    transport.group, transport.rank, transport.size = None, rank, size
    handle = SimpleNamespace(
        buffer_ptrs=[((p + 1) << 20) - 64 for p in range(size)], multicast_ptr=(1 << 40) - 64, offset=64
    )
    monkeypatch.setattr(
        kind, "_shared", lambda self, buffer, step, device: (torch.zeros(step * size, dtype=torch.uint8), handle)
    )
    return transport


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_symmetric_names_this_ranks_slot_on_every_rank(monkeypatch, size: int) -> None:
    for rank in range(size):
        box = group_of(monkeypatch, Symmetric, size, rank).mailbox(mail(size), "cpu")
        assert box.targets[:, 0].tolist() == [((p + 1) << 20) + rank * 64 for p in range(size)]
        assert box.targets[:, 1].tolist() == [factor_word(1.0)] * size
        assert box.own.shape == (size, 2, 8)
        assert box.own.dtype == torch.int32


def test_multicast_has_one_address_and_nulls(monkeypatch) -> None:
    transport = group_of(monkeypatch, Multicast, 4, 3)
    box = transport.mailbox(mail(4), "cpu")
    assert box.targets.tolist() == [[(1 << 40) + 3 * 64, factor_word(1.0)], [0, 0], [0, 0], [0, 0]]
    assert transport.stores == "multicast"
    monkeypatch.setattr(
        Multicast, "_shared", lambda self, buffer, step, device: (None, SimpleNamespace(multicast_ptr=0))
    )
    with pytest.raises(InputError, match="share no multicast object"):
        transport.mailbox(mail(4), "cpu")


def test_symmetric_refuses_without_a_group_or_a_gpu(monkeypatch) -> None:
    with pytest.raises(InputError, match="init_process_group"):
        Symmetric()
    transport = object.__new__(Symmetric)
    transport.group, transport.rank, transport.size = None, 0, 2
    with pytest.raises(InputError, match="memory of GPUs"):
        transport.mailbox(mail(2), "cpu")


def test_multicast_refuses_with_the_reason(monkeypatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with pytest.raises(InputError, match="transport multicast: multicast is switched off here by TORCH_SYMM_MEM_DIS"):
        Multicast()
    for value in ("0", ""):
        monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", value)
        assert "needs an NVIDIA GPU" in (module.multicast_refusal() or "")
    with pytest.raises(InputError, match="transport multicast: it needs an NVIDIA GPU"):
        Multicast()
    monkeypatch.setattr(module, "multicast_refusal", lambda device: "the driver offers no multicast (NVLS) on GPU 0")
    with pytest.raises(InputError, match="no multicast"):
        Multicast()
