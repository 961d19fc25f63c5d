"""The points that were published for vLLM's decode path, by name, and points beside them for which nothing was.

A figure stands beside its conditions and is never compared with one of ours: other hardware, other weights, and the
implementers' own account, which nobody outside has reproduced. The post and the pull request give different figures for
one point, and the sets are never mixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...kernels import InputError, ModelCard

if TYPE_CHECKING:
    from ..run_options import RunOptions

DECODE = "decode throughput without prefill"


@dataclass(frozen=True)
class Published:
    """One figure."""

    text: str
    """The figure and its unit, its stock figure beside it where there was one."""
    hardware: str
    conditions: str
    source: str
    beside: str = DECODE
    """The measure of ours that is printed with it."""

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"published ({self.source}): {self.text}; {self.hardware}; {self.conditions}"


@dataclass(frozen=True)
class Preset:
    """What a bench runs by that name."""

    name: str
    tp: int
    rows: int
    """Requests in the batch."""
    drafts: int
    acceptance_length: float | None
    """Of synthetic acceptance; None without drafts."""
    prompt: int
    """Input tokens a request."""
    tokens: int
    """Output tokens a request."""
    published: tuple[Published, ...] = ()
    """Empty where no figure was published: then none is printed."""
    traffic: bool = False
    """Lengths come from a file of sessions."""

    def to_json(self) -> dict[str, Any]:
        """For reports; published figures are text, so that no program takes one for a measure."""
        return {
            "name": self.name, "tp": self.tp, "rows": self.rows, "drafts": self.drafts,
            "acceptance_length": self.acceptance_length, "prompt": self.prompt, "tokens": self.tokens,
            "published": [{"line": one.line, "beside": one.beside} for one in self.published],
        }  # fmt: skip

    def changed(self, card: ModelCard, options: RunOptions) -> list[str]:
        """What of it a run has otherwise: a line a thing."""
        lengths = () if self.traffic else ("prompt", "tokens")
        own = {
            name: (getattr(options, name), getattr(self, name))
            for name in ("tp", "rows", "drafts", "acceptance_length", *lengths)
        }
        own["context filled"] = (options.fill, 0)
        told = [f"{name.replace('_', ' ')} {here} for {there}" for name, (here, there) in own.items() if here != there]
        return [*([f"model {card.name} for kimi-k3"] if card.name != "kimi-k3" else []), *told]


SIXTEEN = "16 GB300 in one NVLink domain, TP16"
GROUP = "total of the TP group"
POST = "of vLLM's post of October 16, 2026, by the implementers, reproduced by nobody"
PULL = "of the pull request's earlier table, by the implementers, reproduced by nobody"
HEADLINE = "batch 1, DSpark with 7 drafts, SYNTHETIC acceptance length 6, input 1, output 1k; total decode throughput without prefill"

PRESETS = {
    one.name: one
    for one in (
        Preset(
            "headline", 16, 1, 7, 6.0, 1, 1000,
            (
                Published("842 against 488 tok/s of stock (1.73x)", SIXTEEN, HEADLINE, POST),
                Published("838 against 489 tok/s of stock", SIXTEEN, HEADLINE, PULL),
                Published(
                    "13 kernels, 69 us a layer, against 23 kernels, 130 us of stock", "GPUs of the trace not stated",
                    "a trace of the shown configuration, rows not stated; not application latency", POST, "kda MoE layer",
                ),
            ),
        ),
        Preset(
            "plain-1", 16, 1, 0, None, 1, 1000,
            (Published("256.4 tok/s, 1.88x its own stock", SIXTEEN, f"non-speculative, batch 1; {GROUP}", POST),),
        ),
        Preset(
            "plain-64", 16, 64, 0, None, 1, 1000,
            (Published("3606.1 tok/s, 1.62x its own stock", SIXTEEN, f"non-speculative, batch 64; {GROUP}, not per user", POST),),
        ),
        Preset("plain-8", 16, 8, 0, None, 1, 1000),
        Preset("drafts-3", 16, 1, 3, 3.0, 1, 1000),
        Preset("headline-tp8", 8, 1, 7, 6.0, 1, 1000),
        Preset("plain-1-tp8", 8, 1, 0, None, 1, 1000),
        Preset(
            "agentx-1", 16, 1, 0, None, 1, 1,
            (Published(
                "P90 403.2 against 223.7 tok/s per user", "16 GPUs against 8: another number of GPUs, so it does not isolate the path",
                "AgentX, concurrency 1: longer contexts, turns, pauses, cache reuse; which tail its P90 is, is not said (here nine of ten are slower)", POST, "user rate, P90",
            ),),
            traffic=True,
        ),
    )
}  # fmt: skip
"""Name to preset."""


def preset_of(name: str) -> Preset:
    """The preset of that name.

    Raises:
        InputError: there is none.
    """
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}; presets: {', '.join(PRESETS)}")
    return PRESETS[name]
