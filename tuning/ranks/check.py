"""A case on this rank against the twin over the group, and the same bits on all ranks in thousands of steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ...kernels import family
from ..check import poison_value
from ..compare import compare
from .cases import Case, twin
from .group import OnHost, RankGroup

if TYPE_CHECKING:
    import torch

SETS = 3
"""Sets of inputs taken in turn: what an earlier step left in a mailbox is never what this step must find there."""
LOOK = 100
"""Steps between two looks from the host."""


class Played(Protocol):
    """A case, ready for launches on this rank."""

    @property
    def outputs(self) -> Mapping[str, torch.Tensor]:
        """What a launch writes."""
        ...

    def launch(self, which: int) -> None:
        """One step with the inputs ``which``."""
        ...

    def settle(self) -> None:
        """Wait, within the limit, until all launches have ended.

        Raises:
            CollectiveError: one gave up or did not end; names the rank that was waited for.
        """
        ...


def digest(outputs: Mapping[str, torch.Tensor]) -> bytes:
    """SHA-256 of all outputs' bytes, in the order of their names."""
    import torch

    made = hashlib.sha256()
    for name in sorted(outputs):
        made.update(name.encode())
        made.update(outputs[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return made.digest()


def _poison(outputs: Mapping[str, torch.Tensor]) -> None:
    for tensor in outputs.values():
        tensor.fill_(poison_value(tensor.dtype))


def check_case(
    case: Case, played: Played, inputs: list[dict[str, torch.Tensor]], group: RankGroup, steps: int
) -> dict[str, Any]:
    """Every rank calls it, and all get the same ``faults``: one line each, none where all is right.

    Returns:
        ``errors`` (output to relative error), ``steps``, ``digest`` (hex, of the first inputs' outputs), ``faults``.

    Raises:
        CollectiveError: a rank was late or is gone.
    """
    import torch

    owner, faults = family(case.family), []
    first: list[dict[str, torch.Tensor]] = []
    errors: dict[str, float] = {}
    for which, one in enumerate(inputs):
        wanted = twin(case, one, OnHost(group.host))
        _poison(played.outputs)
        played.launch(which)
        played.settle()
        first.append({name: tensor.clone() for name, tensor in played.outputs.items()})
        for name, value in wanted.items():
            result = compare(name, first[-1][name], value, owner.tolerance(case.problem, name))
            errors[name] = max(errors.get(name, 0.0), result.relative)
            if not result.ok:
                faults.append(f"inputs {which}: {result.message}")
    mine = torch.frombuffer(bytearray(b"".join(digest(one) for one in first)), dtype=torch.uint8)
    theirs = group.host.all_gather(mine[None], 0)
    for rank in range(1, group.size):
        if not torch.equal(theirs[rank], theirs[0]):
            faults.append(f"rank {rank} has other bits than rank 0")
    if changed := _again(played, first, group, steps):
        faults.append(f"{changed} of {steps} steps gave other bits than the first with the same inputs")
    bad = group.all(float(len(faults)))
    others = [rank for rank, count in enumerate(bad) if count and rank != group.rank]
    faults += [f"rank {rank} found faults" for rank in others if not faults]
    return {
        "errors": errors, "steps": steps, "digest": bytes(theirs[0].tolist())[:32].hex(), "faults": faults,
    }  # fmt: skip


def _again(played: Played, first: list[dict[str, torch.Tensor]], group: RankGroup, steps: int) -> int:
    """How many of so many more steps differ from the first with their inputs."""
    import torch

    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [{name: one[name].view(whole[one[name].element_size()]) for name in one} for one in first]
    device = next(iter(first[0].values())).device
    changed = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(steps):
        which = step % len(first)
        _poison(played.outputs)
        played.launch(which)
        differs = [(played.outputs[name].view(wanted.dtype) != wanted).any() for name, wanted in bits[which].items()]
        changed += torch.stack(differs).any()
        if step % LOOK == LOOK - 1 or step == steps - 1:
            played.settle()
    group.meet()
    return int(changed)
