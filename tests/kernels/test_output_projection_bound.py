"""The judge of the GPU tests on the CPU: the kernel's arithmetic in FP32 stays within the bound, faults do not."""

import pytest
import torch
from k3lab.kernels.output_projection import OutputProjection

from .output_projection_case import exact_input, twin, whole_numbers, worst

HIDDEN, ROWS = 7168, 12
ONE = OutputProjection(tp=4, rows=ROWS, kind="kda", width=32, hidden=HIDDEN, blocks=8, eps=1e-5)
FACTORS = [(-1.0) ** rank * 2.0 ** (rank % 3 - 1) for rank in range(4)]


def over_a_row(products):
    """Sum as the kernel adds: seven columns of a lane ascending, then butterflies over 32 lanes and 32 units."""
    lanes = products.unflatten(-1, (1024, 7))
    total = lanes[..., 0]
    for column in range(1, 7):
        total = total + lanes[..., column]
    for _ in range(10):
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def kernel(inputs, prefix, eps):
    """The finishing warps' formula in FP32, rounded once."""
    t = {name: tensor.float() for name, tensor in inputs.items()}
    p, blocks = prefix.float(), t["blocks"]
    folded = t["res_norm"] * t["res_proj"][0]

    def score(v):
        return over_a_row(v * folded) * (over_a_row(v * v) * (1 / HIDDEN) + eps).rsqrt()

    scores = score(blocks)
    largest = scores.amax(0)
    weights = (scores - largest).exp()
    mix = torch.zeros_like(p)
    for weight, block in zip(weights, blocks, strict=True):
        mix = mix + weight[:, None] * block
    last = score(p)
    top = torch.maximum(largest, last)
    a, b = (largest - top).exp(), (last - top).exp()
    scale = 1 / (a * weights.sum(0) + b)
    a, b = a * scale, b * scale
    mean = (a * a * over_a_row(mix * mix) + 2 * a * b * over_a_row(mix * p) + b * b * over_a_row(p * p)) * (1 / HIDDEN)
    r = (mean + eps).rsqrt()
    return ((a[:, None] * mix + b[:, None] * p) * r[:, None] * t["norm_w"]).bfloat16()


@pytest.fixture(scope="module")
def case():
    inputs = whole_numbers(ONE, 5)
    prefix = twin(ONE, inputs, FACTORS, None)["prefix_out"]
    return inputs, prefix, *exact_input(inputs, prefix, ONE.eps)


def test_the_kernels_arithmetic_lies_within_the_bound(case):
    inputs, prefix, value, bound = case
    found = kernel(inputs, prefix, ONE.eps)
    assert worst(found, value, bound) is None
    assert worst(twin(ONE, inputs, FACTORS, None)["mlp_input"], value, bound) is None
    error = (found.double() - value).abs()
    # terms cancel somewhere: there an error relative to the result says nothing
    assert (error > 2**-8 * value.abs()).any()
    ordinary = value.abs() > 0.5
    assert (bound[ordinary] < 1.5 * 2**-8 * value.abs()[ordinary]).all()


def test_a_wrong_element_is_named(case):
    inputs, prefix, value, bound = case
    right = kernel(inputs, prefix, ONE.eps)
    place = int(value[7].abs().argmax())
    wrong = right.clone()
    wrong.view(torch.int16)[7, place] += 2
    assert f"1 of {value.numel()} elements lie beyond their bound, worst [7, {place}]" in worst(wrong, value, bound)
    wrong = right.clone()
    wrong[3, 5] = float("nan")
    assert "worst [3, 5]: nan" in worst(wrong, value, bound)


@pytest.mark.parametrize("part", ["last block", "norm weight", "prefix unrounded"])
def test_a_wrong_formula_is_told(case, part):
    inputs, prefix, value, bound = case
    changed = dict(inputs)
    if part == "last block":
        changed["blocks"] = inputs["blocks"][:-1]
    elif part == "norm weight":
        changed["norm_w"] = inputs["norm_w"].roll(1)
    else:
        prefix = prefix + 2**-6
    assert worst(kernel(changed, prefix, ONE.eps), value, bound) is not None
