"""One engine of the output projection on a GPU over loopback, and how its outputs are judged."""

from __future__ import annotations

import torch
from k3lab.kernels import family
from k3lab.kernels.collectives import LoopbackGroup, TwoShot
from k3lab.kernels.health import check_health
from k3lab.kernels.output_projection.twin import output_projection
from k3lab.kernels.transports import Loopback

FAMILY = family("output_projection")
U = 2.0**-24
"""Most relative error of one FP32 rounding; of a BF16 rounding it is 2^-8."""
SUM_ROUNDINGS = 19
"""On the way of one product into a sum over a row: folded weight, product, 7 columns, 5 + 5 steps of butterflies."""


def whole_numbers(one, seed=0):
    """Inputs whose products and sums are exact in FP32, so that every rounding of the twin is met to the bit."""
    generator = torch.Generator().manual_seed(seed)
    inputs = FAMILY.inputs(one, seed)
    inputs["x"] = torch.randint(-3, 4, inputs["x"].shape, generator=generator).to(torch.bfloat16)
    inputs["w_o"] = (torch.randint(-3, 4, inputs["w_o"].shape, generator=generator) / 64).to(torch.bfloat16)
    return inputs


def twin(one, inputs, factors, exchange):
    """With the twin's roundings, on the CPU."""
    group = LoopbackGroup(tuple(factors))
    prefix, mlp_input = output_projection(
        inputs["x"], inputs["w_o"], inputs.get("prefix"), list(inputs["blocks"]), inputs["res_norm"], inputs["res_proj"],
        inputs["norm_w"], eps=one.eps, comm=TwoShot(group) if exchange == "two_shot" else group,
    )  # fmt: skip
    return {"prefix_out": prefix, "mlp_input": mlp_input}


def exact_input(inputs, prefix, eps):
    """(the MLP's input from a rounded prefix, in FP64; how far a kernel's may lie from it), each [rows, hidden].

    The result is one BF16 rounding of an FP32 value. That value is a sum of terms ``alpha_i v_i r n`` that may cancel,
    so its error is relative to the sum of their magnitudes, not to the result:

    - a score's error is :data:`SUM_ROUNDINGS` roundings of ``sum |v f| rsqrt(mean v^2)``, and 14 of the score itself
      (half those of the square, a reciprocal root, a product);
    - a weight's is twice the largest score's (numerator and denominator), and 32 roundings for two exponentials,
      sums, reciprocal and products;
    - the norm's is half that of the mean square, which the kernel adds up from three sums that may cancel too.
    """
    f64 = {name: tensor.double() for name, tensor in inputs.items()}
    sources = torch.cat([f64["blocks"], prefix.double()[None]])
    folded, norm_w = f64["res_norm"] * f64["res_proj"][0], f64["norm_w"]
    root = (sources.square().mean(-1) + eps).rsqrt()
    scores = (sources @ folded) * root
    alpha = scores.softmax(0)
    parts = alpha[..., None] * sources
    mix = parts.sum(0)
    mean = mix.square().mean(-1, keepdim=True) + eps
    value = mix * mean.rsqrt() * norm_w

    score_error = (SUM_ROUNDINGS * (sources.abs() @ folded.abs()) * root + 14 * scores.abs()).amax(0)[:, None] * U
    weight_error = 2 * score_error + 32 * U
    terms = parts.abs().sum(0) * mean.rsqrt() * norm_w.abs()
    squares = (parts[:-1].sum(0).abs() + parts[-1].abs()).square().mean(-1, keepdim=True)
    norm_error = squares / mean * (weight_error + SUM_ROUNDINGS * U)
    before = terms * weight_error + value.abs() * norm_error
    return value, 2**-8 * value.abs() + (1 + 2**-8) * before


def worst(found, value, bound):
    """Why an output is refused, naming the element that is farthest beyond its bound; None if none is."""
    error = (found.double() - value).abs()
    beyond = torch.where(error == 0, 0.0, torch.where(error.isnan(), torch.inf, error / bound))
    place = int(beyond.argmax())
    row, column = divmod(place, value.shape[1])
    if beyond.flatten()[place] <= 1:
        return None
    return (
        f"{int((beyond > 1).sum())} of {value.numel()} elements lie beyond their bound, worst [{row}, {column}]: "
        f"{float(found[row, column])!r} where {float(value[row, column])!r} is exact, off by "
        f"{float(error[row, column]):.3e} with {float(bound[row, column]):.3e} allowed"
    )


class Case:
    """A compiled engine, its runner over loopback, tensors on the GPU and what they should become."""

    def __init__(self, device, one, chosen, factors=None, *, engine, seed=0):
        from k3lab.kernels.launch import Runner
        from k3lab.tuning.compiling import compile_config

        # factors near one, of both signs, so that prefix and blocks count for as much as the sum
        self.factors = factors or [(-1.0) ** rank * 2.0 ** (rank % 3 - 1) for rank in range(one.tp)]
        self.one, self.inputs = one, whole_numbers(one, seed)
        self.wanted = twin(one, self.inputs, self.factors, chosen.get("exchange"))
        self.exact, self.bound = exact_input(self.inputs, self.wanted["prefix_out"], one.eps)
        self.compiled = compile_config(engine, one, chosen, device.arch)
        self.runner = Runner(self.compiled, transport=Loopback(one.tp, tuple(self.factors)))
        self.outputs = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            for name, (shape, dtype) in FAMILY.output_specs(one).items()
        }
        self.tensors = {**{name: tensor.cuda() for name, tensor in self.inputs.items()}, **self.outputs}

    def poison(self):
        for tensor in self.outputs.values():
            tensor.fill_(float("nan"))

    def run(self, rows=None, pdl=None, tensors=None):
        self.poison()
        self.runner.bind({**self.tensors, **(tensors or {})}, rows=rows, pdl=pdl)()
        torch.cuda.synchronize()
        check_health(self.runner.buffers)

    def with_dead_rows(self, rows):
        """Activations whose rows from ``rows`` on are NaN."""
        found = {}
        for name, axis in FAMILY.row_axes(self.one).items():
            found[name] = self.tensors[name].clone()
            found[name].narrow(axis, rows, self.one.rows - rows).fill_(float("nan"))
        return found

    def judge(self, rows=None):
        rows = rows or self.one.rows
        got = {name: tensor.cpu() for name, tensor in self.outputs.items()}
        assert torch.equal(
            got["prefix_out"][:rows].view(torch.int16), self.wanted["prefix_out"][:rows].view(torch.int16)
        )
        found, wanted = got["mlp_input"][:rows], self.wanted["mlp_input"][:rows].double()
        assert (found.double() - wanted).norm() / wanted.norm() < 2**-10  # few roundings fall to the other side
        reason = worst(found, self.exact[:rows], self.bound[:rows])
        assert reason is None, f"mlp_input: {reason}"
        for tensor in got.values():
            assert tensor[rows:].isnan().all()

    def bits(self):
        return [tensor.view(torch.int16).clone() for tensor in self.outputs.values()]
