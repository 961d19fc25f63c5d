"""Real processes, one a rank, on the GPUs there are: ``python gpu_ranks.py SIZE SCENARIO FOLDER`` writes ``FOLDER/RANK.pt``.

Processes that share a GPU are time-sliced. Forked before anything touches a GPU.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import torch
from engines_case import engine_entries, five_layers
from forked_ranks import fork, join, keep
from k3lab.cli.default_engines import DefaultEngines
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.choices import StepForm, Tuned, choose
from k3lab.decode.context_parallel import context_group
from k3lab.decode.delays import Delayed
from k3lab.decode.graphs import Capture
from k3lab.decode.group import Group
from k3lab.decode.group import join as join_group
from k3lab.decode.prefill import prefill
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.random_weights import random_weights
from k3lab.decode.step import forward, step
from k3lab.decode.tuned import TunedOperators
from k3lab.decode.weights import RankWeights
from k3lab.kernels import SMALL_K3, ModelCard
from k3lab.kernels.collectives import CollectiveError
from k3lab.kernels.device import require
from k3lab.kernels.health import NAME, set_limit

PATIENT_S, WALL_S, LIMIT_S = 120.0, 300.0, 8.0
PROMPT = (17, 400, 3, 256, 8, 9, 44, 12, 300)
STEPS = ([[1], [2]], [[3], [4]], [[7], [8]])
SEEDS, KERNELS_TOO = 100, 25
"""Of random delays; every so many the kernels' own hand-overs are delayed too, which compiles them anew."""


@cache
def weights_of(card: ModelCard, dtype: torch.dtype, size: int, rank: int) -> RankWeights:
    """Slices of one model."""
    return random_weights(card, seed=5, dtype=dtype, device="cuda", tp=size, rank=rank)


