"""The server of a campaign: the embedded Valkey, keeping every write it acknowledges, killed and started again."""

import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from worker.embedded import EmbeddedServer, embedded_server


class Place:
    """A server in a folder, at one port for all its lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._life = ExitStack()
        self._server: EmbeddedServer | None = None
        self.restarts = 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life.close()

    def client(self) -> Any:
        """A new client of the server itself, past the proxy."""
        return redis.Redis(port=self.port)

    def restart(self, down_s: float) -> None:
        """Kill the server, and start it again after a while."""
        os.kill(self._pid(), signal.SIGKILL)
        self._life.close()
        time.sleep(down_s)
        self._start()
        self.restarts += 1

    def freeze(self, seconds: float) -> None:
        """Stop the server for a while: what is sent meanwhile waits in its sockets, and is done late."""
        os.kill(self._pid(), signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self._pid(), signal.SIGCONT)

    def _pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def _start(self) -> None:
        server = embedded_server(
            folder=self._folder, port=self.port, appendonly=True, settings={"appendfsync": "always"}
        )
        self._server = self._life.enter_context(server)
