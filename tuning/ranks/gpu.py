"""A rank that has a GPU, or a share of one: kernels over symmetric memory, over loopback, and what stands beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...kernels import K3, Compiled, InputError, family
from ...kernels.device import discover, gpu_count
from ...kernels.health import check_health, set_limit
from ...kernels.launch import Runner, unfit
from ...kernels.transports import Symmetric
from ..compare import compare
from ..compiling import compile_config
from ..timing import copies_for
from .beside import all_reduces, chain_call
from .beside_names import NCCL_CHAIN
from .cases import Case, cases, rank_inputs, twin
from .clock import Call
from .gpu_clock import GpuClock, ended
from .group import OnHost, RankGroup
from .links import links
from .request import RanksRequest

Tensors = dict[str, torch.Tensor]


class GpuPlayed:
    """See :class:`k3lab.tuning.ranks.check.Played`."""

    def __init__(
        self, runner: Runner, inputs: list[Tensors], outputs: Tensors, group: RankGroup, limit_s: float
    ) -> None:
        """``inputs``: sets that :meth:`launch` names."""
        self.runner, self._outputs, self._group, self._limit_s = runner, outputs, group, limit_s
        if "health" in runner.buffers:
            set_limit(runner.buffers, limit_s / 2)  # before the host gives up: the kernel knows whom it waits for
        self._calls = [runner.bind({**one, **outputs}) for one in inputs]

    @property
    def outputs(self) -> Mapping[str, torch.Tensor]:
        """On the GPU."""
        return self._outputs

    def launch(self, which: int) -> None:
        """As compiled, with its programmatic edges."""
        self._calls[which]()

    def settle(self) -> None:
        """See the protocol."""
        ended(self._group, self._limit_s)
        check_health(self.runner.buffers, self._group.rank)


class GpuPlayer:
    """What :func:`k3lab.tuning.ranks.run.run_rank` asks of a rank."""

    real = True
    """Engines of the families, whose sources have a digest."""

    def __init__(self, request: RanksRequest, group: RankGroup) -> None:
        """A collective call.

        Raises:
            InputError: no GPU, none with a card, or fewer than ranks.
        """
        count = gpu_count()
        device = discover(group.rank % count) if count else None
        if device is None:
            raise InputError("ranks need NVIDIA GPUs, and none is visible here")
        if group.size > count and not request.time_sliced:
            raise InputError(
                f"{group.size} ranks have {count} GPUs here; --time-sliced lets them share, for checks alone"
            )
        self.request, self.group, self.found, self.card = request, group, device, device.need_card()
        self.device = f"cuda:{device.index}"
        torch.cuda.set_device(device.index)
        self.transport = Symmetric()
        self._nccl: Any = None
        self._clock: GpuClock | None = None
        if not request.time_sliced:
            self._nccl = dist.new_group(backend="nccl", timeout=timedelta(seconds=request.limit_s))
            self._clock = GpuClock(device.index, group, request.limit_s)

    @property
    def clock(self) -> GpuClock:
        """Only where each rank has a GPU."""
        assert self._clock is not None
        return self._clock

    def describe(self) -> dict[str, Any]:
        """The GPU, and of rank 0 how the host's are linked."""
        return {"gpu": self.found.to_json(), "links": links(gpu_count()) if self.group.rank == 0 else None}

    def cases(self) -> tuple[list[Case], list[dict[str, Any]]]:
        """See :func:`k3lab.tuning.ranks.cases.cases`."""
        return cases(self.request.families, self.request.rows, self.group.size, self.card)

    def compiled(self, case: Case) -> Compiled:
        """From the cache, once prepared."""
        engine = family(case.family).engine(case.engine)
        return compile_config(engine, case.problem, case.config, self.found.arch)

    def prepare(self, found: list[Case]) -> None:
        """Each rank compiles its share into the cache."""
        for case in found[self.group.rank :: self.group.size]:
            self.compiled(case)
        self.group.meet(patient=True)

    def _outputs(self, case: Case) -> Tensors:
        specs = family(case.family).output_specs(case.problem)
        return {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            for name, (shape, dtype) in specs.items()
        }

    def unfit(self, case: Case) -> str | None:
        """Why this GPU cannot hold the case's blocks; the same on all ranks."""
        return unfit(self.compiled(case), self.device)

    def play(self, case: Case, inputs: list[Tensors]) -> GpuPlayed:
        """A collective call: mailboxes are of all ranks."""
        runner = Runner(self.compiled(case), device=self.device, transport=self.transport)
        return GpuPlayed(runner, inputs, self._outputs(case), self.group, self.request.limit_s)

    def _copies(self, case: Case, inputs: Tensors) -> list[Tensors]:
        """Enough copies of the weights that each is cold when its turn comes; as many on every rank."""
        owner, first = family(case.family), {**inputs, **self._outputs(case)}
        cold = [name for name in owner.rotated if name in first]
        rotated = sum(first[name].numel() * first[name].element_size() for name in cold)
        free, _ = torch.cuda.mem_get_info()
        count = int(min(self.group.all(float(copies_for(rotated, self.request.policy, free)))))
        return [first, *({**first, **{name: first[name].clone() for name in cold}} for _ in range(count - 1))]

    def calls(self, case: Case, played: GpuPlayed, inputs: Tensors) -> Iterator[tuple[str, list[Call]]]:
        """``real`` over the links and ``loopback`` on this GPU alone, both isolated and with cold weights."""
        copies = self._copies(case, inputs)
        yield "real", [played.runner.bind(one, pdl=False) for one in copies]
        played.settle()
        alone = Runner(self.compiled(case), device=self.device)
        yield "loopback", [alone.bind(one, pdl=False) for one in copies]
        check_health(alone.buffers)

    def beside(self, found: list[Case]) -> Iterator[tuple[dict[str, Any], list[Call]]]:
        """(what it is, calls): all-reduces, warm, and the families' chains over NCCL, with cold weights; or ``why`` and no calls."""
        for rows in self.request.rows:
            for name, call in all_reduces(rows, K3.hidden_size, self.group, self._nccl, self.request.limit_s):
                what: dict[str, Any] = {"what": name, "rows": rows}
                yield ({**what, "why": call}, []) if isinstance(call, str) else (what, [call])
        seen = set()
        for case in found:
            if (case.family, case.problem.rows) in seen:
                continue
            seen.add((case.family, case.problem.rows))
            inputs = rank_inputs(case, self.group.rank, self.request.seed, self.device)
            copies = self._copies(case, inputs)
            calls = [chain_call(case.family, case.problem, one, self._nccl) for one in copies]
            calls[0]()
            off = self._off(case, inputs, copies[0])
            yield {"what": NCCL_CHAIN, "family": case.family, "rows": case.problem.rows, "relative_error": off}, calls

    def _off(self, case: Case, inputs: Tensors, got: Tensors) -> dict[str, float]:
        """How far the chain's outputs are from the twin's; equal scores may be chosen in another order than the twin's."""
        ended(self.group, self.request.limit_s)
        wanted, owner = twin(case, inputs, OnHost(self.group.host)), family(case.family)
        compared = sorted(wanted.keys() - {"ids", "weights"})
        return {
            name: compare(name, got[name], wanted[name], owner.tolerance(case.problem, name)).relative
            for name in compared
        }
