"""The experts in the chain that a prefetch is for: experts, then the next attention projection, then its output projection.

Stand-ins take the time of what lies between them without touching the memory, as in :mod:`.chain`. All weights are cold.
The same chain runs with the prefetch and without: its gain is the difference, and all outputs must have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kernels import Compiled, Config, Engine, Family, Problem
from ..kernels.errors import InputError
from ..kernels.model_card import ModelCard
from .chain import predecessor_of
from .graphs import captured, programmatic_edges
from .policy import TimingPolicy
from .timing import BrokenMeasurement, input_copies

if TYPE_CHECKING:
    import torch

    from ..kernels.gpu_cards import GpuCard
    from ..kernels.launch import Runner

FRONT_US, BETWEEN_US = 8.0, 5.0
"""What the stand-ins spin: router and latent before the experts; the MoE tail, and then the attention, behind them."""


@dataclass(frozen=True)
class Link:
    """One kernel of the chain."""

    family: Family
    problem: Problem
    engine: Engine
    config: Config


def links(card: ModelCard, tp: int, rows: int, kind: str, gpu: GpuCard, configs: Mapping[str, Config]) -> list[Link]:
    """The three kernels, each by the first of its engines, its default first, that serves the problem.

    Args:
        card: of the model.
        tp: ranks.
        rows: token rows.
        kind: of the next layer, ``kda`` or ``mla``.
        gpu: where it runs.
        configs: by family, what differs from the default configs; ``engine`` names an engine.

    Raises:
        InputError: no engine of a family serves the problem, or a config is illegal.
    """
    from ..kernels import family

    found = []
    for name, of_kind in (("experts", "bf16"), ("attention_projection", kind), ("output_projection", kind)):
        owner = family(name)
        problem = owner.problem(card, tp=tp, rows=rows, kind=of_kind)
        given = dict(configs.get(name, {}))
        asked = given.pop("engine", None)
        engines = sorted(owner.engines, key=lambda one: one.name != owner.default_engine)
        able = [one for one in engines if one.refuses(problem, gpu.arch) is None and asked in (None, one.name)]
        if not able:
            raise InputError(
                f"no engine of {name} {f'named {asked} ' if asked else ''}serves {problem.label} on {gpu.name}"
            )
        engine = able[0]
        space = engine.space(problem, gpu)
        config = {**space.default, **given}
        space.check(config)
        found.append(Link(owner, problem, engine, config))
    return found


def copies_of(chain: Sequence[Link], policy: TimingPolicy, seed: int) -> list[list[dict[str, torch.Tensor]]]:
    """Inputs and outputs of each kernel, as many as the experts have: each pass reads other weights.

    Between two uses of a copy lie the experts' bytes of all other passes, which are at least the policy's.
    """
    first, *others = chain
    made = [input_copies(first.family, first.problem, policy, seed)]
    for one in others:
        tensors = input_copies(one.family, one.problem, policy, seed)[: len(made[0])]
        while len(tensors) < len(made[0]):
            own = {
                name: tensors[0][name].clone()
                for name in (*one.family.rotated, *one.family.mutated)
                if name in tensors[0]
            }
            tensors.append({**tensors[0], **own})
        made.append(tensors)
    return made


def weights_behind(chain: Sequence[Link], tensors: Sequence[Mapping[str, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The cold inputs of each kernel behind the experts, in the order of use."""
    return [
        [given[name] for name in one.family.rotated if name in given]
        for one, given in zip(chain[1:], tensors[1:], strict=True)
    ]  # fmt: skip


def one_pass(
    steps: Sequence[Callable[[], None]], prefetch: Callable[[], None] | None, fork: str, side: Any, current: Callable[[], Any], on: Callable[[Any], Any]
) -> Callable[[], None]:  # fmt: skip
    """A pass through the chain, as one call.

    Args:
        steps: stand-in, experts, and whatever follows.
        prefetch: its launch; None where it is off.
        fork: see :func:`k3lab.kernels.experts.prefetch.space`.
        side: the stream of its own.
        current: gives the current stream.
        on: a context that makes a stream the current one.
    """
    front, experts, *behind = steps
    own = prefetch is not None and fork in ("ahead", "beside")

    def leave() -> None:
        assert prefetch is not None
        side.wait_stream(current())
        with on(side):
            prefetch()

    def run() -> None:
        if own and fork == "ahead":
            leave()
        front()
        if own and fork == "beside":
            leave()
        if prefetch is not None and fork == "before":
            prefetch()
        experts()
        if prefetch is not None and fork == "behind":
            prefetch()
        for step in behind:
            step()
        if own:  # at the end of all that it is for: nothing of the chain waits for it
            current().wait_stream(side)

    return run


