"""The right answer for h200_decode_graph.json.gz, by its own short way: python answer.py prints it as JSON.

A layer is cut at its one attention projection. KDA layers run ours, k3_attention_projection_*. MLA layers had none in
the bundle and run a stock GEMM in split-K, told by the reduction behind it: 256 outputs a block, 8 rows x 2880 outputs.
The last layer ends where the head's GEMM begins: 8 rows x 1024 outputs, a sixteenth of 16384 words.
"""

import gzip
import json

FILE = __file__.replace("answer.py", "h200_decode_graph.json.gz")
MLA_BLOCKS, HEAD_BLOCKS = 8 * 2880 // 256, 8 * 1024 // 256


def ns(text):
    """Microseconds with three decimals, as the text in the file, to ns."""
    whole, _, part = text.partition(".")
    return int(whole) * 1000 + int((part + "000")[:3])


def is_reduction(kernel, blocks):
    return "splitKreduce_kernel" in kernel["name"] and kernel["args"]["grid"] == [blocks, 1, 1]


def cuts(kernels):
    """Where layers begin, their kinds, and where the last one ends."""
    starts, kinds, end = [], [], None
    for index, kernel in enumerate(kernels):
        following = kernels[index + 1] if index + 1 < len(kernels) else kernel
        if kernel["name"].startswith("k3_attention_projection"):
            starts, kinds = [*starts, index], [*kinds, "kda"]
        elif "splitK_" in kernel["name"] and is_reduction(following, MLA_BLOCKS):
            starts, kinds = [*starts, index], [*kinds, "mla"]
        elif "splitK_" in kernel["name"] and is_reduction(following, HEAD_BLOCKS):
            end = index
    return starts, kinds, end


def answer():
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        events = json.load(file, parse_float=str)["traceEvents"]
    launches = [event["args"]["correlation"] for event in events if event["name"] == "cudaGraphLaunch"]
    steps = []
    for launch in sorted(launches):
        own = [event for event in events if event["cat"] == "kernel" and event["args"]["correlation"] == launch]
        steps.append(sorted(own, key=lambda event: ns(event["ts"])))  # one stream: launched as they start
    starts, kinds, end = cuts(steps[0])
    assert all(cuts(step) == (starts, kinds, end) for step in steps)
    layers = list(zip(starts, [*starts[1:], end], strict=True))
    periods = []
    for step in steps:
        reached, latest = [], 0
        for kernel in step:
            latest = max(latest, ns(kernel["ts"]) + ns(kernel["dur"]))
            reached.append(latest)
        periods.append([reached[b - 1] - reached[a - 1] for a, b in layers])
    medians = []
    for values in zip(*periods, strict=True):
        ranked = sorted(values)
        low, high = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
        medians.append((low + high + 1) // 2)  # of an even number the middle two's mean, rounded up
    return {
        "steps": len(steps),
        "kernels_per_step": sorted({len(step) for step in steps}),
        "prefix": starts[0],
        "kernels_per_layer": [b - a for a, b in layers],
        "kinds": kinds,
        "suffix": len(steps[0]) - end,
        "completion_period_ns": medians,
    }


if __name__ == "__main__":
    print(json.dumps(answer()))
