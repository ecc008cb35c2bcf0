"""A real cluster: the queue is found by way of any node, and found again when its slot moves."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.exceptions import TryAgainError
from structlog.testing import capture_logs

from producer import Producer, RedisUnavailableError
from wire import Keys, Label
from worker.embedded import embedded_server
from worker.errors import ConfigError, UsageError
from worker.ports import Answer, Claim
from worker.queue.claims import QueueSettings, RedisQueue
from worker.queue.connection import connect
from worker.queue.streams import StreamReader, depth
from worker.queue.verbs import StreamLengths, Verbs

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

SLOTS = 16384


@dataclass
class Node:
    """One node, and the client that sees it alone."""

    port: int
    client: Any

    @property
    def url(self) -> str:
        """The cluster, by way of this node."""
        return f"redis+cluster://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        """Its name in the cluster."""
        return str(self.client.execute_command("CLUSTER", "MYID").decode())

    def cluster(self, *words: object) -> Any:
        """A CLUSTER command to this node."""
        return self.client.execute_command("CLUSTER", *words)


@dataclass
class Cluster:
    """`holder` has the slot of the queue `tickets`, `other` some slots before it."""

    holder: Node
    other: Node
    slot: int

    def move_slot(self) -> None:
        """Move the queue's slot from its holder to the other node, as a resharding tool does."""
        self.begin_to_move()
        for key in self.holder.cluster("GETKEYSINSLOT", self.slot, 1000):
            self.holder.client.migrate("127.0.0.1", self.other.port, key, 0, 5000)
        self.end_to_move()

    def begin_to_move(self) -> None:
        """From here on a script may find some of its keys here and some there: TRYAGAIN, ASK."""
        self.other.cluster("SETSLOT", self.slot, "IMPORTING", self.holder.id)
        self.holder.cluster("SETSLOT", self.slot, "MIGRATING", self.other.id)

    def end_to_move(self) -> None:
        """All keys are there: from here on the old holder says MOVED."""
        for node in (self.other, self.holder):
            node.cluster("SETSLOT", self.slot, "NODE", self.other.id)


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@pytest.fixture
def cluster(desk: Desk) -> Iterator[Cluster]:
    """Two nodes that know of each other, each with some of the slots."""
    ports = free_ports(4)
    with ExitStack() as stack:
        nodes = []
        for port, bus in zip(ports[:2], ports[2:], strict=True):
            settings = {"cluster-enabled": "yes", "cluster-port": str(bus), "cluster-require-full-coverage": "no"}
            server = stack.enter_context(embedded_server(port=port, settings=settings))
            nodes.append(Node(port, stack.enter_context(redis.Redis.from_url(server.url))))
        other, holder = nodes
        slot = holder.cluster("KEYSLOT", "tickets")
        other.cluster("ADDSLOTSRANGE", 0, slot // 2)
        holder.cluster("ADDSLOTSRANGE", slot // 2 + 1, SLOTS - 1)
        other.cluster("MEET", "127.0.0.1", ports[1], ports[3])
        assert desk.eventually(lambda: all(knows_all(node) for node in nodes), within_s=15)
        yield Cluster(holder, other, slot)


def knows_all(node: Node) -> bool:
    """Whether a node has heard who has which slot, and takes commands."""
    info = node.cluster("INFO")
    text = info.decode() if isinstance(info, bytes) else str(info)
    return "cluster_state:ok" in text and f"cluster_slots_assigned:{SLOTS}" in text


def some(claim: Claim | None) -> Claim:
    """A claim that there must be."""
    assert claim is not None
    return claim


def queue_at(url: str, worker: str = "w", *, patient: bool = True, **settings: Any) -> RedisQueue:
    """A worker's queue."""
    return RedisQueue(url, Keys("tickets"), worker, QueueSettings(**settings), threading.Event(), patient=patient)


def test_one_node_with_all_slots(desk: Desk) -> None:
    """The smallest cluster: producer, worker and reader go through with a `redis+cluster://` URL."""
    port, bus = free_ports(2)
    with embedded_server(port=port, settings={"cluster-enabled": "yes", "cluster-port": str(bus)}) as server:
        with redis.Redis.from_url(server.url) as client:
            node = Node(port, client)
            node.cluster("ADDSLOTSRANGE", 0, SLOTS - 1)
            assert desk.eventually(lambda: knows_all(node), within_s=10)
        pushed_claimed_published_read(desk, node.url)


def pushed_claimed_published_read(desk: Desk, url: str) -> None:
    """One ticket's whole way."""
    with Producer(url) as producer:
        assert producer.push({"id": "t-1", "body": "b"}) == ["t-1"]
    with connect(url) as client:
        assert depth(client, Keys("tickets")) == 1
    with queue_at(url) as queue:
        claim = some(queue.claim())
        assert queue.commit(claim, desk.outcome("b", {1: "t-1"})).answer is Answer.OK
        assert queue.claim() is None
    with connect(url) as client:
        assert [label.id for label in StreamReader(client, "{tickets}:results", Label).available()] == ["t-1"]


@pytest.mark.parametrize("by", ["holder", "other"])
def test_any_node_leads_to_the_queue(desk: Desk, cluster: Cluster, by: str) -> None:
    """A URL that names only a node without the queue's slot does as well: MOVED is followed, and not told."""
    with capture_logs() as logs:
        pushed_claimed_published_read(desk, getattr(cluster, by).url)
    assert logs == []
    assert cluster.holder.client.xlen("{tickets}:results") == 1


def test_work_goes_on_when_the_slot_moves(desk: Desk, cluster: Cluster) -> None:
    """The slot goes to another node in the midst of work: a claim is committed there, the rest claimed, no lease lost.

    While some keys are here and some there, verbs wait (TRYAGAIN); never more than three connections are open.
    """
    cluster.holder.client.rpush("tickets", b"one", b"two")
    with ThreadPoolExecutor(1) as pool, queue_at(cluster.holder.url, drain_size=1, lease_ms=900) as queue:
        claim = some(queue.claim())
        with capture_logs() as logs:
            cluster.begin_to_move()
            keys = cluster.holder.cluster("GETKEYSINSLOT", cluster.slot, 1000)
            cluster.holder.client.migrate("127.0.0.1", cluster.other.port, keys[0], 0, 5000)
            committing = pool.submit(queue.commit, claim, desk.outcome("b", {1: "t-1"}))
            time.sleep(0.4)
            assert not committing.done()
            cluster.move_slot()
            assert committing.result(8).answer is Answer.OK
            assert desk.eventually(lambda: len(logs) == 2)  # the keeper may be the last that gets through
        assert [entry["event"] for entry in logs] == ["redis gone", "redis back"]
        claim = some(queue.claim())
        assert [ticket.payload for ticket in claim.tickets] == [b"two"]
        time.sleep(1.2)  # longer than the lease: it was renewed on the new node
        assert queue.commit(claim, desk.outcome("c", {1: "t-2"})).answer is Answer.OK
        assert connections(cluster.other, "w") <= 3
        assert connections(cluster.holder, "w") == 0
    assert cluster.other.client.xlen("{tickets}:results") == 2


def test_no_verb_is_torn_by_a_slot_on_its_way(desk: Desk, cluster: Cluster) -> None:
    """A node that gives a slot away runs no verb, though it has all its keys: one that empties a key and writes it
    again, as each renewal does, would fail halfway there, and leave a worker without its lease.
    """
    keys, url = Keys("tickets"), cluster.holder.url
    cluster.holder.client.rpush("tickets", b"one")
    with connect(url) as client:
        verbs = Verbs(client)
        verbs.claim(keys, "c", 1, 1000, 60_000)
        assert verbs.renew(keys, 60_000, "w", b"{}", ["c"]) == [True]
        cluster.begin_to_move()
        with pytest.raises(TryAgainError):
            verbs.renew(keys, 60_000, "w", b"{}", ["c"])
        cluster.move_slot()
        assert verbs.renew(keys, 60_000, "w", b"{}", ["c"]) == [True]
        verbs.commit(keys, "c", desk.outcome("b", {1: "t-1"}), 1000, StreamLengths())
    assert cluster.other.client.xlen("{tickets}:results") == 1


def connections(node: Node, worker: str) -> int:
    """How many connections a worker has to a node."""
    return sum(one["name"].startswith(worker) for one in node.client.client_list())


def test_a_producer_follows_the_slot(cluster: Cluster) -> None:
    """A push after the slot has moved goes to the new node, once; nothing was executed on the old one."""
    with Producer(cluster.holder.url) as producer:
        producer.push({"id": "t-1", "body": "b"})
        cluster.move_slot()
        producer.push({"id": "t-2", "body": "b"})
    assert cluster.other.client.llen("tickets") == 2


def test_a_node_by_its_plain_url_is_explained(cluster: Cluster) -> None:
    """A worker with a `redis://` URL of a node without the slot ends at once, and is told which URL to use."""
    with (
        queue_at(f"redis://127.0.0.1:{cluster.other.port}/0") as queue,
        pytest.raises(ConfigError, match=r"redis\+cluster://"),
    ):
        queue.claim()


def test_no_node_is_there() -> None:
    """Where nobody answers, an impatient worker and a producer say so at once; a bad URL is a usage error."""
    (port,) = free_ports(1)
    url = f"redis+cluster://:secret@127.0.0.1:{port}"
    with pytest.raises(Exception, match="none of the servers asked") as caught, queue_at(url, patient=False):
        pass
    assert "secret" not in str(caught.value)
    with Producer(url) as producer, pytest.raises(RedisUnavailableError, match="none of the servers asked"):
        producer.push({"body": "b"})
    for bad in ("redis+cluster://:secret@h:1/3", "redis+sentinel://:secret@h"):
        with pytest.raises(UsageError, match=r"redis\+sentinel://host") as refused:
            connect(bad)
        assert "secret" not in str(refused.value)
        with pytest.raises(ValueError, match=r"redis\+cluster://host") as named:
            Producer(bad)
        assert "secret" not in str(named.value)
