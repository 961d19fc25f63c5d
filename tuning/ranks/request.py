"""What is asked of all ranks, and the errors that end them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from ...kernels.errors import InputError, KernelError
from ..policy import FULL, TimingPolicy

FAMILIES = ("output_projection", "router", "moe_tail")
"""Those whose kernels publish to the other ranks in a decode layer."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
STEPS = 2000
LIMIT_S = 30.0
PREPARE_S = 900.0
"""That ranks wait for each other's compilers."""
GPU_PLAYER = "k3lab.tuning.ranks.gpu:GpuPlayer"


class RanksError(KernelError):
    """A rank died, was late or had wrong results; the message names it."""


@dataclass(frozen=True)
class RanksRequest:
    """The same for every rank."""

    size: int
    families: tuple[str, ...] = FAMILIES
    rows: tuple[int, ...] = ROWS
    steps: int = STEPS
    seed: int = 0
    time_sliced: bool = False
    """More ranks than GPUs: outputs are checked, and nothing is timed."""
    limit_s: float = LIMIT_S
    """That ranks wait for each other."""
    policy: TimingPolicy = field(default_factory=lambda: FULL)
    player: str = GPU_PLAYER
    """``module:name`` of what launches; tests have one of their own."""

    def __post_init__(self) -> None:
        if self.size < 2:
            raise InputError(f"a group has at least 2 ranks, not {self.size}")
        if unknown := [name for name in self.families if name not in FAMILIES]:
            raise InputError(f"{unknown[0]!r} does not publish; families that do: {', '.join(FAMILIES)}")
        if wrong := [rows for rows in self.rows if not 1 <= rows <= 64]:
            raise InputError(f"rows is {wrong[0]}; the decode path serves 1 to 64 rows")
        if not (self.families and self.rows):
            raise InputError("name at least one family and one row count")
        if not 1 <= self.steps <= 1_000_000:
            raise InputError(f"steps is {self.steps}, must be 1 to 1000000")
        if not 1 <= self.limit_s <= 600:
            raise InputError(f"ranks may wait 1 to 600 s for each other, not {self.limit_s:g}")

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RanksRequest:
        """Inverse of :meth:`to_text`."""
        data = json.loads(text)
        lists = {name: tuple(data[name]) for name in ("families", "rows")}
        return cls(**{**data, **lists, "policy": TimingPolicy(**data["policy"])})
