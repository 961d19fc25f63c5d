"""The cute engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import health
from ..contract import Arg, Buffer, Compiled, Engine, Problem, Work
from ..cute_sources import CUTE_PARTS
from ..errors import InputError
from ..mxfp4 import ROUNDINGS
from ..params import K_ORDER, RELEASE, pinned
from ..residency import register_limit
from ..space import Config, Constraint, Param, Space
from ..stamps import build_of
from .family import Experts
from .plan import EXPERT_BITS, PLACE_BITS, Plan

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
INVARIANT = {"warps": 8}
"""What the order of the sums depends on, pinned for batch-invariant results."""
RESERVED_REGISTERS = 56
"""Addresses, loop state, a step's operands and the allocator's slack, beside what is in flight."""
WITHIN_REGISTERS = 12
"""More where a unit asks for its own later steps too: their addresses beside the next unit's."""
RESERVED = (0, 4, 8, 16, 24, 32, 48, 64)
INPUTS = (
    "latent", "ids", "weights", "w13", "w13_scale", "w2", "w2_scale", "x", "gate_up", "down", "latent_partial",
    "shared_partial",
)  # fmt: skip


def experts(problem: Problem) -> Experts:
    """The problem as this family's own type."""
    assert isinstance(problem, Experts)
    return problem


def plan_of(problem: Experts, config: Config) -> Plan:
    """Sizes of the kernel."""
    return Plan(
        rows=problem.rows, top_k=problem.top_k, experts=problem.experts, latent=problem.latent, inner=problem.intermediate,
        warps=int(config["warps"]), depth=int(config["depth"]), x_depth=int(config["x_depth"]), tasks=int(config["tasks"]),
        blocks=int(config["sms"]) * int(config["per_sm"]), hidden=problem.hidden,
        wide=problem.shared_intermediate if problem.has_shared else 0,
        latent_rounding=ROUNDINGS[problem.activations][0] or "", hidden_rounding=ROUNDINGS[problem.activations][1] or "",
        reserved=int(config["reserved"]),
    )  # fmt: skip


def registers(plan: Plan) -> int:
    """A thread's: weights and scales in flight, activations, and the rest."""
    routed = 5 * plan.depth + 4 * plan.x_depth
    second = 5 * plan.depth + 4 * plan.batch
    each = 4 * plan.halves * plan.shared_x_depth(plan.shared_steps1)
    shared = 5 * plan.depth + plan.row_tiles * (4 + each) if plan.wide else 0
    within = WITHIN_REGISTERS if plan.depth < plan.steps1 else 0
    return max(routed, second, shared) + RESERVED_REGISTERS + within


def buffers(plan: Plan) -> tuple[Buffer, ...]:
    """What blocks and launches leave to each other."""
    return (
        Buffer("hidden", (plan.pairs * plan.hidden_packets, 4), "int32", persistent=True),
        Buffer("outputs", (plan.pairs * plan.row_packets, 4), "int32", persistent=True),
        Buffer("wide", (max(1, plan.rows * plan.shared_first), 4), "bfloat16"),
        Buffer("done", (max(1, plan.eights * plan.shared_first),), "int32", persistent=True),
        Buffer("coarse", (plan.rows, plan.latent) if plan.latent_rounding else (1, 8), "bfloat16"),
        Buffer("ready", (plan.rows * plan.spans,), "int32", persistent=True),
        Buffer("epochs", (plan.blocks,), "int32", persistent=True),
        health.BUFFER,
    )


def arguments(problem: Experts, plan: Plan, early: bool) -> tuple[Arg, ...]:
    """Of the kernel, in order; null where there is no shared expert, and where nothing is done early."""
    from .family import FAMILY

    there = {*FAMILY.draws(problem), *FAMILY.output_specs(problem), *(buffer.name for buffer in buffers(plan))}
    names = (*INPUTS, *(buffer.name for buffer in buffers(plan)))
    tensors = (Arg("tensor", name) if name in there else Arg("null") for name in names)
    return (*tensors, Arg("int32", "rows"), Arg("int32", "early") if early else Arg("null"))


def fake_tensors(problem: Experts, plan: Plan) -> list[Any]:
    """What the compiler is told of each argument. Imports the compiler."""
    from cutlass import BFloat16, Float32, Int32, Uint8
    from cutlass.cute.runtime import make_fake_tensor

    from .family import FAMILY

    kinds = {"bfloat16": BFloat16, "float32": Float32, "uint8": Uint8, "int32": Int32}
    shapes = {name: (draw.shape, draw.dtype) for name, draw in FAMILY.draws(problem).items()}
    shapes |= FAMILY.output_specs(problem)
    shapes |= {buffer.name: (buffer.shape, buffer.dtype) for buffer in buffers(plan)}
    made = []
    for name in (*INPUTS, *(buffer.name for buffer in buffers(plan))):
        shape, dtype = shapes.get(name, ((8,), "bfloat16"))
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        made.append(make_fake_tensor(kinds[dtype], shape, stride=tuple(strides), assumed_align=16))
    return made


