"""Redis goes away and comes back, or refuses: what a worker waits out, and what it does not."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis._parsers.base import BaseParser
from structlog.testing import capture_logs

from wire import Keys
from worker.embedded import EmbeddedServer, embedded_server
from worker.errors import RedisUnavailableError
from worker.ports import Answer
from worker.queue.claims import QueueSettings, RedisQueue
from worker.queue.connection import is_outage

if TYPE_CHECKING:
    from tests.contract.conftest import Desk


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, so that the server's socket is in it, and is there again after a restart."""
    with tempfile.TemporaryDirectory(prefix="lw-", dir="/tmp") as name:
        yield Path(name)


@contextmanager
def server_in(folder: Path) -> Iterator[EmbeddedServer]:
    """A server that keeps every write it acknowledges."""
    with embedded_server(folder=folder, appendonly=True, settings={"appendfsync": "always"}) as server:
        yield server


def kill(server: EmbeddedServer) -> None:
    """End a server without a word, and wait until it has."""
    os.kill(server.pid, signal.SIGKILL)
    server.supervisor.wait(5)


@contextmanager
def queue_at(url: str, stop: threading.Event | None = None, patient: bool = True) -> Iterator[RedisQueue]:
    """A worker's queue; its keeper rests for 10 s after its first round. Stopped after a while: nothing hangs."""
    stop = stop or threading.Event()
    timer = threading.Timer(8, stop.set)
    timer.start()
    try:
        with RedisQueue(url, Keys("tickets"), "w", QueueSettings(), stop, patient=patient) as queue:
            yield queue
    finally:
        timer.cancel()
        stop.set()


def keeper_rests(client: Any) -> bool:
    """Whether the keeper has looked for leases that ran out, which ends its round."""
    return any(entry["name"] == "w-keeper" and entry["cmd"] == "zrange" for entry in client.client_list())


def test_a_restart_is_waited_out(desk: Desk, folder: Path) -> None:
    """Calls made while the server is gone wait and then go on, with all that was acknowledged; one line each way."""
    with ThreadPoolExecutor(1) as pool, capture_logs() as logs, ExitStack() as at_end:
        with server_in(folder) as server:
            client: Any = at_end.enter_context(redis.Redis.from_url(server.url))
            client.rpush("tickets", b"one", b"two")
            queue = at_end.enter_context(queue_at(server.url))
            claim = queue.claim()
            assert claim is not None
            assert desk.eventually(lambda: keeper_rests(client))  # else it has its own line to tell
            kill(server)
            committing = pool.submit(queue.commit, claim, desk.outcome("b", {1: "t-1"}))
            time.sleep(0.5)
            assert not committing.done()
        with server_in(folder):
            assert committing.result(5).answer is Answer.OK
            assert queue.release(claim) == 1
            assert client.lrange("tickets", 0, -1) == [b"two"]
            assert client.xlen("{tickets}:results") == 1
    told = [(entry["log_level"], entry["event"]) for entry in logs]
    assert told == [("warning", "redis gone"), ("info", "redis back")]
    assert logs[1]["outage_s"] > 0.4


def test_a_wait_goes_on_after_a_restart(folder: Path) -> None:
    """A worker that waits for tickets when the server dies waits on, and gets the first that comes after."""
    with ThreadPoolExecutor(1) as pool, capture_logs(), ExitStack() as at_end:
        with server_in(folder) as server:
            queue = at_end.enter_context(queue_at(server.url))
            claiming = pool.submit(queue.claim)
            time.sleep(0.1)
            kill(server)
            time.sleep(0.2)
            assert not claiming.done()
        with server_in(folder) as server, redis.Redis.from_url(server.url) as client:
            client.rpush("tickets", b"one")
            claim = claiming.result(5) or queue.claim()
            assert claim is not None
            assert [ticket.payload for ticket in claim.tickets] == [b"one"]


def test_without_patience_an_outage_is_an_error(own_server: EmbeddedServer) -> None:
    """`patient=False` raises at the first outage, at the start as in the midst of work, and says what to do."""
    with ThreadPoolExecutor(1) as pool, capture_logs(), queue_at(own_server.url, patient=False) as queue:
        kill(own_server)
        with pytest.raises(RedisUnavailableError, match="lengthwise server"):
            pool.submit(queue.claim).result(5)
    with pytest.raises(RedisUnavailableError, match="no usable Redis"), queue_at(own_server.url, patient=False):
        pass


