"""How a rank's packets get into the mailboxes of the others: one small interface, three ways.

A mailbox is memory whose first dimension counts ranks: slot r is written by rank r and read by the mailbox's owner.
A kernel that publishes is given a table, a line a rank: where its own slot lies on that rank, and the factor of
what it writes there. So one and the same kernel serves every transport of plain stores:

- ``loopback``: one GPU plays all ranks. The kernel's partial goes into every slot of its own mailbox, slot r times
  a power of two of its own: as many words as one rank receives in a real step.
- ``symmetric``: PyTorch's symmetric memory; the stores go to the peers over NVLink. All factors are one.
- ``multicast``: one store that the switch copies to every rank (``multimem.st``), for kernels compiled for it.

torch is imported inside the functions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .contract import Buffer, Compiled
from .errors import InputError

if TYPE_CHECKING:
    import torch

Stores = Literal["peer", "multicast"]
"""What a kernel publishes with: plain stores, one a rank, or one ``multimem.st`` for all."""
SLOT_ALIGNMENT = 16
"""A slot is whole 16-byte packets."""


@dataclass(frozen=True)
class Mailbox:
    """This rank's mailbox, and where this rank writes."""

    own: torch.Tensor
    """As the buffer says, first dimension the ranks; zeroed on every rank before any rank has this object."""
    targets: torch.Tensor
    """int64 [ranks, 2] on the mailbox's device: address of this rank's slot on rank p, and the factor of what goes
    there, twice as BF16 in the low 32 bits."""
    handle: Any = None
    """What keeps the peers' memory mapped."""


class Transport(Protocol):
    """A tensor-parallel group as a kernel that publishes sees it."""

    @property
    def name(self) -> str:
        """``loopback``, ``symmetric`` or ``multicast``."""
        ...

    @property
    def stores(self) -> Stores:
        """Which kernels it serves."""
        ...

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def mailbox(self, buffer: Buffer, device: str) -> Mailbox:
        """Allocate a zeroed mailbox on every rank; all ranks call this in the same order.

        Raises:
            InputError: the transport cannot serve this buffer here; the message says why.
        """
        ...

    def barrier(self) -> None:
        """Return when every rank has called this; ends by the group's own limit."""
        ...


def factor_word(factor: float) -> int:
    """A factor twice as BF16 in 32 bits: what a multiply of two packed values takes.

    Raises:
        InputError: the factor is no BF16 value.
    """
    (bits,) = struct.unpack("<I", struct.pack("<f", factor))
    if bits & 0xFFFF:
        raise InputError(f"factor {factor!r} is no BF16 value")
    return bits >> 16 | bits & 0xFFFF0000


def slot_bytes(buffer: Buffer, size: int) -> int:
    """Bytes of one rank's slot of a mailbox.

    Raises:
        InputError: its first dimension is not the group's size, or a slot is not whole packets.
    """
    from .twin_family import ITEM_BYTES

    if not buffer.shape or buffer.shape[0] != size:
        raise InputError(
            f"mailbox {buffer.name} has the shape {buffer.shape}; its first dimension must be {size} ranks"
        )
    total = ITEM_BYTES[buffer.dtype]
    for extent in buffer.shape[1:]:
        total *= extent
    if total % SLOT_ALIGNMENT:
        raise InputError(f"a slot of mailbox {buffer.name} has {total} bytes; whole packets of 16 are needed")
    return total


def target_rows(addresses: Sequence[int], factors: Sequence[float]) -> list[list[int]]:
    """The lines of a table of targets, as signed 64-bit integers."""
    if len(addresses) != len(factors):
        raise InputError(f"{len(addresses)} targets have {len(factors)} factors")
    return [
        [address - (1 << 64) if address >> 63 else address, factor_word(factor)]
        for address, factor in zip(addresses, factors, strict=True)
    ]


def _table(addresses: Sequence[int], factors: Sequence[float], device: Any) -> torch.Tensor:
    import torch

    return torch.tensor(target_rows(addresses, factors), dtype=torch.int64, device=device)