class CuteEngine(Engine):
    """Routed and shared experts in one persistent launch; MXFP4 dequantised in registers, straight into MMAs."""

    name = "cute"
    family = "experts"
    compiler = "cute"
    sources = (
        *(HERE / f"cute_{name}.py" for name in ("experts", "group", "mxfp8", "parts", "ring", "shared")),
        *CUTE_PARTS,
    )

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Whole blocks, a table that fits its words."""
        problem = experts(problem)
        if arch not in self.archs:
            return f"architecture {arch} is not among {', '.join(self.archs)}"
        for name, width, unit in (
            ("latent", problem.latent, 512), ("hidden", problem.hidden, 512),
            ("intermediate", problem.intermediate, 32), ("shared_intermediate", problem.shared_intermediate, 32),
        ):  # fmt: skip
            if width % unit:
                return f"{name} {width} is not a multiple of {unit}"
        if problem.experts > 1 << EXPERT_BITS or problem.rows * problem.top_k >= 1 << PLACE_BITS or problem.top_k > 32:
            return (
                f"{problem.experts} experts, {problem.top_k} of them for each of {problem.rows} rows: at most "
                f"{1 << EXPERT_BITS}, 32, and {(1 << PLACE_BITS) - 1} pairs"
            )
        return None

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Warps that share a product, what is in flight, how fine the second product is cut, blocks an SM."""
        problem = experts(problem)

        def fits(c: Config) -> bool:
            plan = plan_of(problem, c)
            return plan.refusal() is None

        def in_registers(c: Config) -> bool:
            plan = plan_of(problem, c)
            return registers(plan) <= register_limit(plan.threads, gpu, int(c["per_sm"]))

        def in_shared(c: Config) -> bool:
            bytes_ = plan_of(problem, c).shared_bytes
            return bytes_ <= gpu.shared_per_block and (bytes_ + 1024) * int(c["per_sm"]) <= gpu.shared_per_sm

        return Space(
            params=(
                Param("warps", (4, 8, 16), "warps of a block, which share the columns of the first product"),
                Param("depth", (2, 4, 7, 14), "steps of 512 bytes of weights in flight a warp"),
                Param("x_depth", (1, 2, 4, 7), "steps of activations in flight a warp, routed first product"),
                Param(
                    "tasks", (1, 2, 4, 7), "times 32 output columns of a warp in a unit of the routed second product"
                ),
                Param("per_sm", (1, 2, 3, 4), "blocks an SM"),
                Param(
                    "reserved",
                    RESERVED if problem.has_shared else (0,),
                    "blocks for the shared expert alone; 0: all blocks take units of both",
                ),
                Param("sms", (gpu.sms,), "SMs that the grid covers"),
                Param(
                    "early",
                    ("none", "shared") if problem.has_shared else ("none",),
                    "shared: its first products come before the routed ones are known, in a step before the wait for them",
                ),
                RELEASE,
                K_ORDER,
            ),
            constraints=(
                pinned(INVARIANT),
                Constraint(
                    fits,
                    "{warps} warps, {depth} and {x_depth} steps in flight and {tasks} tasks do not divide the widths",
                ),
                Constraint(in_registers, "{per_sm} blocks of {warps} warps: what is in flight exceeds the registers"),
                Constraint(in_shared, "{per_sm} blocks of {warps} warps: tables and sums exceed the shared memory"),
            ),
            default=self._default(problem, gpu),
        )

    @staticmethod
    def _default(problem: Experts, gpu: GpuCard) -> Config:
        """One block an SM, as many warps as divide the columns, all activations of a unit in flight.

        The shared expert's sums of many rows leave fewer warps their registers.
        """
        many = problem.has_shared and problem.rows > 32
        for warps in (8,) if many else (16, 8, 4, 2):
            steps = problem.latent // (32 * warps)
            depth = next((size for size in (7, 8, 4, 2) if steps and steps % size == 0), 0)
            if depth and problem.latent % (32 * warps) == 0 and problem.hidden % (32 * warps * depth) == 0:
                return {
                    "warps": warps, "depth": depth, "x_depth": depth if depth == steps else 2 if steps % 2 == 0 else 1, "tasks": 1, "per_sm": 1,
                    "reserved": 0,
                    "sms": gpu.sms, "early": "none", "release": "loads", "k_order": "free",
                }  # fmt: skip
        raise InputError(f"latent {problem.latent} and hidden {problem.hidden} do not divide over the warps of a block")

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch."""
        from cutlass import Int32

        from ..cute_compile import compile_cute
        from .cute_experts import launch

        problem = experts(problem)
        plan, early = plan_of(problem, config), config["early"] == "shared"
        built = compile_cute(
            launch,
            (
                *fake_tensors(problem, plan), Int32(1), Int32(0), plan, problem.beta, problem.linear_beta, early,
                str(config["release"]), build_of(config), int(config["per_sm"]),
            ),
            arch,
            grid=(plan.blocks, 1, 1),
            block=(plan.threads, 1, 1),
            shared_bytes=plan.shared_bytes,
            args=arguments(problem, plan, early),
            pdl=True,
        )  # fmt: skip
        built = dataclasses.replace(built, needs_residency=True)
        return Compiled(self.family, self.name, problem, config, arch, (built,), buffers(plan))

    def work(self, problem: Problem, config: Config) -> Work:
        """Each item's units read its rows again; three hand-overs between blocks."""
        problem = experts(problem)
        plan = plan_of(problem, config)
        pairs = problem.rows * problem.top_k
        first = pairs * plan.tiles * problem.latent * 2
        second = pairs * plan.chunks * plan.warps * plan.hidden_packets * 16
        return Work(
            l2_bytes=first + second + 2 * pairs * plan.row_packets * 16,
            in_flight_bytes=plan.depth * 544 * plan.warps,
            tile_turns=problem.distinct * (plan.tiles * plan.steps1 + plan.chunks * plan.steps2) / plan.blocks,
            dependent_steps=3,
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernel's docstring."""
        warps = config["warps"]
        return (
            f"first products: MMAs of a scale group ascending (shared expert: of a warp), groups of a warp ascending, {warps} runs of "
            "columns ascending; second products: groups ascending; expert outputs rounded, weighted and added by slots ascending"
        )
