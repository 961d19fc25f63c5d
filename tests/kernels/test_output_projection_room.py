"""What blocks of the output projection wait for each other fits on every GPU's card; the sanitizer comes to every way they wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from k3lab.kernels import K3, InputError, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.compiling import compile_config, resources_of
from k3lab.tuning.evaluate import not_together

from . import sanitize
from .kernel_cases import MORE

FAMILY = family("output_projection")
DEFAULTS: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("cute_fused", 16, 8, {}), ("cute_apart", 16, 1, {}), ("cute_apart", 8, 16, {}), ("cute_split", 8, 64, {}),
    ("cute_split", 16, 16, {"row_sums": "cluster", "mixers": 4}),  # clusters of 8, of which GPCs are uneven
)  # fmt: skip


@pytest.mark.parametrize("gpu", ["H200", "GB300", pytest.param("B200", marks=pytest.mark.slow)])
def test_blocks_that_wait_for_each_other_fit(gpu: str) -> None:
    """By registers, shared memory and GPCs of 132, 148 and 152 SMs. The driver is asked again before a launch."""
    card = gpu_card(gpu)
    assert card.sms in (132, 148, 152)
    for name, tp, rows, change in DEFAULTS:
        engine, problem = FAMILY.engine(name), FAMILY.problem(K3, tp=tp, rows=rows)
        space = engine.space(problem, card)
        chosen = {**space.default, **change}
        assert space.illegal(chosen) is None
        compiled = compile_config(engine, problem, chosen, card.arch)
        assert not_together(compiled, resources_of(compiled), card) is None
        # whoever polls is asked about; a producer waits for nobody
        assert [launch.needs_residency for launch in compiled.launches] == [False, True][-len(compiled.launches) :]


def test_the_sanitizer_comes_to_every_way_that_blocks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine by default, and both packets, exchanges, row sums and waits; tiles in fewer places than there are."""
    came: list[tuple[str, int, dict[str, Any]]] = []

    def stopped(engine: Any, problem: Any, config: dict[str, Any], arch: str) -> None:
        space = engine.space(problem, gpu_card("H200"))
        assert space.illegal(config) is None
        came.append((engine.name, problem.width // (32 * int(config["warps_k"])), config))
        raise InputError("no GPU here")

    monkeypatch.setattr(sanitize, "compile_config", stopped)
    device = SimpleNamespace(need_card=lambda: gpu_card("H200"), arch="sm_90a")
    monkeypatch.setattr(sanitize, "require", lambda _: device)
    assert sanitize.main("output_projection", [8, 64], []) == len(came)
    for engine in FAMILY.engines:
        configs = [config for name, _, config in came if name == engine.name]
        assert {config["packet"] for config in configs} == {"bf16x7e16", "b32e32"}
    split = [config for name, _, config in came if name == "cute_split"]
    for name, values in (
        ("exchange", {"one_shot", "two_shot"}), ("row_sums", {"packets", "cluster"}), ("consumer_wait", {"start", "exit"}),
    ):  # fmt: skip
        assert {config[name] for config in split} == values
    assert any(int(config["depth"]) < steps for name, steps, config in came if name == "cute_apart")
    before = len(came)
    sanitize.main("output_projection", [8], ["restart"])
    assert len(came) - before == len(FAMILY.engines) and len(MORE["output_projection"]) < before
