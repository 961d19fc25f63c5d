"""What a decode run is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..kernels import InputError, ModelCard
from ..kernels.gpu_cards import gpu_card
from .choices import check_backend, check_rows

MAX_TOKENS = 4096


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

    @property
    def context(self) -> int:
        """Tokens a request's cache must hold."""
        return self.fill + self.prompt - 1 + self.tokens

    @property
    def again(self) -> tuple[str, ...]:
        """The words of a command that runs this once more, without model, backend and bundle."""
        told: dict[str, int | Path] = {
            "--tp": self.tp,
            "--rows": self.rows,
            "--tokens": self.tokens,
            "--seed": self.seed,
        }
        if self.checkpoint:
            told["--checkpoint"] = self.checkpoint
        if self.prompt > 1:
            told |= {"--prompt": self.prompt, "--chunk": self.chunk}
        if self.fill:
            told["--fill-context"] = self.fill
        return tuple(word for name, value in told.items() for word in (name, str(value)))

    def check(self, card: ModelCard) -> None:
        """Raise InputError for anything that cannot be run."""
        card.check_tp(self.tp)
        check_rows(self.rows)
        check_backend(self.backend)
        gpu_card(self.gpu)
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed}; a seed is a whole number of 64 bits")
        longest = min(MAX_TOKENS, card.max_position_embeddings)
        if not 1 <= self.tokens <= longest:
            raise InputError(f"tokens is {self.tokens}; a run of {card.name} produces 1 to {longest} tokens a request")
        if self.prompt < 1 or self.fill < 0 or self.chunk < 1:
            raise InputError(
                f"prompt {self.prompt}, fill-context {self.fill}, chunk {self.chunk}: a prompt and a chunk have 1 token or more"
            )
        if self.context > card.max_position_embeddings:
            raise InputError(
                f"a context of {self.context} tokens is asked for; {card.name} has at most {card.max_position_embeddings}"
            )