class Chain:
    """The chain on the current GPU, its kernels loaded, for any number of prefetch configs."""

    def __init__(self, chain: Sequence[Link], compiled: Sequence[Compiled], policy: TimingPolicy, seed: int) -> None:
        """Compile nothing: ``compiled`` is of ``chain``, link by link."""
        from ..kernels.launch import Runner

        self.chain = list(chain)
        self.compiled = list(compiled)
        self.runners = [Runner(one) for one in compiled]
        self.copies = copies_of(chain, policy, seed)
        self.kept: list[Any] = []
        spins = (FRONT_US, *[BETWEEN_US] * (len(chain) - 1))
        self.before = [
            predecessor_of(link.family, tensors, runner.carveout, spin)
            for link, tensors, runner, spin in zip(chain, self.copies, self.runners, spins, strict=True)
        ]
        self.bound = [
            [runner.bind(given) for given in tensors] for runner, tensors in zip(self.runners, self.copies, strict=True)
        ]

    def passes(self, config: Config, arch: str) -> list[Callable[[], None]]:
        """One call for each copy of the weights; a cap of 0 launches no prefetch."""
        import torch

        from ..kernels.experts.prefetch import compile_prefetch, in_order, table
        from ..kernels.launch import Runner

        runner: Runner | None = None
        side = torch.cuda.Stream(priority=-1 if config["priority"] == "high" else 0)
        made = []
        for number in range(len(self.copies[0])):
            prefetch = None
            if config["cap_mb"]:
                tensors = [each[number] for each in self.copies]
                ranges = table(in_order(weights_behind(self.chain, tensors), config), config)
                if runner is None:
                    # where it is the first on an SM, it leaves the experts their shared memory
                    made_for = compile_prefetch(len(ranges), config, arch)
                    runner = Runner(made_for, carveout=self.runners[0].carveout)
                prefetch = runner.bind({"ranges": ranges})
            steps = [
                call for before, bound in zip(self.before, self.bound, strict=True) for call in (before, bound[number])
            ]
            made.append(
                one_pass(steps, prefetch, str(config["fork"]), side, torch.cuda.current_stream, torch.cuda.stream)
            )
        self.kept.append((runner, side, made))  # a graph of them points to the tables of ranges
        return made

    def require_edges(self, passes: Sequence[Callable[[], None]], config: Config) -> int:
        """Programmatic edges in the captured graph of the passes: one for every launch that asks for one, prefetch or not.

        Raises:
            BrokenMeasurement: fewer.
        """
        for call in passes:  # a kernel's first launch loads it, which a capture does not allow
            call()
        found = programmatic_edges(captured(passes))
        wanted = len(passes) * sum(launch.pdl for one in self.compiled for launch in one.launches)
        if found < wanted:
            raise BrokenMeasurement(f"{found} programmatic edges in the graph of {len(passes)} passes, not {wanted}")
        return found

    def outputs(self, passes: Sequence[Callable[[], None]]) -> list[torch.Tensor]:
        """Every output of the last pass, after all of them, poisoned before: to be compared bit for bit."""
        import torch

        found = [
            tensors[-1][name] for link, tensors in zip(self.chain, self.copies, strict=True)
            for name in link.family.output_specs(link.problem)
        ]  # fmt: skip
        for one in found:
            one.fill_(float("nan"))
        for call in passes:
            call()
        torch.cuda.synchronize()
        return [one.clone() for one in found]

    def check_health(self) -> None:
        """Raise BrokenMeasurement if a wait of a kernel gave up."""
        from ..kernels.collectives import CollectiveError
        from ..kernels.health import check_health

        for runner in self.runners:
            try:
                check_health(runner.buffers)
            except CollectiveError as error:
                raise BrokenMeasurement(f"a wait of the kernel gave up while it was timed: {error}") from error
