"""The judge of compiled kernels, driven on the CPU: a stand-in launcher plays right and wrong kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from k3lab.kernels import K3, Buffer, Compiled, Family, Launch, Problem, Tolerance, Traffic, family, health
from k3lab.tuning import chain, check, check_chain

WIDTH = 8
DEAD = "launch, other rows NaN"
Kernel = Callable[[dict, int], None]


class Accumulate(Family):
    """``state += x; out = state * 2``: an output, an input updated in place, a scratch buffer."""

    name, title, outputs, mutated = "accumulate", "for this test", ("out",), ("state",)

    def problem(self, card, *, tp, rows, kind=None):
        return Problem(tp, rows)

    def problem_from_json(self, data):
        return Problem(**data)

    def inputs(self, problem, seed, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(problem.rows, WIDTH, generator=generator) for name in ("x", "state")}

    def output_specs(self, problem):
        return {"out": ((problem.rows, WIDTH), "float32")}

    def twin(self, problem, inputs):
        inputs["state"].add_(inputs["x"])  # a twin may update its own copy
        return {"out": inputs["state"] * 2}

    def traffic(self, problem):
        return Traffic(0, 1, 1)

    def tolerance(self, problem, output):
        return Tolerance(1e-6, 1e-5, "FP32")


class Double(Accumulate):
    """``out = x * 2``: nothing is updated in place."""

    mutated = ()

    def inputs(self, problem, seed, device="cpu"):
        return {"x": super().inputs(problem, seed, device)["x"]}

    def twin(self, problem, inputs):
        return {"out": inputs["x"] * 2}


class Saved(Accumulate):
    """``out = x * 2 + sum of the saved blocks``: as many of them, along the first axis, as there are rows."""

    mutated = ()

    def inputs(self, problem, seed, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        saved = torch.randn(4, problem.rows, WIDTH, generator=generator)
        return {"x": super().inputs(problem, seed, device)["x"], "saved": saved}

    def twin(self, problem, inputs):
        return {"out": inputs["x"] * 2 + inputs["saved"].sum(0)}


class Whole(Accumulate):
    """The same with an output of whole numbers, such as expert ids."""

    def inputs(self, problem, seed, device="cpu"):
        return {name: (tensor * 8).round() for name, tensor in super().inputs(problem, seed, device).items()}

    def output_specs(self, problem):
        return {"out": ((problem.rows, WIDTH), "int32")}


def right(tensors: dict, rows: int) -> None:
    tensors["state"][:rows] += tensors["x"][:rows]
    tensors["out"][:rows] = tensors["state"][:rows] * 2


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(tensor, (tensor.numel() + 8,), (1,))


def all_rows(tensors: dict, rows: int) -> None:
    right(tensors, tensors["x"].shape[0])


def one_row_short(tensors: dict, rows: int) -> None:
    right(tensors, rows - 1)


def behind_the_end(tensors: dict, rows: int) -> None:
    right(tensors, rows)
    if rows == tensors["x"].shape[0]:
        whole_storage(tensors["out"])[rows * WIDTH + 3] = 0.0


def input_changed(tensors: dict, rows: int) -> None:
    right(tensors, rows)
    tensors["x"][0, 0] += 1


def reads_dead_rows(tensors: dict, rows: int) -> None:
    right(tensors, rows)
    tensors["out"][:rows] += 0 * tensors["x"][rows:].sum()  # harmless as long as they hold numbers


def scratch_left(tensors: dict, rows: int) -> None:
    right(tensors, rows)
    tensors["count"][0] = 1


def counts_its_launches(tensors: dict, rows: int) -> None:
    tensors["epoch"] += 1
    right(tensors, rows)


def gives_up(tensors: dict, rows: int) -> None:
    tensors["health"][[health.EPOCH, health.PHASE, health.SLOT]] = torch.tensor([2, 1, 3], dtype=torch.int32)
    tensors["out"][:rows] = 0


def forgets_the_state(tensors: dict, rows: int) -> None:
    tensors["out"][:rows] = tensors["x"][:rows] * 2


class Moody:
    """Another last bit every second run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, tensors: dict, rows: int) -> None:
        right(tensors, rows)
        self.runs += 1
        if self.runs % 2:
            tensors["out"][0, 0] = torch.nextafter(tensors["out"][0, 0], torch.tensor(9e9))


