"""What a server may answer, and how it may fall silent, in the midst of work."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.exceptions import BusyLoadingError
from structlog.testing import capture_logs

from producer import Producer
from producer import RedisUnavailableError as ProducerUnavailableError
from wire import Keys
from worker.embedded import embedded_server
from worker.errors import ConfigError, RedisUnavailableError
from worker.ports import Answer, Claim
from worker.queue.claims import QueueSettings, RedisQueue
from worker.queue.connection import Link
from worker.queue.outage import Outage

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

GONE_AND_BACK = ["redis gone", "redis back"]


def some(claim: Claim | None) -> Claim:
    """A claim that there must be."""
    assert claim is not None
    return claim


def events(logs: list[Any]) -> list[str]:
    """What was logged of outages, and anything graver."""
    return [entry["event"] for entry in logs if entry["event"] in GONE_AND_BACK or entry["log_level"] == "error"]


@contextmanager
def waited_out(desk: Desk, begin: Callable[[], Any], end: Callable[[], Any], refusal: str) -> Iterator[None]:
    """A claim is made before the fault begins; its commit waits until the fault ends, then publishes; told once."""
    desk.push(b"one")
    with ThreadPoolExecutor(1) as pool, desk.queue() as queue, capture_logs() as logs:
        claim = some(queue.claim())
        begin()
        committing = pool.submit(queue.commit, claim, desk.outcome("b", {1: "t-1"}))
        time.sleep(0.4)
        assert not committing.done()
        yield
        end()
        assert committing.result(8).answer is Answer.OK
    assert len(desk.labels()) == 1
    assert events(logs) == GONE_AND_BACK
    assert refusal in logs[0]["error"]


def test_forgotten_scripts_are_sent_again(desk: Desk) -> None:
    """SCRIPT FLUSH in the midst of work goes unnoticed: the next verb brings its script along."""
    desk.push(b"one")
    with desk.queue() as queue, capture_logs() as logs:
        claim = some(queue.claim())
        desk.redis.script_flush()
        assert queue.commit(claim, desk.outcome("b", {1: "t-1"})).answer is Answer.OK
        desk.redis.script_flush()
        assert queue.claim() is None
    assert logs == []


def test_a_busy_server_is_waited_out(own_desk: Desk) -> None:
    """A script of somebody else's that runs too long (BUSY) is waited for."""
    own_desk.redis.config_set("lua-time-limit", 50)  # since Redis 7 also busy-reply-threshold

    def occupy() -> None:
        threading.Thread(target=endless_script, args=(own_desk.url,), daemon=True).start()
        assert own_desk.eventually(lambda: refuses(own_desk.redis, "BUSY"))

    with waited_out(own_desk, occupy, own_desk.redis.script_kill, "BUSY"):
        pass


def endless_script(url: str) -> None:
    """Occupy the server until somebody kills the script."""
    with redis.Redis.from_url(url) as client, contextlib.suppress(redis.RedisError):
        client.eval("while true do end", 0)


def refuses(client: Any, word: str) -> bool:
    """Whether a harmless command is refused so."""
    try:
        client.get("x")
    except redis.RedisError as error:
        return word in str(error)
    return False


def test_a_failing_save_is_waited_out(own_desk: Desk) -> None:
    """A server that takes no writes because it could not save (MISCONF) is waited for."""
    (Path(own_desk.redis.config_get("dir")["dir"]) / "dump.rdb" / "in-the-way").mkdir(parents=True)

    def fail() -> None:
        own_desk.redis.config_set("save", "3600 100000")
        own_desk.redis.bgsave()
        assert own_desk.eventually(lambda: own_desk.redis.info("persistence")["rdb_last_bgsave_status"] == "err")

    def mend() -> None:
        own_desk.redis.config_set("stop-writes-on-bgsave-error", "no")
        own_desk.redis.config_set("save", "")  # or it would refuse to end, too

    with waited_out(own_desk, fail, mend, "MISCONF"):
        pass


