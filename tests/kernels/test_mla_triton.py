"""The Triton engine of the MLA core: equal to the twin on the interpreter, compiled for every architecture, waits in order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.cost_features import tensor_instructions
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.interpret import check_interpreted
from k3lab.tuning.propose import ENUMERABLE
from k3lab.tuning.sass_order import behind_fault, order, wait_fault

from .mla_case import FAMILY, H200, problem, row_counts, small

ENGINE = FAMILY.engine("triton")
CASES = [
    # kind, rows, live rows, changes of the config, of the problem
    ("bf16", 5, 2, {"splits": 1, "merge": "own"}, {}),
    ("bf16_verify4", 4, 4, {"splits": 2, "merge": "own"}, {"heads": 12}),
    ("bf16_verify8", 16, 11, {"splits": 4, "queries": 16}, {}),
    ("fp8", 5, 5, {"splits": 4, "merge": "own", "block_n": 64}, {}),
    ("fp8_verify4", 8, 7, {"splits": 2}, {}),
    ("bf16", 20, 20, {"splits": 2, "block_n": 16}, {"context": 40, "heads": 1, "v_dim": 16, "block_size": 64}),
]


def config(one, **changes):
    space = ENGINE.space(one, H200)
    chosen = {**space.default, **changes}
    assert space.illegal(chosen) is None
    return chosen


def _child(index: int) -> None:
    """One case in a process that has the interpreter."""
    from .mla_case import drawn, inserted, judge, same_cache, written

    kind, rows, live, changes, sizes = CASES[index]
    one = small(rows, kind, **{**sizes, "context": sizes.get("context", 100)})
    inputs = drawn(one, index)
    inputs["context"][-1] = one.context if index % 2 else 0  # one request without a token, one that fills its blocks
    dead = dict(inputs)
    dead["proj"] = inputs["proj"].clone()
    dead["proj"][live:] = float("nan")
    alive = -(-live // one.q_len)
    for name in ("context", "block_table"):
        dead[name] = inputs[name].clone()
        dead[name][alive:] = -(2**30)
    found = ENGINE.interpreted(one, config(one, **{"block_k": 64, **changes}), dead, rows=live)
    judge(one, inputs, found["out"], live)
    same_cache(
        found["cache"].to(inputs["cache"].dtype), inserted(one, inputs), inputs["cache"], written(one, inputs, live)
    )


@pytest.mark.parametrize("index", range(len(CASES)))
def test_equals_the_twin_on_the_interpreter(index):
    """Fewer rows than compiled for, dead rows of NaN, dead requests whose tables lead nowhere."""
    code = f"from tests.kernels import test_mla_triton as t; t._child({index})"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = __file__.rsplit("/tests/", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert not done.returncode, done.stderr[-2000:]


def test_the_house_check_interprets_it():
    one = small(3)
    result = check_interpreted(FAMILY, ENGINE, one, config(one), 0)
    assert result.how == "interpreter" and result.ok, result.reason
    verify = small(8, "fp8_verify8")
    result = check_interpreted(FAMILY, ENGINE, verify, config(verify), 0)
    assert result.ok and [case["rows"] for case in result.cases] == [8, 7], result.reason


@pytest.mark.parametrize(
    ("arch", "kind", "rows"),
    [("sm_90a", "bf16", 1), ("sm_103a", "bf16_verify8", 8), ("sm_90a", "fp8_128k_verify8", 8), ("sm_103a", "fp8", 64)],
)
def test_compiles_without_spills_and_waits_before_it_reads_what_others_write(arch, kind, rows):
    one = problem(rows, kind)
    compiled = ENGINE.compile(one, config(one), arch)
    assert json.dumps(dict(compiled.config))
    for launch in compiled.launches:
        found = kernel_resources(launch)
        assert re.match(r"k3_mla_triton_(query|absorb|attend|merge|value)$", found.kernel)
        assert found.spill_instructions == 0 and found.stack_bytes == 0 and found.registers <= 255, found.kernel
        assert found.dynamic_shared_bytes == launch.shared_bytes <= H200.shared_per_block, found.kernel
        assert (tensor_instructions(found.instructions) > 0) != found.kernel.endswith("merge"), found.kernel
        assert launch.pdl
        weights = found.kernel.endswith(("query", "absorb", "value"))
        # none but weights are asked for before the wait, and those of every kernel that has some
        assert wait_fault(order(launch.cubin), r"LDG\.E\.EF\.\S*", ahead=int(weights)) is None, found.kernel
    assert ENGINE.releases_behind(compiled.config) and behind_fault(order(compiled.launches[-1].cubin)) is None


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("kind", FAMILY.kinds[::3])
def test_defaults_are_legal_and_the_space_can_be_listed(tp, kind):
    for rows in row_counts(kind):
        one = problem(rows, kind, tp)
        for card in ("H200", "GB300"):
            space = ENGINE.space(one, gpu_card(card))
            assert space.illegal(space.default) is None
            assert space.size <= ENUMERABLE


def test_refusals_and_illegal_configs_say_why():
    assert "sm_80" in ENGINE.refuses(problem(8), "sm_80")
    assert "rope 8 is not a power of two" in ENGINE.refuses(small(1, rope=8), "sm_90a")
    assert "v_dim 24" in ENGINE.refuses(small(1, v_dim=24), "sm_90a")
    assert "q_lora 48" in ENGINE.refuses(small(1, q_lora=48), "sm_90a")
    assert "cache blocks of 48" in ENGINE.refuses(small(1, block_size=48), "sm_90a")
    space = ENGINE.space(problem(1), H200)
    for change, why in (
        ({"splits": 128}, "fewer than 16 tokens each"),
        ({"queries": 32}, "a request has fewer"),
        ({"k_order": "invariant", "block_k": 256}, "block_k 128"),
        ({"block_n": 64, "stages": 3}, "shared memory"),
    ):
        assert why in space.illegal({**space.default, **change}), change


def test_invariant_configs_have_one_order():
    orders = set()
    for rows, tp, kind in ((1, 16, "bf16"), (64, 8, "bf16"), (8, 4, "bf16_verify8")):
        one = problem(rows, kind, tp)
        space = ENGINE.space(one, H200).restricted({"k_order": "invariant"})
        orders.add(ENGINE.summation_order(one, space.default))
    assert len(orders) == 1


def test_the_chain_in_operators_equals_the_twin():
    from .mla_case import inserted, judge, same_cache, written

    for kind, rows in (("bf16", 3), ("bf16_verify4", 8), ("fp8", 2), ("fp8_verify2", 4)):
        one = small(rows, kind)
        inputs = FAMILY.inputs(one, 7)
        own = {**inputs, "cache": inputs["cache"].clone()}
        out = FAMILY.operators(one)(own)["out"]
        judge(one, inputs, out)
        same_cache(own["cache"], inserted(one, inputs), inputs["cache"], written(one, inputs))
        tensors = {**inputs, "cache": inputs["cache"].clone(), "out": torch.zeros_like(out)}
        FAMILY.alternative(one, tensors)()
        assert torch.equal(tensors["out"], out)
