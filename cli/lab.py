"""The notebook facade: one object for one problem of one family; every result shows itself.

``open_lab("attention_projection", tp=16, rows=8).check()`` does what ``k3lab check`` does. Edit a file of the family, run a
cell again, and the edited kernel is what is checked: a lab looks at the family's files before each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels import K3, Config, Engine, Family, InputError, ModelCard, Problem, Space
from ..kernels.gpu_cards import GpuCard, gpu_card
from .edited import EditedFamily, edited_family
from .shown import Shown, live

if TYPE_CHECKING:
    import torch


def _import_optuna() -> None:
    """Import it without the warning that its progress bar, which is not used, would like ipywidgets in a notebook."""
    import importlib
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        importlib.import_module("optuna")


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} us"


class Lab:
    """One family, engine and problem, for one GPU. Made by :func:`open_lab`."""

    def __init__(
        self, edited: EditedFamily, engine: str | None, gpu: GpuCard, model: ModelCard, tp: int, rows: int, kind: str | None
    ) -> None:  # fmt: skip
        self._edited = edited
        self._asked = engine
        self._made = {"card": model, "tp": tp, "rows": rows, "kind": kind}
        self.gpu = gpu
        if engine:
            self.family.engine(engine)
        self.problem  # noqa: B018  # a wrong one is told at once

    @property
    def family(self) -> Family:
        """The family, from its files as they are now."""
        if changed := self._edited.refresh():
            print(f"imported again: {', '.join(path.name for path in changed)}")
        return self._edited.family

    @property
    def problem(self) -> Problem:
        """The instance of the family that the lab is about."""
        made = dict(self._made)
        return self.family.problem(made.pop("card"), **made)  # type: ignore[arg-type]

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            InputError: the family has none yet.
        """
        owner = self.family
        return owner.engine(self._asked or owner.default_engine)

    @property
    def space(self) -> Space:
        """Configs to choose from on the GPU.

        Raises:
            InputError: the engine refuses the problem.
        """
        engine, problem = self.engine, self.problem
        if refusal := engine.refuses(problem, self.gpu.arch):
            raise InputError(f"{engine.family}/{engine.name} refuses {problem.label}: {refusal}")
        return engine.space(problem, self.gpu)

    @property
    def title(self) -> str:
        """Family, engine and problem in a few words."""
        name = self._asked or self.family.default_engine
        return f"{self.family.name}{f'/{name}' if name else ''} {self.problem.label}"

    def __repr__(self) -> str:
        return repr(self._overview())

    def _repr_html_(self) -> str:
        return self._overview()._repr_html_()

    def _overview(self) -> Shown:
        traffic = self.family.traffic(self.problem)
        rows: list[tuple[str, Any]] = [("what", self.family.title)]
        rows += [(name, value) for name, value in self.problem.to_json().items()]
        rows += [
            ("bytes a call", f"{traffic.bytes / 1e6:.2f} MB"),
            ("floor", f"{_us(self._floor())} on {self.gpu.name} ({self.gpu.read_bandwidth_source} bandwidth)"),
        ]
        rows += [("engines", ", ".join(engine.name for engine in self.family.engines) or "none yet")]
        return Shown(self.title, {"problem": self.problem.to_json()}, rows)

    def _floor(self) -> float:
        return self.family.traffic(self.problem).bytes / self.gpu.read_bandwidth * 1e6

    def _config(self, config: Mapping[str, Any] | None) -> Config:
        space = self.space
        chosen = {**space.default, **(config or {})}
        space.check(chosen)
        return chosen

    def inputs(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Random inputs on the CPU."""
        return self.family.inputs(self.problem, seed)

    def twin(self, inputs: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """What the kernel must compute, from the readable reference."""
        return self.family.twin(self.problem, inputs or self.inputs())

    def check(self, config: Mapping[str, Any] | None = None, seed: int = 0) -> Shown:
        """The engine against the twin: on the GPU here, or on Triton's interpreter."""
        from ..tuning.check import check
        from .lab_figures import check_figure

        result = check(self.family, self.engine, self.problem, self._config(config), seed)
        rows = [("verdict", "pass" if result.ok else "fail"), ("where", result.how), ("reason", result.reason or "-")]
        rows += [(f"relative error of {name}", f"{error:.2e}") for name, error in result.errors.items()]
        for name in self.family.output_specs(self.problem):
            bound = self.family.tolerance(self.problem, name)
            rows.append((f"bound of {name}", f"{bound.relative:.2e} ({bound.why})"))
        title, cases = f"check {self.title}", result.cases
        figures = {"errors": lambda: check_figure(title, cases)} if cases else {}
        return Shown(title, result.to_json(), rows, figures)

    def compile(self, config: Mapping[str, Any] | None = None, arch: str | None = None) -> Shown:
        """What the compiler makes of a config, for the GPU's architecture or another; needs no GPU."""
        from ..tuning.compiling import compile_config
        from ..tuning.cubin import resources

        target = arch or self.gpu.arch
        kernels = resources(compile_config(self.engine, self.problem, self._config(config), target))
        rows: list[tuple[str, Any]] = []
        for kernel in kernels:
            mix = ", ".join(f"{name} {count}" for name, count in list(kernel.instructions.items())[:8])
            rows += [
                ("kernel", kernel.kernel), ("registers a thread", kernel.registers), ("threads", kernel.threads),
                ("blocks", kernel.blocks), ("shared memory", f"{kernel.dynamic_shared_bytes} bytes"),
                ("spills", kernel.spill_instructions), ("instructions", mix),
            ]  # fmt: skip
        return Shown(f"compiled {self.title} for {target}", {"kernels": [kernel.to_json() for kernel in kernels]}, rows)

    def predict(self, config: Mapping[str, Any] | None = None) -> Shown:
        """Time by the cost model for the GPU, which need not be here."""
        from ..tuning.compiling import compile_config
        from ..tuning.predict import predict

        chosen = self._config(config)
        compiled = compile_config(self.engine, self.problem, chosen, self.gpu.arch)
        found = predict(self.family, self.engine, self.problem, chosen, self.gpu, compiled)
        rows = [
            ("predicted", _us(found.microseconds)),
            ("floor", _us(self._floor())),
            ("error of the model", found.error),
        ]
        return Shown(f"predicted {self.title} on {self.gpu.name}", found.to_json(), [*rows, *found.terms.items()])

    def time(self, config: Mapping[str, Any] | None = None) -> Shown:
        """Measured on the GPU here: cold and hot, beside PyTorch's operators, and in a chain where it has programmatic edges.

        Raises:
            InputError: there is no GPU.
        """
        from ..kernels.device import require
        from ..tuning.compiling import compile_config
        from ..tuning.timing import time_compiled
        from .timing_data import shown_timing

        device = require("timing")
        compiled = compile_config(self.engine, self.problem, self._config(config), device.arch)
        found = time_compiled(self.family, compiled, alternative=True, chain=True)
        return shown_timing(f"{self.title} on {device.name}", found.to_json())

    def tune(
        self,
        trials: int,
        study: str | Path | None = None,
        objective: str | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> Shown:
        """Search until the study holds so many trials; what it holds already counts, and the result says so.

        Measured where the GPU is here, predicted elsewhere; ``study`` is its file (default: under studies/);
        ``fixed`` holds parameters at one value. Figures: ``history``, ``importance``, ``slices``.
        """
        from ..kernels.device import discover
        from ..tuning.tune import TuneRequest, tune
        from .tuned import shown_study

        _import_optuna()

        here = discover()
        known = here is not None and here.card is not None and here.card.name == self.gpu.name
        goal = objective or ("measured" if known else "predicted")
        if goal not in ("measured", "predicted"):
            raise InputError(f"objective {goal!r} is neither measured nor predicted")
        path = Path(study) if study else None
        request = TuneRequest(
            self.family, self.engine, self.problem, self.gpu, goal, trials, path, fixed=dict(fixed or {}),  # type: ignore[arg-type]
        )  # fmt: skip
        result = tune(request, live())
        return shown_study(f"tuned {self.title} for {self.gpu.name}", self.family, result, self._floor())

    def roofline(self, tp: Sequence[int] | None = None, rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)) -> Shown:
        """The family at several TP sizes and row counts under the GPU's roofs: by its byte floor, by arithmetic, by which of both.

        Figures: ``roofline``, and ``floors``, the byte floor of this problem on every GPU with a card.
        """
        from .roofline_data import shown_roofline

        return shown_roofline(self.family, self.problem, self.gpu, tp or (4, 8, 16), rows, self._made)

    def recorded(self, results: str | Path = "results") -> Shown:
        """What a folder of results knows of this problem, measured or predicted, on every GPU: needs no GPU.

        Raises:
            InputError: nothing of its shape.
        """
        from .table_data import shown_record

        return shown_record(self.family, self.problem, Path(results))

    def trace(self, path: str | Path | None = None, budget: str | None = None) -> Shown:
        """A decode trace judged against a layer budget: verdict, what costs most, this family's share, and a typical layer drawn.

        Without a path the demo model is decoded and traced on the GPU here; without one a synthetic trace stands in, and the
        title says so.
        """
        from .lab_trace import shown_trace

        return shown_trace(self.family.name, self.problem, None if path is None else Path(path), budget)


def open_lab(
    name: str,
    tp: int = 16,
    rows: int = 8,
    *,
    kind: str | None = None,
    gpu: str = "GB300",
    engine: str | None = None,
    model: ModelCard = K3,
) -> Lab:
    """Open a family on a problem.

    Args:
        name: family, as ``k3lab kernels`` lists them, or ``module:ATTRIBUTE`` of one that is not registered.
        tp: tensor-parallel size.
        rows: token rows of the step.
        kind: layer kind or variant, where the family has some.
        gpu: GPU card to compile, predict and tune for.
        engine: engine; the family's default if None.
        model: the model's dimensions.

    Raises:
        InputError: no such family, kind, engine or GPU, or a problem out of range.
    """
    return Lab(edited_family(name), engine, gpu_card(gpu), model, tp, rows, kind)
