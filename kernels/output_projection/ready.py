"""A polling kernel with its inputs ready: for profilers that run one kernel at a time, and for tests without peers.

What others would publish is put into this rank's mailboxes before the launch, so that no wait of it has to last. Blocks of one
launch still wait for each other; they are on the GPU together. Imports torch inside the functions.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..contract import Compiled
from .common import form, mail, projection
from .mailbox import Packet, parity

if TYPE_CHECKING:
    from torch import Tensor


def polling(compiled: Compiled) -> Compiled:
    """The launches that wait for packets, without those that only publish."""
    return dataclasses.replace(compiled, launches=tuple(one for one in compiled.launches if one.needs_residency))


def packed(values: Tensor, packet: Packet, epoch: int) -> Tensor:
    """Packets as memory holds them.

    Args:
        values: BF16 [..., columns].
        packet: their form.
        epoch: whose low bits they carry.

    Returns:
        int16 [..., packets, bytes / 2].
    """
    import torch

    columns = [packet.columns(index) for index in range(packet.count(values.shape[-1]))]
    data = values.view(torch.int16)[..., torch.tensor(columns, device=values.device)]
    words = packet.tag(epoch).to_bytes(packet.epoch_bits // 8, "little")
    tag = torch.frombuffer(bytearray(words), dtype=torch.int16).to(values.device)
    return torch.cat([data, tag.expand(*data.shape[:-1], tag.numel())], dim=-1)


def make_ready(runner: Any, partials: Tensor) -> None:
    """Put what every rank would publish for the next launch into the mailboxes of a runner.

    Where one GPU plays all ranks (loopback), a launch sends the sums of its own columns to itself, so they are not put there.

    Args:
        runner: a :class:`~k3lab.kernels.launch.Runner` of this family's engine.
        partials: BF16 [ranks, rows, hidden], rank r's partial sums as they arrive; on the runner's device.
    """
    import torch

    compiled: Compiled = runner.compiled
    problem, config, buffers = projection(compiled.problem), compiled.config, runner.buffers
    boxes, packet = mail(problem, config), form(config)
    # the last counter is that of a block which polls
    epoch = (int(buffers["epochs"][-1]) + 1) & 0xFFFFFFFF
    received = [partials]
    if len(boxes) == 2:
        mine = partials.chunk(problem.tp, dim=-1)[runner.transport.rank]
        received = [mine.contiguous()]
        if runner.transport.name != "loopback":
            sums = partials.sum(0, dtype=torch.float32).to(partials.dtype)
            received.append(torch.stack(sums.chunk(problem.tp, dim=-1)))
    for name, box, values in zip(("mailbox", "totals"), boxes, received, strict=False):
        place = (problem.tp, 2, problem.rows, box.packets, packet.bytes // 2)
        buffers[name].view(torch.int16).view(place)[:, parity(epoch)] = packed(values, packet, epoch)
