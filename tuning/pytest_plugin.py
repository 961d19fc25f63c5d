"""The pytest plugin of k3lab: ``k3_kernel`` checks a kernel against its twin, ``k3_timing`` holds its time against a baseline.

It comes with the installation (entry point ``pytest11``)::

    @pytest.mark.k3_kernel("token_mix", tp=16, rows=8)
    def test_token_mix(k3_kernel):
        k3_kernel.check()

    @pytest.mark.k3_kernel("token_mix", tp=16, rows=8)
    def test_token_mix_is_as_quick_as_it_was(k3_kernel, k3_timing):
        k3_timing(k3_kernel)

``pytest --k3-store`` times and stores baselines in ``k3_baselines.json`` beside the test file; without it a run is held
against them. Where the GPU of a baseline is not here the test is skipped and says so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..kernels import Config, Engine, Family, Problem
    from ..kernels.device import Device
    from .check import CheckResult
    from .timing import Timing

BASELINES = "k3_baselines.json"
ROUNDS, STORED_ROUNDS = 3, 5
"""Captures of a run, and of a baseline that is stored."""
MARK = (
    "k3_kernel(family, tp=16, rows=8, kind=None, engine=None, config=None, model=None, seed=0): what the fixture k3_kernel "
    "opens; rows may be a list, which makes a test of each"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--k3-store``."""
    group = parser.getgroup("k3lab")
    group.addoption("--k3-store", action="store_true", help=f"time kernels and store the baselines of k3_timing in {BASELINES}")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A list of rows in the mark makes one test a row count."""
    mark = metafunc.definition.get_closest_marker("k3_kernel")
    rows = mark.kwargs.get("rows") if mark else None
    if isinstance(rows, (list, tuple)) and "k3_kernel" in metafunc.fixturenames:
        metafunc.parametrize("k3_kernel", rows, indirect=True, ids=[f"rows{count}" for count in rows])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One engine of a family on one problem, as a test sees it."""

    family: Family
    engine: Engine
    problem: Problem
    given: Mapping[str, Any]
    """Parameters that differ from the default config."""
    seed: int

    def config(self) -> Config:
        """The space's default with the given parameters, for the GPU here or for GB300.

        Raises:
            InputError: no legal config.
        """
        from ..kernels.device import discover
        from ..kernels.gpu_cards import GB300

        device = discover()
        space = self.engine.space(self.problem, device.need_card() if device else GB300)
        chosen = {**space.default, **self.given}
        space.check(chosen)
        return chosen

    def check(self, seed: int | None = None) -> CheckResult:
        """Hold the engine against its twin, on the GPU here or on Triton's interpreter; fails the test where they differ.

        A kernel that can run on neither is compiled, and the test skipped with that reason.
        """
        from .check import check

        result = check(self.family, self.engine, self.problem, self.config(), self.seed if seed is None else seed)
        if result.how == "compiled":
            pytest.skip(str(result.reason))
        if not result.ok:
            pytest.fail(f"{self.label}: {result.reason}", pytrace=False)
        return result

    @property
    def label(self) -> str:
        """Family, engine and problem in a few words."""
        return f"{self.family.name}/{self.engine.name} {self.problem.label}"

    def to_json(self) -> dict[str, Any]:
        """What a baseline is of."""
        names = {"family": self.family.name, "engine": self.engine.name, "problem": self.problem.to_json()}
        return dict(json.loads(json.dumps({**names, "config": dict(self.config())})))  # as a file gives it back


def open_kernel(
    name: str, tp: int = 16, rows: int = 8, *, kind: str | None = None, engine: str | None = None,
    config: Mapping[str, Any] | None = None, model: Any = None, seed: int = 0,
) -> Kernel:  # fmt: skip
    """The kernel of a mark, see :data:`MARK`.

    Raises:
        InputError: no such family, kind or engine, or a problem out of range.
    """
    from ..kernels import K3, family

    owner = family(name)
    problem = owner.problem(model or K3, tp=tp, rows=rows, kind=kind)
    return Kernel(owner, owner.engine(engine or owner.default_engine), problem, dict(config or {}), seed)


