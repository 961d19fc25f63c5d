"""``k3lab decode bench``: batches or agent traffic through both backends, and published figures beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..tuning.stop import ended_by_sigterm
from .decode_bench_view import render_bench
from .decode_inputs import Accept, BundlePath, Dcp, Gpu, KvDtype, bundle_of, progress_bar, real_card
from .output import Json, emit

if TYPE_CHECKING:
    from ..decode.bench.presets import Preset

BATCH_ONLY = {"prompt": "--prompt", "tokens": "--tokens", "fill": "--fill-context", "rounds": "--rounds"}  # fmt: skip
TRAFFIC_ONLY = {"keep_gb": "--keep-gb", "reuse": "--no-reuse", "real_pauses": "--real-pauses"}


@ended_by_sigterm()
def bench_command(
    preset: str | None = typer.Option(None, "--preset", help="A published point or one beside them, by name; options change it. `list` lists them."),
    workload: Path | None = typer.Option(None, "--workload", help="Sessions, JSON lines, in place of batches: agent traffic; `k3lab decode traffic` makes some."),
    model: str | None = typer.Option(None, "--model", help="small (default; k3 with a preset), k3, or the path of a config.json."),
    checkpoint: Path | None = typer.Option(None, "--checkpoint", help="Folder in the published form, in place of random weights."),
    backend: str = typer.Option("both", "--backend", help="auto, latency_specialized, or both in one run."),
    rows: int | None = typer.Option(None, "--rows", help="Requests in the batch, or turns at a time, 1 to 64 (default 1)."),
    prompt: int | None = typer.Option(None, "--prompt", help="Input tokens a request (default 1)."),
    tokens: int | None = typer.Option(None, "--tokens", help="Output tokens a request (default 64)."),
    fill: int | None = typer.Option(None, "--fill-context", help="Tokens of a made-up context before the prompt (default 0)."),
    chunk: int = typer.Option(512, "--chunk", help="Tokens of a prefill chunk."),
    rounds: int | None = typer.Option(None, "--rounds", help="Batches, one after the other (default 1): more requests for percentiles."),
    drafts: int | None = typer.Option(None, "--drafts", help="Tokens drafted for every request and step, up to 7; 0: plain steps."),
    temperature: float = typer.Option(0.0, "--temperature", help="With drafts: of sampling; 0 takes the likeliest."),
    acceptance_length: float | None = typer.Option(None, "--acceptance-length", help="With drafts: SYNTHETIC acceptance of so many mean tokens a step."),
    draft_checkpoint: Path | None = typer.Option(None, "--draft-checkpoint", help="Folder of the drafter, in place of random weights."),
    tp: int | None = typer.Option(None, "--tp", help="Tensor-parallel size (default 1)."),
    dcp: Dcp = 1,
    kv_dtype: KvDtype = "bfloat16",
    rank: int | None = typer.Option(None, "--rank", help="Run this rank of the group alone, over loopback: no link cost is in its times."),
    of: int | None = typer.Option(None, "--of", help="With --rank: ranks of the group, as --tp."),
    transport: str | None = typer.Option(None, "--transport", help="Of kernels that publish: loopback (one rank alone), symmetric, multicast (torchrun)."),
    keep_gb: float | None = typer.Option(None, "--keep-gb", help="With --workload: host memory for contexts between turns (default 16)."),
    reuse: bool = typer.Option(True, "--reuse/--no-reuse", help="With --workload: put contexts back, or compute them again in every turn."),
    real_pauses: bool = typer.Option(False, "--real-pauses", help="With --workload: wait where nothing runs; else such time is only counted."),
    samples: int = typer.Option(30, "--samples", help="On a GPU: replays of each graph of layers that are timed."),
    seed: int = typer.Option(0, "--seed", help="Of random weights, prompts and sampling."),
    bundle: BundlePath = None,
    accept: Accept = None,
    gpu: Gpu = "GB300",
    out: Path | None = typer.Option(None, "--out", help="Folder: requests or turns as they end, and a report a backend for decode compare."),
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure both backends on the same work in one run: throughputs, first token, latency, steps, layers, launches, drafting."""
    from ..decode.bench.presets import PRESETS, preset_of
    from ..decode.bench.run import names_of, run_bench
    from ..decode.bench.traffic import Handling, run_traffic
    from ..decode.run_options import RunOptions
    from ..kernels import InputError, device
    from ..tuning.environment import environment

    if preset == "list":
        from .decode_bench_view import render_presets

        emit({"presets": [one.to_json() for one in PRESETS.values()]}, as_json, render_presets)
        return
    given: dict[str, Any] = {
        "prompt": prompt, "tokens": tokens, "fill": fill, "rounds": rounds, "keep_gb": keep_gb, "reuse": None if reuse else False, "real_pauses": real_pauses or None,
    }  # fmt: skip
    known = preset_of(preset) if preset is not None else None
    _check_together(given, workload, known)
    names = names_of(backend)
    if checkpoint and model:
        raise InputError("--checkpoint has a model of its own; give it without --model")
    if of is not None and rank is None:
        raise InputError("--of speaks of one rank alone; give --rank, or --tp for all ranks")
    if of is not None and tp not in (None, of):
        raise InputError(f"--of {of} and --tp {tp} are both the ranks of the group; give one of them")
    size = of if of is not None else tp
    if rank is not None and size is None and known is None:
        raise InputError("--rank is one rank of a group; give the group's size with --of")

    def chosen(value: Any, name: str, default: Any) -> Any:
        return value if value is not None else getattr(known, name) if known else default

    word = model or ("k3" if known and not checkpoint else "small")
    size = chosen(size, "tp", 1)
    count = chosen(drafts, "drafts", 0)
    length = acceptance_length
    if length is None and known and count == known.drafts:
        length = known.acceptance_length
    card = real_card(str(checkpoint / "config.json") if checkpoint else word, size)
    options = RunOptions(
        tp=size, rows=chosen(rows, "rows", 1), prompt=chosen(prompt, "prompt", 1),
        tokens=2 if workload else chosen(tokens, "tokens", 64), fill=fill or 0, chunk=chunk, seed=seed, gpu=gpu,
        model="" if checkpoint else word, checkpoint=checkpoint, drafts=count, temperature=temperature, acceptance_length=length,
        draft_checkpoint=draft_checkpoint, dcp=dcp, kv_dtype=kv_dtype, rank=rank, transport=transport,
    )  # fmt: skip
    loaded, here = bundle_of(bundle, accept), environment(device.discover())
    with progress_bar() as told:
        alike: dict[str, Any] = {
            "names": names,
            "bundle": loaded,
            "preset": known,
            "out": out,
            "environment": here,
            "say": told,
        }
        if workload:
            from ..decode.traffic.sessions import read_traffic

            how = Handling(16.0 if keep_gb is None else keep_gb, reuse, real_pauses)
            data = run_traffic(card, options, read_traffic(workload), handling=how, **alike)
        else:
            data = run_bench(card, options, rounds=1 if rounds is None else rounds, samples=samples, **alike)
    unwritten = data.pop("unwritten")
    data["out"] = str(out) if out and not unwritten else None
    if data["rank"] == 0 or rank is not None:  # of torchrun's processes one prints
        emit(data, as_json, render_bench)
    if unwritten:
        raise InputError(unwritten)
    if any((one.get("launches") or {}).get("differences") for one in data["reports"].values()):
        raise typer.Exit(1)


def _check_together(given: dict[str, Any], workload: Path | None, known: Preset | None) -> None:
    from ..kernels import InputError

    if known and known.traffic != (workload is not None):
        what = "sessions: give them with --workload" if known.traffic else "batches: give it without --workload"
        raise InputError(f"preset {known.name} runs {what}")
    words = BATCH_ONLY if workload else TRAFFIC_ONLY
    wrong = next((option for name, option in words.items() if given[name] is not None), None)
    if wrong:
        speaks = "batches; a workload's lengths are the file's" if workload else "sessions; give them with --workload"
        raise InputError(f"{wrong} speaks of {speaks}")
