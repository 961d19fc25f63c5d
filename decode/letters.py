"""What ranks tell each other once, before a run: data that the host knows, the same list on every rank."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..kernels import InputError

if TYPE_CHECKING:
    from ..kernels.collectives import Collectives


def letters(mine: Any, comm: Collectives, most: int, what: str) -> list[Any]:
    """Gather what every rank says; every rank returns the same, rank 0's first.

    Args:
        mine: JSON-able.
        comm: the group; outside kernels.
        most: bytes of a letter.
        what: it is, for errors.

    Raises:
        InputError: ``mine`` takes more than ``most`` bytes.
        CollectiveError: a rank did not come within the group's limit; it is named.
    """
    import torch

    text = json.dumps(mine).encode()
    if len(text) > most:
        raise InputError(f"{what} takes {len(text)} bytes, at most {most} can be told")
    told = comm.all_gather(torch.frombuffer(bytearray(text.ljust(most)), dtype=torch.uint8)[None], dim=0)
    return [json.loads(bytes(letter.tolist())) for letter in told]
