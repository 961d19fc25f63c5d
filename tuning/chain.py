"""A kernel in a chain: what its early weight loads hide behind the kernel before it.

A stand-in for the predecessor takes its time on the SMs without touching the memory, lets dependents start
at once, leaves as much shared memory as the kernel takes, and writes the kernel's activation at its end. A pair of the two is timed with the programmatic edge
between them and without; what the predecessor takes alone is taken off both. A chain figure stands beside
the isolated one and never in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..kernels import Arg, Compiled, Family, Problem
from .graphs import captured, programmatic_edges
from .policy import TimingPolicy
from .timing import BrokenMeasurement, steady

if TYPE_CHECKING:
    import torch

    from ..kernels.launch import Runner

PREDECESSOR_US = 8.0
"""Microseconds the predecessor spins: about as long as the small kernels of the layer take."""
TICK_NS = 20
"""Fewest nanoseconds one reading of the clock takes: bounds the turns of the spin."""
BLOCK = 512


@dataclass(frozen=True)
class Handover(Problem):
    """What the predecessor does: spins, then copies that many 32-bit words."""

    nanoseconds: int
    words: int


@dataclass(frozen=True)
class ChainTiming:
    """Pairs of predecessor and kernel, weights cold; microseconds a pair or a predecessor."""

    spin_us: float
    """What the predecessor spins."""
    predecessor_us: float
    """The predecessor alone, one after the other."""
    pair_us: float
    """Predecessor and kernel, a programmatic edge between them."""
    pair_plain_us: float
    """The same without that edge."""
    pairs: int
    programmatic_edges: int
    """Counted in the captured graph of the pairs."""
    carveout: int
    """Percent of an SM's memory that the predecessor leaves to shared memory: what the kernel takes."""
    spread: float
    """(p90 - p10) / median of the pair with the edge."""
    stable: bool
    """All three within the policy's spread."""
    early: bool = False
    """Whether the kernel read what is older than its predecessor ahead of its wait, as in a decode step."""

    @property
    def chain_us(self) -> float:
        """What the kernel adds to its predecessor with the edge."""
        return self.pair_us - self.predecessor_us

    @property
    def plain_us(self) -> float:
        """What it adds without the edge: close to the isolated figure."""
        return self.pair_plain_us - self.predecessor_us

    @property
    def hidden_us(self) -> float:
        """What the edge hides."""
        return self.plain_us - self.chain_us

    def to_json(self) -> dict[str, Any]:
        """Field name to value, with the three differences."""
        data = asdict(self) | {name: getattr(self, name) for name in ("chain_us", "plain_us", "hidden_us")}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in data.items()}


