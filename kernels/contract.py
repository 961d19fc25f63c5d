"""The contract between a kernel family, its engines, and everything that compiles, checks, times,
tunes, exports and launches them.

A :class:`Family` is one decode kernel of the model. Its :class:`Engine` objects implement it; an
engine turns (problem, config, architecture) into a :class:`Compiled`: cubins, and how to launch them.
The same compiled object is checked, timed, exported and run by the decode path, so what was measured
is what ships. This module imports neither torch nor a compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .space import Config, Space

if TYPE_CHECKING:
    import torch

    from .gpu_cards import GpuCard
    from .model_card import ModelCard

Tensors = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class Problem:
    """Which instance of a family: frozen, JSON-able fields only. Families subclass it.

    An object compiled for ``rows`` serves every smaller row count of an otherwise equal problem.
    """

    tp: int
    """Tensor-parallel size."""
    rows: int
    """Token rows in the step (requests times verify length)."""

    def to_json(self) -> dict[str, Any]:
        """Field name to value."""
        return dataclasses.asdict(self)

    @property
    def key(self) -> dict[str, Any]:
        """All fields but rows: what a bundle entry must match exactly."""
        return {name: value for name, value in self.to_json().items() if name != "rows"}

    @property
    def label(self) -> str:
        """Short text for tables and study names, e.g. ``kda-tp16-rows8``."""
        return f"tp{self.tp}-rows{self.rows}"


@dataclass(frozen=True)
class Traffic:
    """Fewest bytes through device memory and operations of one call on one rank."""

    weight_bytes: int
    """Weights and other operands that are cold in a decode step."""
    activation_bytes: int
    """Activations read and written (mostly L2 hits in a step)."""
    flops: int

    @property
    def bytes(self) -> int:
        """Every input read once, every output written once."""
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True)
class Work:
    """What a config makes the GPU do beyond the fewest bytes: features of the cost model."""

    l2_bytes: int = 0
    """Bytes read again through the L2, such as activations that every block reads."""
    in_flight_bytes: int = 0
    """Cold bytes one block keeps under way."""
    scalar_flops: int = 0
    """Operations outside the tensor cores."""
    tile_turns: float = 0.0
    """Turns of one block's tile loop, each weighed by the work of its busiest warp; 0 where it has no such loop."""
    dependent_steps: int = 0
    """Hand-overs between blocks, one after the other."""
    link_bytes: int = 0
    """Bytes that a rank receives from the others of its group."""
    link_hops: int = 0
    """Times that what a rank sends must have come before it goes on, one after the other."""


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted relative error ``norm(out - twin) / norm(twin)`` and largest element error."""

    relative: float
    """Bound on the relative Frobenius norm."""
    element: float
    """Bound on ``max |out - twin| / max(rms(twin), |twin| / 5)``."""
    why: str
    """Where the bound comes from: dtype and reduction length."""


@dataclass(frozen=True)
class Buffer:
    """Scratch memory a compiled engine needs, allocated once by its user."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch dtype name, e.g. ``float32``."""
    zeroed: bool = False
    """Must hold zeros before the first launch; every launch leaves it zeroed again."""
    persistent: bool = False
    """Holds zeros before the first launch and is the kernels' own from then on: what one launch leaves there the
    next one finds (launch counters, mailboxes, a health record). At most one of ``zeroed`` and ``persistent``."""
    targets_of: str = ""
    """Names a buffer whose first dimension counts ranks: its slots, slot r written by rank r. This one is then the
    table of where this rank writes, ``int64 [ranks, 2]``, filled by the transport before the first launch: for each
    rank p the address of this rank's slot there, and the factor of what goes into it, twice as BF16 in the low 32
    bits (see :mod:`.transports`)."""

    def __post_init__(self) -> None:
        if self.zeroed and self.persistent:
            raise ValueError(f"buffer {self.name}: either every launch leaves zeros, or what it holds is kept")
        table = self.dtype == "int64" and len(self.shape) == 2 and self.shape[1] == 2
        if self.targets_of and (not table or self.zeroed or self.persistent):
            raise ValueError(f"buffer {self.name}: a table of targets is int64 [ranks, 2], filled by the transport")


