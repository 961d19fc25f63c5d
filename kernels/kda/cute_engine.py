"""The cute engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import Arg, Compiled, Engine, Problem, Work
from ..cute_sources import CUTE_PARTS
from ..params import K_ORDER, RELEASE, pinned
from ..residency import register_limit
from ..space import Config, Constraint, Param, Space
from ..stamps import build_of
from .common import TENSORS, kda
from .family import Kda
from .layout import DIM, MOST_STEPS, RANK, TAPS, Split

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
TOGETHER = (1, 2, 3, 4, 5, 6, 8)
FORMS = ("serial", "rolled", "wy")
INVARIANT: Config = {"parts": 4, "warps": 8, "lanes": 8, "run": 4, "form": "serial"}
"""What the order of any sum depends on, pinned for batch-invariant results."""
LEAST_LOG = -80.0
"""Of decays whose reciprocals' products with keys are FP32 numbers."""
RESERVED_REGISTERS = 26
"""Addresses, slots and the allocator's slack, beside operands and states."""


def split_of(problem: Kda, config: Config) -> Split:
    """How a config shares out the work."""
    parts, together, warps, lanes, depth, run = (
        int(config[name]) for name in ("parts", "together", "warps", "lanes", "depth", "run")
    )
    return Split(
        problem.heads, problem.requests, problem.q_len, problem.columns, parts, together, warps, lanes, depth, run,
        str(config["form"]),
    )  # fmt: skip


def registers(split: Split) -> int:
    """A thread's: at the dependency wait states in flight, gate rows and raw rows; later states, vectors of a step, outputs."""
    words = (TAPS if split.tokens == 1 else 2 * TAPS - 1) * split.run // 2
    waiting = (
        split.depth * split.state_words
        + 32 * split.gate_turns
        + 2 * words * split.query_turns
        + words * split.value_turns
        + 28
    )
    states = min(split.depth + 1, split.together) + (split.together > 1)
    at_work = states * split.state_words + 12 * split.quads
    if split.form == "wy":
        rows = split.turns + split.key_turns
        at_work = rows * (2 * split.padded_steps + 4 * split.quads) + 4 * split.quads
    return max(waiting, at_work) + split.steps * (split.turns + 1) + RESERVED_REGISTERS


