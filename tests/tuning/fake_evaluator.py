"""What a worker of the tests does in place of compiling, checking and timing: a latency model, and faults on demand.

``FAKE_SECONDS`` slows every evaluation down; ``FAKE_LOG`` names a file that gets one line an evaluation.
"""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

from k3lab.kernels import config_digest
from k3lab.tuning.evaluate import build_payload
from k3lab.tuning.outcome import Outcome, SetupError, Status, failure


def latency_us(engine: str, config: dict[str, Any]) -> float:
    """A smooth model with a tie: the best small config is tile 4, deep; mode changes almost nothing."""
    if engine == "small":
        return 20 + abs(config["tile"] - 4) * 3 - 2 * config["deep"] + (0.01 if config["mode"] == "a" else 0.0)
    if engine == "large":
        return 10 + (config["p"] - 3) ** 2 + (config["q"] - 5) ** 2 + config["r"] + 0.5 * config["s"]
    return 5.0 + config["n"]


def _break(fault: str) -> Outcome | None:
    """Do what the config is meant to do; None if it is nothing."""
    if fault in ("exit", "check_exit"):
        print("last words", flush=True)
        os._exit(3)
    if fault == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault in ("hang", "check_hang"):
        time.sleep(3600)
    if fault in ("raise", "check_raise"):
        raise ValueError("no such\ninstruction")
    if fault == "full":
        try:
            raise OSError(28, "No space left on device", "/tmp/x")
        except OSError as error:
            raise RuntimeError("does not compile") from error
    if fault == "no_tool":
        raise SetupError("no cuobjdump; set K3LAB_CUDA_BIN")
    if fault == "wrong":
        return failure(Status.WRONG, "out differs by 0.5")
    if fault == "oom":
        raise type("OutOfMemoryError", (RuntimeError,), {})("tried to allocate 80 GiB")
    if fault == "memory":
        raise MemoryError("host")
    if fault == "unstable":
        return failure(Status.UNSTABLE, "spread 40%")
    if fault == "illegal":
        return failure(Status.ILLEGAL, "needs 1 MB of shared memory")
    return None


def log(task: Any) -> None:
    """One line with the kind, the config and the process, if asked for."""
    if path := os.environ.get("FAKE_LOG"):
        with open(path, "a") as file:
            file.write(json.dumps([task.job.kind, config_digest(task.job.config), os.getpid()]) + "\n")


def _slower() -> float:
    """How much slower than others this GPU is: ``FAKE_SLOWER`` names a file that says so."""
    try:
        return float(Path(os.environ["FAKE_SLOWER"]).read_text())
    except (KeyError, OSError):
        return 1.0


def _evaluate(task: Any, stage: Any, measured: bool) -> Outcome:
    config = dict(task.job.config)
    log(task)
    stage("compile")
    fault = config.get("fault", "none")
    time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
    if fault == "prints":
        print('{"event": "done"}', flush=True)
        os.write(1, b"a library writes to fd 1\n")
    if fault in ("exit", "segv", "hang", "raise", "illegal") and (broken := _break(fault)):
        return broken
    stage("check")
    if broken := _break(fault):
        return broken
    stage("time")
    value = float("nan") if fault == "nan" else latency_us(task.engine.name, config) * _slower()
    kernel = {
        "kernel": "k3_fake",
        "registers": 32,
        "threads": 128,
        "dynamic_shared_bytes": 1024 * config.get("tile", 1),
    }
    if not measured:
        return Outcome(
            Status.OK, value=value, resources=(kernel,), prediction={"microseconds": value, "relative_error": 0.001}
        )
    noise = zlib.crc32(f"{config_digest(config)}{task.job.seed}".encode()) % 100 / 100_000  # up to 0.1 %
    return Outcome(
        Status.OK, value=value * (1 + noise), resources=(kernel,), timing={"cold_us": value, "spread": 0.002}
    )


def compile(task: Any, stage: Any) -> Outcome:
    """What goes wrong while compiling, and nothing else."""
    config = dict(task.job.config)
    log(task)
    stage("compile")
    fault = config.get("fault", "none")
    time.sleep(float(os.environ.get("FAKE_COMPILE_SECONDS", "0")))
    if fault in ("exit", "segv", "hang", "raise", "illegal") and (broken := _break(fault)):
        return broken
    return Outcome(Status.OK, value=1.0)


def predict(task: Any, stage: Any) -> Outcome:
    """The latency model."""
    return _evaluate(task, stage, measured=False)


def measure(task: Any, stage: Any) -> Outcome:
    """The latency model with noise."""
    return _evaluate(task, stage, measured=True)


retime = measure


def contest(task: Any, stage: Any) -> Outcome:
    """The latency model with noise, round by round; a config of ``FAKE_BREAKS`` ends the process."""
    stage("compile")
    log(task)
    results = []
    for one in task.job.contestants:
        stage("time")
        digest = config_digest(one["config"])
        if digest in os.environ.get("FAKE_BREAKS", "").split():
            os._exit(4)
        value = latency_us(one["engine"], one["config"])
        noise = [zlib.crc32(f"{digest}{turn}".encode()) % 100 / 100_000 for turn in range(3)]
        results.append({"values_us": [value * (1 + part) for part in noise], "spreads": [0.002] * 3, "failed": ""})
    payload = {
        "results": results, "alternatives": {"PyTorch": 33.0}, "floor_us": 4.0, "read_ceiling": 4.2e12, "rounds": 3,
        "policy": {"samples": 3}, "notes": [],
    }  # fmt: skip
    return Outcome(Status.OK, value=1.0, payload=payload)


def chain(task: Any, stage: Any) -> Outcome:
    """Behind a predecessor: 3 us of what it takes alone are hidden, or what ``FAKE_CHAIN`` (JSON by config digest) says.

    That holds microseconds, or a reason why it fails; the word ``dies`` ends the process.
    """
    stage("compile")
    log(task)
    told = json.loads(os.environ.get("FAKE_CHAIN", "{}"))
    results: list[dict[str, Any]] = []
    for one in task.job.contestants:
        stage("time")
        plain = latency_us(one["engine"], one["config"])
        value = told.get(config_digest(one["config"]), plain - 3)
        if value == "dies" or "all" in told:
            os._exit(4)
        if isinstance(value, str):
            results.append({"failed": value})
            continue
        figures = {"chain_us": value, "plain_us": plain, "hidden_us": plain - value, "band_us": 0.1}
        results.append({**figures, "programmatic": True, "failed": ""})
    payload = {"results": results, "spin_us": 8.0, "predecessor_us": 9.0, "rounds": 2, "policy": {"samples": 3}}
    return Outcome(Status.OK, value=1.0, payload=payload)


def build(task: Any, stage: Any) -> Outcome:
    """The fake engine's cubin."""
    stage("compile")
    compiled = task.engine.compile(task.problem, task.job.config, task.job.arch)
    resources = [
        {
            "kernel": launch.kernel,
            "registers": 32,
            "static_shared_bytes": 0,
            "dynamic_shared_bytes": 1024,
            "spill_instructions": 0,
        }
        for launch in compiled.launches
    ]
    return Outcome(Status.OK, value=1.0, payload=build_payload(compiled, resources))