def test_a_server_that_became_a_replica_is_left(own_desk: Desk) -> None:
    """READONLY drops the connection, of a worker as of a producer: the name in the URL may lead to a new master."""
    own_desk.push(b"one")
    with ThreadPoolExecutor(1) as pool, own_desk.queue() as queue, capture_logs() as logs:
        claim, producer = some(queue.claim()), Producer(own_desk.url)
        producer.push({"body": "b"})
        before = connections(own_desk)
        own_desk.redis.replicaof("127.0.0.1", 1)
        before &= connections(own_desk)  # a demotion may break some by itself
        committing = pool.submit(queue.commit, claim, own_desk.outcome("b", {1: "t-1"}))
        with pytest.raises(ProducerUnavailableError, match="read only"):
            producer.push({"body": "b"})
        time.sleep(0.3)
        after = connections(own_desk)
        own_desk.redis.replicaof("no", "one")
        assert committing.result(5).answer is Answer.OK
        assert len(producer.push({"body": "b"})) == 1
        producer.close()
    assert {name for _, name in before} == {"w", "w-keeper", ""}
    assert {name for _, name in before & after} == {"w-keeper"}  # which has nothing to write just now
    assert events(logs) == GONE_AND_BACK


def connections(desk: Desk) -> set[tuple[int, str]]:
    """Id and name of each, but our own."""
    return {(int(one["id"]), one["name"]) for one in desk.redis.client_list() if one["name"] != "lengthwise"}


def test_a_full_server_is_worked_off(own_desk: Desk) -> None:
    """A server without memory (OOM) refuses the wait, and what came before it was full is claimed and published."""
    own_desk.push(b"one")
    own_desk.redis.config_set("maxmemory", 1)
    with own_desk.queue() as queue, capture_logs() as logs:
        claim = some(queue.claim())
        assert queue.commit(claim, own_desk.outcome("b", {1: "t-1"})).answer is Answer.OK
        assert queue.claim() is None
    assert events(logs) == []


def test_a_loading_server_is_waited_out(own_desk: Desk) -> None:
    """A worker that starts while the server still reads its data (LOADING) waits, and begins when it can."""
    with tempfile.TemporaryDirectory(prefix="lw-", dir="/tmp") as name, ThreadPoolExecutor(1) as pool:
        folder, done = Path(name), threading.Event()
        with embedded_server(folder=folder, appendonly=True) as server, redis.Redis.from_url(server.url) as client:
            client.rpush("tickets", b"one")
            with client.pipeline(transaction=False) as pipeline:
                for number in range(20_000):
                    pipeline.set("key", number)
                pipeline.execute()
        slowly = {"key-load-delay": "100"}  # microseconds a write; it looks up and answers after each 1,024

        def serve() -> None:
            with embedded_server(folder=folder, appendonly=True, settings=slowly):
                done.wait(20)

        serving = pool.submit(serve)
        try:
            with redis.Redis.from_url(server.url) as client:
                assert own_desk.eventually(lambda: is_loading(client))
            with capture_logs() as logs, worker_at(server.url) as queue:
                assert [ticket.payload for ticket in some(queue.claim()).tickets] == [b"one"]
            assert "loading" in logs[0]["error"].lower()
            assert events(logs) == GONE_AND_BACK
        finally:
            done.set()
            serving.result(10)


def is_loading(client: Any) -> bool:
    """Whether the server says so."""
    try:
        client.ping()
    except BusyLoadingError:
        return True
    except redis.RedisError:
        return False
    return False


@contextmanager
def worker_at(url: str, **settings: Any) -> Iterator[RedisQueue]:
    """A patient worker's queue, stopped at the end and after 15 s at the latest."""
    stop = threading.Event()
    timer = threading.Timer(15, stop.set)
    timer.start()
    try:
        with RedisQueue(url, Keys("tickets"), "w", QueueSettings(**settings), stop) as queue:
            yield queue
    finally:
        timer.cancel()
        stop.set()


@pytest.mark.parametrize("as_error", [True, False])
def test_an_unblocked_wait_goes_on(desk: Desk, as_error: bool) -> None:
    """CLIENT UNBLOCK of a waiting worker harms nothing and is no outage: the next ticket is claimed."""
    with ThreadPoolExecutor(1) as pool, desk.queue() as queue, capture_logs() as logs:
        waiting = pool.submit(queue.claim)
        assert desk.eventually(lambda: bool(blocked(desk, "w")))
        assert desk.redis.client_unblock(blocked(desk, "w")[0], error=as_error)
        desk.push(b"one")
        claim = waiting.result(5) or queue.claim()
        assert [ticket.payload for ticket in some(claim).tickets] == [b"one"]
    assert events(logs) == []


def blocked(desk: Desk, name: str) -> list[int]:
    """The ids of a worker's connections that wait in the server."""
    return [int(one["id"]) for one in desk.redis.client_list() if one["name"] == name and "b" in one["flags"]]


