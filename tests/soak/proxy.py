"""A TCP proxy that mistreats connections: before the command is there, after its effect, half open, or too late."""

import contextlib
import socket
import socketserver
import threading
import time
from collections import Counter
from random import Random

FAULTS = ("before", "torn", "after", "torn-reply", "half-open", "late")
_WEIGHTS = (4, 1, 4, 1, 1, 1)  # the last two cost the client its whole timeout


class Proxy(socketserver.ThreadingTCPServer):
    """Forwards to a port on this machine. Each request meets a fault with the probability `faulty`.

    before: dropped, the connection closed; torn: half of it arrives; after: it arrives, the reply is lost;
    torn-reply: half a reply comes; half-open: nothing comes back any more, and the request is lost;
    late: likewise, and the request arrives when its sender has given it up.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.upstream_port = port
        self.faulty = 0.0
        self.counts: Counter[str] = Counter()
        self.held = 0  # requests that may still arrive late
        self._random, self._lock = Random(seed), threading.Lock()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    def next_fault(self) -> str | None:
        """What is to become of a request."""
        with self._lock:
            if self._random.random() >= self.faulty:
                return None
            fault = self._random.choices(FAULTS, _WEIGHTS)[0]
            self.counts[fault] += 1
            return fault

    def hold(self, count: int) -> None:
        """Count requests that are held back (1) or were let go (-1)."""
        with self._lock:
            self.held += count

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that breaks is what this is about."""


class _Connection(socketserver.BaseRequestHandler):
    server: Proxy
    request: socket.socket
    lose_reply: str | None = None

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with socket.create_connection(("127.0.0.1", self.server.upstream_port)) as upstream:
                upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._forward_replies, args=(upstream,), daemon=True).start()
                self._forward_requests(upstream)

    def _forward_requests(self, upstream: socket.socket) -> None:
        while request := self.request.recv(1 << 20):
            fault = self.server.next_fault()
            if fault == "before":
                return
            if fault == "torn":
                upstream.sendall(request[: len(request) // 2])
                return
            if fault in ("half-open", "late"):
                self._keep_waiting(upstream, request if fault == "late" else b"")
                return
            self.lose_reply = fault
            upstream.sendall(request)

    def _keep_waiting(self, upstream: socket.socket, request: bytes) -> None:
        """Until the client hangs up, or is killed; then deliver what it sent, all the same."""
        self.server.hold(1)
        try:
            while more := self.request.recv(1 << 20):
                request += more if request else b""
            upstream.sendall(request)
            time.sleep(0.05)  # a connection closed with replies unread would be reset, the request with it
        finally:
            self.server.hold(-1)

    def _forward_replies(self, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while reply := upstream.recv(1 << 20):
                if self.lose_reply == "torn-reply":
                    self.request.sendall(reply[: len(reply) // 2])
                if self.lose_reply:
                    break
                self.request.sendall(reply)
        with contextlib.suppress(OSError):
            self.request.shutdown(socket.SHUT_RDWR)