@dataclass(frozen=True)
class Arg:
    """One kernel parameter, in the order of the cubin's parameters."""

    kind: Literal["tensor", "tensor_map", "int32", "null"]
    """A device pointer, a TMA tensor map by value (128 bytes), a 32-bit integer, or a null pointer
    (Triton's unused scratch)."""
    name: str = ""
    """Input, output or buffer name for a tensor or a tensor map; ``rows``, ``rank`` (of the transport's group) or
    another problem field for an int32."""
    box: tuple[int, int] = (0, 0)
    """Tensor maps: rows x columns that one copy brings in; at most 256 each."""
    swizzle: Literal[0, 32, 64, 128] = 0
    """Tensor maps: bytes of the shared-memory swizzle; a row of the box is at most that long."""
    extent: str = ""
    """Tensor maps: ``rows`` or another problem field that says how many rows of the tensor are live, what lies
    beyond reads as zeros; empty: all rows of the tensor."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: everything the driver needs beside the tensors."""

    kernel: str
    """Symbol in the cubin: ``k3_<family>_<engine>_<role>``."""
    cubin: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    """Dynamic shared memory."""
    args: tuple[Arg, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    pdl: bool = False
    """Launch with programmatic stream serialization (the kernel waits for its predecessor itself)."""
    needs_residency: bool = False
    """Blocks of the grid wait for each other beyond one cluster: it may start only where all of them fit at once."""

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def cluster_blocks(self) -> int:
        """Blocks a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


@dataclass(frozen=True)
class Compiled:
    """An engine compiled for one problem, config and architecture."""

    family: str
    engine: str
    problem: Problem
    config: Config
    arch: str
    launches: tuple[Launch, ...]
    buffers: tuple[Buffer, ...] = ()


class Engine(ABC):
    """One implementation of a family on a range of problems and architectures."""

    name: str
    family: str
    compiler: Literal["triton", "cute"]
    archs: tuple[str, ...] = ("sm_90a", "sm_100a", "sm_103a")
    sources: tuple[Path, ...]
    """The kernel files: what the source digest covers."""

    @abstractmethod
    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Why the engine cannot serve the problem on the architecture, or None if it can."""

    @abstractmethod
    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """The configs to choose from."""

    @abstractmethod
    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """Build the kernels; needs no GPU. Any exception means the config does not compile."""

    @abstractmethod
    def summation_order(self, problem: Problem, config: Config) -> str:
        """In which order the reduction is summed, in words; part of what a config means."""

    def work(self, problem: Problem, config: Config) -> Work:
        """Features for the cost model; an engine that says nothing is predicted by bytes and residency alone."""
        return Work()

    def releases_behind(self, config: Config) -> bool:
        """Whether every block of the last launch lets the next one start only behind its own dependency wait.

        What comes next then begins when all that was before this engine's launches has ended: it may read that early.
        """
        return False

    def interpret(self, problem: Problem, config: Config, inputs: Tensors) -> dict[str, torch.Tensor] | None:
        """Run on the CPU where the compiler has an interpreter (Triton); None where it has none."""
        return None

    def source_digest(self) -> str:
        """Digest of the kernel files' bytes: 16 hex digits. A changed kernel is another kernel."""
        digest = hashlib.sha256()
        for path in sorted(self.sources):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:16]