def logits(
    card: ModelCard,
    group: Group,
    operators: Any,
    dtype: torch.dtype,
    *,
    captured: bool = False,
    dcp: int = 1,
    prompted: bool = True,
) -> torch.Tensor:
    """Of a prompt and a few steps behind it, all in one row."""
    weights = weights_of(card, dtype, group.size, group.rank)
    if hasattr(operators, "take"):
        operators.take(weights)
    cache = DecodeCache(
        card, tp=group.size, max_requests=2, max_context=80, dtype=dtype, block_size=64, padding=True, device="cuda",
        dcp=dcp,
    )  # fmt: skip
    slots = [cache.add(), cache.add()]
    many = PrefillOperators(card, dtype=dtype, device="cuda", context_group=context_group(group.comm, dcp))
    prompt = torch.tensor(PROMPT)
    found = [prefill(weights, cache, slots[1], prompt, many, group.comm, chunk=4)] if prompted else []
    where, ids = torch.full((2,), 2, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    out = torch.zeros(2, card.vocab_size, dtype=dtype, device="cuda")
    replay = None
    if captured:
        replay = Capture(weights.device)(
            lambda: out.copy_(forward(weights, cache, ids, where, operators, group.comm, q_len=1))
        )
        where.copy_(torch.tensor(slots))
    for tokens in STEPS:
        if replay:
            cache.begin(slots, 1)
            ids.copy_(torch.tensor(tokens).flatten())
            replay()
            found.append(out.clone().flatten())
        else:
            found.append(step(weights, cache, torch.tensor(tokens), slots, operators, group.comm).flatten())
        torch.cuda.synchronize()
        operators.check()
        cache.accept(slots, [1, 1])
    return torch.cat(found).cpu()


def auto(group: Group) -> dict:
    """PyTorch operators over symmetric memory, in FP64: equal to one rank; captured too, and with contexts over all ranks."""
    where: dict[str, Any] = {"dtype": torch.float64, "device": "cuda"}
    operators, shared = AutoOperators(SMALL_K3, **where), AutoOperators(SMALL_K3, context_group=group.comm, **where)
    over: dict[str, Any] = {"dcp": group.size}
    return {
        "eager": logits(SMALL_K3, group, operators, torch.float64),
        "captured": logits(SMALL_K3, group, operators, torch.float64, captured=True),
        "shared": logits(SMALL_K3, group, shared, torch.float64, **over),
        "shared captured": logits(SMALL_K3, group, shared, torch.float64, captured=True, **over),
    }


def kernels_of_shared_contexts(group: Group) -> TunedOperators:
    """The same where each context lies over all ranks."""
    card, gpu = five_layers(256, 2048), require("this test").need_card().name
    form = StepForm(context=80, dcp=group.size)
    choices = choose(card, tp=group.size, rows=2, gpu=gpu, bundle=DefaultEngines(), objective="measured", form=form)
    assert any(isinstance(one, Tuned) and one.family == "mla" for one in choices), choices
    return TunedOperators(
        card, choices, dtype=torch.bfloat16, device="cuda", transport=group.transport, context_group=group.comm
    )


def kernels(group: Group, jitter: int = 0, exchange: str = "") -> TunedOperators:
    """Every family's default engine over the group's transport."""
    card = five_layers(256, 2048)
    choices, without = engine_entries(
        card, tp=group.size, rows=2, q_len=1, arch=require("this test").arch, jitter=jitter, exchange=exchange
    )
    assert not [one for one in without if "output_projection" in one], without
    return TunedOperators(card, choices, dtype=torch.bfloat16, device="cuda", transport=group.transport)


def tuned(group: Group) -> dict:
    """Kernels that publish to each other, beside auto; eagerly and captured."""
    card, used = five_layers(256, 2048), kernels(group)
    plain = AutoOperators(card, dtype=torch.bfloat16, device="cuda")
    found = {
        "auto": logits(card, group, plain, torch.bfloat16), "eager": logits(card, group, used, torch.bfloat16),
        "captured": logits(card, group, used, torch.bfloat16, captured=True),
    }  # fmt: skip
    over: dict[str, Any] = {"dcp": group.size}
    shared = kernels_of_shared_contexts(group)
    found["shared"] = logits(card, group, shared, torch.bfloat16, **over)
    found["shared captured"] = logits(card, group, shared, torch.bfloat16, captured=True, **over)
    for exchange in ("one_shot", "two_shot"):
        found[exchange] = logits(card, group, kernels(group, exchange=exchange), torch.bfloat16)
    return found


def late(group: Group) -> dict:
    """Random delays before operators, other ones on every rank and in every run, and in every hand-over of the kernels."""
    card, used = five_layers(256, 2048), kernels(group)
    found = [logits(card, group, used, torch.bfloat16, prompted=False)]
    for seed in range(SEEDS):
        delayed = kernels(group, 1 + seed) if seed % KERNELS_TOO == 0 else used
        slow = Delayed(delayed, f"{seed}/{group.rank}", most_us=300)
        found.append(logits(card, group, slow, torch.bfloat16, prompted=False))
    return {"same": [torch.equal(one, found[0]) for one in found], "eager": found[0]}


def killed(group: Group) -> dict:
    """Rank 1 dies when all have come to a step; the others' kernels give up, or their barrier does."""
    card, used = five_layers(256, 2048), kernels(group)
    for own in used._kernels.values():
        if NAME in own.runner.buffers:
            set_limit(own.runner.buffers, LIMIT_S / 2)
    logits(card, group, used, torch.bfloat16)

    def steps() -> torch.Tensor:
        if group.rank == 1:  # the others know it as one that came
            os.kill(os.getpid(), signal.SIGKILL)
        return logits(card, group, used, torch.bfloat16)

    return {"eager": group.together("a step", steps)}


SCENARIOS = {one.__name__: one for one in (auto, tuned, late, killed)}


def rank_main(rank: int, size: int, port: int, scenario: str, folder: Path) -> None:
    """One rank: what the scenario returns, or the error's text, and how long it took."""
    join(rank, size, port, PATIENT_S)
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in places.items()})
    started = time.monotonic()
    try:
        group = join_group(size, require("this test"), limit_s=LIMIT_S if scenario == "killed" else PATIENT_S)
        assert group is not None
        found = SCENARIOS[scenario](group)
    except CollectiveError as error:
        found = {"error": str(error)}
    found["seconds"] = time.monotonic() - started
    keep(found, folder, rank)


def main() -> None:
    """Fork the ranks and see to it that all of them end."""
    size, scenario, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    ended = fork(
        size, lambda rank, port: rank_main(rank, size, port, scenario, folder), patience_s=PATIENT_S, wall_s=WALL_S
    )
    sys.exit(not ended)


if __name__ == "__main__":
    main()
