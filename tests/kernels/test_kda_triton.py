"""The Triton engine of KDA: on the interpreter against the twin, padded and in place, and its machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.sass_order import WAIT, behind_fault, order, places, release_fault, unwaited

from .kda_case import FAMILY, H200, problem

ENGINE = FAMILY.engine("triton")


INTERPRETED = """
import json, sys, torch
from k3lab.kernels.kda.triton_engine import TritonEngine
from tests.kernels.kda_case import FAMILY, expected_in_place, pool, problem
engine, found = TritonEngine(), []
for rows, kind in json.loads(sys.argv[1]):
    one = problem(rows, kind, heads=2)
    inputs = FAMILY.inputs(one, rows)
    got, wanted = engine.interpret(one, {"num_warps": 8, "release": "entry"}, inputs), FAMILY.twin(one, inputs)
    assert set(got) == set(wanted)
    found.append({n: float((got[n].double() - wanted[n].double()).norm() / wanted[n].double().norm()) for n in wanted})
for rows, live, kind, slots in json.loads(sys.argv[2]):
    one = problem(rows, kind, heads=1)
    inputs = pool(one, slots, 8)
    out, history, state = expected_in_place(one, inputs, live)
    held = {n: t.clone().float() if t.is_floating_point() else t for n, t in inputs.items()}
    held |= {"conv_states": held["conv_state"], "states": held["state"], "out": torch.full((rows, one.width), 7.0), "rows": live}
    function, args, constants = TritonEngine._kernel(one, {"release": "entry"}, pdl=False)
    function[(one.requests,)](**{name: held[arg.name] for name, (_, arg) in args.items()}, **constants)
    assert torch.equal(held["conv_state"], history.float()), "history"
    written = {to - 1 for row in slots if row[0] > 0 for to in row[1:] if to > 0}
    for entry in set(range(8)) - written:
        assert torch.equal(held["state"][entry], inputs["state"][entry]), f"entry {entry} was written"
    assert float((held["state"] - state).norm() / state.norm()) < 2**-9
    assert (held["out"][live:] == 7).all() and not held["out"][:live][out[:live] == 0].any()
    assert float((held["out"][:live] - out[:live]).norm()) <= 2**-7 * float(out[:live].norm())
print(json.dumps(found))
"""


def test_equals_the_twin_on_the_interpreter_and_a_cache_in_place_and_padded():
    """In one process, with the interpreter on."""
    cases = [(3, "plain"), (6, "verify3"), (8, "verify8")]
    pools = [
        (4, 3, "plain", [[2, 2], [0, 4], [5, 0], [3, 3]]),
        (8, 6, "verify4", [[4, 1, 2, 3, 4], [6, 5, 0, 7, 8]]),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps(cases), json.dumps(pools)],
        capture_output=True, text=True, timeout=240, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for (rows, kind), errors in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        for name, error in errors.items():
            assert error <= FAMILY.tolerance(problem(rows, kind), name).relative, (kind, name, error)


def test_refusals_and_rules_say_why():
    assert ENGINE.refuses(problem(8), "sm_103a") is None
    assert "power of two" in ENGINE.refuses(problem(8, head_dim=96), "sm_90a")
    assert "3 taps" in ENGINE.refuses(problem(8, conv_size=3), "sm_90a")
    assert "do not fit" in ENGINE.refuses(problem(8, head_dim=256), "sm_90a")
    space = ENGINE.space(problem(8, gate_rank=512), H200)
    assert "exceed the registers of 4 warps" in space.illegal({**space.default, "num_warps": 4})


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize(("rows", "kind"), [(8, "plain"), (8, "verify8")])
def test_machine_code(arch, rows, kind):
    one = problem(rows, kind)
    chosen = ENGINE.space(one, H200).default
    (launch,) = ENGINE.compile(one, chosen, arch).launches
    found, code = kernel_resources(launch), order(launch.cubin)
    assert found.kernel.startswith("k3_kda_triton_step") and launch.pdl
    # a few words of a head's 64 KB of state and 32 of gate rows, with all 255 registers taken
    assert found.stack_bytes <= 64 and found.spill_instructions <= 16 and found.registers <= 255
    assert found.dynamic_shared_bytes == launch.shared_bytes == 8192
    (wait,) = places(code, WAIT)
    assert not code[wait].predicated
    early = [code[place].mnemonic for place in unwaited(code)]
    assert early.count("LDG.E.EF.128") == 16, "the whole state is asked for before the wait"
    assert not any(one.startswith(("STG", "ST.", "RED", "ATOM")) or one == "EXIT" for one in early)
    assert release_fault(code, r"LDG\.E\.EF\.128", "loads") is None
    assert ENGINE.releases_behind(chosen) and behind_fault(code) is None