class Family(ABC):
    """One decode kernel of the model: its problem, twin, inputs, bytes, tolerance and engines."""

    name: str
    title: str
    """One line for tables."""
    outputs: tuple[str, ...]
    """Names of the output tensors; a problem has those of its ``output_specs``, and the twin returns exactly these."""
    rotated: tuple[str, ...] = ()
    """Inputs that are cold in a decode step (weights): timing rotates copies of them."""
    constant: tuple[str, ...] = ()
    """Small inputs that no kernel of a step writes, so that they may be read before the dependency wait, but that stay in
    the L2: timing does not rotate them."""
    older: tuple[str, ...] = ()
    """Inputs that in a decode step are older than the launch before: kernels with an argument ``early`` may read them ahead of
    their wait for it (:meth:`k3lab.kernels.launch.Runner.bind`)."""
    mutated: tuple[str, ...] = ()
    """Inputs an engine updates in place (caches, states); restored before each check."""
    engines: tuple[Engine, ...] = ()
    default_engine: str = ""
    """Engine used untuned."""

    @abstractmethod
    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> Problem:
        """The problem of a model at a TP size and row count.

        Raises:
            InputError: TP does not divide, rows outside 1..64, or no such kind.
        """

    @abstractmethod
    def problem_from_json(self, data: Mapping[str, Any]) -> Problem:
        """Inverse of ``Problem.to_json``."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Layer kinds or variants this family distinguishes; empty if none."""
        return ()

    @abstractmethod
    def inputs(self, problem: Problem, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Random inputs of the right shapes, dtypes and magnitudes, the same for the same seed."""

    def input_shapes(self, problem: Problem) -> dict[str, tuple[int, ...]]:
        """Input name to shape; families whose inputs are large say it without drawing them."""
        return {name: tuple(tensor.shape) for name, tensor in self.inputs(problem, 0).items()}

    def row_axes(self, problem: Problem) -> dict[str, int]:
        """Inputs that hold something of each token row, and along which axis: the one that grows with the rows.

        An axis that merely happens to be as long, such as eight saved blocks beside eight rows, is none.
        """
        few = self.input_shapes(problem)
        many = self.input_shapes(dataclasses.replace(problem, rows=2 * problem.rows))
        return {
            name: axis
            for name, shape in few.items()
            for axis, extents in enumerate(zip(shape, many[name], strict=True))
            if extents == (problem.rows, 2 * problem.rows)
        }

    def cold_copies(
        self, problem: Problem, tensors: Tensors, rotate_bytes: int
    ) -> list[dict[str, torch.Tensor]] | None:
        """Tensors of calls that read ``rotate_bytes`` of other weights before the first is read again, for a family whose calls
        read a part of their weights, chosen by another input; None: timing copies whole weights.

        Args:
            problem: the problem.
            tensors: inputs and outputs on the GPU.
            rotate_bytes: between two uses of the same weights.
        """
        return None

    @abstractmethod
    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """Output name to (shape, torch dtype name)."""

    @abstractmethod
    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """The plain PyTorch reference, in FP32 or better: what engines are judged by."""

    def expected(self, problem: Problem, config: Config, inputs: Tensors) -> dict[str, torch.Tensor]:
        """What an engine's outputs are judged by in a check on one GPU: the twin, unless one GPU plays several ranks
        and the config says how.
        """
        return self.twin(problem, inputs)

    @abstractmethod
    def traffic(self, problem: Problem) -> Traffic:
        """Bytes and flops of one call on one rank."""

    @abstractmethod
    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """How far an engine's output may lie from the twin's."""

    def measurement_fault(self, problem: Problem, tensors: Tensors) -> str | None:
        """Why a timing is refused, by what the last call left in its outputs and buffers; None where it stands."""
        return None

    def alternative(self, problem: Problem, tensors: Tensors) -> Callable[[], None] | None:
        """The same work as a user would write it in PyTorch operators today, on tensors of inputs and
        outputs on the GPU, capturable in a graph; None where there is no such thing.
        """
        return None

    def operators(self, problem: Problem) -> Callable[[Tensors], Tensors] | None:
        """The same work as a function of inputs that returns the outputs: what torch.compile is given; None where
        there is no such thing.
        """
        return None

    def engine(self, name: str) -> Engine:
        """The engine of that name.

        Raises:
            InputError: no such engine; the message lists those there are.
        """
        from .errors import InputError

        for engine in self.engines:
            if engine.name == name:
                return engine
        have = ", ".join(engine.name for engine in self.engines) or "none yet (twin only)"
        raise InputError(f"family {self.name} has no engine {name!r}; it has: {have}")
