"""A PDL kernel among its like: launched back to back, and behind a predecessor whose result is not there yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..kernels import Family
from . import chain
from .graphs import captured

if TYPE_CHECKING:
    import torch

SETS = 4
"""Sets of outputs (and of activations and states) that the calls go round."""
ROUNDS = 3
"""Times round back to back; once where an input is updated in place, and behind a predecessor: the second time round the
activations of the first are still there, and reading them too soon would do no harm."""
SPIN_US = 100.0
"""What the predecessor takes: longer than the host needs for the launches that follow."""
POISON = 0xFF
"""Every byte of an activation that was not handed over: NaN."""


def chain_faults(
    family: Family,
    runner: Any,
    inputs: Mapping[str, torch.Tensor],
    fresh: Mapping[str, torch.Tensor],
    output: Callable[[str], tuple[torch.Tensor, torch.Tensor]],
) -> list[str]:
    """What goes wrong with programmatic edges that goes right without.

    The reference is a launch without the edge. Launched back to back, the kernel must not hurt the scratch
    memory or the results of its own earlier call, which may still run. Behind a predecessor that writes the
    activations at its end it must not read them sooner than its wait.

    Args:
        family: the engine's.
        runner: of what is checked; launches of it have ``pdl``.
        inputs: by name, on the GPU; not changed.
        fresh: what inputs that are updated in place hold before a call.
        output: gives a new (poisoned whole, view) of an output by its name.
    """
    import torch

    from .check import poison_value, written_beyond

    handed = chain.handed_over(family, inputs)
    sets: list[dict[str, torch.Tensor]] = []
    wholes: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
    for _ in range(SETS):
        outputs = {name: output(name) for name in family.output_specs(runner.compiled.problem)}
        own = {name: inputs[name].clone() for name in (*handed, *family.mutated)}
        wholes.append(outputs)
        sets.append({**inputs, **own, **{name: view for name, (_, view) in outputs.items()}})

    def reset(*, hand_over: bool) -> None:
        for tensors, outputs in zip(sets, wholes, strict=True):
            for whole, _ in outputs.values():
                whole.fill_(poison_value(whole.dtype))
            for name in family.mutated:
                tensors[name].copy_(fresh[name])
            for name in handed:
                if hand_over:
                    tensors[name].view(-1).view(torch.uint8).fill_(POISON)
                else:
                    tensors[name].copy_(inputs[name])

    def bits(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[name].reshape(-1).view(torch.uint8).clone() for name in wholes[0]]

    reset(hand_over=False)
    runner.bind(sets[0], pdl=False)()
    torch.cuda.synchronize()
    wanted = bits(sets[0])
    faults: list[str] = []

    def judge(how: str) -> None:
        torch.cuda.synchronize()
        for outputs in wholes:
            for name, (whole, view) in outputs.items():
                if (place := written_beyond(whole, view)) is not None:
                    faults.append(f"{how}: {name} was written beyond its end, at element {place} of {view.numel()}")
        wrong = sum(not all(torch.equal(a, b) for a, b in zip(bits(tensors), wanted, strict=True)) for tensors in sets)
        if wrong:
            faults.append(f"{how}: {wrong} of {SETS} outputs have other bits than without programmatic edges")

    calls = [runner.bind(tensors) for tensors in sets]
    before = [
        [chain.predecessor(inputs[name], tensors[name], SPIN_US, runner.carveout) for name in handed]
        for tensors in sets
    ]
    for hand_over, where in ((False, "back to back"), (True, "behind a predecessor that writes the activations last")):
        sequence: list[Callable[[], None]] = []
        for _ in range(1 if hand_over or family.mutated else ROUNDS):
            for call, predecessors in zip(calls, before, strict=True):
                sequence += [*(predecessors if hand_over else ()), call]
        reset(hand_over=hand_over)
        for step in sequence:
            step()
        judge(f"PDL launches {where}")
        graph = captured(sequence)
        reset(hand_over=hand_over)
        graph.replay()
        judge(f"a graph of PDL launches {where}")
        if faults:
            break
    return faults