class CuteEngine(Engine):
    """A head's state cut by value rows over the blocks of a cluster, in registers from load to store."""

    name = "cute"
    family = "kda"
    compiler = "cute"
    sources = (
        *(HERE / f"cute_{part}.py" for part in ("step", "halves", "forms", "core", "tokens", "parts")),
        *CUTE_PARTS,
    )

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """K3's head: the kernel's loads and MMAs are written for its width, rank and taps."""
        problem = kda(problem)
        if arch not in self.archs:
            return f"architecture {arch} is not among {', '.join(self.archs)}"
        sizes = (problem.head_dim, problem.gate_rank, problem.conv_size)
        if sizes != (DIM, RANK, TAPS):
            return (
                f"heads of {sizes[0]}, a gate of rank {sizes[1]} and {sizes[2]} taps: the kernel is written for {DIM}, {RANK} "
                f"and {TAPS}"
            )
        return None

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Blocks a head, requests a block, warps, lanes a row, states in flight."""
        problem = kda(problem)
        tokens = problem.q_len

        def split(c: Config) -> Split:
            return split_of(problem, c)

        def whole_rows(c: Config) -> bool:
            return split(c).slice_rows * split(c).lanes % split(c).threads == 0

        return Space(
            params=(
                Param("parts", (1, 2, 4, 8, 16), "blocks of a cluster, which share the value rows of a head"),
                Param("together", TOGETHER, "requests a block, one after the other"),
                Param("warps", (4, 8, 16), "warps a block"),
                Param("lanes", (8, 16, 32), "lanes that share a row of the state"),
                Param("depth", (1, 2, 3, 4), "states of requests in flight before the first is used"),
                Param(
                    "run", (4, 2, 1), "neighbouring channels a thread convolves: fewer spread a token over more warps"
                ),
                Param(
                    "form", FORMS if tokens > 1 else FORMS[:1], "of a request's tokens: one after the other, or at once"
                ),
                RELEASE,
                K_ORDER,
            ),
            constraints=(
                pinned(INVARIANT),
                Constraint(
                    lambda c: int(c["together"]) * tokens <= MOST_STEPS,
                    f"{{together}} requests of {tokens} tokens exceed the {MOST_STEPS} columns of the gate's MMA",
                ),
                Constraint(
                    lambda c: tokens == 1 or c["together"] == 1, "a request with several tokens has a block of its own"
                ),
                Constraint(lambda c: int(c["together"]) <= problem.requests, "more requests a block than there are"),
                Constraint(lambda c: int(c["depth"]) <= int(c["together"]), "more states in flight than a block has"),
                Constraint(
                    whole_rows, "{lanes} lanes a row and {warps} warps do not share out the rows of {parts} parts"
                ),
                Constraint(
                    lambda c: split(c).warps >= split(c).packets,
                    "fewer warps than packets of sums, one warp sends each",
                ),
                Constraint(
                    lambda c: c["run"] == 4 or split(c).steps * split(c).spread <= int(c["warps"]),
                    "queries and keys in runs of {run} channels take more warps than the block has",
                ),
                Constraint(
                    lambda c: c["form"] != "wy" or 2 * split(c).padded_steps <= int(c["lanes"]),
                    "the sums of {form} are dealt to the lanes of a row, {lanes} are too few",
                ),
                Constraint(lambda c: c["form"] != "wy" or c["run"] == 4, "{form} needs normalised keys, so run 4"),
                Constraint(
                    lambda c: c["form"] != "wy" or tokens * problem.lower_bound >= LEAST_LOG,
                    f"{{form}}: one over the decays of {tokens} tokens may exceed FP32",
                ),
                Constraint(
                    lambda c: c["release"] != "loads" or c["depth"] == c["together"],
                    "release loads: states are loaded after others are stored, so there is no last load before the stores",
                ),
                Constraint(
                    lambda c: registers(split(c)) <= register_limit(split(c).threads, gpu),
                    "states in flight, gate rows and taps exceed a thread's registers",
                ),
            ),
            default=default(problem, gpu),
        )

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch. ``stamps``, not in the space: see :mod:`..stamps`."""
        from cutlass import Int32

        from ..cute_compile import compile_cute
        from .cute_step import launch_step

        problem = kda(problem)
        split = split_of(problem, config)
        fakes = fake_tensors(problem)
        more = (
            float(problem.lower_bound),
            float(problem.eps),
            str(config["release"]),
            min(build_of(config), 0),
            split,
        )
        launch = compile_cute(
            launch_step, (*(fakes[name] for name in TENSORS), Int32(1), *more), arch, grid=(split.blocks, 1, 1),
            block=(split.threads, 1, 1), shared_bytes=split.shared_bytes,
            args=(*(Arg("tensor", name) for name in TENSORS), Arg("int32", "rows")), cluster=(split.parts, 1, 1), pdl=True,
        )  # fmt: skip
        return Compiled(self.family, self.name, problem, config, arch, (launch,))

    def releases_behind(self, config: Config) -> bool:
        """Other than at entry a block releases behind its wait."""
        return str(config["release"]) != "entry"

    def work(self, problem: Problem, config: Config) -> Work:
        """Every block reads the gate rows, taps and projections of its head; parts hand over once."""
        split = split_of(kda(problem), config)
        a_block = DIM * RANK * 2 + 3 * DIM * TAPS * 4 + split.steps * (3 * DIM + RANK) * 2
        in_flight = split.depth * split.slice_rows * DIM * 4
        return Work(
            l2_bytes=split.blocks * a_block, in_flight_bytes=in_flight,
            tile_turns=split.steps / (2 if split.form == "wy" else 1),
            dependent_steps=1 if split.parts > 1 else 0,
        )  # fmt: skip

    def summation_order(self, problem: Problem, config: Config) -> str:
        """Of S k and S q, and of the norm; the gate's and the convolution's are the same in all configs."""
        split = split_of(kda(problem), config)
        sums = f"four sums a lane over every {split.lanes}th run of 4 keys ascending, their two pairs, then"
        products = f"S k and S q: {sums} {split.lanes} lanes by butterfly"
        if split.form == "wy":
            products = (
                f"products of all tokens' keys and queries, times their decays, with the state before the step and with keys over "
                f"their decays: keys of a lane ascending, {split.lanes} lanes by butterfly; corrections: tokens ascending"
            )
        if split.spread > 1:
            products += "; norms of q and k beside them, in the same order"
        return (
            f"{products}; norm: {split.turns} rows a lane, lanes by butterfly, {split.warps} warps ascending, "
            f"{split.parts} blocks ascending; gate: MMAs over 16 of the rank ascending; convolution: taps ascending"
        )


SHAPES = {2: (8, 8), 4: (8, 8), 8: (8, 16)}
"""Blocks a head to warps and lanes a row, of defaults: one or two rows a thread."""


def default(problem: Kda, gpu: GpuCard) -> dict[str, Any]:
    """The shape with which an SM takes the shortest, its blocks one after the other; of equals that with fewest parts.

    In states of a head: what it moves of them, and for each block's beginning, gate rows and exchange a quarter.
    """

    def cost(parts: int, together: int) -> float:
        blocks = -(-problem.requests // together) * problem.heads * parts
        return -(-blocks // gpu.sms) * (together / parts + 0.25)

    most = MOST_STEPS if problem.q_len == 1 else 1
    pairs = [(parts, n) for parts in SHAPES for n in TOGETHER if n <= min(most, problem.requests)]
    parts, together = min(pairs, key=lambda pair: (cost(*pair), pair))
    depth, (warps, lanes) = min(2, together), SHAPES[parts]
    return {
        "parts": parts, "together": together, "warps": warps, "lanes": lanes, "depth": depth,
        "run": 4, "form": "serial", "release": "loads" if depth == together else "entry", "k_order": "free",
    }  # fmt: skip


def fake_tensors(problem: Kda) -> dict[str, Any]:
    """What the compiler is told of each argument. Imports the compiler."""
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    from .family import FAMILY

    kinds = {"bfloat16": cutlass.BFloat16, "float32": cutlass.Float32, "int32": cutlass.Int32}
    sizes = {name: (draw.dtype, draw.shape) for name, draw in FAMILY.draws(problem).items()}
    sizes |= {name: (dtype, shape) for name, (shape, dtype) in FAMILY.output_specs(problem).items()}
    made = {}
    for name, (dtype, shape) in sizes.items():
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        made[name] = make_fake_tensor(kinds[dtype], shape, stride=tuple(strides), assumed_align=16)
    return made
