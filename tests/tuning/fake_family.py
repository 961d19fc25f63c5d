"""A family whose engine compiles to nothing but a header: for tests of search, store, choice, export and bundle.

It lives outside the package, as a user's family does, and is not registered: workers find it by its
module path. What its configs do is decided in ``fake_evaluator``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3lab.kernels import (
    Arg,
    Buffer,
    Compiled,
    Config,
    Constraint,
    Engine,
    Family,
    InputError,
    Launch,
    ModelCard,
    Param,
    Problem,
    Space,
    Tolerance,
    Traffic,
)

ELF_CUDA = b"\x7fELF\x02\x01\x01\x33" + bytes(8) + b"\x02\x00" + (190).to_bytes(2, "little")
"""First bytes of an ELF file for machine 190, NVIDIA CUDA."""


@dataclass(frozen=True)
class FakeProblem(Problem):
    """A problem with a width."""

    width: int = 64


class FakeEngine(Engine):
    """Compiles anything at once."""

    compiler = "triton"
    family = "fake"
    sources = (Path(__file__),)

    def __init__(
        self, name: str, params: tuple[Param, ...], constraints: tuple[Constraint, ...], default: Config
    ) -> None:
        self.name = name
        self.params, self.constraints, self.default = params, constraints, default

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Only a width of 13."""
        return "width 13 is unlucky" if getattr(problem, "width", 0) == 13 else None

    def space(self, problem: Problem, gpu: Any) -> Space:
        """The same for all problems."""
        return Space(self.params, self.constraints, self.default)

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """A header and a digest of what was asked for."""
        body = hashlib.sha256(json.dumps([problem.to_json(), dict(config), arch], sort_keys=True).encode()).digest()
        args = (Arg("tensor", "x"), Arg("tensor", "out"), Arg("tensor", "scratch"), Arg("int32", "rows"))
        launch = Launch(f"k3_fake_{self.name}_main", ELF_CUDA + body, (4, 1, 1), (128, 1, 1), 1024, args, pdl=True)
        return Compiled(
            "fake", self.name, problem, config, arch, (launch,), (Buffer("scratch", (4, 8), "int32", zeroed=True),)
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """There is no sum."""
        return "ascending"


SMALL = FakeEngine(
    "small",
    (
        Param("tile", (1, 2, 4, 8), "tile"),
        Param("deep", (False, True), "pipelined"),
        Param("mode", ("a", "b"), "schedule"),
    ),
    (Constraint(lambda c: not (c["deep"] and c["tile"] == 8), "tile {tile} is too large to be deep"),),
    {"tile": 1, "deep": False, "mode": "a"},
)
LARGE = FakeEngine(
    "large",
    tuple(Param(name, tuple(range(8)), name) for name in ("p", "q", "r", "s")),
    (Constraint(lambda c: (c["p"] + c["q"]) % 2 == 0, "p + q is odd"),),
    {"p": 0, "q": 0, "r": 0, "s": 0},
)
FAULTS = (
    "none", "exit", "segv", "hang", "raise", "check_hang", "check_exit", "check_raise", "wrong", "oom", "memory", "unstable",
    "nan", "prints", "illegal",
)  # fmt: skip
FAULTY = FakeEngine(
    "faulty", (Param("fault", FAULTS, "what goes wrong"), Param("n", (0, 1), "n")), (), {"fault": "none", "n": 0}
)
FAULTY_STATUSES = {
    "compile_error": 2, "compile_timeout": 2, "crashed": 8, "illegal": 2, "ok": 4, "oom": 4, "timeout": 2, "unstable": 4, "wrong": 2,
}  # fmt: skip
"""How the trials of its whole space end."""


class FakeFamily(Family):
    """Nothing to compute."""

    name = "fake"
    title = "a fake for tests"
    outputs = ("out",)
    engines = (SMALL, LARGE, FAULTY)
    default_engine = "small"

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> FakeProblem:
        """Any."""
        if not 1 <= rows <= 64:
            raise InputError(f"rows is {rows}; 1 to 64")
        return FakeProblem(tp, rows)

    def problem_from_json(self, data: Mapping[str, Any]) -> FakeProblem:
        """Inverse of to_json."""
        return FakeProblem(**data)

    def inputs(self, problem: Problem, seed: int, device: str = "cpu") -> dict[str, Any]:
        """None."""
        return {}

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """One."""
        return {"out": ((problem.rows,), "bfloat16")}

    def twin(self, problem: Problem, inputs: Any) -> dict[str, Any]:
        """None."""
        return {}

    def traffic(self, problem: Problem) -> Traffic:
        """Some."""
        return Traffic(1000, 100, 10)

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """Some."""
        return Tolerance(0.01, 0.1, "fake")


FAMILY = FakeFamily()
