"""Which steps the ``latency_specialized`` path serves, and why it leaves the others to ``auto``.

What holds for a session is gathered from all ranks once, before anything waits (:func:`agree`); a step is then judged
by what the scheduler says of it alone. Both are the same on every rank, and so are the verdicts. Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..kernels import InputError, ModelCard, family
from ..kernels.device import Device, nvlink_domain
from .choices import Finder, model_families
from .cures import joined
from .letters import letters
from .plan import TUNED_FAMILIES

if TYPE_CHECKING:
    from ..kernels.collectives import Collectives

MAX_ROWS, MAX_DRAFTS = 64, 7
SSM_DTYPES = ("float32",)
KV_DTYPES = ("bfloat16", "float8_e4m3fn")
TABLE_ROWS = "1-8,12,16,24,32,48,64"
LETTER = 1024
"""Bytes in which a rank tells the others what it is."""


@dataclass(frozen=True)
class StepShape:
    """What a scheduler wants to run in one step."""

    drafts: tuple[int, ...] = ()
    """Of every request that decodes; 0 for a plain step."""
    prefill: int = 0
    """Prompt tokens in the same step."""

    @property
    def rows(self) -> int:
        """Token rows that decode."""
        return len(self.drafts) + sum(self.drafts)


@dataclass(frozen=True)
class RankSituation:
    """What one rank brings; what decides a session."""

    tp: int
    gpu: str
    """Name of its GPU card."""
    sms: int
    """SMs it may use."""
    tuned_sms: int
    """SMs its kernels were compiled and tuned for."""
    domain: str = ""
    """NVLink domain."""
    ssm_dtype: str = "float32"
    kv_dtype: str = "bfloat16"
    graph_rows: int = MAX_ROWS
    """Steps of at most so many rows have a captured graph, padded where need be; 0: none was captured."""
    entry_rows: int = 0
    """Steps of at most so many rows have a bundle's entry of one family or more at this TP; 0: none has."""
    bundle: str = ""
    """Digest of the bundle."""


@dataclass(frozen=True)
class Reason:
    """Why a step, or every step of a session, is left to ``auto``."""

    code: str
    text: str
    cure: str


@dataclass(frozen=True)
class Scope:
    """What a group of ranks has agreed on."""

    ranks: tuple[RankSituation, ...]
    session: Reason | None
    """Why no step at all is served; None where steps are."""

    def judge(self, step: StepShape) -> Reason | None:
        """None where the path serves the step, else why not: the first reason that applies.

        Raises:
            InputError: a step in which nothing runs, or that drafts a negative number of tokens.
        """
        if step.prefill < 0 or any(drafts < 0 for drafts in step.drafts) or not (step.drafts or step.prefill):
            raise InputError(f"a step of {step.prefill} prompt tokens and drafts {list(step.drafts)} is none")
        if self.session:
            return self.session
        own = self.ranks[0]
        if step.prefill and not step.drafts:
            return PREFILL
        if step.prefill:
            return MIXED
        if len(set(step.drafts)) > 1:
            return RAGGED
        if step.drafts[0] > MAX_DRAFTS:
            return DRAFTS
        if step.rows > MAX_ROWS:
            return ROWS
        if step.rows > own.graph_rows:
            return NO_GRAPH
        if step.rows > own.entry_rows:
            return Reason(
                "no_rows",
                f"the bundle's entries at TP {own.tp} serve at most {own.entry_rows} rows",
                _tune(own),
            )
        return None


PREFILL = Reason(
    "prefill", "prefill", "none is needed: prompts have operators of their own; longer chunks make such steps fewer"
)
MIXED = Reason("mixed", "prefill and decode in one step", "let the scheduler give prompts steps of their own")
RAGGED = Reason(
    "ragged", "requests with unequal numbers of drafts", "fill the shorter ones up with the token -1, which is never accepted"
)  # fmt: skip
DRAFTS = Reason("drafts", f"more than {MAX_DRAFTS} drafts a request", f"draft at most {MAX_DRAFTS} tokens")
ROWS = Reason(
    "rows", f"more than {MAX_ROWS} rows", f"at most {MAX_ROWS} // (1 + drafts) requests a step: fewer requests or drafts"
)  # fmt: skip
NO_GRAPH = Reason("no_graph", "no captured graph for so many rows", "capture graphs up to the largest step")
REASONS = ("ssm_dtype", "kv_dtype", "differ", "sms", "nvlink", "no_tp", "prefill", "mixed", "ragged", "drafts",
           "rows", "no_graph", "no_rows")  # fmt: skip
"""All codes, in the order in which they are looked for."""


def _tune(rank: RankSituation) -> str:
    """Commands that tune the first family for all rows, where that GPU is."""
    table = f"k3lab tune-table attention_projection --tp {rank.tp} --kind kda,mla --rows {TABLE_ROWS}"
    return joined((table, "k3lab export studies --out out/bundle --add"))


def group_scope(ranks: Sequence[RankSituation]) -> Scope:
    """What ranks can do together, from what each of them is; the same for the same list.

    Raises:
        InputError: no rank, or as many as another TP has.
    """
    if not ranks:
        raise InputError("a scope needs one rank or more")
    return Scope(tuple(ranks), _session(ranks))


