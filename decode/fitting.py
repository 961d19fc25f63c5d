"""Entries whose blocks a GPU of the group cannot hold together: found before weights are made, left out by all ranks alike.

Such an entry is no error of a run: its family falls back, as if the bundle had none, and the reason says what does not fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernels import Compiled, Problem
from .choices import Choice, Finder, Tuned
from .letters import letters

if TYPE_CHECKING:
    from ..kernels.bundle.reader import BundleEntry, Miss
    from ..kernels.collectives import Collectives
    from .group import Group

LETTER = 8192
"""Bytes in which a rank tells the others what does not fit on its GPU."""
WORDS = 300
"""Most characters of one reason: those of all families fit into a letter."""
Place = tuple[str, str, str, int]
"""Which entry of a bundle, as :class:`~k3lab.decode.choices.Tuned` has it."""


@dataclass(frozen=True)
class Fitting:
    """A bundle as it can be used here: entries that do not fit are not found, and the reason is told in their place."""

    bundle: Finder
    refused: Mapping[Place, str]

    @property
    def path(self) -> Path:
        """See :class:`~k3lab.decode.choices.Finder`."""
        return self.bundle.path

    @property
    def accept_predicted(self) -> bool:
        """See :class:`~k3lab.decode.choices.Finder`."""
        return self.bundle.accept_predicted

    @property
    def accept_compiled(self) -> bool:
        """See :class:`~k3lab.decode.choices.Finder`."""
        return self.bundle.accept_compiled

    @property
    def entries(self) -> tuple[BundleEntry, ...]:
        """All of the bundle: what it is does not depend on the GPU."""
        return self.bundle.entries

    def find(self, family: str, problem: Problem, gpu_name: str) -> BundleEntry | Miss:
        """See :class:`~k3lab.decode.choices.Finder`."""
        from ..kernels.bundle.reader import Miss, tune_command

        found = self.bundle.find(family, problem, gpu_name)
        if isinstance(found, Miss) or found.model.place not in self.refused:
            return found
        return Miss(self.refused[found.model.place], tune_command(family, problem, gpu_name))


def _word(place: Place) -> str:
    return hashlib.sha256(json.dumps(place).encode()).hexdigest()[:12]


def fitting(
    bundle: Finder | None, choices: Iterable[Choice], host: Collectives | None, ask: Callable[[Compiled], str | None]
) -> Finder | None:
    """The bundle without chosen entries that do not fit on some rank's GPU; choose again from what is returned.

    Every rank of a group must call it, whatever it has chosen, before any of its kernels is loaded: loading makes mailboxes,
    for which ranks wait.

    Args:
        bundle: what was chosen from.
        choices: of :func:`~k3lab.decode.choices.choose`, of all steps that will run.
        host: of torchrun's processes; None where this rank decides alone.
        ask: why this GPU cannot hold compiled kernels, or None (:func:`k3lab.kernels.launch.unfit`).

    Raises:
        CollectiveError: a rank did not come within the group's limit; it is named.
    """
    chosen = {choice.place: choice.compiled for choice in choices if isinstance(choice, Tuned)}
    mine = {_word(place): reason[:WORDS] for place, compiled in chosen.items() if (reason := ask(compiled))}
    told = letters(mine, host, LETTER, "what does not fit on this rank's GPU") if host else [mine]
    refused = {}
    for place in chosen:
        first = next(((rank, said[_word(place)]) for rank, said in enumerate(told) if _word(place) in said), None)
        if first is not None:
            where = f"the GPU of rank {first[0]}" if host else "this GPU"
            refused[place] = f"the bundle's entry for {place[0]} does not fit on {where}: {first[1]}"
    return Fitting(bundle, refused) if bundle is not None and refused else bundle


def fitting_here(bundle: Finder | None, choices: Iterable[Choice], group: Group) -> Finder | None:
    """:func:`fitting` on a group's GPUs, asked of the driver; without GPUs nothing is launched, and nothing left out."""
    device = group.device
    if device is None:
        return bundle
    from ..kernels.launch import unfit

    launched = choices if device.card else ()
    return fitting(bundle, launched, group.host, lambda compiled: unfit(compiled, f"cuda:{device.index}"))
