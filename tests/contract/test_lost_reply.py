"""The fault after the effect: the server has done it, and the reply never arrives."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from worker.ports import Answer, Claim

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

A_CLAIM_KEY = b":claim:"  # in every claim, commit and release; in no renewal and no wait


class Proxy(socketserver.ThreadingTCPServer):
    """Forwards to the server. `lose` swallows the reply to a coming request and drops its connection instead."""

    daemon_threads = True

    def __init__(self, upstream: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.upstream = upstream
        self.lost = 0
        self.hold_s = 0.0
        self._marker: bytes | None = None

    def lose(self, marker: bytes, hold_s: float = 0.0) -> None:
        """Lose the reply to the next request that has these bytes, and keep its sender waiting so long before."""
        self._marker, self.hold_s = marker, hold_s

    def loses(self, request: bytes) -> bool:
        """Whether this is the request whose reply is to be lost; it is asked once."""
        hit = self._marker is not None and self._marker in request
        if hit:
            self._marker = None
        return hit

    def connect(self) -> socket.socket:
        """A connection to the server itself."""
        if "path" in self.upstream:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self.upstream["path"])
            return connection
        return socket.create_connection((self.upstream["host"], self.upstream["port"]))


class _Connection(socketserver.BaseRequestHandler):
    server: Proxy
    losing = False

    def handle(self) -> None:
        with self.server.connect() as upstream:
            threading.Thread(target=self.forward_replies, args=(upstream,), daemon=True).start()
            with contextlib.suppress(OSError):
                while request := self.request.recv(1 << 20):
                    self.losing = self.losing or self.server.loses(request)
                    upstream.sendall(request)

    def forward_replies(self, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while reply := upstream.recv(1 << 20):
                if self.losing:
                    time.sleep(self.server.hold_s)
                    self.server.lost += 1
                    break
                self.request.sendall(reply)
        with contextlib.suppress(OSError):
            self.request.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(desk: Desk) -> Iterator[Proxy]:
    """A proxy before the shared server. The scripts are loaded, so that each call is one request."""
    desk.push(b"warm-up")
    desk.claim()
    desk.commit(desk.outcome("warm-up"))
    desk.release()
    desk.redis.flushdb()
    with Proxy(desk.redis.connection_pool.connection_kwargs) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


@pytest.fixture
def proxy_url(proxy: Proxy) -> str:
    """Where the proxy listens."""
    login = f":{proxy.upstream['password']}@" if proxy.upstream.get("password") else ""
    return f"redis://{login}127.0.0.1:{proxy.server_address[1]}/{proxy.upstream.get('db') or 0}"


def claimed(claim: Claim | None) -> list[bytes]:
    """The payloads of a claim that there must be."""
    assert claim is not None
    return [ticket.payload for ticket in claim.tickets]


def test_a_claim_happens_once(desk: Desk, proxy: Proxy, proxy_url: str) -> None:
    """A claim whose reply is lost is given by the repetition, and takes nothing more off the list."""
    desk.push(b"one", b"two", b"three")
    with desk.queue(url=proxy_url, drain_size=2) as queue:
        proxy.lose(A_CLAIM_KEY)
        assert claimed(queue.claim()) == [b"one", b"two"]
        assert proxy.lost == 1
        assert desk.waiting() == [b"three"]
        assert len(desk.leases()) == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_commit_happens_once(desk: Desk, proxy: Proxy, proxy_url: str, whole: bool) -> None:
    """A commit whose reply is lost has published once, and its repetition says ALREADY, of the last part too."""
    desk.push(b"one", b"two")
    with desk.queue(url=proxy_url) as queue:
        claim = queue.claim()
        assert claim is not None
        proxy.lose(A_CLAIM_KEY)
        receipt = queue.commit(claim, desk.outcome("b", {1: None, 2: None} if whole else {1: None}))
        assert proxy.lost == 1
        assert receipt.answer is Answer.ALREADY
        assert len(desk.labels()) == (2 if whole else 1)
        assert len(desk.reports()) == 1
        assert desk.leases() == ([] if whole else [claim.id])


def test_already_however_late_the_news(desk: Desk, proxy: Proxy, proxy_url: str) -> None:
    """A commit that was done is ALREADY, not FENCED, though the keeper saw the lease gone before the news came."""
    desk.push(b"one")
    with desk.queue(url=proxy_url, lease_ms=300) as queue:
        claim = queue.claim()
        assert claim is not None
        proxy.lose(A_CLAIM_KEY, hold_s=0.5)
        assert queue.commit(claim, desk.outcome("b", {1: None})).answer is Answer.ALREADY
        assert proxy.lost == 1
        assert len(desk.labels()) == 1


def test_a_hand_back_happens_once(desk: Desk, proxy: Proxy, proxy_url: str) -> None:
    """A hand-back whose reply is lost has happened once; the repetition finds nothing left to do."""
    desk.push(b"one", b"two")
    with desk.queue(url=proxy_url) as queue:
        claim = queue.claim()
        assert claim is not None
        desk.push(b"late")
        proxy.lose(A_CLAIM_KEY)
        assert queue.release(claim) == 0
        assert proxy.lost == 1
        assert desk.waiting() == [b"one", b"two", b"late"]
        assert desk.leases() == []
