"""The experts' compiled kernel with MXFP8 activations on :mod:`ptx_machine`: latent and hidden values rounded as the twin rounds them, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from k3lab.kernels.experts.layout import LOADED, unload
from k3lab.kernels.experts.twin import routed

from . import test_experts_machine as compiled
from .ptx_machine import Step


class Mxfp8Machine(compiled.ExpertsMachine):
    """With conversions to E4M3 and back."""

    def do_cvt(self, step: Step, who: np.ndarray) -> None:
        if step.name == ("cvt", "rn", "satfinite", "e4m3x2", "f32"):
            codes = []
            for arg in step.args[1:3]:
                value = torch.from_numpy(self.get(arg, who, "f32").copy()).clamp(-448, 448)
                codes.append(value.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint16))
            self.put(step.args[0], who, codes[0] << np.uint16(8) | codes[1])
        elif step.name == ("cvt", "rn", "f16x2", "e4m3x2"):
            both = np.ascontiguousarray(self.get(step.args[1], who, "b16")).view(np.uint8)
            halves = torch.from_numpy(both.copy()).view(torch.float8_e4m3fn).half()
            self.put(step.args[0], who, halves.numpy().view(np.uint32))
        elif step.name == ("cvt", "f32", "f16"):
            value = np.ascontiguousarray(self.get(step.args[1], who, "b16")).view(np.float16)
            self.put(step.args[0], who, value.astype(np.float32))
        else:
            super().do_cvt(step, who)

    def do_mov(self, step: Step, who: np.ndarray) -> None:
        targets = self.words(step.args[0])
        if step.name[-1] != "b32" or len(targets) != 2:
            super().do_mov(step, who)
            return
        word = self.get(step.args[1], who, "b32")
        self.put(targets[0], who, (word & np.uint32(0xFFFF)).astype(np.uint16))
        self.put(targets[1], who, (word >> np.uint32(16)).astype(np.uint16))

    def do_max(self, step: Step, who: np.ndarray) -> None:
        if "NaN" not in step.name:
            super().do_max(step, who)
            return
        first, second = (self.get(arg, who, "f32") for arg in step.args[1:3])
        self.put(step.args[0], who, np.maximum(first, second))


@pytest.mark.parametrize("kind", ["mxfp8_floor", "mxfp8_ceil", "mxfp8_ceil_floor"])
def test_the_compiled_kernel_has_the_twins_bits(monkeypatch, kind):
    monkeypatch.setattr(compiled, "ExpertsMachine", Mxfp8Machine)
    change = {"rows": 3, "kind": kind, "intermediate": 32}
    made = compiled.launched(monkeypatch, change, {"tasks": 4}, 2)
    latent = torch.from_numpy(made.memory.get("latent")).view(torch.bfloat16)
    steep = torch.randint(0, 3, latent.shape, generator=torch.Generator().manual_seed(1)) * 7 + 1
    latent.mul_((steep * (latent > 0)).bfloat16())  # whole numbers to 15, which MXFP8 rounds where they are together
    made.memory.data[made.at["latent"] :][: 2 * latent.numel()] = latent.view(torch.uint8).numpy().reshape(-1)
    made.run(0)
    problem, inputs = made.problem, made.inputs
    chosen, ids = torch.unique(inputs["ids"][:2], return_inverse=True)
    experts = unload({name: inputs[name][chosen] for name in LOADED})
    given = (latent[:2], ids, inputs["weights"][:2], experts)
    betas = {"beta": problem.beta, "linear_beta": problem.linear_beta}
    wanted = routed(*given, **betas, activations=kind)
    got = torch.from_numpy(made.memory.get("latent_partial")).view(torch.bfloat16)
    assert torch.equal(got[:2].view(torch.int16), wanted.view(torch.int16)) and got[2:].isnan().all()
    assert not torch.equal(wanted, routed(*given, **betas)), "nothing was rounded"
