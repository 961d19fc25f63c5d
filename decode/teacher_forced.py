"""How far a backend drifts: many steps with given tokens, judged by the FP64 twins on the same weights.

Tokens are given, not chosen, so that a difference does not choose another text. The same steps, with batches that
change and verify steps of which a random part is accepted, go through every backend.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import InputError
from ..kernels.collectives import Collectives
from .caches import DecodeCache
from .graphs import StepGraphs
from .operators import Operators
from .saved import SavedRequest, save
from .step import MAX_ROWS, MAX_VERIFY, step
from .weights import RankWeights


@dataclass(frozen=True)
class ForcedStep:
    """One step of a batch; requests go by numbers that are never used again."""

    leave: tuple[int, ...]
    """Released before the step."""
    join: tuple[int, ...]
    """Admitted before the step."""
    requests: tuple[int, ...]
    """Who is in the step, in row order."""
    tokens: tuple[tuple[int, ...], ...]
    """Of each, equally many."""
    accept: tuple[int, ...]
    """How many of them count."""


def schedule(
    *, vocabulary: int, steps: int, requests: int, context: int, max_verify: int = MAX_VERIFY, seed: int = 0
) -> list[ForcedStep]:
    """Random steps: two of three plain, the others verify 2 to ``max_verify`` tokens; anybody may sit a step out.

    Args:
        vocabulary: of the model.
        steps: how many.
        requests: at most at a time.
        context: longest of a request; one that comes near leaves, another joins in its place.
        max_verify: tokens a request and step.
        seed: of everything.

    Raises:
        InputError: sizes with which no step can be made.
    """
    if steps < 1 or requests < 1 or not 1 <= max_verify <= MAX_VERIFY or context < 2 * max_verify or vocabulary < 1:
        raise InputError(
            f"no schedule of {steps} steps, {requests} requests, contexts of {context} and {max_verify} tokens a step"
        )
    draw = random.Random(seed)
    lengths: dict[int, int] = {}
    made, number = [], 0
    for _ in range(steps):
        leave = tuple(
            one for one, length in lengths.items() if length + max_verify > context or draw.random() < 0.01
        )  # fmt: skip
        for one in leave:
            del lengths[one]
        join = []
        while not lengths or (len(lengths) < requests and draw.random() < 0.3):
            join.append(number)
            lengths[number] = 0
            number += 1
        width = draw.randint(2, max_verify) if max_verify > 1 and draw.random() < 1 / 3 else 1
        most = min(len(lengths), MAX_ROWS // width)
        chosen = draw.sample(sorted(lengths), draw.randint(1, most))
        tokens = tuple(tuple(draw.randrange(vocabulary) for _ in range(width)) for _ in chosen)
        accept = tuple(draw.randint(1, width) for _ in chosen)
        for one, count in zip(chosen, accept, strict=True):
            lengths[one] += count
        made.append(ForcedStep(leave, tuple(join), tuple(chosen), tokens, accept))
    return made


class Follower:
    """A backend on its way through a schedule."""

    def __init__(
        self, weights: RankWeights, operators: Operators, comm: Collectives, *, requests: int, context: int,
        max_verify: int = MAX_VERIFY, verify: Mapping[int, Operators] | None = None, sizes: Sequence[int] = (), **cache: Any,
    ) -> None:  # fmt: skip
        """Set up.

        Args:
            weights: the backend's.
            operators: of every step but those of ``verify``.
            comm: the tensor-parallel group.
            requests: as the schedule's.
            context: as the schedule's.
            max_verify: as the schedule's.
            verify: tokens a request to the operators of such steps, for backends whose kernels are made for one number.
            sizes: requests of the steps that are captured, on a GPU; fewer are filled up with the padding slot. None are captured
                without it, and steps have the rows they have.
            cache: goes to :class:`~k3lab.decode.caches.DecodeCache`.
        """
        self.weights, self.operators, self.comm = weights, operators, comm
        self.cache = DecodeCache(
            weights.card, tp=weights.tp, max_requests=requests, max_context=context, max_verify=max_verify,
            dtype=weights.dtype, device=weights.device, padding=bool(sizes), **cache,
        )  # fmt: skip
        self._verify, self._sizes = verify or {}, sizes
        self._graphs: dict[int, StepGraphs] = {}
        self._slots: dict[int, int] = {}

    def __call__(self, one: ForcedStep) -> Tensor:
        """Logits [requests, tokens, V] of the next step of the schedule."""
        for request in one.leave:
            self.cache.release(self._slots.pop(request))
        for request in one.join:
            self._slots[request] = self.cache.add()
        slots, ids = [self._slots[request] for request in one.requests], torch.tensor(one.tokens)
        used = self._verify.get(ids.shape[1], self.operators)
        if self._sizes:
            graphs = self._captured(ids.shape[1], used)
            self.cache.begin(slots, ids.shape[1])
            logits = graphs.step(ids, slots).clone()  # the next step overwrites the graphs' memory
        else:
            logits = step(self.weights, self.cache, ids, slots, used, self.comm)
        used.check()
        self.cache.accept(slots, one.accept)
        return logits

    def _captured(self, width: int, used: Operators) -> StepGraphs:
        if width not in self._graphs:
            sizes = [size for size in self._sizes if size * width <= MAX_ROWS]
            self._graphs[width] = StepGraphs(
                self.weights, self.cache, self.comm, lambda _rows: used, q_len=width, sizes=sizes
            )
        return self._graphs[width]

    def states(self) -> dict[int, SavedRequest]:
        """What every live request is now."""
        return {request: save(self.cache, slot) for request, slot in sorted(self._slots.items())}


def widened(weights: RankWeights) -> RankWeights:
    """The same numbers in FP64; packed experts stay as they are. For a judge."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double() if value.is_floating_point() else value
        if isinstance(value, tuple) and value and is_dataclass(value[0]):
            return tuple(map(wide, value))
        if is_dataclass(value) and not isinstance(value, type) and any(
            isinstance(getattr(value, field.name), (Tensor, tuple)) or is_dataclass(getattr(value, field.name))
            for field in fields(value)
        ) and value is not weights.card:  # fmt: skip
            return type(value)(**{field.name: wide(getattr(value, field.name)) for field in fields(value)})
        return value

    made: RankWeights = wide(weights)
    return made