@contextmanager
def _told() -> Iterator[None]:
    """Wrong input is one line of the test's report, not a traceback through k3lab."""
    from ..kernels import InputError

    try:
        yield
    except InputError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def k3_kernel(request: pytest.FixtureRequest) -> Kernel:
    """The kernel that the test's mark ``k3_kernel`` names."""
    mark = request.node.get_closest_marker("k3_kernel")
    if mark is None:
        pytest.fail(f"the fixture k3_kernel needs a mark: @pytest.mark.{MARK.split(':')[0]}", pytrace=False)
    given = {**mark.kwargs, **({"rows": request.param} if hasattr(request, "param") else {})}
    with _told():
        return open_kernel(*mark.args, **given)


def take_round(kernel: Kernel, device: Device) -> Timing:
    """One round: inputs, capture and replays anew.

    Raises:
        BrokenMeasurement: see :func:`k3lab.tuning.timing.time_compiled`.
    """
    from .compiling import compile_config
    from .timing import time_compiled

    compiled = compile_config(kernel.engine, kernel.problem, kernel.config(), device.arch)
    return time_compiled(kernel.family, compiled, seed=kernel.seed)


@pytest.fixture
def k3_timing(request: pytest.FixtureRequest) -> Callable[[Kernel], None]:
    """Call it with the kernel: times it, and fails where it is slower than its baseline by more than noise.

    The device times become the statistics of pytest-benchmark, where that is installed.
    """
    from ..kernels.device import discover
    from .baseline import Baseline, BaselineFile, hold
    from .benchmark_stats import record
    from .environment import environment

    path = Path(request.path).with_name(BASELINES)
    file, name = BaselineFile(path), f"{Path(request.path).stem}::{request.node.name}"
    storing = bool(request.config.getoption("--k3-store"))

    def timed(kernel: Kernel) -> None:
        with _told():
            _timed(kernel)

    def _timed(kernel: Kernel) -> None:
        if hasattr(request.config, "workerinput"):
            pytest.fail("processes of pytest-xdist would time each other: run the tests of k3_timing with -n 0", pytrace=False)  # fmt: skip
        device = discover()
        stored = ", ".join(file.gpus(name))
        if device is None:
            pytest.skip(f"no GPU here; {f'its baseline is of {stored}' if stored else 'no baseline is stored yet'}")
        gpu = device.need_card().name
        baseline = None if storing else file.get(name, gpu)
        if baseline is None and not storing:
            other = f"; there is one of {stored}" if stored else ""
            pytest.skip(f"{path.name} has no baseline of {name} on {gpu}{other}: pytest --k3-store stores one")
        if baseline is not None and baseline.what != kernel.to_json():
            pytest.fail(f"the baseline of {name} is of another kernel, problem or config: pytest --k3-store stores this one", pytrace=False)  # fmt: skip
        rounds = [take_round(kernel, device) for _ in range(STORED_ROUNDS if storing else ROUNDS)]
        medians = [timing.cold_us for timing in rounds]
        samples = [sample for timing in rounds for sample in timing.cold.samples_ns]
        extra = {**kernel.to_json(), "gpu": gpu, "rounds_us": medians, "timing": rounds[-1].to_json()}
        with suppress(pytest.FixtureLookupError):  # pytest-benchmark is not installed, or switched off
            record(request.getfixturevalue("benchmark"), samples, extra)
        if storing:
            made = Baseline(gpu, tuple(round(us, 3) for us in medians), kernel.to_json(), environment(device))
            if made.fault:
                pytest.fail(f"the baseline of {name} is not stored: {made.fault}", pytrace=False)
            file.store(name, made)
            return
        assert baseline is not None
        found = hold(baseline, medians)
        request.node.user_properties.append(("k3_timing", found.line))
        if not found.ok:
            pytest.fail(f"{kernel.label}: {found.line}", pytrace=False)

    return timed
