"""One rank of a layer pair's measurement: its weights, both backends' operators, its graphs, its trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..kernels import InputError, ModelCard
from ..kernels.whole_file import write_whole
from .auto import AutoOperators
from .choices import Choice, Finder, Tuned
from .context_parallel import context_group
from .expert_memory import release
from .group import Group
from .layer_pair import by_clock, on_rank, together
from .measure_bars import Bench, Load
from .operators import Operators, ReferenceOperators
from .plan import Plan, plan
from .random_weights import random_rank_weights
from .ranges import profiler_range
from .symmetric_group import SymmetricGroup
from .tuned import KernelPool, TunedOperators
from .weights import MoeMlp, RankWeights

STEPS = 30
"""Of a trace."""
PLAN = "plan.json"
"""Beside the traces: what they must hold, as ``decode plan --json`` says it."""
Say = Callable[[str, int, int], None]
Recorder = Callable[[Path], AbstractContextManager[object]]


@dataclass
class PairRank:
    """Every rank makes one, and calls its methods in the same order."""

    card: ModelCard
    """Cut down to the pairs."""
    group: Group
    bundle: Finder | None
    """Of the tuned path; None: ``auto`` alone runs."""
    choices: Mapping[Load, Sequence[Choice]]
    """Made from it."""
    seed: int
    say: Say
    _pool: KernelPool = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = f"cuda:{self.group.device.index}" if self.group.device else "cpu"
        self.weights: RankWeights = random_rank_weights(
            self.card, seed=self.seed, dtype=torch.bfloat16, device=device, tp=self.group.size, rank=self.group.rank,
            progress=lambda done, of: self.say("weights", done, of),
        )  # fmt: skip
        self.names = ("auto",) if self.bundle is None else ("auto", "latency_specialized")

    def operators(self, name: str, load: Load) -> Operators:
        """Of a backend; the experts are brought into the layout that it reads. Without a GPU PyTorch and the twins."""
        where: dict[str, Any] = {"dtype": self.weights.dtype, "device": self.weights.device}
        shared = context_group(self.group.comm, load.dcp)
        made: Operators
        if name == "auto":
            for layer in self.weights.layers:
                if isinstance(layer.mlp, MoeMlp):
                    release(layer.mlp)
            made = AutoOperators(self.card, context_group=shared, **where)
        elif self.group.device is None:
            made = ReferenceOperators(self.card, context_group=shared)
        else:
            made = TunedOperators(
                self.card, self.choices[load], transport=self.group.transport, pool=self._pool, context_group=shared, **where
            )  # fmt: skip
            made.take(self.weights)
        self.group.meet()  # loading takes its time
        return made

    def planned(self, name: str, load: Load) -> Plan | None:
        """What a step launches; None where no kernel is tuned."""
        device = self.group.device
        if name == "auto" or device is None or not any(isinstance(one, Tuned) for one in self.choices[load]):
            return None
        return plan(
            self.card, tp=self.group.size, rows=load.rows, backend=name, bundle=self.bundle, gpu=device.need_card().name,
            objective="measured", form=load.form,
        )  # fmt: skip

    def _bench(self, load: Load) -> Bench:
        return Bench(self.weights, self.group.comm, load, seed=self.seed)

    def measured(self, load: Load, samples: int) -> dict[str, Any]:
        """Backend to what :func:`~k3lab.decode.layer_pair.on_rank` says of it."""
        comm = self.group.comm
        timer = together(comm.meet) if isinstance(comm, SymmetricGroup) else by_clock(self.group.meet)
        found, beside = {}, None
        for name in self.names:
            self.say(f"{load.rows} rows, {name}", 0, 1)
            operators, planned = self.operators(name, load), _launches(self.planned(name, load))
            found[name], logits = on_rank(self._bench(load), operators, timer, samples, planned, beside)
            beside = logits if beside is None else beside
        return found

    def traced(self, load: Load, folder: Path, record: Recorder) -> dict[str, Any]:
        """Record steps of all layers from the graph of the last backend: the file, and what it must hold. Rank 0 leaves the plan beside it.

        ``lost`` says why there is no such file; this rank takes part all the same, for the others wait for it.

        Raises:
            InputError: no GPU.
        """
        if self.group.device is None:
            raise InputError("--traces records device kernels and needs NVIDIA GPUs")
        name, path = self.names[-1], folder / f"rank{self.group.rank}.json.gz"
        operators = self.operators(name, load)
        _, run = self._bench(load).captured(operators)
        with ExitStack() as recorded:
            lost = _lost(lambda: recorded.enter_context(record(path)))
            self.group.meet()  # profilers start at leisure
            for step in range(STEPS):
                with profiler_range(f"decode step {step}"):
                    run()
                torch.cuda.synchronize(self.group.device.index)
            lost = lost or _lost(recorded.close)
        operators.check()
        planned = self.planned(name, load)
        if planned and not self.group.rank:
            text = json.dumps(planned.to_json(), indent=1) + "\n"
            lost = lost or _lost(lambda: write_whole(folder / PLAN, text))
        return {
            "file": str(path), "backend": name, "rows": load.rows, "steps": STEPS, "planned": _launches(planned), "lost": lost,
        }  # fmt: skip


def _lost(write: Callable[[], object]) -> str | None:
    """Why something could not be written, or None."""
    try:
        write()
    except (OSError, InputError) as error:
        return str(error)
    return None


def _launches(planned: Plan | None) -> dict[str, int]:
    return planned.tuned_kernels() if planned else {}