def relative(got: Tensor, want: Tensor) -> float:
    """``norm(got - want) / norm(want)``, in FP64."""
    difference = got.double() - want.double()
    return (difference.norm() / want.double().norm()).item()


@dataclass(frozen=True)
class Drift:
    """A backend against the judge."""

    logits: tuple[float, ...]
    """Relative error step by step."""
    states: float
    """Of all live requests' KDA states after the last step."""
    clear: int
    """Rows whose two highest logits lie further apart, by the judge, than the tolerance."""
    agreed: int
    """Of those, rows with the judge's likeliest token."""

    @property
    def agreement(self) -> float:
        """Share of the clear rows; 1 where none is clear."""
        return self.agreed / self.clear if self.clear else 1.0

    @property
    def mean(self) -> float:
        """Of the steps' errors."""
        return sum(self.logits) / len(self.logits)


def state_error(got: dict[int, SavedRequest], want: dict[int, SavedRequest]) -> float:
    """Relative error of the KDA states of all requests and layers together."""

    def joined(states: dict[int, SavedRequest]) -> Tensor:
        parts = [state.double().flatten() for one in states.values() for _, state in one.kda.values()]
        return torch.cat(parts)

    return relative(joined(got), joined(want))


def drift(
    judge: Follower, followers: Sequence[Follower], steps: Sequence[ForcedStep], *, tolerance: float
) -> list[Drift]:
    """Take all through the schedule, step by step, and judge them.

    Args:
        judge: the FP64 twins.
        followers: the backends.
        steps: of :func:`schedule`.
        tolerance: top-2 gap, in units of the logits' root mean square, from which on a row is clear.

    Returns:
        For each follower how far it drifted.
    """
    errors: list[list[float]] = [[] for _ in followers]
    agreed, clear = [0] * len(followers), 0
    for one in steps:
        want = judge(one)
        best = want.topk(2, dim=-1)
        plain = (best.values[..., 0] - best.values[..., 1]) > tolerance * want.square().mean().sqrt()
        clear += int(plain.sum())
        for index, follower in enumerate(followers):
            got = follower(one)
            errors[index].append(relative(got, want))
            agreed[index] += int(((got.double().argmax(-1) == best.indices[..., 0]) & plain).sum())
    final = judge.states()
    return [
        Drift(tuple(errors[index]), state_error(follower.states(), final), clear, agreed[index])
        for index, follower in enumerate(followers)
    ]


def bits(follower: Follower, steps: Sequence[ForcedStep]) -> Iterator[bytes]:
    """The logits of every step, to be compared bit for bit with another run's."""
    for one in steps:
        logits = follower(one)
        yield logits.contiguous().view(torch.uint8).cpu().numpy().tobytes()
