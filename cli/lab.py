"""The notebook facade: one object for one problem of one family; every result shows itself.

``open_lab("attention_projection", tp=16, rows=8).check()`` does what ``k3lab check`` does.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels import K3, Config, Engine, Family, InputError, ModelCard, Problem, Space, family
from ..kernels.gpu_cards import GpuCard, gpu_card

if TYPE_CHECKING:
    import torch
    from plotly.graph_objects import Figure


class Shown:
    """A result: ``data`` as JSON would hold it, and a table of it where a notebook shows it."""

    def __init__(self, title: str, data: Mapping[str, Any], rows: Sequence[tuple[str, Any]]) -> None:
        self.title = title
        self.data = data
        self.rows = list(rows)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __repr__(self) -> str:
        width = max((len(name) for name, _ in self.rows), default=0)
        return "\n".join([self.title, *(f"  {name:<{width}}  {value}" for name, value in self.rows)])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td><td style='text-align:left'>{html.escape(str(value))}</td></tr>"
            for name, value in self.rows
        )
        return f"<b>{html.escape(self.title)}</b><table>{cells}</table>"


class Study(Shown):
    """The result of :meth:`Lab.tune`, with its figure."""

    @property
    def figure(self) -> Figure:
        """Trials in order, best so far, byte floor."""
        from .figures import study_figure

        return study_figure(dict(self.data))


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

    def __init__(self, owner: Family, engine: Engine | None, problem: Problem, gpu: GpuCard) -> None:
        self.family = owner
        self.problem = problem
        self.gpu = gpu
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            InputError: the family has none yet.
        """
        return self._engine or self.family.engine(self.family.default_engine)

    @property
    def space(self) -> Space:
        """Configs to choose from on the GPU."""
        return self.engine.space(self.problem, self.gpu)

    @property
    def title(self) -> str:
        """Family, engine and problem in a few words."""
        engine = f"/{self._engine.name}" if self._engine else ""
        return f"{self.family.name}{engine} {self.problem.label}"

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
            ("floor", f"{_us(self._floor())} on {self.gpu.name}"),
        ]
        rows += [("engines", ", ".join(engine.name for engine in self.family.engines) or "none yet")]
        return Shown(self.title, {"problem": self.problem.to_json()}, rows)

    def _floor(self) -> float:
        return self.family.traffic(self.problem).bytes / self.gpu.read_bandwidth * 1e6

    def _config(self, config: Mapping[str, Any] | None) -> Config:
        chosen = {**self.space.default, **(config or {})}
        self.space.check(chosen)
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

        result = check(self.family, self.engine, self.problem, self._config(config), seed)
        rows = [("verdict", "pass" if result.ok else "fail"), ("where", result.how), ("reason", result.reason or "-")]
        rows += [(f"relative error of {name}", f"{error:.2e}") for name, error in result.errors.items()]
        for name in self.family.output_specs(self.problem):
            bound = self.family.tolerance(self.problem, name)
            rows.append((f"bound of {name}", f"{bound.relative:.2e} ({bound.why})"))
        return Shown(f"check {self.title}", result.to_json(), rows)

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
        """Measured on the GPU here, cold and hot.

        Raises:
            InputError: there is no GPU.
        """
        from ..kernels.device import require
        from ..tuning.compiling import compile_config
        from ..tuning.timing import time_compiled

        device = require("timing")
        compiled = compile_config(self.engine, self.problem, self._config(config), device.arch)
        found = time_compiled(self.family, compiled, alternative=True)
        rows = [
            ("cold", _us(found.cold_us)), ("hot", _us(found.hot_us)), ("floor", _us(found.floor_us)),
            ("of the read ceiling", f"{found.percent_of_ceiling:.1f} %"), ("PyTorch operators, cold", _us(found.alternative_us)),
            ("spread", f"{found.spread:.1%}"), *(("note", note) for note in found.notes),
        ]  # fmt: skip
        return Shown(f"measured {self.title} on {device.name}", found.to_json(), rows)

    def tune(
        self,
        trials: int,
        study: str | Path | None = None,
        objective: str | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> Study:
        """Search until the study holds so many trials; what it holds already counts, and the result says so.

        Measured where the GPU is here, predicted elsewhere; ``study`` is its file (default: under studies/);
        ``fixed`` holds parameters at one value.
        """
        from ..kernels.device import discover
        from ..tuning.tune import TuneRequest, tune
        from .study_data import study_data

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
        result = tune(request)
        data = study_data(result.path)
        rows: list[tuple[str, Any]] = [
            ("trials", ", ".join(f"{count} {status}" for status, count in result.statuses.items()))
        ]
        older = sum(result.statuses.values()) - result.new_trials
        if older and result.new_trials:
            rows.append(("older", f"{older} of them were in the study already, {result.new_trials} are new"))
        elif older:
            rows.append(
                (
                    "older",
                    f"all {older} were in the study already: nothing ran; ask for more trials, or name another study",
                )
            )
        if result.choice:
            chosen = result.choice
            rows += [
                ("winner", f"{_us(chosen.value_us)}, {chosen.evidence}"), ("config", dict(chosen.config)),
                ("why", chosen.reason), ("default config", _us(chosen.default_us)), ("floor", _us(self._floor())),
            ]  # fmt: skip
        return Study(f"tuned {self.title} for {self.gpu.name}", data, [*rows, ("study", result.path)])

    def roofline(self, tp: Sequence[int] | None = None) -> Figure:
        """Byte floor of the problem at other TP sizes, on every GPU with a card."""
        from .figures import floor_figure
        from .study_data import floors

        return floor_figure(self.family.name, self.problem, floors(self.family, self.problem, tp or (4, 8, 16)))

    def trace(self, path: str | Path, budget: str = "gb300-tp16") -> Shown:
        """A decode trace judged against a layer budget, with the findings that cost most."""
        from .verdict_data import verdict_data

        data = verdict_data(Path(path), budget)
        rows = [("verdict", data["word"]), ("because", data["line"])]
        rows += [(f"finding {place}", text) for place, text in enumerate(data["findings"][:3], 1)]
        return Shown(f"trace {Path(path).name} against {budget}", data, rows)


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
        name: family, as ``k3lab kernels`` lists them.
        tp: tensor-parallel size.
        rows: token rows of the step.
        kind: layer kind or variant, where the family has some.
        gpu: GPU card to compile, predict and tune for.
        engine: engine; the family's default if None.
        model: the model's dimensions.

    Raises:
        InputError: no such family, kind, engine or GPU, or a problem out of range.
    """
    owner = family(name)
    problem = owner.problem(model, tp=tp, rows=rows, kind=kind)
    found = owner.engine(engine) if engine else owner.engine(owner.default_engine) if owner.engines else None
    return Lab(owner, found, problem, gpu_card(gpu))
