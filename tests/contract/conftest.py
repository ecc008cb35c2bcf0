"""A desk to work a queue from: every verb with plain arguments, and everything that is stored to look at.

Its types are for annotations; at run time tests get it as a fixture, so that no test module imports another.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from wire import BatchReport, DeadLetter, Keys, Label, Totals
from worker.embedded import embedded_server
from worker.ports import Claim, Outcome, Receipt
from worker.queue.claims import QueueSettings, RedisQueue
from worker.queue.connection import connect
from worker.queue.streams import StreamReader, read_totals
from worker.queue.verbs import StreamLengths, Verbs

DAY_MS = 24 * 3600 * 1000
MANY_BYTES = 16 * 1024 * 1024
LENGTHS = StreamLengths()


class Desk:
    """One queue on one server."""

    def __init__(self, url: str, queue: str = "tickets") -> None:
        self.url = url
        self.keys = Keys(queue)
        self.redis: Any = connect(url)  # redis-py's own types mix the answers of its two kinds of client
        self.verbs = Verbs(self.redis)

    def push(self, *payloads: bytes) -> None:
        """Put tickets at the end."""
        self.redis.rpush(self.keys.waiting, *payloads)

    def claim(
        self, claim_id: str = "c", most: int = 256, most_bytes: int = MANY_BYTES, lease_ms: int = DAY_MS
    ) -> Claim:
        """Claim by a worker that renews nothing."""
        return self.verbs.claim(self.keys, claim_id, most, most_bytes, lease_ms)

    def take(self, claim_id: str = "c", most: int = 256) -> list[bytes]:
        """Claim, and give the payloads alone."""
        return [ticket.payload for ticket in self.claim(claim_id, most).tickets]

    def commit(
        self, outcome: Outcome, claim_id: str = "c", window_ms: int = DAY_MS, lengths: StreamLengths = LENGTHS
    ) -> Receipt:
        """Publish a batch of a claim."""
        return self.verbs.commit(self.keys, claim_id, outcome, window_ms, lengths)

    def release(self, claim_id: str = "c") -> int:
        """Hand a claim back."""
        return self.verbs.release(self.keys, claim_id)

    def renew(self, *claim_ids: str, worker: str = "w", state: bytes = b"{}", lease_ms: int = DAY_MS) -> list[bool]:
        """Prolong leases."""
        return self.verbs.renew(self.keys, lease_ms, worker, state, claim_ids)

    def reclaim(self, claim_id: str = "c", crash_limit: int = 3, dead_length: int = 0) -> tuple[int, int]:
        """Take a claim back if its lease ran out."""
        return self.verbs.reclaim(self.keys, claim_id, crash_limit, "reaper", int(time.time() * 1000), dead_length)

    def expire(self, claim_id: str = "c") -> None:
        """Let a lease run out now."""
        assert self.redis.zadd(self.keys.leases, {claim_id: self.now_ms() - 1}, xx=True, ch=True)

    def crash(self, claim_id: str = "c", crash_limit: int = 3) -> tuple[int, int]:
        """What happens when a worker ends without a word."""
        self.expire(claim_id)
        return self.reclaim(claim_id, crash_limit)

    def now_ms(self) -> int:
        """Redis' own time."""
        seconds, micros = self.redis.time()
        return int(seconds * 1000 + micros // 1000)

    def waiting(self) -> list[bytes]:
        """The list, oldest first."""
        return list(self.redis.lrange(self.keys.waiting, 0, -1))

    def leases(self) -> list[str]:
        """The claims that are alive."""
        return [claim_id.decode() for claim_id in self.redis.zrange(self.keys.leases, 0, -1)]

    def labels(self) -> list[Label]:
        """All that was published."""
        return list(StreamReader(self.redis, self.keys.results, Label).available())

    def reports(self) -> list[BatchReport]:
        """All metrics."""
        return list(StreamReader(self.redis, self.keys.metrics, BatchReport).available())

    def dead(self) -> list[DeadLetter]:
        """All that was buried."""
        return list(StreamReader(self.redis, self.keys.dead, DeadLetter).available())

    def totals(self) -> Totals:
        """The sums."""
        return read_totals(self.redis, self.keys)

    def dump(self) -> dict[bytes, bytes]:
        """Everything the server holds, to compare."""
        return {key: self.redis.dump(key) for key in self.redis.keys("*")}

    def outcome(
        self,
        batch: str,
        labels: Mapping[int, str | None] | Sequence[tuple[int, str | None]] = (),
        dead: Mapping[int, str] = {},
    ) -> Outcome:
        """A batch: index -> own id, or None for no duplicate check; and index -> reason."""
        entries = list(labels.items() if isinstance(labels, Mapping) else labels)
        return Outcome(
            [(index, own_id, _label(own_id or f"sha256:{index}", batch)) for index, own_id in entries],
            [(index, _letter(reason)) for index, reason in dead.items()],
            _report(batch, len(entries) + len(dead), len(dead)),
        )

    @contextmanager
    def queue(
        self,
        worker: str = "w",
        *,
        url: str | None = None,
        stop: threading.Event | None = None,
        patient: bool = True,
        **settings: Any,
    ) -> Iterator[RedisQueue]:
        """The queue as the drain loop has it, the keeper's first round done. It is stopped at the end."""
        stop = stop or threading.Event()
        with RedisQueue(url or self.url, self.keys, worker, QueueSettings(**settings), stop, patient=patient) as queue:
            try:
                assert self.eventually(lambda: keeper_rests(self.redis, worker))
                yield queue
            finally:
                stop.set()

    def eventually(self, question: Callable[[], bool], within_s: float = 3.0) -> bool:
        """Ask until the answer is yes or the time is up."""
        end_s = time.monotonic() + within_s
        while not question():
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        return True


def keeper_rests(client: Any, worker: str) -> bool:
    """Whether the keeper has come to the end of a round, where it looks for leases that ran out."""
    return any(entry["name"] == f"{worker}-keeper" and entry["cmd"] == "zrange" for entry in client.client_list())


@pytest.fixture
def desk(redis_url: str, redis_client: object) -> Iterator[Desk]:
    """A queue on the shared server, whose database is empty and is emptied again."""
    desk = Desk(redis_url)
    yield desk
    desk.redis.close()


@pytest.fixture
def own_desk() -> Iterator[Desk]:
    """A queue on a server of its own, to be filled up, locked or reconfigured."""
    with embedded_server(settings={"maxmemory-policy": "noeviction"}) as server:
        desk = Desk(server.url)
        yield desk
        desk.redis.close()


def _label(ticket_id: str, batch: str) -> Label:
    return Label(
        id=ticket_id,
        label="bug",
        confidence=0.75,
        margin=1.5,
        scores={"bug": -0.25, "other": -1.75},
        model="m",
        task="t",
        batch=batch,
        worker="w",
        labelled_at_ms=2,
    )


def _letter(reason: str) -> DeadLetter:
    return DeadLetter(payload=b"", reason=reason, detail="why", attempts=1, at_ms=3, worker="w")


def _report(batch: str, size: int, dead: int) -> BatchReport:
    return BatchReport(
        batch=batch,
        worker="w",
        seq=1,
        at_ms=4,
        size=size,
        dead=dead,
        labels={"bug": size - dead},
        tokens_prompt=10 * size,
        tokens_computed=7 * size,
        tokens_padding=size,
        tokens_saved_prefix=4 * size,
        tokens_saved_duplicates=0,
        tokens_saved_packing=0,
        padding_ratio=1 / 7,
        tokenise_ms=1.0,
        score_ms=2.0,
        publish_ms=3.0,
        closed="drained",
        latency_buckets=[size],
        lease_margin_ms=5.0,
        reclaimed=0,
        model="m",
        task="t",
        strategy="padded",
        certificate="none",
    )
