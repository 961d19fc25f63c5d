"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..contract import Engine, Family, Problem, Tensors, Tolerance, Traffic
from ..errors import InputError
from ..model_card import K3, ModelCard

if TYPE_CHECKING:
    import torch

MAX_ROWS = 64


@dataclass(frozen=True)
class AttentionProjection(Problem):
    """``out[rows, outputs] = x[rows, hidden] @ w[outputs, hidden]^T`` on one rank."""

    kind: str
    """``kda`` or ``mla``."""
    hidden: int
    outputs: int
    """Rows of this rank's packed weight."""
    dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        """E.g. ``kda-tp16-rows8``; another hidden size than K3's is named, so that studies of two models differ."""
        other = "" if self.hidden == K3.hidden_size else f"-hidden{self.hidden}"
        return f"{self.kind}-tp{self.tp}-rows{self.rows}{other}"


def packed_outputs(card: ModelCard, kind: str, tp: int) -> int:
    """Rows of one rank's packed projection: KDA ``[q|k|v|g|f_a|b]`` padded to 16, MLA ``[q_a|kv_a|g]``."""
    if kind == "kda":
        rows = 4 * card.kda_dim // tp + card.kda_gate_rank + card.kda_num_heads // tp
        return -(-rows // 16) * 16
    return card.q_lora_rank + card.kv_lora_rank + card.qk_rope_head_dim + card.mla_dim // tp


class AttentionProjectionFamily(Family):
    """See :class:`AttentionProjection`."""

    name = "attention_projection"
    title = "attention input projection (small and large batch)"
    outputs = ("out",)
    rotated = ("w",)
    default_engine = "triton"

    @property
    def engines(self) -> tuple[Engine, ...]:  # type: ignore[override]
        """Built on first use: engine modules are light, their kernels are not."""
        from .engines import ENGINES

        return ENGINES

    @property
    def kinds(self) -> tuple[str, ...]:
        """Both layer kinds project; they differ in the number of outputs."""
        return ("kda", "mla")

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> AttentionProjection:
        """See :meth:`Family.problem`; ``kind`` defaults to ``kda``."""
        card.check_tp(tp)
        kind = kind or "kda"
        if kind not in self.kinds:
            raise InputError(f"{self.name} has no kind {kind!r}; kinds: kda, mla")
        if not 1 <= rows <= MAX_ROWS:
            raise InputError(f"rows is {rows}; the decode path serves 1 to {MAX_ROWS} rows")
        return AttentionProjection(tp, rows, kind, card.hidden_size, packed_outputs(card, kind, tp))

    def problem_from_json(self, data: Mapping[str, Any]) -> AttentionProjection:
        """Inverse of ``to_json``."""
        try:
            return AttentionProjection(**data)
        except TypeError as error:
            raise InputError(f"not a problem of {self.name}: {error}") from error

    def inputs(self, problem: Problem, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """``x`` N(0, 1) and ``w`` N(0, 0.02), as a normalised input and an initialised projection are."""
        import torch

        assert isinstance(problem, AttentionProjection)
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, problem.dtype)

        spreads = {"x": 1.0, "w": 0.02}
        return {
            name: (torch.randn(shape, generator=generator, device=device) * spreads[name]).to(dtype)
            for name, shape in self.input_shapes(problem).items()
        }

    def input_shapes(self, problem: Problem) -> dict[str, tuple[int, ...]]:
        """``x`` [rows, hidden], ``w`` [outputs, hidden]."""
        assert isinstance(problem, AttentionProjection)
        return {"x": (problem.rows, problem.hidden), "w": (problem.outputs, problem.hidden)}

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``out``: [rows, outputs]."""
        assert isinstance(problem, AttentionProjection)
        return {"out": ((problem.rows, problem.outputs), problem.dtype)}

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, not rounded: engines are judged by it."""
        from .twin import project

        return {"out": project(inputs["x"].float(), inputs["w"].float())}

    def alternative(self, problem: Problem, tensors: Tensors) -> Callable[[], None]:
        """CuBLAS through torch.mm."""
        import torch

        x, weight, out = tensors["x"], tensors["w"].T, tensors["out"]

        def call() -> None:
            torch.mm(x, weight, out=out)

        return call

    def operators(self, problem: Problem) -> Callable[[Tensors], Tensors]:
        """One matrix product."""
        import torch

        def project(tensors: Tensors) -> Tensors:
            return {"out": torch.mm(tensors["x"], tensors["w"].T)}

        return project

    def traffic(self, problem: Problem) -> Traffic:
        """Weights once, activations once."""
        assert isinstance(problem, AttentionProjection)
        rows, hidden, outputs = problem.rows, problem.hidden, problem.outputs
        return Traffic(2 * outputs * hidden, 2 * rows * (hidden + outputs), 2 * rows * hidden * outputs)

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """One BF16 rounding, at most 2^-8 of an element and below 2^-9 in the root mean square, plus FP32 sums."""
        assert isinstance(problem, AttentionProjection)
        accumulate = 2**-24 * problem.hidden**0.5
        return Tolerance(
            relative=2**-9 + 4 * accumulate,
            element=2**-8 * 6 + 32 * accumulate,
            why=f"one BF16 rounding; FP32 sum of {problem.hidden} products (elements: up to 6 rms)",
        )


FAMILY = AttentionProjectionFamily()