def loopback_factors(size: int) -> tuple[float, ...]:
    """A power of two for each slot, all different: 2^(r - size/2)."""
    return tuple(2.0 ** (slot - size // 2) for slot in range(size))


@dataclass(frozen=True)
class Loopback:
    """One GPU plays every rank: its partial goes into all slots, slot r times ``factors[r]``."""

    size: int
    factors: tuple[float, ...] = ()
    """BF16 values; by default :func:`loopback_factors`. One and zeros stand in for a group whose other ranks add
    nothing; a test may pick factors under which a wrong slot or another order of the sum shows."""
    rank: int = field(default=0, init=False)
    name: str = field(default="loopback", init=False)
    stores: Stores = field(default="peer", init=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"a group has at least one rank, got {self.size}")
        object.__setattr__(self, "factors", tuple(self.factors) or loopback_factors(self.size))
        if len(self.factors) != self.size:
            raise InputError(f"{self.size} slots have {len(self.factors)} factors")
        for factor in self.factors:
            factor_word(factor)

    @classmethod
    def alone(cls, size: int) -> Loopback:
        """The other ranks' partials are zeros, in as many words: the sum is this rank's own partial."""
        return cls.only(size, 0)

    @classmethod
    def only(cls, size: int, slot: int) -> Loopback:
        """One slot has the partial, the others zeros: in a sum over all with the usual factors the small ones drown."""
        return cls(size, tuple(float(other == slot) for other in range(size)))

    def mailbox(self, buffer: Buffer, device: str) -> Mailbox:
        """Zeroed memory of this GPU; line r of the table is slot r of it."""
        import torch

        step = slot_bytes(buffer, self.size)
        own = torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype), device=device)
        return Mailbox(own, _table([own.data_ptr() + slot * step for slot in range(self.size)], self.factors, device))

    def barrier(self) -> None:
        """Nobody else is there."""


class Symmetric:
    """PyTorch's symmetric memory: every rank's mailbox is mapped by every other, and stores go there directly.

    One process a rank. Several ranks on one GPU need ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`` and a group of
    gloo; they are time-sliced.
    """

    name = "symmetric"
    stores: Stores = "peer"

    def __init__(self, group: Any = None) -> None:
        """``group``: of torch.distributed; the default group if None."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(f"transport {self.name} needs torch.distributed.init_process_group on every rank first")
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    def mailbox(self, buffer: Buffer, device: str) -> Mailbox:
        """See :class:`Transport`; a collective call."""
        import torch

        step = slot_bytes(buffer, self.size)
        own, handle = self._shared(buffer, step, device)
        bases = self._bases(handle)
        table = _table([base + self.rank * step for base in bases], [1.0] * len(bases), device)
        # the rendezvous is over, so every rank has zeroed its own
        return Mailbox(own.view(getattr(torch, buffer.dtype)).view(buffer.shape), table, handle)

    def _shared(self, buffer: Buffer, step: int, device: str) -> tuple[torch.Tensor, Any]:
        """(zeroed bytes, handle)."""
        import torch
        import torch.distributed._symmetric_memory as symmetric

        if torch.device(device).type != "cuda":
            raise InputError(
                f"transport {self.name} is memory of GPUs; mailbox {buffer.name} was asked for on {device}"
            )
        # with its index: a rank of several GPUs means its current one
        where = torch.empty(0, device=device).device
        try:
            own = symmetric.empty(step * self.size, dtype=torch.uint8, device=where)
            own.zero_()
            torch.cuda.synchronize(where)
            return own, symmetric.rendezvous(own, self.group)
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise InputError(
                f"PyTorch's symmetric memory refuses mailbox {buffer.name}: {first} (ranks that share a GPU need "
                f"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1)"
            ) from error

    def _bases(self, handle: Any) -> list[int]:
        """Address of each rank's mailbox, as this rank sees it."""
        offset = int(getattr(handle, "offset", 0))
        return [int(pointer) + offset for pointer in handle.buffer_ptrs]

    def barrier(self) -> None:
        """Of the group; ends by its limit."""
        import torch.distributed as dist

        dist.barrier(self.group)