def test_a_stop_ends_the_waiting(own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop asked for during an outage ends the wait at once, in the midst of a long pause too."""
    monkeypatch.setattr("random.uniform", lambda least, most: most)  # then the fifth pause is from 0.75 to 1.55 s
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool, capture_logs(), queue_at(own_server.url, stop) as queue:
        kill(own_server)
        claiming = pool.submit(queue.claim)
        time.sleep(0.9)
        assert not claiming.done()
        stop.set()
        stopped_s = time.monotonic()
        with pytest.raises(RedisUnavailableError):
            claiming.result(5)
        assert time.monotonic() - stopped_s < 0.4


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server of one's own, to be killed."""
    with embedded_server() as server:
        yield server


def test_a_wrong_password_is_no_outage(own_desk: Desk) -> None:
    """A password that is wrong or missing raises at once, however patient, and the message does not tell it."""
    own_desk.redis.config_set("requirepass", "right-one")
    for url in (own_desk.url, own_desk.url.replace("://", "://:wrong-one@", 1)):
        started_s = time.monotonic()
        with pytest.raises(RedisUnavailableError, match="no usable Redis") as caught, queue_at(url):
            pass
        assert time.monotonic() - started_s < 1
        assert "wrong-one" not in str(caught.value)


def test_a_missing_permission_is_no_outage(own_desk: Desk) -> None:
    """What the server's access list forbids raises at once, however patient."""
    own_desk.redis.acl_setuser(
        "worker", enabled=True, passwords="+secret", commands=["+ping", "+client"], keys=["other"]
    )
    url = own_desk.url.replace("://", "://worker:secret@", 1)
    started_s = time.monotonic()
    with capture_logs(), queue_at(url) as queue, pytest.raises(RedisUnavailableError, match="permission"):
        queue.claim()
    assert time.monotonic() - started_s < 1.5


def test_a_read_only_server_is_waited_out(own_desk: Desk) -> None:
    """A server that became a replica is waited for until it takes writes again."""
    own_desk.push(b"one")
    with ThreadPoolExecutor(1) as pool, own_desk.queue() as queue, capture_logs() as logs:
        own_desk.redis.replicaof("127.0.0.1", 1)
        claiming = pool.submit(queue.claim)
        time.sleep(0.3)
        assert not claiming.done()
        own_desk.redis.replicaof("no", "one")
        claim = claiming.result(5)
        assert claim is not None
        assert [ticket.payload for ticket in claim.tickets] == [b"one"]
    assert [entry["event"] for entry in logs] == ["redis gone", "redis back"]


@pytest.mark.parametrize(
    ("reply", "passes"),
    [
        ("LOADING Valkey is loading the dataset in memory", True),
        ("READONLY You can't write against a read only replica.", True),
        ("OOM command not allowed when used memory > 'maxmemory'.", True),
        ("MISCONF Valkey is configured to save RDB snapshots", True),
        ("BUSY Valkey is busy running a script.", True),
        ("MASTERDOWN Link with MASTER is down", True),
        ("CLUSTERDOWN The cluster is down", True),
        ("TRYAGAIN Multiple keys request during rehashing of slot", True),
        ("NOREPLICAS Not enough good replicas to write.", True),
        ("UNBLOCKED force unblock from blocking operation", True),
        ("ERR max number of clients reached", True),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
        ("ERR unknown command 'BLMOVE'", False),
        ("NOAUTH Authentication required.", False),
        ("WRONGPASS invalid username-password pair or user is disabled.", False),
        ("NOPERM this user has no permissions", False),
        ("CROSSSLOT Keys in request don't hash to the same slot", False),
    ],
)
def test_what_passes_by_itself(reply: str, passes: bool) -> None:
    """Of the server's refusals, as the client library hands them on, those that pass are waited out, and no others."""
    parser: Any = BaseParser  # redis-py leaves it untyped
    assert is_outage(parser.parse_error(reply)) is passes