@cache
def compile_predecessor(arch: str, sms: int, nanoseconds: int, words: int) -> Compiled:
    """The predecessor: one block of one warp an SM, no shared memory of its own."""
    from ..kernels.triton_compile import TritonKernel, compile_triton
    from .chain_predecessor import k3lab_chain_predecessor

    args = {
        "source_ptr": ("*i32", Arg("tensor", "source")),
        "result_ptr": ("*i32", Arg("tensor", "result")),
        "nanoseconds": ("i32", Arg("int32", "nanoseconds")),
        "words": ("i32", Arg("int32", "words")),
    }
    constants = {"BLOCKS": sms, "BLOCK": BLOCK, "MOST_TURNS": nanoseconds // TICK_NS + 1}
    launch = compile_triton(TritonKernel(k3lab_chain_predecessor, args, constants, 1, 1), (sms, 1, 1), arch)
    return Compiled("chain", "predecessor", Handover(1, 1, nanoseconds, words), {}, arch, (launch,))


def handed_over(family: Family, inputs: Mapping[str, torch.Tensor]) -> list[str]:
    """Inputs that a predecessor writes: activations of whole 32-bit words; no weights, states or indices."""
    return [
        name
        for name, tensor in inputs.items()
        if name not in (*family.rotated, *family.constant, *family.mutated, *family.outputs)
        and tensor.is_floating_point()
        and tensor.numel() * tensor.element_size() % 4 == 0
    ]


def predecessor(source: torch.Tensor, result: torch.Tensor, microseconds: float, carveout: int) -> Callable[[], None]:
    """A call that takes so long and then copies ``source`` to ``result``, both of the same whole 32-bit words.

    ``carveout``: percent of an SM's memory that it leaves to shared memory (:attr:`k3lab.kernels.launch.Runner.carveout`
    of what follows).
    """
    import torch

    from ..kernels.device import require
    from ..kernels.launch import Runner

    device = require("a chain")
    words = source.view(-1).view(torch.int32)
    made = compile_predecessor(device.arch, device.sms, round(microseconds * 1000), words.numel())
    # a full edge to whatever ran before: the spin begins where that has ended
    return Runner(made, carveout=carveout).bind(
        {"source": words, "result": result.view(-1).view(torch.int32)}, pdl=False
    )


def predecessor_of(
    family: Family, copies: Sequence[Mapping[str, torch.Tensor]], carveout: int, microseconds: float = PREDECESSOR_US
) -> Callable[[], None]:
    """The predecessor of kernels that work on these copies: it writes the first activation they share."""
    import torch

    names = [name for name in handed_over(family, copies[0]) if name not in family.older]
    source = copies[0][names[0]].clone() if names else torch.zeros(4, dtype=torch.int32, device="cuda")
    result = copies[0][names[0]] if names else torch.empty_like(source)
    return predecessor(source, result, microseconds, carveout)


def pairs(
    before: Callable[[], None], runner: Runner, copies: Sequence[Mapping[str, torch.Tensor]], pdl: bool | None = None
) -> list[Callable[[], None]]:
    """Predecessor and kernel, one pair a copy; ``pdl`` as for :meth:`k3lab.kernels.launch.Runner.bind`.

    The predecessor begins when all before it has ended and writes nothing that the step has older: so, where there is an
    edge, the kernel may be early.
    """
    early: dict[str, Any] = {"early": True} if pdl is None and reads_early(runner.compiled) else {}
    return [_after(before, runner.bind(tensors, pdl=pdl, **early)) for tensors in copies]


def reads_early(compiled: Compiled) -> bool:
    """Whether kernels can be told to read what is older than the launch before ahead of their wait for it."""
    return any(arg.name == "early" for launch in compiled.launches for arg in launch.args)


def require_edges(chained: Sequence[Callable[[], None]], compiled: Compiled) -> int:
    """Programmatic edges in the captured graph of the pairs.

    Raises:
        BrokenMeasurement: fewer than launches that ask for one.
    """
    for call in chained:  # a kernel's first launch loads it, which a capture does not allow
        call()
    found = programmatic_edges(captured(chained))
    wanted = len(chained) * sum(launch.pdl for launch in compiled.launches)
    if found < wanted:
        raise BrokenMeasurement(f"{found} programmatic edges in the graph of {len(chained)} pairs, not {wanted}")
    return found


def time_chain(
    family: Family,
    compiled: Compiled,
    runner: Runner,
    copies: Sequence[Mapping[str, torch.Tensor]],
    policy: TimingPolicy,
    *,
    microseconds: float = PREDECESSOR_US,
    restore: Callable[[], None] | None = None,
) -> ChainTiming:
    """Time the pairs on the current GPU.

    Args:
        family: the engine's.
        compiled: its launches have ``pdl``, all or some.
        runner: of ``compiled``.
        copies: inputs and outputs, the weights another copy in each.
        policy: as for an isolated timing.
        microseconds: what the predecessor spins.
        restore: see :func:`k3lab.tuning.timing.time_calls`.

    Raises:
        BrokenMeasurement: the captured graph has fewer programmatic edges than launches that ask for one.
    """
    before = predecessor_of(family, copies, runner.carveout, microseconds)
    chained = pairs(before, runner, copies)
    found = require_edges(chained, compiled)
    alone, quiet = steady([before], policy)
    pair, calm = steady(chained, policy, restore)
    plain, still = steady(pairs(before, runner, copies, pdl=False), policy, restore)
    return ChainTiming(
        spin_us=microseconds,
        predecessor_us=alone.median_us,
        pair_us=pair.median_us,
        pair_plain_us=plain.median_us,
        pairs=len(chained),
        programmatic_edges=found,
        carveout=runner.carveout,
        spread=pair.spread,
        stable=quiet and calm and still,
        early=reads_early(compiled),
    )


def _after(before: Callable[[], None], call: Callable[[], None]) -> Callable[[], None]:
    def pair() -> None:
        before()
        call()

    return pair