class Multicast(Symmetric):
    """One store that the NVLink switch copies to every rank; for kernels compiled with ``multimem.st``.

    Line 0 of the table is the multicast address of this rank's slot, all other lines are null: a kernel of plain
    stores would fault at once.
    """

    name = "multicast"
    stores: Stores = "multicast"

    def __init__(self, group: Any = None, device: str = "cuda") -> None:
        """Refuses where the GPU has no multicast.

        Raises:
            InputError: the reason.
        """
        reason = multicast_refusal(device)
        if reason:
            raise InputError(f"transport {self.name}: {reason}")
        super().__init__(group)

    def _bases(self, handle: Any) -> list[int]:
        base = int(handle.multicast_ptr or 0)
        if not base:
            raise InputError(f"transport {self.name}: the ranks' GPUs share no multicast object (no NVLink switch?)")
        return [base + int(getattr(handle, "offset", 0))]

    def mailbox(self, buffer: Buffer, device: str) -> Mailbox:
        """See :class:`Transport`; the other lines of the table are null."""
        import torch

        box = super().mailbox(buffer, device)
        nulls = torch.zeros(self.size - 1, 2, dtype=torch.int64, device=box.targets.device)
        return Mailbox(box.own, torch.cat([box.targets, nulls]), box.handle)


def multicast_refusal(device: str = "cuda") -> str | None:
    """Why multicast cannot be used on the GPU, or None. Where it is switched off nothing is asked of the driver."""
    from .device import discover
    from .env import multicast_off

    if multicast_off():
        return "multicast is switched off here by TORCH_SYMM_MEM_DISABLE_MULTICAST; use symmetric"
    if discover() is None:
        return "it needs an NVIDIA GPU, and none is visible here"
    import torch
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, index):
        return f"the driver offers no multicast (NVLS) on GPU {index}; use symmetric"
    return None


def own_buffers(compiled: Compiled, transport: Transport, device: str) -> tuple[dict[str, torch.Tensor], list[Mailbox]]:
    """The scratch memory of a compiled engine, by name: zeroed where it must be, mailboxes through the transport.

    Returns:
        (buffers, mailboxes): the buffers are in use as long as the mailboxes are held.

    Raises:
        InputError: the kernels publish in another way than the transport, or to another number of ranks.
    """
    import torch

    tables = {buffer.targets_of: buffer.name for buffer in compiled.buffers if buffer.targets_of}
    by_name = {buffer.name: buffer for buffer in compiled.buffers}
    if tables:
        wanted = compiled.config.get("stores", "peer")
        if wanted != transport.stores:
            raise InputError(
                f"{compiled.engine} was compiled for {wanted} stores; transport {transport.name} has {transport.stores}"
            )
        if compiled.problem.tp != transport.size:
            raise InputError(
                f"{compiled.problem.label} has TP {compiled.problem.tp}, the transport {transport.size} ranks"
            )
        if unknown := sorted(set(tables) - set(by_name)):
            raise InputError(
                f"{compiled.engine} has a table of targets of {unknown[0]!r}, which is none of its buffers"
            )
    held: dict[str, torch.Tensor] = {}
    boxes: list[Mailbox] = []
    for buffer in compiled.buffers:
        if buffer.name in tables:
            box = transport.mailbox(buffer, device)
            held |= {buffer.name: box.own, tables[buffer.name]: box.targets}
            boxes.append(box)
        elif not buffer.targets_of:
            empty = not (buffer.zeroed or buffer.persistent)
            make = torch.empty if empty else torch.zeros
            held[buffer.name] = make(buffer.shape, dtype=getattr(torch, buffer.dtype), device=device)
    return held, boxes
