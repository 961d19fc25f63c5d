"""The health record: how kernels that wait for other ranks give up, and how the host learns whom they waited for.

Every kernel whose blocks poll memory that another rank or block writes has one buffer :data:`NAME`, int32
[:data:`WORDS`], persistent. A wait reads the clock every thousand polls or so. Past its limit it claims the record
(compare-and-swap of word 0 from zero, so that the first one stays), and all other waits on the GPU that see the
claim give up too; each that gives up adds the rank it missed to the set of its phase. The launch ends, what it
wrote is worthless, and later launches end as soon as they would have to wait. The host reads the record where it
synchronises anyway, and clears it with everything else that launches leave to each other.

torch is imported inside the functions; the layout is plain numbers, for kernels and for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from .collectives import CollectiveError
from .contract import Buffer
from .errors import InputError

if TYPE_CHECKING:
    import torch

NAME = "health"
WORDS = 16
"""int32 words of the record: one sector of 64 bytes."""

EPOCH, PHASE, SLOT, BLOCK = 0, 1, 2, 3
"""The claim: epoch of the launch (not zero), phase, slot (rank) waited for, block of the grid. Words 1 to 3 are
written by whoever won word 0."""
MISSED = 4
"""First of one word a :class:`Phase`: set of the ranks, bit r for rank r, that waits of this phase gave up on."""
LIMIT = 10
"""Two words, low first: the limit in nanoseconds that the host sets; zero stands for :data:`DEFAULT_LIMIT_S`."""
MOST_RANKS = 32
"""Bits of a word."""

DEFAULT_LIMIT_S = 10.0
POLLS_A_LOOK = 1024
"""Polls between two looks at the clock and at the record."""
LEAST_LIMIT_S, MOST_LIMIT_S = 1e-3, 3600.0


class Phase(IntEnum):
    """What was waited for; the record's set of a phase is word ``MISSED + phase - 1``."""

    PARTIAL = 1
    """A rank's partial sums in the mailbox."""
    TOTAL = 2
    """A column owner's sums: it may itself have waited for another rank."""
    ROW = 3
    """Scalars of a row from other blocks of this GPU; names no rank, and its set stays empty."""
    COLUMNS = 4
    """A rank's columns of a result that all ranks gather: it may itself have waited for sums."""
    QUERIES = 5
    """A rank's queries, which all ranks gather before they have anything to sum."""


OF_RANKS = (Phase.QUERIES, Phase.PARTIAL, Phase.TOTAL, Phase.COLUMNS)
"""The phases that name ranks, first causes first: who missed one of them sends nothing of the next."""

BUFFER = Buffer(NAME, (WORDS,), "int32", persistent=True)
"""What an engine lists among its buffers."""


def default_limit_ns() -> int:
    """What a kernel takes for a limit of zero."""
    return round(DEFAULT_LIMIT_S * 1e9)


@dataclass(frozen=True)
class Report:
    """What a claimed record says."""

    epoch: int
    """Of the launch that gave up, from 1."""
    phase: Phase
    slot: int
    block: int
    missed: Mapping[Phase, tuple[int, ...]]
    """Ranks whose packets had not come, by phase."""
    limit_s: float

    @property
    def late(self) -> tuple[int, ...]:
        """The ranks at fault: those whose queries are missing; else whose partials; else owners whose sums are; else whose columns are."""
        for phase in OF_RANKS:
            if self.missed.get(phase):
                return self.missed[phase]
        return (self.slot,) if self.phase is not Phase.ROW else ()

    def message(self, rank: int | None = None) -> str:
        """One line."""
        ranks = ", ".join(map(str, self.late))
        what = {
            Phase.PARTIAL: f"rank {ranks} did not publish its partial sums",
            Phase.TOTAL: f"rank {ranks} did not publish the sums of its columns",
            Phase.COLUMNS: f"rank {ranks} did not publish its columns",
            Phase.QUERIES: f"rank {ranks} did not publish its queries",
            Phase.ROW: "a block of this GPU did not publish its part of a row",
        }
        phase = next((one for one in OF_RANKS if self.missed.get(one)), self.phase)
        seen = "" if rank is None else f" (seen by rank {rank})"
        return f"{what[phase]} within {self.limit_s:g} s: launch {self.epoch}, block {self.block}{seen}"


