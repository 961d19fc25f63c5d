"""MLA: absorbed against unabsorbed and transformers' module, paged against contiguous, FP8 by hand."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.collectives import run_virtual_ranks
from k3lab.kernels.mla.twin import MlaWeights, mla, mla_unabsorbed

BF16, F32, F64, FP8 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
HEADS, Q_LORA, LATENT, NOPE, ROPE, V = 16, 12, 10, 6, 4, 5
COLUMNS = Q_LORA + LATENT + ROPE + HEADS * V
STEP = {"eps": 1e-2, "nope": NOPE, "rope": ROPE}  # a large eps, so that a wrong place for it shows
CONTEXT = [7, 0, 12]


def _weights(seed: int = 0) -> MlaWeights:
    torch.manual_seed(seed)
    return MlaWeights(
        q_a_norm=1 + 0.3 * torch.randn(Q_LORA, dtype=F64),
        kv_a_norm=1 + 0.3 * torch.randn(LATENT, dtype=F64),
        q_b=torch.randn(HEADS * (NOPE + ROPE), Q_LORA, dtype=F64),
        w_uk=torch.randn(HEADS, NOPE, LATENT, dtype=F64) * 0.5,
        w_uv=torch.randn(HEADS, V, LATENT, dtype=F64),
    )


def _paged(q_len: int, block_size: int = 4, dtype: torch.dtype = F64, seed: int = 1):
    """(proj, cache, block_table, context) with blocks in a scrambled order; unused rows are NaN."""
    torch.manual_seed(seed)
    each = -(-(max(CONTEXT) + q_len) // block_size)
    table = torch.randperm(len(CONTEXT) * each).view(len(CONTEXT), each)
    cache = torch.full((len(CONTEXT) * each, block_size, LATENT + ROPE), float("nan"), dtype=F64)
    for request, tokens in enumerate(CONTEXT):
        for position in range(tokens):
            cache[table[request, position // block_size], position % block_size] = torch.randn(LATENT + ROPE, dtype=F64)
    proj = torch.randn(len(CONTEXT) * q_len, COLUMNS + 2, dtype=F64)
    return proj.to(dtype), cache.to(dtype), table, torch.tensor(CONTEXT)


def _weights_as(weights: MlaWeights, dtype: torch.dtype) -> MlaWeights:
    return dataclasses.replace(weights, **{k: v.to(dtype) for k, v in vars(weights).items()})


@pytest.mark.parametrize("q_len", [1, 2, 5, 8])
def test_absorbed_equals_unabsorbed(q_len: int) -> None:
    weights = _weights()
    proj, cache, *where = _paged(q_len)
    expected = mla_unabsorbed(proj, weights, cache.clone(), *where, q_len=q_len, **STEP)
    got = mla(proj, weights, cache, *where, q_len=q_len, **STEP)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_paged_cache_equals_one_contiguous_block(block_size: int) -> None:
    weights, q_len = _weights(), 3
    proj, cache, table, context = _paged(q_len, block_size)
    pages, size = table.shape[1], table.shape[1] * block_size
    one = torch.stack([cache[table[r]].reshape(pages * block_size, -1) for r in range(len(CONTEXT))])
    got = mla(proj, weights, cache, table, context, q_len=q_len, **STEP)
    expected = mla(proj, weights, one, torch.arange(len(CONTEXT))[:, None], context, q_len=q_len, **STEP)
    assert one.shape[1] == size
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    again = torch.stack([cache[table[r]].reshape(size, -1) for r in range(len(CONTEXT))])
    torch.testing.assert_close(again, one, rtol=0, atol=0, equal_nan=True)  # and the new rows went to their place


def test_insertion_writes_the_normed_latent_and_the_raw_shared_key() -> None:
    weights, q_len = _weights(), 3
    proj, cache, table, context = _paged(q_len)
    before = cache.clone()
    mla(proj, weights, cache, table, context, q_len=q_len, **STEP)
    kvc, kpe = proj[:, Q_LORA : Q_LORA + LATENT], proj[:, Q_LORA + LATENT : Q_LORA + LATENT + ROPE]
    latent = kvc / (kvc.square().mean(-1, keepdim=True) + STEP["eps"]).sqrt() * weights.kv_a_norm
    written = torch.zeros(cache.shape[:2], dtype=torch.bool)
    for request, tokens in enumerate(CONTEXT):
        for j in range(q_len):
            block, slot = table[request, (tokens + j) // 4], (tokens + j) % 4
            written[block, slot] = True
            row = request * q_len + j
            torch.testing.assert_close(cache[block, slot], torch.cat([latent[row], kpe[row]]), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(cache[~written], before[~written], rtol=0, atol=0, equal_nan=True)


def test_agrees_with_transformers_attention() -> None:
    """Its module has no output gate and no cache here: we decode the last tokens of its whole sequence."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = types.SimpleNamespace(
        attention_dropout=0.0, hidden_size=24, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=Q_LORA,
        qk_rope_head_dim=ROPE, kv_lora_rank=LATENT, v_head_dim=V, qk_nope_head_dim=NOPE, attention_bias=False,
        _attn_implementation="eager",
    )  # fmt: skip
    weights, tokens, q_len = _weights_as(_weights(), F32), 11, 4
    module = modeling.KimiLinearAttention(config, 0)
    kv_b = torch.cat([weights.w_uk, weights.w_uv], dim=1).reshape(-1, LATENT)
    with torch.no_grad():
        module.q_a_layernorm.weight.copy_(weights.q_a_norm)
        module.kv_a_layernorm.weight.copy_(weights.kv_a_norm)
        module.q_b_proj.weight.copy_(weights.q_b)
        module.kv_b_proj.weight.copy_(kv_b)
        module.o_proj = torch.nn.Identity()
        x = torch.randn(1, tokens, 24)
        mask = torch.full((1, 1, tokens, tokens), -torch.inf).triu(1)
        expected, _ = module(x, mask)
        kv = module.kv_a_proj_with_mqa(x[0])
        cache = torch.zeros(4, 4, LATENT + ROPE)
        flat = cache.view(16, -1)
        flat[:tokens] = torch.cat([module.kv_a_layernorm(kv[:, :LATENT]), kv[:, LATENT:]], dim=-1)
        flat[tokens - q_len :] = float("nan")  # what the step itself must write
        gate = torch.randn(q_len, HEADS * V)
        proj = torch.cat([module.q_a_proj(x[0, -q_len:]), kv[-q_len:], gate], dim=-1)
        got = mla(
            proj, weights, cache, torch.arange(4)[None], torch.tensor([tokens - q_len]),
            q_len=q_len, eps=module.q_a_layernorm.variance_epsilon, nope=NOPE, rope=ROPE,
        )  # fmt: skip
    torch.testing.assert_close(got, expected[0, -q_len:] * gate.sigmoid(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["fp64", "bf16", "fp8"])
def test_a_verify_step_equals_single_steps(kind: str) -> None:
    dtype = F64 if kind == "fp64" else BF16
    weights, q_len = _weights_as(_weights(), dtype), 8
    proj, cache, table, context = _paged(q_len, dtype=dtype)
    if kind == "fp8":
        cache = cache.to(FP8)
    singly = cache.clone()
    out = mla(proj, weights, cache, table, context, q_len=q_len, **STEP).view(len(CONTEXT), q_len, -1)
    rows = proj.view(len(CONTEXT), q_len, -1)
    for token in range(q_len):
        one = mla(rows[:, token], weights, singly, table, context + token, q_len=1, **STEP)
        tolerance = {"rtol": 1e-12, "atol": 1e-12} if kind == "fp64" else {"rtol": 2**-6, "atol": 2**-6}
        torch.testing.assert_close(one, out[:, token], **tolerance)
    torch.testing.assert_close(singly.to(F64), cache.to(F64), rtol=0, atol=0, equal_nan=True)


def test_a_row_sees_its_own_token_and_none_after_it() -> None:
    weights, q_len = _weights(), 4
    proj, cache, *where = _paged(q_len)
    expected = mla(proj, weights, cache.clone(), *where, q_len=q_len, **STEP).view(len(CONTEXT), q_len, -1)
    key = slice(Q_LORA, Q_LORA + LATENT + ROPE)
    for token in range(q_len):
        changed = proj.clone().view(len(CONTEXT), q_len, -1)
        changed[:, token, key] += 1.0
        got = mla(changed.flatten(0, 1), weights, cache.clone(), *where, q_len=q_len, **STEP)
        moved = (got.view_as(expected) - expected).abs().amax(-1) > 1e-9
        assert moved.tolist() == [[row >= token for row in range(q_len)]] * len(CONTEXT)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_sharded_by_heads_equals_unsharded(size: int) -> None:
    weights, q_len = _weights(), 3
    proj, cache, *where = _paged(q_len)
    whole_cache = cache.clone()
    whole = mla(proj, weights, whole_cache, *where, q_len=q_len, **STEP)

    def body(comm):
        shared, gate = proj[:, : COLUMNS - HEADS * V], proj[:, COLUMNS - HEADS * V : COLUMNS]
        local = {k: getattr(weights, k).chunk(size)[comm.rank] for k in ("q_b", "w_uk", "w_uv")}
        own_cache = cache.clone()
        mine = torch.cat([shared, gate.chunk(size, dim=-1)[comm.rank]], dim=-1)
        out = mla(mine, dataclasses.replace(weights, **local), own_cache, *where, q_len=q_len, **STEP)
        return comm.all_gather(out, dim=-1), own_cache

    for out, own_cache in run_virtual_ranks(size, body):
        torch.testing.assert_close(out, whole, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own_cache, whole_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("k_scale", [1.0, 0.25, 0.1])
def test_fp8_cache_stores_scaled_saturated_values_and_quantises_the_query(k_scale: float) -> None:
    weights, q_len = _weights(), 2
    proj, cache, table, context = _paged(q_len)
    proj[:, Q_LORA + LATENT] = 300.0  # past 448 * k_scale for the smaller scales
    fp8 = (cache / k_scale).clamp(-448, 448).to(FP8)
    got = mla(proj, weights, fp8, table, context, q_len=q_len, k_scale=k_scale, **STEP)

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + STEP["eps"]).sqrt() * w

    def to_fp8(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-448, 448).to(FP8).to(F64)

    qa, kvc, kpe, gate = proj[:, :COLUMNS].split([Q_LORA, LATENT, ROPE, HEADS * V], dim=-1)
    q = (norm(qa, weights.q_a_norm) @ weights.q_b.T).view(-1, HEADS, NOPE + ROPE)
    new = to_fp8(torch.cat([norm(kvc, weights.kv_a_norm), kpe], dim=-1) / k_scale) * k_scale
    for request, tokens in enumerate(CONTEXT):
        past = torch.stack([cache[table[request, t // 4], t % 4] for t in range(tokens)]) if tokens else new[:0]
        keys = torch.cat([to_fp8(past / k_scale) * k_scale, new[request * q_len : (request + 1) * q_len]])
        for j in range(q_len):
            row = request * q_len + j
            for head in range(HEADS):
                absorbed = q[row, head, :NOPE] @ weights.w_uk[head]
                query = to_fp8(torch.cat([absorbed, q[row, head, NOPE:]]))
                weight = torch.softmax(keys[: tokens + j + 1] @ query / (NOPE + ROPE) ** 0.5, dim=0)
                out = weights.w_uv[head] @ (weight @ keys[: tokens + j + 1, :LATENT])
                out = out * gate[row, head * V : head * V + V].sigmoid()
                torch.testing.assert_close(got[row, head * V : head * V + V], out, rtol=1e-9, atol=1e-9)


def test_rounding_points() -> None:
    q_len = 4
    weights = _weights_as(_weights(), BF16)
    proj, cache, *where = _paged(q_len, dtype=BF16, seed=3)
    wide = _weights_as(weights, F64)
    exact = mla(proj.to(F64), wide, cache.to(F64), *where, q_len=q_len, **STEP)
    error = {}
    for fused in (True, False):
        out = mla(proj, weights, cache.clone(), *where, q_len=q_len, fused_rounding=fused, **STEP)
        assert out.dtype == BF16
        error[fused] = ((out.to(F64) - exact).norm() / exact.norm()).item()
    assert error[True] < error[False] < 12 * 2**-9


def test_wrong_shapes_and_tables_are_refused() -> None:
    weights = _weights()
    proj, cache, table, context = _paged(2)
    with pytest.raises(InputError, match="6 rows are not 3 requests times 3 tokens"):
        mla(proj, weights, cache, table, context, q_len=3, **STEP)
    with pytest.raises(InputError, match=f"need {COLUMNS}"):
        mla(proj[:, :-3], weights, cache, table, context, q_len=2, **STEP)
    with pytest.raises(InputError, match="cache rows are 13 wide"):
        mla(proj, weights, cache[..., :-1], table, context, q_len=2, **STEP)
    with pytest.raises(InputError, match="request 2 reaches token 14, its block table holds 12"):
        mla(proj, weights, cache, table[:, :-1], context, q_len=2, **STEP)
    for block in (-1, len(cache)):
        wrong = torch.where(table == table[0, 0], block, table)
        with pytest.raises(InputError, match=r"request 0 names a block outside 0\.\.11"):
            mla(proj, weights, cache, wrong, context, q_len=2, **STEP)
