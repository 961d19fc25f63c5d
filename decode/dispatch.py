"""One step as a scheduler asks for it, on the specialised path or, told and counted, on ``auto``.

The fallback computes the same step: prompts by the prefill operators, requests with equally many tokens together, at
most 64 rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels import InputError
from ..kernels.collectives import Collectives
from .caches import DecodeCache
from .choices import check_backend
from .context_parallel import context_group
from .graphs import StepGraphs
from .likeliest import likeliest_of
from .operators import Operators
from .prefill import CHUNK, prefill
from .prefill_operators import PrefillOperators
from .scope import MAX_ROWS, Scope, StepShape, Tally
from .step import Range, Tap, check_tokens, no_range, step
from .weights import RankWeights


@dataclass(frozen=True)
class StepWork:
    """What runs in one step; the same on every rank."""

    tokens: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Slot to the tokens a request appends: the last one sampled, then its drafts. ``-1`` is a draft that only fills up."""
    prompts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Slot to prompt tokens."""

    @property
    def width(self) -> int:
        """Tokens of the first request that decodes; 0 where none does."""
        return len(next(iter(self.tokens.values()), ()))

    @property
    def shape(self) -> StepShape:
        """What its verdict depends on."""
        prompt = sum(len(ids) for ids in self.prompts.values())
        return StepShape(tuple(len(ids) - 1 for ids in self.tokens.values()), prompt)


class Dispatcher:
    """Runs steps of one rank. With backend ``auto`` nothing is judged and nothing counted."""

    def __init__(
        self,
        weights: RankWeights,
        cache: DecodeCache,
        comm: Collectives,
        *,
        auto: Operators,
        specialized: Callable[[int], Operators] | None = None,
        scope: Scope | None = None,
        backend: str = "auto",
        chunk: int = CHUNK,
        say: Callable[[str], None] | None = None,
        graphs: Callable[[int], StepGraphs | None] | None = None,
        mark: Range = no_range,
    ) -> None:
        """Set up.

        Args:
            weights: this rank's; both backends read them.
            cache: this rank's.
            comm: the tensor-parallel group.
            auto: operators of the fallback.
            specialized: rows to the operators that serve a step of so many.
            scope: what all ranks agreed on.
            backend: ``auto`` unless ``latency_specialized`` is asked for.
            chunk: of prefill.
            say: is told of every reason to fall back, once.
            graphs: tokens a request to the captured steps of so many, which served steps are replayed from; None runs them
                eagerly.
            mark: profiler ranges of steps and layers that are run eagerly.

        Raises:
            InputError: an unknown backend, or the specialised one without its operators or a scope.
        """
        check_backend(backend)
        if backend == "latency_specialized" and (specialized is None or scope is None):
            raise InputError("backend latency_specialized needs its operators and the scope that all ranks agreed on")
        self.weights, self.cache, self.comm, self.backend = weights, cache, comm, backend
        self._auto, self._specialized, self._scope, self._chunk, self._graphs = auto, specialized, scope, chunk, graphs
        self._prefill = PrefillOperators(
            weights.card, dtype=weights.dtype, device=weights.device, context_group=context_group(comm, cache.dcp)
        )
        self._mark, self.tally = mark, Tally(say)

    def operators_of(self, shape: StepShape) -> Operators:
        """Those that serve a step of this shape, by the same verdict; nothing is counted."""
        if self.backend == "latency_specialized" and self._scope and self._scope.judge(shape) is None:
            assert self._specialized
            return self._specialized(shape.rows)
        return self._auto

    def run(
        self, work: StepWork, tap: Callable[[int], Tap] | None = None, *, tokens: bool = False
    ) -> dict[int, Tensor]:
        """Run a step; accept what was decoded before the next one (prompts count already).

        Args:
            work: what runs.
            tap: slot to what sees that request's residual after every layer, its own rows alone.
            tokens: whether the likeliest tokens are all that is asked for: what the head's kernels may exchange alone.

        Returns:
            Slot to logits, [tokens, V] of what was decoded and [1, V] after a prompt; with ``tokens`` the likeliest ones
            of the same rows, int64.

        Raises:
            InputError: a slot twice, no tokens, more than 8 tokens a request, or a full cache. What had run by then has.
        """
        twice = set(work.tokens) & set(work.prompts)
        if twice:
            raise InputError(f"request {min(twice)} has a prompt and tokens to decode in the same step")
        shape = work.shape
        reason = None
        if self.backend == "latency_specialized":
            assert self._scope
            reason = self._scope.judge(shape)
            self.tally.note(reason)
        if self.backend == "latency_specialized" and reason is None:
            assert self._specialized
            captured = self._graphs(work.width) if self._graphs else None
            if captured is not None:
                replayed = self._replay(captured, work, tap)
                return {slot: self._likeliest(out) if tokens else out for slot, out in replayed.items()}
            return self._decode(list(work.tokens), work, self._specialized(shape.rows), tap, tokens)
        made = {}
        for slot, ids in work.prompts.items():
            out = prefill(
                self.weights, self.cache, slot, torch.tensor(list(ids), dtype=torch.int64), self._prefill, self.comm,
                chunk=self._chunk, tap=tap(slot) if tap else None, mark=self._mark,
            )  # fmt: skip
            made[slot] = self._likeliest(out[None]) if tokens else out[None]
        for slots in alike(work.tokens):
            made |= self._decode(slots, work, self._auto, tap, tokens)
        return {slot: made[slot] for slot in (*work.prompts, *work.tokens)}

    def _likeliest(self, logits: Tensor) -> Tensor:
        return likeliest_of(logits, self.weights.lm_head.shape[0], self.comm)

    @torch.inference_mode()
    def _replay(self, graphs: StepGraphs, work: StepWork, tap: Callable[[int], Tap] | None) -> dict[int, Tensor]:
        slots = list(work.tokens)
        ids, taps = _ids(slots, work), [tap(slot) for slot in slots] if tap else []
        q_len = check_tokens(ids, len(slots), self.weights.card.vocab_size)
        self.cache.begin(slots, q_len)
        try:
            out = graphs.step(ids, slots, _split(taps, q_len) if tap else None)
        except BaseException:
            self.cache.spoil(slots)
            raise
        # the graphs' own memory: the next step overwrites it
        return dict(zip(slots, out.clone(), strict=True))

    def _decode(
        self, slots: list[int], work: StepWork, operators: Operators, tap: Callable[[int], Tap] | None, tokens: bool
    ) -> dict[int, Tensor]:
        ids, taps = _ids(slots, work), [tap(slot) for slot in slots] if tap else []
        every = _split(taps, ids.shape[1]) if tap else None
        out = step(
            self.weights, self.cache, ids, slots, operators, self.comm, tap=every, mark=self._mark, tokens=tokens
        )
        return dict(zip(slots, out, strict=True))


def _ids(slots: list[int], work: StepWork) -> Tensor:
    """[requests, tokens]; a draft that only fills up is computed as some token and never accepted."""
    return torch.tensor([[max(0, token) for token in work.tokens[slot]] for slot in slots])


def _split(taps: list[Tap], q_len: int) -> Tap:
    """Every request's tap sees its own rows."""

    def every(layer: int, residual: Tensor) -> None:
        for own, rows in zip(taps, residual.split(q_len), strict=True):
            own(layer, rows)

    return every


def alike(tokens: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
    """Requests of equally many tokens together, in the order they are named, at most 64 rows at a time."""
    groups: dict[int, list[int]] = {}
    for slot, ids in tokens.items():
        groups.setdefault(len(ids), []).append(slot)
    for length, slots in groups.items():
        most = max(1, MAX_ROWS // max(1, length))
        for start in range(0, len(slots), most):
            yield slots[start : start + most]
