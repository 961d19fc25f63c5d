"""The two backends of an evaluation here and now: on a GPU the real ones, without one PyTorch operators beside the twins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels import ModelCard
from ...kernels.mla.family import BLOCK_SIZE
from ..choices import Choice, Finder, StepForm, choose
from ..plan import TUNED_FAMILIES
from ..scope import KV_DTYPES, digest

if TYPE_CHECKING:
    from ..dispatch import Dispatcher
    from ..group import Group

Say = Callable[[str, int, int], None]
SAMPLES, SAMPLE = 64, 256
"""Of a shard, and the bytes of each: the first are the header's, the last the last tensor's."""


@dataclass(frozen=True)
class Places:
    """What :func:`~k3lab.decode.evaluation.evaluate.evaluate` needs, and what its report must say of it."""

    backends: dict[str, Callable[[], Dispatcher]]
    conditions: dict[str, Any]
    """Model, weights, GPU, bundle: what outputs depend on beside the problems."""
    notes: tuple[str, ...]
    """What must be known before a number is read."""
    bundle: dict[str, Any] | None = None
    """Its digest and evidence, and what of it was used."""


def weights_digest(checkpoint: Path | None, seed: int) -> str:
    """Names, sizes, index and, evenly spread over each shard, a few thousand bytes of a checkpoint, 16 hex digits; or which random weights.

    All bytes of a full model would take longer to read than most runs do. Another training changes every tensor; a change of a few
    bytes may go unseen.
    """
    if checkpoint is None:
        return f"random, seed {seed}"
    made = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors*")):
        size = path.stat().st_size
        made.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if path.suffix == ".json":
                made.update(file.read())
                continue
            for part in range(SAMPLES):
                file.seek(max(0, size - SAMPLE) * part // (SAMPLES - 1))
                made.update(file.read(SAMPLE))
    return made.hexdigest()[:16]


def places(
    card: ModelCard, group: Group, *, checkpoint: Path | None, bundle: Finder | None, gpu: str, rows: int, seed: int, context: int,
    kv_dtype: str = KV_DTYPES[0], say: Say | None = None,
) -> Places:  # fmt: skip
    """Load the weights, once for both.

    Args:
        card: the model.
        group: whose ranks answer together; each calls this.
        checkpoint: a folder in the published form; None: random weights of that seed.
        bundle: what ``latency_specialized`` runs; without one, or where an entry is missing, ``auto``'s operators do.
        gpu: whose entries are meant where no GPU is here.
        rows: requests in a step at most.
        seed: of random weights.
        context: tokens of a request at most, prompt and output.
        kv_dtype: of the MLA rows, under both.
        say: is told how far it is.

    Raises:
        InputError: a checkpoint that cannot be read, or more than fits here.
    """
    from ..auto import AutoOperators
    from ..backends import backend_of
    from ..bench.places import weights_here
    from ..bench.reports import bundled
    from ..fitting import fitting_here
    from ..memory import check_memory
    from ..operators import ReferenceOperators
    from ..run import usable_choices
    from ..run_options import RunOptions
    from ..run_places import known_gpu

    device, tell = group.device, say if say and group.rank == 0 else lambda _what, _done, _of: None
    options = RunOptions(
        tp=group.size,
        rows=rows,
        backend="latency_specialized",
        seed=seed,
        gpu=gpu,
        checkpoint=checkpoint,
        kv_dtype=kv_dtype,
    )
    check_memory(card, group.size, device, whole=checkpoint is None, requests=rows, context=context)
    notes = [] if checkpoint else [f"random weights (seed {seed}): scores say nothing of the model"]
    known, choices = None, tuple[Choice, ...]()
    if device is not None:
        known = known_gpu(options, device)
        wanted = partial(
            choose, card, tp=group.size, rows=rows, gpu=known, only=TUNED_FAMILIES, objective="measured", command=("eval",),
            form=StepForm(1, kv_dtype, context),
        )  # fmt: skip
        bundle = fitting_here(bundle, wanted(bundle=bundle), group)
        choices = usable_choices(wanted(bundle=bundle), options, device)
    weights = weights_here(card, options, group.comm, group, tell)
    auto: Any
    used: Any
    if device is None:
        notes.append("no GPU: latency_specialized is the twins, auto is PyTorch on the CPU; no kernel is judged")
        auto, used, scope = AutoOperators(card, dtype=weights.dtype, device="cpu"), ReferenceOperators(card), None
    else:
        made = backend_of(card, options, choices, weights, group, bundle)
        auto, used, scope = made.auto, made.used, made.scope
        notes.append(
            "kernels are launched one by one, in no captured graph: the same kernels, and no step time is told"
        )

    def make(backend: str) -> Dispatcher:
        from ..caches import DecodeCache
        from ..dispatch import Dispatcher

        cache = DecodeCache(
            card, tp=group.size, max_requests=rows, max_context=context, dtype=weights.dtype, device=weights.device,
            block_size=BLOCK_SIZE, cache_dtype=options.cache_dtype,
        )  # fmt: skip
        if scope is None:  # the twins serve every step
            return Dispatcher(weights, cache, group.comm, auto=auto if backend == "auto" else used)
        return Dispatcher(
            weights, cache, group.comm, auto=auto, specialized=lambda _rows: used, scope=scope, backend=backend,
        )  # fmt: skip

    conditions = {
        "model": card.name, "weights": weights_digest(checkpoint, seed), "tp": group.size, "device": device.name if device else "cpu",
        "gpu": known, "kv_dtype": kv_dtype, "bundle": f"{digest(bundle)} {bundle.path}" if bundle else None,
    }  # fmt: skip
    return Places(
        {name: partial(make, name) for name in ("auto", "latency_specialized")},
        conditions, tuple(notes), bundled(bundle, choices),
    )  # fmt: skip
