"""The queue as the drain loop sees it: claim, commit, release, with the lease kept and outages waited out."""

import itertools
import secrets
import time
from collections.abc import Callable

import msgspec
import redis

from wire import Keys
from worker.ports import Claim, Outcome, Receipt
from worker.queue.connection import Link, StopSign, is_outage
from worker.queue.keeper import Keeper
from worker.queue.outage import Outage
from worker.queue.verbs import StreamLengths, Verbs

# How long an idle worker blocks at a time. Well under the socket timeout, and what a stop may have to wait for.
WAIT_S = 0.5
# Where blocking is refused (a full Redis), the list is looked at this often.
POLL_S = 0.03


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may set about the queue."""

    drain_size: int = 256
    drain_bytes: int = 16 * 1024 * 1024
    lease_ms: int = 30_000
    window_ms: int = 24 * 3600 * 1000  # a ticket id is published once inside it
    crash_limit: int = 3
    lengths: StreamLengths = StreamLengths()


class RedisQueue:
    """`worker.ports.Queue` over Redis. Claims on one thread, commits on another, renews on a third of its own.

    The promise: at-least-once processing; at most one publication a ticket id within the window, as long as Redis
    keeps the writes it acknowledged; never half a batch.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        worker: str,
        settings: QueueSettings,
        stop: StopSign,
        *,
        patient: bool = True,
        state: Callable[[], dict[str, object]] = dict,
    ) -> None:
        self._keys, self._settings = keys, settings
        outage = Outage(url)
        self._link = Link(url, stop, patient=patient, client_name=worker, outage=outage)
        self._verbs = Verbs(self._link.redis)
        # Not the worker's name alone: a worker that starts again under the same name must not find what it left as its
        # own, neither a claim, whose crash would not be counted, nor a commit, which would be taken for done.
        self._claim_prefix, self._claim_numbers = f"{worker}-{secrets.token_hex(4)}", itertools.count(1)
        self._stop = stop
        self._keeper = Keeper(
            Link(url, stop, patient=patient, client_name=f"{worker}-keeper", outage=outage),
            keys,
            worker,
            lease_ms=settings.lease_ms,
            crash_limit=settings.crash_limit,
            dead_length=settings.lengths.dead,
            state=state,
        )

    def __enter__(self) -> "RedisQueue":
        self._link.call(self._link.redis.ping)
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.close()
        self._link.close()

    def claim(self, most: int | None = None) -> Claim | None:
        """The next tickets, `most` or the drain size, whichever is less; None if there were none for `WAIT_S`."""
        number = self._settings.drain_size if most is None else min(most, self._settings.drain_size)
        return self._claim_once(number) or (self._wait() and self._claim_once(number)) or None

    def commit(self, claim: Claim, outcome: Outcome) -> Receipt:
        """Publish one batch. Past its lease the worker first asks for it anew.

        The script alone gives the answer, for it alone can tell a claim that was taken over from one that was
        committed to its end by an attempt whose reply was lost: neither has a lease.
        """

        def attempt() -> Receipt:
            if self._keeper.margin_ms(claim.id) <= 0:
                self._keeper.renew(self._link)
            return self._verbs.commit(self._keys, claim.id, outcome, self._settings.window_ms, self._settings.lengths)

        return self._link.call(attempt)

    def release(self, claim: Claim) -> int:
        """Hand back what the claim still owes, in order; nothing if it owes nothing or was taken over."""
        self._keeper.drop(claim.id)
        return self._link.call(lambda: self._verbs.release(self._keys, claim.id))

    def lease_margin_ms(self, claim: Claim) -> float:
        """What is left of the claim's lease; negative once it ran out."""
        return self._keeper.margin_ms(claim.id)

    def take_reclaimed(self) -> int:
        """Tickets taken back from dead workers since this was last asked."""
        return self._keeper.take_reclaimed()

    def _claim_once(self, most: int) -> Claim | None:
        claim_id = f"{self._claim_prefix}-{next(self._claim_numbers)}"

        def attempt() -> Claim:
            asked_at_s = time.monotonic()
            claim = self._verbs.claim(self._keys, claim_id, most, self._settings.drain_bytes, self._settings.lease_ms)
            if claim.tickets:
                self._keeper.hold(claim_id, asked_at_s)
            return claim

        claim = self._link.call(attempt)
        return claim if claim.tickets else None

    def _wait(self) -> bool:
        """Block until there is something, without ever holding a ticket: the head is moved onto itself."""

        def attempt() -> bool:
            try:
                # Spelled out, because redis-py's own method takes whole seconds.
                moved = self._link.redis.execute_command(  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
                    "BLMOVE", self._keys.waiting, self._keys.waiting, "LEFT", "LEFT", WAIT_S
                )
                return moved is not None
            except redis.ResponseError as error:
                if not is_outage(error):
                    raise
                return self._poll()  # a full Redis refuses the move, though not a claim

        return self._link.call(attempt)

    def _poll(self) -> bool:
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s and not self._stop.wait(POLL_S):
            if self._link.redis.llen(self._keys.waiting):
                return True
        return False
