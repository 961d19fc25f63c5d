"""A headless Chromium that tests drive over its debugging pipe: no driver, no port, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 60.0


def find_chromium() -> str | None:
    """Path of a Chromium on this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. ``requests`` holds the addresses it asked for, ``complaints`` what its console said."""

    def __init__(self, process: subprocess.Popen[bytes], out: int, back: int) -> None:
        self._process, self._out, self._back = process, out, back
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self._loaded = 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium did not answer within {LIMIT_S:g} s")
            data = os.read(self._back, 1 << 20)
            if not data:
                raise RuntimeError("Chromium ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._out, json.dumps({"id": self._number, "method": method, "params": params, **session}).encode() + b"\0"
        )
        deadline = time.monotonic() + LIMIT_S
        while True:
            message = self._receive(deadline)
            self._note(message)
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded += 1
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(item.get("value")) for item in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of that size, for a reader who prefers dark or light, and wait until it has loaded."""
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._ask("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        before = self._loaded
        self._ask("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + LIMIT_S
        while self._loaded == before:
            self._note(self._receive(deadline))

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON has it; promises are waited for."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", "exception"))
        return found["result"].get("value")

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])


@contextmanager
def chromium(path: str, profile: Path) -> Iterator[Browser]:
    """A browser with a profile folder of its own; ended however the block ends."""
    given = [*os.pipe(), *os.pipe()]
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in given]  # clear of fd 3 and 4
    for fd in given:
        os.close(fd)
    theirs_in, out, back, theirs_out = ends
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--remote-debugging-pipe",
    )
    command = [
        "bash",
        "-c",
        f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}',
        path,
        *flags,
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(
        command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(process, out, back)
    finally:
        os.close(out)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        os.close(back)
