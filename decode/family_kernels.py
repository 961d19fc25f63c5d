"""The kernels of one bundle entry, loaded, and called by the names of their family: for every family alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels import InputError, family
from ..kernels.launch import Runner
from ..kernels.transports import Transport
from . import library
from .choices import Tuned


class SavedBlocks:
    """A step's saved blocks side by side, as a kernel reads them: each is copied once, when it is first seen."""

    def __init__(self, blocks: int, rows: int, hidden: int, *, dtype: torch.dtype, device: str | torch.device) -> None:
        """``rows``: those that the kernel was compiled for."""
        self._memory = torch.zeros(blocks, rows, hidden, dtype=dtype, device=device)
        self._held: list[Tensor] = []
        self.copied = False
        """Whether the last call had to copy: the launch before what comes next writes here."""

    def forget(self) -> None:
        """A step begins: what is copied in it may be captured, whatever another step had copied before."""
        self._held = []

    def side_by_side(self, blocks: Sequence[Tensor]) -> Tensor:
        """[all that may be saved, rows, hidden], the first of them ``blocks``; the same objects are not copied again."""
        same = 0
        while same < min(len(blocks), len(self._held)) and blocks[same] is self._held[same]:
            same += 1
        self.copied = same < len(blocks)
        for place in range(same, len(blocks)):
            self._memory[place, : blocks[place].shape[0]].copy_(blocks[place])
        self._held = [*self._held[:same], *blocks[same:]]
        return self._memory


class FamilyKernels:
    """An entry's kernels on this GPU. Mailboxes and counters are theirs, so one object serves every layer and row count."""

    def __init__(
        self, choice: Tuned, *, dtype: torch.dtype, device: str | torch.device, transport: Transport, make: Any = Runner
    ) -> None:
        """Load.

        Args:
            choice: of :func:`~k3lab.decode.choices.choose`.
            dtype: of the model.
            device: the GPU.
            transport: of kernels that write to other ranks.
            make: what runs compiled kernels.
        """
        self.family, self.engine = family(choice.family), choice.engine
        known = {engine.name: engine for engine in self.family.engines}
        self.releases_behind = self.engine in known and known[self.engine].releases_behind(choice.compiled.config)
        # an entry for more rows serves the step: its kernels have those in their strides
        self.rows = choice.place[3]
        self.problem = replace(choice.compiled.problem, rows=self.rows)
        self.runner = make(replace(choice.compiled, problem=self.problem), str(device), transport)
        self.dtype, self.device = dtype, device
        self.handle = library.register(self)

    def __getattr__(self, name: str) -> Any:
        """Fields of the problem that its tensors' shapes follow from."""
        if name in ("problem", "family"):
            raise AttributeError(name)
        return getattr(self.problem, name)

    def _shapes(self, rows: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        specs = self.family.output_specs(replace(self.problem, rows=rows))
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        kinds = {"bfloat16": self.dtype, "float32": wide}
        return {name: (shape, kinds.get(dtype) or getattr(torch, dtype)) for name, (shape, dtype) in specs.items()}

    def check(self, tensors: Mapping[str, Tensor], rows: int) -> None:
        """Raise InputError unless results have the family's shapes for so many rows, and rows were compiled for."""
        if not 1 <= rows <= self.rows:
            raise InputError(f"{self.family.name} with {rows} rows: compiled for 1 to {self.rows}")
        for name, (shape, _) in self._shapes(rows).items():
            pooled = name in ("states", "conv_states")  # a cache in place: as many entries as it has
            if name not in tensors or tuple(tensors[name].shape)[pooled:] != shape[pooled:]:
                raise InputError(f"{self.family.name} writes {name} of {list(shape)}")

    def launch(self, tensors: Mapping[str, Tensor], rows: int, fewer: Mapping[str, int], early: bool) -> None:
        """Bind and launch on the current stream."""
        more: dict[str, Any] = {"fewer": dict(fewer)} if fewer else {}
        if early:
            more["early"] = True
        self.runner.bind(tensors, rows=rows, **more)()

    def __call__(
        self, inputs: Mapping[str, Tensor], *, rows: int, fewer: Mapping[str, int] | None = None,
        updated: Mapping[str, Tensor] | None = None, early: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Run; the family's outputs by name.

        Args:
            inputs: by the family's names, contiguous.
            rows: token rows of the step.
            fewer: as :meth:`~k3lab.kernels.launch.Runner.bind` has it.
            updated: tensors that the kernels write in place; ``a=b`` names one that they know by two names.
            early: as :meth:`~k3lab.kernels.launch.Runner.bind` has it; not if an input has to be copied first.
        """
        there = {name for word in updated or () for name in word.split("=")}
        made = {
            name: torch.empty(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self._shapes(rows).items()
            if name not in there
        }
        ready = {name: tensor.contiguous() for name, tensor in inputs.items()}
        early = early and all(ready[name] is tensor for name, tensor in inputs.items())
        library.call(self, ready, {**made, **(updated or {})}, rows, fewer or {}, early)
        return made