def _session(ranks: Sequence[RankSituation]) -> Reason | None:
    first = ranks[0]
    for index, rank in enumerate(ranks):
        who = f"rank {index}" if len(ranks) > 1 else "this rank"
        if rank.ssm_dtype not in SSM_DTYPES:
            return Reason(
                "ssm_dtype", f"KDA states of {rank.ssm_dtype} on {who}; the kernels have {' or '.join(SSM_DTYPES)}",
                f"keep KDA states in {SSM_DTYPES[0]}",
            )  # fmt: skip
        if rank.kv_dtype not in KV_DTYPES:
            return Reason(
                "kv_dtype", f"an MLA cache of {rank.kv_dtype} on {who}; the kernels have {' or '.join(KV_DTYPES)}",
                f"keep MLA rows in {KV_DTYPES[0]} or {KV_DTYPES[1]}",
            )  # fmt: skip
        for name in ("tp", "gpu", "ssm_dtype", "kv_dtype", "graph_rows", "entry_rows", "bundle"):
            mine, theirs = getattr(rank, name), getattr(first, name)
            if mine != theirs:
                return Reason(
                    "differ", f"rank {index} has {name} {mine!r}, rank 0 has {theirs!r}",
                    "start every rank with the same options and the same bundle",
                )  # fmt: skip
        if rank.sms != rank.tuned_sms:
            return Reason(
                "sms", f"{who} has {rank.sms} SMs, its kernels are for {rank.tuned_sms}",
                "give the process the whole GPU, or tune for the part: waiting blocks must all fit at once",
            )  # fmt: skip
        if rank.domain != first.domain:
            return Reason(
                "nvlink", f"rank {index} is in NVLink domain {rank.domain!r}, rank 0 in {first.domain!r}",
                "start all ranks in one NVLink domain",
            )  # fmt: skip
    if not first.entry_rows:
        text = f"no accepted entry of a bundle at TP {first.tp} on {first.gpu}"
        return Reason("no_tp", text, _tune(first))
    return None


def agree(mine: RankSituation, comm: Collectives) -> Scope:
    """Gather what every rank is; every rank returns the same. Call it once, before the first step.

    Raises:
        InputError: what this rank is takes more than :data:`LETTER` bytes.
        CollectiveError: a rank did not come within the group's limit; it is named.
    """
    return group_scope([RankSituation(**one) for one in letters(asdict(mine), comm, LETTER, "what this rank is")])


def entry_rows(card: ModelCard, bundle: Finder | None, *, tp: int, gpu: str) -> int:
    """The most rows of a step that has an accepted entry of a family that can be launched; 0 without any."""
    if bundle is None:
        return 0
    from ..kernels.bundle.reader import Miss

    for rows in range(MAX_ROWS, 0, -1):
        for name, kind in model_families(card, TUNED_FAMILIES):
            found = family(name)
            if name not in TUNED_FAMILIES:
                continue
            if not isinstance(bundle.find(name, found.problem(card, tp=tp, rows=rows, kind=kind), gpu), Miss):
                return rows
    return 0


def here(
    card: ModelCard, device: Device, bundle: Finder | None, *, tp: int, graph_rows: int = MAX_ROWS,
    ssm_dtype: str = "float32", kv_dtype: str = "bfloat16",
) -> RankSituation:  # fmt: skip
    """What the rank on this GPU brings; for :func:`agree`.

    Args:
        card: the model.
        device: its GPU.
        bundle: what it loaded.
        tp: tensor-parallel size.
        graph_rows: most rows of a captured graph.
        ssm_dtype: of the KDA states.
        kv_dtype: of the MLA rows.
    """
    chip = device.card
    return RankSituation(
        tp=tp,
        gpu=chip.name if chip else device.name,
        sms=device.sms,
        tuned_sms=chip.sms if chip else device.sms,
        domain=nvlink_domain(device.index),
        ssm_dtype=ssm_dtype,
        kv_dtype=kv_dtype,
        graph_rows=graph_rows,
        entry_rows=entry_rows(card, bundle, tp=tp, gpu=chip.name) if chip else 0,
        bundle=digest(bundle),
    )


def digest(bundle: Finder | None) -> str:
    """Of what a bundle holds, wherever it lies: equal texts on all ranks mean equal kernels. Empty without one."""
    if bundle is None:
        return ""
    places = sorted(
        f"{entry.model.place} {entry.model.config_digest} {entry.model.source_digest}" for entry in bundle.entries
    )
    return hashlib.sha256("\n".join(places).encode()).hexdigest()[:16]


class Tally:
    """Counts of steps by verdict; the first of every kind is told at once."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """``say`` is given one line for every reason, when it first applies."""
        self.served = 0
        self.counts: Counter[Reason] = Counter()
        self._say = say

    def note(self, reason: Reason | None, count: int = 1) -> None:
        """Count a step that was judged so, or ``count`` equal ones."""
        if reason is None:
            self.served += count
            return
        if self._say and reason not in self.counts:
            self._say(f"backend auto runs this step: {reason.text}; cure: {reason.cure}")
        self.counts[reason] += count

    @property
    def steps(self) -> int:
        """All that were judged."""
        return self.served + sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """Served and left, the most frequent reason first."""
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], REASONS.index(item[0].code), item[0].text))
        return {
            "steps": self.steps, "served": self.served, "share": self.served / self.steps if self.steps else 0.0,
            "fallbacks": [
                {"code": reason.code, "reason": reason.text, "count": count, "share": count / self.steps, "cure": reason.cure}
                for reason, count in ordered
            ],
        }  # fmt: skip
