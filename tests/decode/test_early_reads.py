"""What KDA's kernels read before they wait for the launch before them was written before any launch of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from k3lab.decode import tuned
from k3lab.decode.expert_memory import hold
from k3lab.decode.weights import RankWeights
from k3lab.kernels import ModelCard, family
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .test_tuned_families import steps, turn, weights
from .twin_runner import AnyTwinRunner, every_entry

__all__ = ["weights"]  # the fixture
POOLS = ("conv_state", "state")


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Log(TorchDispatchMode):
    """In order: memory that operators write, and kernels of families with the memory of their tensors.

    Tensors are kept, so that no memory is given out twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, dict[str, int]]] = []
        self.kept: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        written = [*tree_leaves(made)]
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(value)
        if not function.is_view:
            found = {str(place): storage(one) for place, one in enumerate(written) if isinstance(one, torch.Tensor)}
            self.entries.append(("", found))
        self.kept.append(written)
        return made


@pytest.mark.parametrize(("requests", "q_len"), [(3, 1), (2, 4)])
def test_nothing_writes_slots_weights_or_states_between_the_first_launch_of_a_step_and_kda(
    tiny: ModelCard, weights: RankWeights, monkeypatch: pytest.MonkeyPatch, requests: int, q_len: int
) -> None:
    log = Log()

    class Runner(AnyTwinRunner):
        def bind(self, tensors: dict[str, torch.Tensor], **more: Any) -> Any:
            call, places = super().bind(tensors, **more), {name: storage(one) for name, one in tensors.items()}
            log.kept.append(tensors)

            def logged() -> None:
                log.entries.append((self.family.name, places))
                with torch.utils._python_dispatch._disable_current_modes():  # a kernel's own work
                    call()

            return logged

    monkeypatch.setattr(tuned, "Runner", Runner)
    AnyTwinRunner.calls = []
    used = tuned.TunedOperators(tiny, every_entry(tiny, q_len), dtype=torch.float64, device="cpu")
    turn(weights, hold)
    with log:
        steps(weights, used, requests, q_len)
    kda, first, looked = family("kda"), 0, 0
    early = {*kda.rotated, *kda.constant}
    for place, (name, tensors) in enumerate(log.entries):
        if name == "lm_head" and "tokens" in tensors:  # a step begins with the embedding
            first, seen = place, set()
        if name != "kda":
            continue
        looked += 1
        read = {tensors[one]: one for one in early}
        for by, others in log.entries[first:place]:
            # a layer's pools are its own: no other layer of the step writes there
            written = set(others.values()) if not by else {others[one] for one in POOLS if by == "kda"}
            assert not written & read.keys(), (
                f"{by or 'an operator'} writes {[read[one] for one in written & read.keys()]}"
            )
        assert tensors["state"] not in seen, "a layer's kernel ran twice in a step"
        seen.add(tensors["state"])
    # the small model's KDA layers, three steps each; and something lies between them and the embedding
    assert looked == 3 * sum(1 for layer in range(tiny.num_hidden_layers) if layer not in tiny.mla_layers)
