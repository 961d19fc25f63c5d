"""KDA: against a scalar recurrence in numpy, flash-linear-attention's naive code, and torch's conv1d."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.collectives import run_virtual_ranks
from k3lab.kernels.kda.twin import KdaWeights, delta_rule, kda, log_decay

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
B, HEADS, D, R, W = 2, 16, 6, 5, 4
WIDTH = HEADS * D
STEP = {"lower_bound": -5.0, "eps": 1e-2}  # a large eps, so that a wrong place for it shows


def _weights(dtype: torch.dtype = F64) -> KdaWeights:
    conv = [torch.randn(WIDTH, W, dtype=F64) for _ in range(3)]
    return KdaWeights(
        f_b=(torch.randn(WIDTH, R, dtype=F64) * 0.5).to(dtype),
        conv_q=conv[0].to(F64 if dtype == F64 else F32),
        conv_k=conv[1].to(F64 if dtype == F64 else F32),
        conv_v=conv[2].to(F64 if dtype == F64 else F32),
        a_log=torch.randn(HEADS, dtype=F64) * 0.7,
        dt_bias=torch.randn(WIDTH, dtype=F64) - 1,
        o_norm=1 + 0.3 * torch.randn(D, dtype=F64),
    )


def _case(q_len: int, seed: int = 0, pad: int = 3) -> tuple[torch.Tensor, KdaWeights, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    weights = _weights()
    proj = torch.randn(B * q_len, 4 * WIDTH + R + HEADS + pad, dtype=F64)
    return proj, weights, torch.randn(B, W - 1, 3 * WIDTH, dtype=F64), torch.randn(B, HEADS, D, D, dtype=F64)


def _sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def _by_formula(proj, weights, conv_state, state, q_len: int):
    """The published formulas, token by token and head by head, in numpy: shares no code with the twin."""
    p, w = proj.numpy(), {k: getattr(weights, k).numpy() for k in vars(weights)}
    taps = np.concatenate([w["conv_q"], w["conv_k"], w["conv_v"]])
    out, states = np.zeros((len(p), WIDTH)), np.zeros((B, q_len, HEADS, D, D))
    for request in range(B):
        history = [row.numpy() for row in conv_state[request]]
        s = state[request].numpy().copy()
        for token in range(q_len):
            row = p[request * q_len + token]
            history.append(row[: 3 * WIDTH])
            conv = sum(taps[:, j] * history[-W + j] for j in range(W))  # the last tap meets the current token
            conv = conv * _sigmoid(conv)
            gate = w["f_b"] @ row[4 * WIDTH : 4 * WIDTH + R]
            for h in range(HEADS):
                mine = slice(h * D, h * D + D)
                q, k, v = (conv[i * WIDTH :][mine] for i in range(3))
                q = q / np.sqrt((q**2).sum() + 1e-6) / np.sqrt(D)
                k = k / np.sqrt((k**2).sum() + 1e-6)
                decay = np.exp(-5 * _sigmoid(np.exp(w["a_log"][h]) * (gate[mine] + w["dt_bias"][mine])))
                beta = _sigmoid(row[4 * WIDTH + R + h])
                s[h] = s[h] * decay[None, :]
                u = beta * (v - s[h] @ k)
                s[h] = s[h] + np.outer(u, k)
                o = s[h] @ q
                o = o / np.sqrt((o**2).mean() + STEP["eps"]) * w["o_norm"]
                out[request * q_len + token, mine] = o * _sigmoid(row[3 * WIDTH : 4 * WIDTH][mine])
            states[request, token] = s
    return out, states


@pytest.mark.parametrize("q_len", [1, 3, 8])
def test_recurrence_follows_the_formulas(q_len: int) -> None:
    case = _case(q_len)
    out, conv_states, states = kda(*case, q_len=q_len, **STEP)
    expected_out, expected_states = _by_formula(*case, q_len)
    np.testing.assert_allclose(out.numpy(), expected_out, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(states.numpy(), expected_states, rtol=1e-9, atol=1e-12)
    raw = case[0][:, : 3 * WIDTH].view(B, q_len, -1)
    history = torch.cat([case[2], raw], dim=1)
    for token in range(q_len):
        assert torch.equal(conv_states[:, token], history[:, token + 1 : token + W])


def test_l2_norm_adds_its_eps_to_the_sum_of_squares() -> None:
    proj, weights, conv_state, state = _case(1)
    proj[:, : 3 * WIDTH] *= 3e-3  # sums of squares of the order of the eps
    conv_state = conv_state * 3e-3
    out, _, states = kda(proj, weights, conv_state, state, q_len=1, **STEP)
    expected_out, expected_states = _by_formula(proj, weights, conv_state, state, 1)
    np.testing.assert_allclose(out.numpy(), expected_out, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(states.numpy(), expected_states, rtol=1e-9, atol=1e-13)


def test_delta_rule_agrees_with_flash_linear_attention() -> None:
    naive = pytest.importorskip("fla.ops.kda.naive")
    torch.manual_seed(1)
    tokens, dim_k, dim_v = 20, 8, 5  # V differs from K: a transposed state would not fit
    q, k = (torch.nn.functional.normalize(torch.randn(B, tokens, HEADS, dim_k), dim=-1) for _ in range(2))
    v, beta = torch.randn(B, tokens, HEADS, dim_v), torch.rand(B, tokens, HEADS)
    decay, state = -5 * torch.rand(B, tokens, HEADS, dim_k), torch.randn(B, HEADS, dim_v, dim_k)
    # its state is [K, V], its gate is the log decay, its scale is applied to q
    expected, final = naive.naive_recurrent_kda(
        q, k, v, decay, beta, initial_state=state.transpose(-1, -2), output_final_state=True
    )
    for t in range(tokens):
        state, out = delta_rule(state, q[:, t] * dim_k**-0.5, k[:, t], v[:, t], decay[:, t], beta[:, t])
        torch.testing.assert_close(out, expected[:, t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final.transpose(-1, -2), rtol=1e-4, atol=1e-5)


def test_decay_gate_agrees_with_flash_linear_attention() -> None:
    gate = pytest.importorskip("fla.ops.kda.gate")
    torch.manual_seed(2)
    raw, a_log, dt_bias = torch.randn(7, HEADS, D) * 4, torch.randn(HEADS), torch.randn(WIDTH)
    expected = gate.naive_kda_lowerbound_gate(raw, a_log, dt_bias, lower_bound=-5.0)
    got = log_decay(raw, a_log, dt_bias, -5.0)
    torch.testing.assert_close(got, expected.view_as(got), rtol=1e-5, atol=1e-6)
    assert -5 <= got.min() <= got.max() <= 0


def test_conv_agrees_with_conv1d() -> None:
    """With a zero state and beta 1 the first token's state is v k^T: it shows the conv output of v."""
    proj, weights, conv_state, state = _case(1)
    proj[:, 4 * WIDTH + R : 4 * WIDTH + R + HEADS] = 60.0
    _, _, states = kda(proj, weights, conv_state, torch.zeros_like(state), q_len=1, **STEP)
    window = torch.cat([conv_state, proj[:, None, : 3 * WIDTH]], dim=1).transpose(1, 2)
    taps = torch.cat([weights.conv_q, weights.conv_k, weights.conv_v])[:, None]
    conv = torch.nn.functional.conv1d(window, taps, groups=3 * WIDTH)[..., 0]
    _, k, v = torch.nn.functional.silu(conv).view(B, 3, HEADS, D).unbind(1)
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(states[:, 0], v[..., :, None] * k[..., None, :], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [F64, BF16])
def test_a_verify_step_equals_single_steps_from_any_snapshot(dtype: torch.dtype) -> None:
    q_len = 8
    proj, weights, conv_state, state = _case(q_len, seed=4)
    proj, conv_state, state = proj.to(dtype), conv_state.to(dtype), state.to(F64 if dtype == F64 else F32)
    out, conv_states, states = kda(proj, weights, conv_state, state, q_len=q_len, **STEP)
    rows = proj.view(B, q_len, -1)
    for token in range(q_len):
        before = (conv_states[:, token - 1], states[:, token - 1]) if token else (conv_state, state)
        one, conv_after, after = kda(rows[:, token], weights, *before, q_len=1, **STEP)
        tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == F64 else {"rtol": 2**-8, "atol": 1e-6}
        torch.testing.assert_close(one, out.view(B, q_len, -1)[:, token], **tolerance)
        torch.testing.assert_close(after[:, 0], states[:, token], rtol=1e-5, atol=1e-6)
        assert torch.equal(conv_after[:, 0], conv_states[:, token])


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_sharded_by_heads_equals_unsharded(size: int) -> None:
    q_len = 3
    proj, weights, conv_state, state = _case(q_len, seed=5)
    whole = kda(proj, weights, conv_state, state, q_len=q_len, **STEP)

    def of_rank(tensor: torch.Tensor, rank: int, parts: int = 1, dim: int = -1) -> torch.Tensor:
        """The rank's heads of each of ``parts`` equal parts side by side along ``dim``."""
        pieces = [part.chunk(size, dim=dim)[rank] for part in tensor.chunk(parts, dim=dim)]
        return torch.cat(pieces, dim=dim)

    def body(comm):
        rank = comm.rank
        qkvg, fa, b, _ = proj.split([4 * WIDTH, R, HEADS, 3], dim=-1)
        mine = torch.cat([of_rank(qkvg, rank, 4), fa, of_rank(b, rank)], dim=-1)
        local = {k: of_rank(v, rank, dim=0) for k, v in vars(weights).items() if k != "o_norm"}
        result = kda(
            mine, dataclasses.replace(weights, **local), of_rank(conv_state, rank, 3), of_rank(state, rank, dim=1),
            q_len=q_len, **STEP,
        )  # fmt: skip
        return comm.all_gather(result[0], dim=-1), result[1], comm.all_gather(result[2], dim=2)

    for rank, (out, conv_states, states) in enumerate(run_virtual_ranks(size, body)):
        torch.testing.assert_close(out, whole[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(states, whole[2], rtol=1e-9, atol=1e-9)
        assert torch.equal(conv_states, of_rank(whole[1], rank, 3))


def test_padding_columns_do_not_matter_and_inputs_stay() -> None:
    proj, weights, conv_state, state = _case(2)
    copies = [t.clone() for t in (proj, conv_state, state)]
    expected = kda(proj, weights, conv_state, state, q_len=2, **STEP)
    assert all(torch.equal(a, b) for a, b in zip(copies, (proj, conv_state, state), strict=True))
    proj[:, -3:] = float("nan")
    for got, wanted in zip(kda(proj, weights, conv_state, state, q_len=2, **STEP), expected, strict=True):
        assert torch.equal(got, wanted)


def test_rounding_points_of_the_fused_and_unfused_kernels() -> None:
    torch.manual_seed(6)
    q_len = 4
    proj, _, conv_state, state = _case(q_len, seed=6)
    weights = _weights(BF16)
    args = (proj.to(BF16), weights, conv_state.to(BF16), state.to(F32))
    wide = dataclasses.replace(weights, **{k: v.to(F64) for k, v in vars(weights).items()})
    exact, _, exact_states = kda(args[0].to(F64), wide, args[2].to(F64), args[3].to(F64), q_len=q_len, **STEP)
    error = {}
    for fused in (True, False):
        out, conv_states, states = kda(*args, q_len=q_len, fused_rounding=fused, **STEP)
        assert (out.dtype, conv_states.dtype, states.dtype) == (BF16, BF16, F32)
        error[fused] = ((out.to(F64) - exact).norm() / exact.norm()).item()
        error[fused, "state"] = ((states.to(F64) - exact_states).norm() / exact_states.norm()).item()
    assert 0.5 * 2**-9 < error[True] < 1.5 * 2**-9
    assert error[True] < error[False] < 6 * 2**-9
    assert error[True, "state"] < 0.5 * error[False, "state"]  # the conv output is not rounded when fused


def test_wrong_shapes_are_refused() -> None:
    proj, weights, conv_state, state = _case(2)
    with pytest.raises(InputError, match="4 rows are not 2 requests times 3 tokens"):
        kda(proj, weights, conv_state, state, q_len=3, **STEP)
    with pytest.raises(InputError, match=f"need {4 * WIDTH + R + HEADS}"):
        kda(proj[:, :-4], weights, conv_state, state, q_len=2, **STEP)


def test_a_filter_of_one_tap_has_no_history():
    proj, weights, _, state = _case(4)
    one = {name: getattr(weights, name)[:, -1:] for name in ("conv_q", "conv_k", "conv_v")}
    weights = dataclasses.replace(weights, **one)
    history = torch.empty(B, 0, 3 * WIDTH, dtype=F64)
    out, convs, _ = kda(proj, weights, history, state, q_len=4, **STEP)
    assert convs.shape == (B, 4, 0, 3 * WIDTH)
    # the same as four taps of which only the last is not zero
    four = {name: torch.nn.functional.pad(tap, (3, 0)) for name, tap in one.items()}
    want, _, _ = kda(
        proj, dataclasses.replace(weights, **four), torch.randn(B, 3, 3 * WIDTH, dtype=F64), state, q_len=4, **STEP
    )
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
