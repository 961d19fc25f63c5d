"""What a decode run is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..kernels import InputError, ModelCard
from ..kernels.gpu_cards import gpu_card
from .choices import StepForm, check_backend, check_rows
from .scope import KV_DTYPES, MAX_DRAFTS, MAX_ROWS
from .sharding import check_dcp, check_holds, check_rank

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 4096


def check_seed(seed: int) -> None:
    """Raise InputError for a number that no generator takes."""
    if not -(2**63) <= seed < 2**63:
        raise InputError(f"seed is {seed}; a seed is a whole number of 64 bits")


def check_kv_dtype(name: str) -> None:
    """Raise InputError for a dtype that MLA rows are not kept in."""
    if name not in KV_DTYPES:
        raise InputError(f"kv-dtype is {name!r}; MLA rows are kept in {' or '.join(KV_DTYPES)}")


def cache_dtype(name: str) -> torch.dtype | None:
    """Of MLA rows, as torch has it; None for the model's own, which BF16 stands for."""
    import torch

    return None if name == KV_DTYPES[0] else getattr(torch, name)


def check_context(card: ModelCard, tokens: int) -> None:
    """Raise InputError for a context that is longer than the model's."""
    if tokens > card.max_position_embeddings:
        raise InputError(
            f"a context of {tokens} tokens is asked for; {card.name} has at most {card.max_position_embeddings}"
        )


@dataclass(frozen=True)
class RunOptions:
    """What to run."""

    tp: int = 1
    rows: int = 2
    """Requests: every plain step has one row a request."""
    tokens: int = 8
    backend: str = "auto"
    seed: int = 0
    gpu: str = "GB300"
    """Whose bundle entries a run without a GPU reports on; a run on a GPU uses that GPU's."""
    trace: Path | None = None
    model: str = ""
    """What ``--model`` was, for the commands a fallback names."""
    checkpoint: Path | None = None
    """A folder in the published form; None: random weights."""
    prompt: int = 1
    """Random tokens a request begins with: all but the last are prefilled, the last is the first step's."""
    fill: int = 0
    """Tokens of a made-up context before the prompt."""
    chunk: int = 512
    """Tokens of a prefill chunk."""

    rank: int | None = None
    """Runs alone as this rank of the group, over loopback; None: all ranks, or rank 0 alone on one GPU."""
    transport: str | None = None
    """Of kernels that publish: see :data:`~k3lab.decode.group.TRANSPORTS`."""

    dcp: int = 1
    """Ranks that share each context: 1, or TP (decode context parallelism)."""
    kv_dtype: str = KV_DTYPES[0]
    """Of the MLA rows, one of :data:`~k3lab.decode.scope.KV_DTYPES`."""

    drafts: int = 0
    """Tokens a request that are drafted for every step; 0: plain steps."""
    temperature: float = 0.0
    """Of drafted and of sampled tokens, with drafts; 0: the likeliest."""
    acceptance_length: float | None = None
    """Mean tokens a step of synthetic acceptance; None: the target decides."""
    draft_checkpoint: Path | None = None
    """The drafter's folder; None: random weights."""

    @property
    def context(self) -> int:
        """Tokens a request's cache must hold; with drafts some come out beyond those asked for, or are rejected."""
        return self.fill + self.prompt - 1 + self.tokens + (2 * self.drafts + 1 if self.drafts else 0)

    @property
    def held_context(self) -> int:
        """Those of them that a rank holds, at most."""
        return -(-self.context // self.dcp)

    @property
    def step_rows(self) -> int:
        """Token rows of a step."""
        return self.rows * (1 + self.drafts)

    @property
    def form(self) -> StepForm:
        """Of its steps: they hand out tokens alone, unless tokens are sampled from the target's logits."""
        head: Literal["logits", "tokens"] = "logits" if self.temperature else "tokens"
        return StepForm(self.drafts + 1, self.kv_dtype, self.context, self.dcp, head)

    @property
    def cache_dtype(self) -> torch.dtype | None:
        """As :class:`~k3lab.decode.caches.DecodeCache` takes it."""
        return cache_dtype(self.kv_dtype)

    @property
    def again(self) -> tuple[str, ...]:
        """The words of a command that runs this once more, without model, backend and bundle."""
        told: dict[str, int | float | str | Path] = {
            "--tp": self.tp,
            "--rows": self.rows,
            "--tokens": self.tokens,
            "--seed": self.seed,
        }
        if self.checkpoint:
            told["--checkpoint"] = self.checkpoint
        if self.rank is not None:
            told["--rank"] = self.rank
        if self.transport is not None:
            told["--transport"] = self.transport
        if self.dcp > 1:
            told["--dcp"] = self.dcp
        if self.kv_dtype != KV_DTYPES[0]:
            told["--kv-dtype"] = self.kv_dtype
        if self.prompt > 1:
            told |= {"--prompt": self.prompt, "--chunk": self.chunk}
        if self.fill:
            told["--fill-context"] = self.fill
        if self.drafts:
            told |= {"--drafts": self.drafts, "--temperature": self.temperature}
        if self.acceptance_length is not None:
            told["--acceptance-length"] = self.acceptance_length
        if self.draft_checkpoint:
            told["--draft-checkpoint"] = self.draft_checkpoint
        return tuple(word for name, value in told.items() for word in (name, str(value)))

    def check(self, card: ModelCard) -> None:
        """Raise InputError for anything that cannot be run."""
        check_rank(card, self.tp, self.rank or 0)
        check_dcp(self.dcp, self.tp)
        check_kv_dtype(self.kv_dtype)
        check_rows(self.rows)
        check_backend(self.backend)
        gpu_card(self.gpu)
        check_seed(self.seed)
        longest = min(MAX_TOKENS, card.max_position_embeddings)
        if not 1 <= self.tokens <= longest:
            raise InputError(f"tokens is {self.tokens}; a run of {card.name} produces 1 to {longest} tokens a request")
        if self.prompt < 1 or self.fill < 0 or self.chunk < 1:
            raise InputError(
                f"prompt {self.prompt}, fill-context {self.fill}, chunk {self.chunk}: a prompt and a chunk have 1 token or more"
            )
        check_context(card, self.context)
        self._check_drafts()

    def check_alone(self, rank: int) -> None:
        """Raise InputError for a rank that runs alone and would hold no token of a shared context at its first step."""
        check_holds(rank, self.dcp, self.fill + self.prompt, "--fill-context or --prompt makes it longer")

    def _check_drafts(self) -> None:
        if not 0 <= self.drafts <= MAX_DRAFTS:
            raise InputError(f"drafts is {self.drafts}; a step verifies 1 to {MAX_DRAFTS}, or 0 for plain steps")
        if not self.drafts:
            if self.acceptance_length is not None or self.draft_checkpoint or self.temperature:
                raise InputError(
                    "--acceptance-length, --temperature and --draft-checkpoint speak of drafts; give --drafts"
                )
            return
        label(self)
        if self.step_rows > MAX_ROWS:
            raise InputError(
                f"{self.rows} requests with {self.drafts} drafts are {self.step_rows} rows; a step takes at most {MAX_ROWS}"
            )


def label(options: RunOptions) -> str:
    """What must stand beside the numbers of a run with drafts: who accepts them."""
    from .dspark.acceptance import acceptance

    return acceptance(options.drafts, options.temperature, options.acceptance_length).label
