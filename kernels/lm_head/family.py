"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..contract import Engine, Problem, Tensors, Tolerance, Traffic
from ..model_card import ModelCard
from ..twin_family import Draw, TwinFamily, in_fp32, rounding_tolerance

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LmHead(Problem):
    """Logits of one rank's vocabulary rows, the likeliest token of all ranks', or embedding rows."""

    hidden: int
    vocab: int
    """Vocabulary rows of one rank, V/T."""
    kind: str = "shard"
    """``shard``: this rank's logits, before any gather. ``argmax``: the token that is likeliest over all ranks. ``embed``: the
    rows of the embedding table that tokens choose, each from the rank that holds it."""

    @property
    def label(self) -> str:
        """E.g. ``argmax-tp16-rows8``."""
        return f"{self.kind}-tp{self.tp}-rows{self.rows}"


class LmHeadFamily(TwinFamily):
    """See :class:`LmHead`.

    One GPU is one rank: over the loopback transport what the others publish comes from the table ``peers``. Of an ``argmax``
    it is int32 [ranks, rows, 2], an FP32 logit's bits and an id each; the slot with factor one is this rank's own. Of an
    ``embed`` it is BF16 [rows, hidden], the rows that other ranks hold.
    """

    name = "lm_head"
    title = "language model head and embedding, sharded by vocabulary: logits, the likeliest token of all ranks, rows"
    outputs = ("logits", "ids", "best", "x")
    rotated = ("w", "table")
    constant = ("peers",)
    problem_type = LmHead
    default_engine = "cute_mma"

    @property
    def engines(self) -> tuple[Engine, ...]:  # type: ignore[override]
        """Built on first use: engine modules are light, their kernels are not."""
        from .engines import ENGINES

        return ENGINES

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is wanted of the logits; and the embedding."""
        return ("shard", "argmax", "embed")

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> LmHead:
        """See :meth:`Family.problem`; ``kind`` defaults to ``shard``."""
        self.check(card, tp, rows, kind)
        return LmHead(tp, rows, card.hidden_size, card.vocab_size // tp, kind or "shard")

    def problem_from_json(self, data: Mapping[str, Any]) -> LmHead:
        """Inverse of ``to_json``; a problem without a kind is a ``shard``."""
        found = super().problem_from_json({"kind": "shard", **data})
        assert isinstance(found, LmHead)
        return found

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """A normalised input and logits of magnitude one; rows of the embedding N(0, 1)."""
        assert isinstance(problem, LmHead)
        if problem.kind == "embed":
            return {"table": Draw((problem.vocab, problem.hidden)), "peers": Draw((problem.rows, problem.hidden))}
        return {
            "h": Draw((problem.rows, problem.hidden)),
            "w": Draw((problem.vocab, problem.hidden), std=problem.hidden**-0.5),
        }

    def inputs(self, problem: Problem, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """As drawn, and the table of the other ranks' best tokens, or the tokens whose rows are wanted."""
        from .peers import best_of_peers, tokens_of_others

        assert isinstance(problem, LmHead)
        inputs = super().inputs(problem, seed, device)
        sizes = (problem.tp, problem.rows, problem.vocab, seed)
        if problem.kind == "argmax":
            inputs["peers"] = best_of_peers(*sizes).to(device)
        if problem.kind == "embed":
            inputs["tokens"] = tokens_of_others(*sizes).to(device)
        return inputs

    def input_shapes(self, problem: Problem) -> dict[str, tuple[int, ...]]:
        """As :meth:`inputs` draws them."""
        assert isinstance(problem, LmHead)
        more: dict[str, dict[str, tuple[int, ...]]] = {
            "argmax": {"peers": (problem.tp, problem.rows, 2)}, "embed": {"tokens": (problem.rows,)},
        }  # fmt: skip
        return {**super().input_shapes(problem), **more.get(problem.kind, {})}

    def cold_copies(
        self, problem: Problem, tensors: Tensors, rotate_bytes: int
    ) -> list[dict[str, torch.Tensor]] | None:
        """Of an ``embed``: calls with other tokens, so that each reads rows of the table that none before it has read."""
        import torch

        assert isinstance(problem, LmHead)
        if problem.kind != "embed":
            return None
        a_call = problem.rows * problem.hidden * 2
        count = max(1, min(rotate_bytes // a_call + 1, problem.vocab // problem.rows))
        order = torch.randperm(problem.vocab, generator=torch.Generator().manual_seed(0))[: count * problem.rows]
        first = tensors["tokens"] // problem.vocab * problem.vocab
        places = order.view(count, problem.rows).to(first)
        return [{**tensors, "tokens": first + places[place]} for place in range(count)]

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``logits`` [rows, V/T]; ``ids`` and ``best``, the likeliest token's id and logit, [rows]; or ``x`` [rows, hidden]."""
        assert isinstance(problem, LmHead)
        if problem.kind == "embed":
            return {"x": ((problem.rows, problem.hidden), "bfloat16")}
        if problem.kind == "argmax":
            return {"ids": ((problem.rows,), "int32"), "best": ((problem.rows,), "float32")}
        return {"logits": ((problem.rows, problem.vocab), "bfloat16")}

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Logits in FP32, not rounded; a token is chosen among logits rounded to BF16, as every engine does."""
        import torch

        from ..collectives import SingleRank
        from .peers import own_slot
        from .twin import best_of_ranks, best_token, lm_head

        assert isinstance(problem, LmHead)
        t = in_fp32(inputs)
        if problem.kind == "embed":
            mine = t["tokens"] < problem.vocab  # rank 0 is here
            own = t["table"][t["tokens"].clamp(max=problem.vocab - 1)]
            return {"x": torch.where(mine[:, None], own, t["peers"])}
        logits = lm_head(t["h"], t["w"], SingleRank())
        if problem.kind == "shard":
            return {"logits": logits}
        slot, vocabulary = own_slot(problem.tp), problem.tp * problem.vocab
        best, ids = best_token(logits.to(torch.bfloat16).float(), 0, vocabulary)
        theirs, tokens = t["peers"][..., 0].view(torch.float32).clone(), t["peers"][..., 1].long().clone()
        theirs[slot], tokens[slot] = best, ids
        best, ids = best_of_ranks(theirs.T, tokens.T, vocabulary)
        return {"ids": ids.to(torch.int32), "best": best}

    def alternative(self, problem: Problem, tensors: Tensors) -> Callable[[], None]:
        """PyTorch operators: cuBLAS, and for a token its argmax, exchanged over the same table."""
        from .chain import chain_call

        assert isinstance(problem, LmHead)
        return chain_call(problem, tensors)

    def operators(self, problem: Problem) -> Callable[[Tensors], Tensors]:
        """The same as a function."""
        from .chain import chain

        assert isinstance(problem, LmHead)
        return chain(problem)

    def flops(self, problem: Problem) -> int:
        """The projection."""
        assert isinstance(problem, LmHead)
        if problem.kind == "embed":
            return 0
        return 2 * problem.rows * problem.hidden * problem.vocab

    def traffic(self, problem: Problem) -> Traffic:
        """Of an ``embed`` one row a token, read from the table by whoever holds it, and written."""
        assert isinstance(problem, LmHead)
        if problem.kind != "embed":
            return super().traffic(problem)
        size = problem.rows * problem.hidden * 2
        return Traffic(-(-size // problem.tp), size + problem.rows * 4, 0)

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """One rounding; what is a whole number, or only moved, must be right."""
        assert isinstance(problem, LmHead)
        if output in ("ids", "x"):
            return Tolerance(0.0, 0.0, "whole numbers, or rows as they are")
        return rounding_tolerance(1, problem.hidden, "the result")


FAMILY = LmHeadFamily()