def test_a_flushed_server_is_begun_anew(own_desk: Desk) -> None:
    """FLUSHALL with a claim in hand: its commit is FENCED, it hands back nothing, and new tickets get through."""
    own_desk.push(b"one", b"two")
    with own_desk.queue() as queue:
        claim = some(queue.claim())
        own_desk.redis.flushall()
        assert queue.commit(claim, own_desk.outcome("b", {1: "t-1"})).answer is Answer.FENCED
        assert queue.release(claim) == 0
        assert own_desk.labels() == []
        own_desk.push(b"three")
        claim = some(queue.claim())
        assert queue.commit(claim, own_desk.outcome("c", {1: "t-3"})).answer is Answer.OK


def test_a_password_changed_during_work_ends_the_worker(own_desk: Desk) -> None:
    """Connections that are open go on; the first that must log in again ends the worker at once, however patient."""
    own_desk.push(b"one")
    with own_desk.queue() as queue, capture_logs():
        own_desk.redis.config_set("requirepass", "changed")
        claim = some(queue.claim())
        with redis.Redis.from_url(own_desk.url, password="changed") as client:
            client.client_kill_filter(_type="normal", skipme=True)
        started_s = time.monotonic()
        with pytest.raises(RedisUnavailableError, match="no usable Redis"):
            queue.commit(claim, own_desk.outcome("b", {1: "t-1"}))
        assert time.monotonic() - started_s < 1


def test_the_keeper_lives_on_after_a_refusal(own_desk: Desk) -> None:
    """A refusal that is no outage does not end the keeper: once it is mended the lease is renewed again."""
    own_desk.push(b"one")
    with own_desk.queue(lease_ms=600) as queue, capture_logs() as logs:
        claim = some(queue.claim())
        own_desk.redis.delete(own_desk.keys.workers)
        own_desk.redis.set(own_desk.keys.workers, "in the way")
        assert own_desk.eventually(lambda: queue.lease_margin_ms(claim) < 0)
        with pytest.raises(ConfigError, match="expected a zset"):
            queue.commit(claim, own_desk.outcome("b", {1: "t-1"}))
        own_desk.redis.delete(own_desk.keys.workers)
        assert own_desk.eventually(lambda: queue.lease_margin_ms(claim) > 0)
        assert queue.commit(claim, own_desk.outcome("b", {1: "t-1"})).answer is Answer.OK
    assert "lease not renewed" in {entry["event"] for entry in logs}


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is an outage after 0.4 s, so that the tests need not wait for long."""
    monkeypatch.setattr("worker.queue.connection.SOCKET_TIMEOUT_S", 0.4)
    monkeypatch.setattr("worker.queue.claims.WAIT_S", 0.1)


@pytest.mark.usefixtures("short_timeouts")
def test_a_hanging_server_is_waited_out(own_desk: Desk) -> None:
    """A server that takes requests and answers none (SIGSTOP) is an outage; what it did afterwards is done once."""
    pid = own_desk.redis.info("server")["process_id"]
    own_desk.push(b"one")
    with ThreadPoolExecutor(1) as pool, own_desk.queue(lease_ms=600) as queue, capture_logs() as logs:
        claim = some(queue.claim())
        os.kill(pid, signal.SIGSTOP)
        committing = pool.submit(queue.commit, claim, own_desk.outcome("b", {1: "t-1"}))
        time.sleep(1.5)
        assert not committing.done()
        os.kill(pid, signal.SIGCONT)
        assert committing.result(8).answer in (Answer.OK, Answer.ALREADY)
        time.sleep(1.0)  # for what the keeper might have to tell
    assert len(own_desk.labels()) == 1
    assert events(logs) == GONE_AND_BACK
    assert logs[-1]["outage_s"] > 0.5


class Proxy(socketserver.ThreadingTCPServer):
    """Forwards to a server's unix socket. `swallow` makes the connections it has half-open; new ones are whole."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.path, self.age = path, 0

    def swallow(self) -> None:
        """Forward nothing more on what is open now, and close nothing."""
        self.age += 1


