"""What a user would run instead: the family's work in PyTorch operators, as called and by torch.compile."""

from __future__ import annotations

import contextlib
import io
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..kernels import Family, Problem
from .outcome import describe
from .policy import TimingPolicy
from .timing import steady

if TYPE_CHECKING:
    import torch

MOST_CALLS = 1000
"""Of a family with small weights there are thousands of copies, and its alternative has dozens of launches a call: a graph of them
took most of a minute. With fewer copies the weights may stay in the L2, which favours the alternative."""
PYTORCH = "PyTorch"
COMPILED = "torch.compile"
MODE = "max-autotune-no-cudagraphs"
"""Every template is tried; the graph is ours, as for all that is timed."""


COMPILE_S = 120.0
"""Most seconds it may take, if no one says otherwise."""


class Late(BaseException):
    """The time is over. No ``Exception``: a compiler that catches those and goes on must not catch this one."""


AGAIN_S = 1.0
"""Between one alarm and the next, for as long as the block is not left."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise :class:`Late` inside the block after so many seconds; in the main thread of a process only.

    Once is not enough: an exception of a signal's handler that falls into a finaliser or a callback is printed and
    lost. A caller's own alarm goes on after the block, at once where its time has passed meanwhile.
    """
    over = False

    def late(*_: object) -> None:
        if not over:
            raise Late(f"not done after {seconds:.0f} s")

    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, late)
    callers, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if callers:
            signal.setitimer(signal.ITIMER_REAL, max(callers - (time.monotonic() - started), 1e-3), interval)


def compiled_calls(
    family: Family, problem: Problem, copies: Sequence[Mapping[str, torch.Tensor]], seconds: float, **options: Any
) -> list[Callable[[], None]] | str:
    """One call per copy of the tensors of the family's operators under torch.compile, or why there is none.

    Args:
        family: whose :meth:`~k3lab.kernels.Family.operators` are compiled.
        problem: which instance.
        copies: inputs and outputs; all of one shape, so that one compilation serves them.
        seconds: most the compilation may take.
        options: for torch.compile, in place of :data:`MODE`.
    """
    import torch

    function = family.operators(problem)
    if function is None:
        return f"family {family.name} has no function for it"
    if seconds <= 0:
        return "left out: no time was given to it"
    if threading.current_thread() is not threading.main_thread():
        return "left out: its time can be limited in the main thread only"
    chatter = io.StringIO()  # the autotuner writes tables
    try:
        with contextlib.redirect_stderr(chatter), within(seconds):
            torch._dynamo.reset()
            made = torch.compile(function, fullgraph=True, dynamic=False, **(options or {"mode": MODE}))
            inputs = [{name: value for name, value in one.items() if name not in family.outputs} for one in copies]
            made(inputs[0])
            # a second compilation would mean that the copies are not alike, and in the end plain operators
            with torch._dynamo.config.patch(error_on_recompile=True):
                for one in inputs:
                    made(one)
    except Late as error:
        return str(error)
    except Exception as error:  # a missing C compiler, an operator it does not know: each has its own type
        return describe(error)
    return [_bound(made, one) for one in inputs]


def _bound(function: Callable[[Any], Any], inputs: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    def call() -> None:
        function(inputs)

    return call


def time_alternatives(
    family: Family,
    problem: Problem,
    copies: Sequence[Mapping[str, torch.Tensor]],
    policy: TimingPolicy,
    *,
    compile_s: float = 0.0,
    restore: Callable[[], None] | None = None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds a call by name, and why another one has none.

    Args:
        family: whose work it is.
        problem: which instance.
        copies: inputs and outputs on the GPU, the weights another copy in each.
        policy: as for the engine.
        compile_s: most that torch.compile may take.
        restore: see :func:`k3lab.tuning.timing.time_calls`.
    """
    found: dict[str, float] = {}
    missing: dict[str, str] = {}
    plain = [call for tensors in copies[:MOST_CALLS] if (call := family.alternative(problem, tensors)) is not None]
    if plain:
        found[PYTORCH] = steady(plain, policy, restore)[0].median_us
    calls = compiled_calls(family, problem, copies[:MOST_CALLS], compile_s)
    if isinstance(calls, str):
        missing[COMPILED] = calls
    else:
        found[COMPILED] = steady(calls, policy, restore)[0].median_us
    return found, missing
