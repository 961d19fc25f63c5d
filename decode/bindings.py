"""What a step can hand to a family's kernels, by name: whatever engine has them. Imports no torch.

The names are the families' own (their inputs, outputs and updated tensors), so an engine needs no line here: one that
asks for a tensor that is not listed is refused, with that name.
"""

from __future__ import annotations

from ..kernels import Compiled, Family, ModelCard
from ..kernels.errors import InputError

_MIX = frozenset(("prefix", "blocks", "res_norm", "res_proj", "norm_w"))
_KDA = frozenset(("f_b", "conv_q", "conv_k", "conv_v", "a_log", "dt_bias", "o_norm"))
_MLA = frozenset(("q_a_norm", "kv_a_norm", "q_b", "w_uk", "w_uv"))
HELD = frozenset(("w13", "w13_scale", "w2", "w2_scale", "gate_up", "down"))
"""Experts in the layout of :mod:`k3lab.decode.expert_memory`."""

GIVEN: dict[str, frozenset[str]] = {
    "attention_projection": frozenset(("x", "w")),
    "kda": _KDA | {"proj", "conv_state", "state", "slots"},
    "mla": _MLA | {"proj", "cache", "block_table", "context", "k_scale"},
    "output_projection": _MIX | {"x", "w_o"},
    "router": frozenset(("x", "w_router", "w_down", "bias", "peers")),
    "experts": HELD | {"latent", "ids", "weights", "x"},
    "moe_tail": _MIX | {"latent_partial", "shared_partial", "latent_norm", "w_up"},
    "attn_res": _MIX,
    "lm_head": frozenset(("h", "w", "peers", "tokens", "table")),
}
"""Family to the tensors that :mod:`k3lab.decode.tuned` has for it, outputs aside."""
PLACES: dict[str, tuple[str, ...]] = {
    "attention_projection": ("kda", "mla"),
    "output_projection": ("kda", "mla", "restart"),
    "attn_res": ("blocks", "first", "final"),
}
"""Families whose kind depends on where in the step a launch stands; of another one a step has one kind."""


def places(found: Family, card: ModelCard) -> tuple[str | None, ...]:
    """Kinds of a family that a step of the model has side by side; (None,) where it has one."""
    kinds = [kind for kind in PLACES.get(found.name, ()) if kind in found.kinds]
    return tuple(kind for kind in kinds if kind not in ("kda", "mla") or kind in card.layer_kinds) or (None,)


def step_kind(
    found: Family, card: ModelCard, *, tp: int, rows: int, q_len: int = 1, cache_dtype: str = "bfloat16", context: int = 0,
    dcp: int = 1,
) -> str | None:  # fmt: skip
    """The kind of a family that has one in a step: by tokens a request, cache format and context, where it tells them apart.

    Args:
        found: the family.
        card: the model.
        tp: tensor-parallel size.
        rows: token rows, a multiple of ``q_len``.
        q_len: tokens a request.
        cache_dtype: torch name of the MLA cache's dtype.
        context: most tokens of a request; 0: whatever the family's first kind has.
        dcp: ranks that share each context.

    Returns:
        None: its default kind, or none fits (and its default's own limits say why).
    """
    best: tuple[int, str] | None = None
    for kind in found.kinds:
        try:
            problem = found.problem(card, tp=tp, rows=rows, kind=kind)
        except InputError:
            continue
        tells = [getattr(problem, name, None) for name in ("q_len", "cache_dtype", "context")]
        if tells == [None, None, None]:
            return None
        length = tells[2] or 0
        fits = tells[0] in (None, q_len) and tells[1] in (None, cache_dtype) and (tells[2] is None or length >= context)
        fits = fits and getattr(problem, "dcp", dcp) == dcp
        if fits and (best is None or length < best[0]):
            best = (length, kind)
    return best[1] if best else None


def lacking(found: Family, compiled: Compiled, context: int = 0) -> str | None:
    """Why a step cannot launch compiled kernels, or None: a tensor that it has not, or a context that they do not hold."""
    own = {buffer.name for buffer in compiled.buffers}
    known = GIVEN.get(found.name, frozenset()) | own | set(found.output_specs(compiled.problem))
    for launch in compiled.launches:
        for arg in launch.args:
            if arg.kind in ("tensor", "tensor_map") and arg.name not in known:
                return f"engine {compiled.engine} reads a tensor {arg.name!r}, which a step does not hold"
    held = getattr(compiled.problem, "context", None)
    if held is not None and context > held:
        return f"its kernels hold contexts of {held} tokens, this run has up to {context}"
    return None