PENDING: list[Callable[[], object]] = []
"""What predecessors have not written yet: a kernel that waits runs it first."""


def wait() -> None:
    while PENDING:
        PENDING.pop(0)()


def handing_over(source: torch.Tensor, result: torch.Tensor, microseconds: float, carveout: int) -> Callable[[], None]:
    def call() -> None:
        wait()  # of its own predecessor
        PENDING.append(lambda: result.copy_(source))

    return call


class Sequence:
    """A graph: the calls again."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        self.calls = list(calls)

    def replay(self) -> None:
        for call in self.calls:
            call()


def waits(tensors: dict, rows: int) -> None:
    wait()
    right(tensors, rows)


def reads_before_it_waits(tensors: dict, rows: int) -> None:
    right(tensors, rows)
    wait()


class HurtsTheCallBefore:
    """With an edge to its predecessor it writes into the output of the call before, as a shared scratch would."""

    def __init__(self) -> None:
        self.before: torch.Tensor | None = None

    def __call__(self, tensors: dict, rows: int) -> None:
        wait()
        right(tensors, rows)
        if tensors["edge"] and self.before is not None and self.before is not tensors["out"]:
            self.before[0, 0] += 1
        self.before = tensors["out"]


def one_bit_off_with_an_edge(tensors: dict, rows: int) -> None:
    wait()
    right(tensors, rows)
    if tensors["edge"]:
        tensors["out"][0, 0] = torch.nextafter(tensors["out"][0, 0], torch.tensor(9e9))


@pytest.fixture
def judge(monkeypatch):
    """Run the check with a Python function in place of the launches; graphs replay what was captured."""
    captured: list[Callable[[], None]] = []
    capturing: list[bool] = []

    class Graph:
        def replay(self) -> None:
            for call in captured:
                call()

    @contextlib.contextmanager
    def capture(graph):
        captured.clear()
        capturing.append(True)
        yield
        capturing.clear()

    def run(kernel: Kernel, rows: int = 4, *, with_pdl: bool = False, owner: Family | None = None) -> check.CheckResult:
        class Runner:
            carveout = 0

            def __init__(self, compiled: Compiled) -> None:
                self.compiled = compiled
                self.buffers = {
                    buffer.name: torch.zeros(buffer.shape, dtype=torch.int32) for buffer in compiled.buffers
                }

            def bind(self, tensors: dict, *, rows: int | None = None, pdl: bool | None = None) -> Callable[[], None]:
                held = {**self.buffers, **tensors, "edge": pdl is None and with_pdl}
                count = tensors["x"].shape[0] if rows is None else rows

                def call() -> None:
                    captured.append(lambda: kernel(held, count)) if capturing else kernel(held, count)

                return call

        import k3lab.kernels.launch as launch

        monkeypatch.setattr(launch, "Runner", Runner)
        real = check.guarded_output
        monkeypatch.setattr(check, "guarded_output", lambda shape, dtype, device: real(shape, dtype, "cpu"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(chain, "predecessor", handing_over)
        monkeypatch.setattr(check_chain, "captured", Sequence)
        launches = (Launch("k3_accumulate_fake_main", b"", (1, 1, 1), (32, 1, 1), 0, (), pdl=True),)
        compiled = Compiled(
            "accumulate", "fake", Problem(1, rows), {}, "sm_90a", launches if with_pdl else (),
            (Buffer("count", (1,), "int32", True), Buffer("epoch", (1,), "int32", persistent=True), health.BUFFER),
        )  # fmt: skip
        return check.check_compiled(owner or Accumulate(), compiled, seed=5)

    return run


def test_a_right_kernel_passes_at_every_row_count(judge):
    result = judge(right)
    assert result.ok, result.reason
    assert [(case["rows"], case["run"]) for case in result.cases] == [
        (4, "launch"), (3, "launch"), (3, DEAD), (2, "launch"), (2, DEAD), (1, "launch"), (1, DEAD), (4, "graph replay"),
    ]  # fmt: skip


def test_what_launches_keep_need_not_be_zeros_again(judge):
    result = judge(counts_its_launches)
    assert result.ok, result.reason


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (all_rows, "rows 3: out was written beyond its 3 rows"),
        (one_row_short, "NaN (never written?), first at [3, 0]"),
        (behind_the_end, "written beyond its end, first at element 35 of 32"),
        (input_changed, "input x was changed"),
        (reads_dead_rows, "rows 3, launch, other rows NaN: "),
        (scratch_left, "scratch buffer count was not left zeroed"),
        (forgets_the_state, "relative error"),
        (gives_up, "a wait of the kernel gave up: rank 3 did not publish its partial sums"),
        (Moody(), "two runs on the same inputs gave different bits"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_a_wrong_kernel_is_told_by_what_it_does(judge, kernel, says):
    result = judge(kernel)
    assert not result.ok
    assert says in result.reason


def test_dead_rows_are_those_of_the_axis_that_grows_with_the_rows(judge):
    """Seen on an H200: eight saved blocks beside eight rows, and the last block was taken for a dead row."""

    def kernel(tensors: dict, rows: int) -> None:
        tensors["out"][:rows] = tensors["x"][:rows] * 2 + tensors["saved"][:, :rows].sum(0)

    def leaky(tensors: dict, rows: int) -> None:
        kernel(tensors, rows)
        tensors["out"][:rows] += 0 * tensors["saved"][:, rows:].sum()

    result = judge(kernel, owner=Saved())
    assert result.ok, result.reason
    assert "rows 3, launch, other rows NaN: " in judge(leaky, owner=Saved()).reason


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("attention_projection", {"x": 0}),
        ("output_projection", {"x": 0, "prefix": 0, "blocks": 1}),
        ("attn_res", {"prefix": 0, "blocks": 1}),
        ("lm_head", {"h": 0}),
    ],
)
def test_families_say_where_their_rows_lie(name, axes):
    one = family(name).problem(K3, tp=8, rows=8)
    found = family(name).row_axes(one)
    assert {key: axis for key, axis in found.items() if key in axes} == axes
    assert not set(found) & set(family(name).rotated)


def test_whole_numbers_are_judged_alike(judge):
    result = judge(right, owner=Whole())
    assert result.ok, result.reason
    assert judge(all_rows, owner=Whole()).reason == "rows 3: out was written beyond its 3 rows"
    assert "written beyond its end" in judge(behind_the_end, owner=Whole()).reason


def test_a_kernel_that_waits_passes_in_chains(judge):
    result = judge(waits, with_pdl=True)
    assert result.ok, result.reason
    assert not PENDING


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (reads_before_it_waits, "PDL launches behind a predecessor that writes the activations last: 4 of 4 outputs"),
        (HurtsTheCallBefore(), "PDL launches back to back: 3 of 4 outputs have other bits than without"),
        (one_bit_off_with_an_edge, "PDL launches back to back: 4 of 4 outputs have other bits"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_a_kernel_that_breaks_in_chains_only_is_told(judge, kernel, says):
    assert judge(kernel).ok  # without programmatic edges nothing shows
    PENDING.clear()
    result = judge(kernel, with_pdl=True)
    PENDING.clear()
    assert not result.ok
    assert says in result.reason


def test_where_nothing_is_updated_an_early_read_is_told_all_the_same(judge):
    """Seen on an H200: a second time round the activations of the first are there, and reading them early did no harm."""

    def double(tensors: dict, rows: int) -> None:
        tensors["out"][:rows] = tensors["x"][:rows] * 2

    def early(tensors: dict, rows: int) -> None:
        double(tensors, rows)
        wait()

    def late(tensors: dict, rows: int) -> None:
        wait()
        double(tensors, rows)

    assert judge(late, with_pdl=True, owner=Double()).ok
    result = judge(early, with_pdl=True, owner=Double())
    PENDING.clear()
    assert not result.ok
    assert "behind a predecessor that writes the activations last: 4 of 4 outputs" in result.reason