def _ranks(word: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(MOST_RANKS) if (word >> rank) & 1)


def read(words: Sequence[int]) -> Report | None:
    """What the record's words (signed or unsigned) say; None where nobody gave up."""
    if len(words) != WORDS:
        raise InputError(f"a health record has {WORDS} words, not {len(words)}")
    unsigned = [word & 0xFFFFFFFF for word in words]
    if not unsigned[EPOCH]:
        return None
    if unsigned[PHASE] not in set(Phase):
        raise CollectiveError(
            f"a wait gave up, and the health record names phase {unsigned[PHASE]}, which no kernel has"
        )
    limit = unsigned[LIMIT] | unsigned[LIMIT + 1] << 32
    return Report(
        epoch=unsigned[EPOCH],
        phase=Phase(unsigned[PHASE]),
        slot=unsigned[SLOT],
        block=unsigned[BLOCK],
        missed={phase: _ranks(unsigned[MISSED + phase - 1]) for phase in Phase},
        limit_s=(limit or default_limit_ns()) / 1e9,
    )


def culprits(reports: Mapping[int, Report]) -> tuple[int, ...]:
    """The ranks at fault, by the reports of all ranks that have one.

    A rank that gave up publishes nothing more, so others give up on it later and name it too. Those that gave up in
    the earliest launch were the first, and among them those that missed queries, then those that missed partial sums: owners' sums
    come after, and columns after those.
    """
    first = min((report.epoch for report in reports.values()), default=0)
    early = [report for report in reports.values() if report.epoch == first]
    for phase in OF_RANKS:
        if named := {rank for report in early for rank in report.missed.get(phase, ())}:
            return tuple(sorted(named))
    return ()


def set_limit(buffers: Mapping[str, torch.Tensor], seconds: float) -> None:
    """How long a wait may last, from the next launch on; in stream order.

    Raises:
        InputError: no record among the buffers, or not 1 ms to an hour.
    """
    if not LEAST_LIMIT_S <= seconds <= MOST_LIMIT_S:
        raise InputError(f"a wait may last {LEAST_LIMIT_S:g} to {MOST_LIMIT_S:g} s, not {seconds:g}")
    nanoseconds = round(seconds * 1e9)
    record = _record(buffers)
    for word, value in ((LIMIT, nanoseconds & 0xFFFFFFFF), (LIMIT + 1, nanoseconds >> 32)):
        record[word] = value - (1 << 32) if value >> 31 else value


def check_health(buffers: Mapping[str, torch.Tensor], rank: int | None = None) -> None:
    """Synchronises with the GPU and raises if a launch on these buffers gave up; buffers without a record pass.

    Args:
        buffers: of a :class:`~k3lab.kernels.launch.Runner`.
        rank: this rank, for the message.

    Raises:
        CollectiveError: names the rank that was late.
    """
    if NAME in buffers and (report := read(_record(buffers).tolist())) is not None:
        raise CollectiveError(report.message(rank))


def rearm(runner: Any) -> None:
    """Make the buffers of a runner fit for the next step after one that gave up; all ranks call it.

    Every rank's GPU must have ended what it had begun before any rank clears its memory, and every rank must have
    cleared before any launches again: hence a barrier on both sides, bounded by the group's limit. The limit of
    the record stays. A graph that was captured before goes on working: the memory is the same.

    Args:
        runner: a :class:`~k3lab.kernels.launch.Runner`.
    """
    import torch

    def quiet() -> None:
        if any(tensor.is_cuda for tensor in runner.buffers.values()):
            torch.cuda.synchronize()
        runner.transport.barrier()

    quiet()
    for buffer in runner.compiled.buffers:
        held = runner.buffers[buffer.name]
        if buffer.name == NAME:
            held[:LIMIT].zero_()
        elif buffer.zeroed or buffer.persistent:  # a launch that gave up leaves nothing as it should
            held.zero_()
    quiet()


def _record(buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if NAME not in buffers:
        raise InputError(f"these buffers hold no {NAME} record: {', '.join(sorted(buffers)) or 'none'}")
    return buffers[NAME]
