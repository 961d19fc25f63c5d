"""The KDA kernel as the compiler made it, run on the CPU: against the twin, in place, padded, and what it reads early."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from k3lab.kernels.stamps import BLOCKS, BYTES, STAGES, TABLE_BYTES, WARPS
from k3lab.tuning.stages import roles_of, stamps_of

from .kda_case import FAMILY, PASSED, READ_EARLY, check, exact, expected_in_place, pool, problem, run

FEW = {"parts": 8, "together": 1, "warps": 8, "lanes": 16, "depth": 1, "release": "loads", "run": 4, "form": "serial"}
WIDE = {"parts": 4, "together": 1, "warps": 8, "lanes": 8, "depth": 1, "release": "end", "run": 4, "form": "serial"}
MANY = {"parts": 2, "together": 3, "warps": 8, "lanes": 8, "depth": 2, "release": "entry", "run": 4, "form": "serial"}


@pytest.mark.parametrize(
    ("rows", "live", "kind", "heads", "change"),
    [
        (1, 1, "plain", 2, FEW),
        (1, 1, "plain", 1, {**FEW, "parts": 1, "lanes": 8}),
        (1, 1, "plain", 1, {**FEW, "parts": 16, "warps": 4, "lanes": 32}),
        (3, 2, "plain", 1, {**WIDE, "warps": 16, "lanes": 16}),
        (5, 4, "plain", 2, MANY),
        (9, 7, "plain", 1, {**MANY, "parts": 4, "together": 8, "warps": 4, "depth": 1}),
        (4, 4, "plain", 1, {**FEW, "together": 4, "warps": 4, "lanes": 8, "depth": 4}),
        (8, 8, "verify8", 2, FEW),
        (8, 5, "verify8", 1, WIDE),
        # queries and keys over several warps
        (1, 1, "plain", 2, {**WIDE, "run": 1}),
        (2, 2, "plain", 1, {**FEW, "together": 2, "depth": 2, "run": 1}),
        (4, 3, "verify4", 1, {**FEW, "run": 2}),
        # all tokens at once: sums of 16 over 16 lanes, of 16 over 32, of 4 over 8
        (8, 8, "verify8", 1, {**FEW, "form": "wy"}),
        (6, 6, "verify6", 1, {**WIDE, "parts": 16, "warps": 4, "lanes": 32, "form": "wy"}),
        (4, 3, "verify2", 1, {**WIDE, "form": "wy"}),
    ],
)
def test_agrees_with_the_twin(monkeypatch, rows, live, kind, heads, change):
    done = run(problem(rows, kind, heads=heads), monkeypatch, live=live, **change)
    check(done)
    assert done.early() == READ_EARLY == {*FAMILY.rotated, *FAMILY.constant}


@pytest.mark.parametrize(
    ("rows", "live", "kind", "slots", "change"),
    [
        # request 1 is padding; request 2 leaves nothing; its neighbours read and write one slot each
        (4, 4, "plain", [[2, 2], [0, 4], [5, 0], [3, 3]], MANY),
        (2, 2, "plain", [[3, 3], [1, 1]], {**FEW, "run": 1}),
        # one of the slots written is the one read: not before all of its history has been read
        (8, 8, "verify8", [[3, 1, 2, 3, 4, 5, 6, 7, 8]], FEW),
        (8, 6, "verify4", [[4, 1, 2, 3, 4], [6, 5, 0, 7, 8]], {**FEW, "form": "wy"}),
        (3, 3, "verify3", [[1, 1, 2, 3]], {**WIDE, "parts": 2, "form": "wy"}),
        (4, 4, "verify4", [[-7, 1, 2, 3, 4]], WIDE),
    ],
)
def test_a_cache_updated_in_place_and_padding_never_written(monkeypatch, rows, live, kind, slots, change):
    one = problem(rows, kind, heads=1)
    inputs = pool(one, slots, 8)
    done = run(one, monkeypatch, live=live, inputs=inputs, in_place=True, **change)
    out, history, state = expected_in_place(one, inputs, live)
    assert torch.equal(done.get("conv_states").view(torch.int16), history.view(torch.int16))
    written = {to - 1 for row in slots if row[0] > 0 for to in row[1:] if to > 0}
    for entry in set(range(8)) - written:
        assert torch.equal(done.get("states")[entry], inputs["state"][entry]), f"entry {entry} was written"
    assert float((done.get("states") - state).norm() / state.norm()) < 2**-9
    got = done.get("out").float()
    assert bool(got[live:].isnan().all()) and not bool(got[:live][out[:live] == 0].any())
    assert float((got[:live] - out[:live]).norm()) <= 2**-7 * float(out[:live].norm())


def test_verify_leaves_the_bits_of_single_steps(monkeypatch):
    """Steps of one token, each on what the one before left, with the same shape of blocks."""
    q_len, change = 3, WIDE
    verify = problem(q_len, "verify3", heads=1)
    inputs = pool(verify, [[1, 2, 3, 4]], 8)
    whole = run(verify, monkeypatch, inputs=inputs, in_place=True, **change)
    single = problem(1, heads=1)
    cache = {name: inputs[name] for name in ("conv_state", "state")}
    for token in range(q_len):
        slots = torch.tensor([[1 + token, 2 + token]], dtype=torch.int32)
        given = {**inputs, **cache, "proj": inputs["proj"][token : token + 1], "slots": slots}
        done = run(single, monkeypatch, inputs=given, in_place=True, **change)
        cache = {"conv_state": done.get("conv_states"), "state": done.get("states")}
        assert torch.equal(done.get("out")[0].view(torch.int16), whole.get("out")[token].view(torch.int16))
    assert torch.equal(cache["state"], whole.get("states"))
    assert torch.equal(cache["conv_state"].view(torch.int16), whole.get("conv_states").view(torch.int16))


def test_a_loop_of_one_body_leaves_the_bits_of_all_tokens_written_out(monkeypatch):
    one = problem(3, "verify3", heads=1)
    written_out, rolled = (run(one, monkeypatch, **{**WIDE, "form": form}) for form in ("serial", "rolled"))
    for name in FAMILY.output_specs(one):
        found, wanted = (done.get(name).contiguous().view(torch.uint8) for done in (rolled, written_out))
        assert torch.equal(found, wanted), name


def test_all_tokens_at_once_are_as_exact_as_one_after_the_other(monkeypatch):
    """Against FP64, with a gate of zero, which no rounding moves, and decays of exp(-5) a token: one over the product of
    eight is 2e17.
    """
    one = problem(8, "verify8", heads=1)
    inputs = FAMILY.inputs(one, 4)
    inputs["f_b"] = torch.zeros_like(inputs["f_b"])
    inputs["dt_bias"] = torch.full_like(inputs["dt_bias"], 12.0)
    wanted = exact(one, inputs)
    for form in ("serial", "wy"):
        found = run(one, monkeypatch, inputs=inputs, **{**FEW, "form": form}).get("states").double()
        error = (found - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        assert float(error.max()) < 4e-7, (form, error.tolist())


def test_requests_a_block_change_no_bit(monkeypatch):
    one = problem(3, heads=1)
    alone, together = (
        run(one, monkeypatch, **{**WIDE, "together": n, "depth": n, "release": release})
        for n, release in ((1, "loads"), (3, "entry"))
    )
    for name in FAMILY.output_specs(one):
        found, wanted = (done.get(name).contiguous().view(torch.uint8) for done in (together, alone))
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize(("rows", "kind", "form"), [(1, "plain", "serial"), (2, "verify2", "wy")])
def test_a_build_with_stamps_tells_when_its_warps_pass(monkeypatch, rows, kind, form):
    table = 16 << 20
    done = run(problem(rows, kind, heads=1), monkeypatch, **{**FEW, "form": form, "stamps": table})
    check(done)
    words = done.memory.data[table : table + TABLE_BYTES].view(np.int64)
    (role,) = roles_of(stamps_of(words.reshape(len(STAGES), BLOCKS, WARPS, BYTES // 8))[0][None])
    assert [one.stage for one in role.stages] == PASSED
    assert (role.warps, role.blocks) == (FEW["warps"] * FEW["parts"], FEW["parts"])
