"""A PostgreSQL server of the tests' own, on the loopback address, gone when they end."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

START_S = 60.0


def programs() -> Path | None:
    """Folder of initdb and postgres: on PATH, or where Debian's package puts them."""
    found = shutil.which("initdb")
    folders = [Path(os.path.realpath(found)).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name, reverse=True)
    return next((one for one in folders if (one / "initdb").exists() and (one / "postgres").exists()), None)


def missing() -> str | None:
    """Why no server can be started here, or None."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        return f"psycopg is not installed ({error}): pip install 'k3lab[postgres]'"
    if programs() is None:
        return "no PostgreSQL server here: apt-get install postgresql"
    if os.geteuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return None


def _user() -> str | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            pwd.getpwnam(name)
            return name
    return None


class Server:
    """A cluster in a folder of its own; it can be stopped and started again, as a lost database is."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="k3lab-postgres-"))
        self.data = self.folder / "data"
        self.user = _user() if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        if self.user:
            shutil.chown(self.folder, self.user)
        self._run("initdb", "-D", str(self.data), "-U", "k3lab", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")

    def _call(self, program: str, *args: str) -> tuple[list[str], dict[str, object]]:
        folder = programs()
        assert folder is not None
        return [str(folder / program), *args], {"user": self.user, "cwd": self.folder} if self.user else {}

    def _run(self, program: str, *args: str) -> None:
        command, how = self._call(program, *args)
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, **how)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Start it, and wait until it answers."""
        import psycopg

        options = [f"port={self.port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}", "fsync=off",
                   "max_connections=60", "shared_buffers=16MB"]  # fmt: skip
        command, how = self._call("postgres", "-D", str(self.data), *(part for one in options for part in ("-c", one)))
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(command, stdout=log, stderr=log, **how)  # type: ignore[call-overload]
        log.close()
        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.address("postgres"), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline and self._process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        """End it at once, as a crash does: connections break."""
        import signal

        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(30)
            self._process = None

    def address(self, database: str) -> str:
        """Where a database is."""
        return f"postgresql://k3lab@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """A new empty database; returns its address."""
        import psycopg

        with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}"')
        return self.address(database)

    def remove(self) -> None:
        """Stop it and delete all that it wrote."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """A server, started; removed at the end."""
    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.remove()