class _Connection(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        self.age = self.server.age
        with socket.socket(socket.AF_UNIX) as upstream:
            upstream.connect(self.server.path)
            threading.Thread(target=self.forward, args=(upstream, self.request), daemon=True).start()
            self.forward(self.request, upstream)

    def forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if self.age == self.server.age:
                    target.sendall(data)


@pytest.fixture
def proxy(own_desk: Desk) -> Iterator[Proxy]:
    """A proxy before the desk's own server."""
    with Proxy(own_desk.redis.connection_pool.connection_kwargs["path"]) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


@pytest.mark.usefixtures("short_timeouts")
def test_half_open_connections_are_one_outage(own_desk: Desk, proxy: Proxy) -> None:
    """Connections that died without a sign are replaced, of both threads and the keeper; all of it is told once."""
    own_desk.push(b"one", b"two")
    url = f"redis://127.0.0.1:{proxy.server_address[1]}/0"
    with ThreadPoolExecutor(1) as pool, own_desk.queue(url=url, lease_ms=600, drain_size=1) as queue:
        first = some(queue.claim())
        with capture_logs() as logs:
            claiming = pool.submit(queue.claim)
            second = some(claiming.result(5))
            proxy.swallow()
            committing = pool.submit(queue.commit, first, own_desk.outcome("b", {1: "t-1"}))
            assert queue.commit(second, own_desk.outcome("c", {1: "t-2"})).answer is Answer.OK
            assert committing.result(5).answer is Answer.OK
            time.sleep(1.2)
    assert events(logs) == GONE_AND_BACK


@pytest.mark.usefixtures("short_timeouts")
def test_what_was_idle_in_an_outage_is_no_second_one(own_desk: Desk, proxy: Proxy) -> None:
    """A connection that died while the keeper slept is replaced when the outage is over, before it is used again."""
    own_desk.push(b"one")
    url = f"redis://127.0.0.1:{proxy.server_address[1]}/0"
    with own_desk.queue(url=url) as queue, capture_logs() as logs:
        claim = some(queue.claim())
        proxy.swallow()
        assert queue.commit(claim, own_desk.outcome("b", {1: "t-1"})).answer is Answer.OK
        queue._keeper._link.call(queue._keeper.renew)
    assert events(logs) == GONE_AND_BACK


def test_an_outage_is_told_once_a_worker() -> None:
    """However many of a worker's threads meet an outage, it says so once, and once that it is over, with its length."""
    with ThreadPoolExecutor(1) as pool, capture_logs() as logs, ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="lw-", dir="/tmp")))
        with embedded_server(folder=folder, appendonly=True) as server:
            queue = at_end.enter_context(worker_at(server.url, lease_ms=300))
            assert queue.claim() is None
            os.kill(server.pid, signal.SIGKILL)
            server.supervisor.wait(5)
            claiming = pool.submit(queue.claim)
            time.sleep(0.6)
        with embedded_server(folder=folder, appendonly=True):
            assert claiming.result(5) is None
            time.sleep(1.0)
            at_end.close()
    assert events(logs) == GONE_AND_BACK
    assert 0.5 < logs[-1]["outage_s"] < 4


def test_an_outage_is_over_when_all_got_through(desk: Desk) -> None:
    """While a call is refused the outage goes on, whichever others get through meanwhile: no line between."""
    outage, stop = Outage(desk.url), threading.Event()
    one, other = (Link(desk.url, stop, outage=outage) for _ in range(2))
    room = [threading.Event(), threading.Event()]

    def write(number: int) -> bool:
        if not room[number].is_set():
            raise redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
        return True

    with ThreadPoolExecutor(2) as pool, capture_logs() as logs:
        writing = [pool.submit(link.call, partial(write, number)) for number, link in enumerate((one, other))]
        assert one.call(one.redis.ping)
        time.sleep(0.1)
        room[0].set()
        assert writing[0].result(5)
        assert [entry["event"] for entry in logs] == ["redis gone"]
        room[1].set()
        assert writing[1].result(5)
    assert events(logs) == GONE_AND_BACK
    one.close()
    other.close()


def break_connections(desk: Desk, name: str) -> None:
    """Close a worker's connections from the server's side."""
    for one in desk.redis.client_list():
        if one["name"].startswith(name):
            desk.redis.client_kill_filter(_id=one["id"])


@pytest.mark.parametrize("outage", [False, True])
def test_three_connections_a_worker_at_most(desk: Desk, outage: bool) -> None:
    """One to claim, one to commit, one to renew: no more while all are busy at once, nor after all were broken."""
    desk.push(*(b"%d" % number for number in range(40)))
    most = 0
    with ThreadPoolExecutor(1) as pool, desk.queue("fleet", lease_ms=300, drain_size=1) as queue, capture_logs():
        for number in range(20):
            if outage and number % 5 == 0:
                break_connections(desk, "fleet")
            claim = some(queue.claim())
            claiming = pool.submit(queue.claim)
            queue.commit(claim, desk.outcome(f"b{number}", {1: f"t-{number}"}))
            most = max(most, sum(one["name"].startswith("fleet") for one in desk.redis.client_list()))
            queue.release(some(claiming.result(5)))
            time.sleep(0.03)
    assert 2 <= most <= 3
