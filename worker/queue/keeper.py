"""Keeps leases alive from a thread and a connection of its own, and takes back what dead workers left behind.

Of its own, because the main thread may be busy in a forward pass for longer than a lease lasts.
"""

import threading
import time
from collections.abc import Callable

import msgspec
import redis
import structlog

from wire import Keys
from worker.errors import LengthwiseError
from worker.queue.connection import Link, StoppedWaitingError
from worker.queue.verbs import Verbs

# A lease is renewed this many times before it would run out, so one lost renewal costs nothing.
RENEWALS_A_LEASE = 3
RECLAIMED_AT_ONCE = 16

log = structlog.get_logger("lengthwise.queue")


class Keeper(threading.Thread):
    """Renews what is held and reclaims what is not, until closed.

    Deadlines are kept by the monotonic clock from before each renewal was sent: the worker believes its lease ended
    a little before Redis does, never after.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        worker: str,
        *,
        lease_ms: int,
        crash_limit: int,
        dead_length: int,
        state: Callable[[], dict[str, object]],
    ) -> None:
        super().__init__(name="lengthwise-keeper", daemon=True)
        self._link, self._keys, self._worker = link, keys, worker
        self._lease_ms, self._crash_limit, self._dead_length = lease_ms, crash_limit, dead_length
        self._state = state
        self._verbs = Verbs(link.redis)
        self._lock = threading.Lock()
        self._deadlines_s: dict[str, float] = {}
        self._reclaimed = 0
        self._closing = threading.Event()

    def hold(self, claim_id: str, leased_at_s: float) -> None:
        """Renew this claim from now on. `leased_at_s`: monotonic time from before the lease was asked for."""
        with self._lock:
            self._deadlines_s[claim_id] = leased_at_s + self._lease_ms / 1000

    def drop(self, claim_id: str) -> None:
        """Renew this claim no more: it is done, handed back or lost."""
        with self._lock:
            self._deadlines_s.pop(claim_id, None)

    def margin_ms(self, claim_id: str) -> float:
        """What is left of the lease; negative once it ran out or was lost."""
        with self._lock:
            return (self._deadlines_s.get(claim_id, 0.0) - time.monotonic()) * 1000

    def take_reclaimed(self) -> int:
        """Tickets taken back since this was last asked."""
        with self._lock:
            taken, self._reclaimed = self._reclaimed, 0
        return taken

    def renew(self, link: Link | None = None) -> None:
        """Renew everything held, once; a claim that Redis no longer knows is dropped."""
        with self._lock:
            held = list(self._deadlines_s)
        state = msgspec.json.encode(self._state())
        sent_s = time.monotonic()
        verbs = self._verbs if link is None else Verbs(link.redis)
        for claim_id, alive in zip(
            held, verbs.renew(self._keys, self._lease_ms, self._worker, state, held), strict=True
        ):
            if alive:
                self._prolong(claim_id, sent_s + self._lease_ms / 1000)
            else:
                self.drop(claim_id)  # done a moment ago, or taken over: then the next commit says so

    def run(self) -> None:
        """The thread: renew, reclaim, sleep."""
        renewed_s = time.monotonic()
        while not self._closing.is_set():
            try:
                self._link.call(self.renew)
                last_s, renewed_s = renewed_s, time.monotonic()
                # After an outage that outlasted the leases, the others get a round to renew theirs: they did not crash.
                if renewed_s - last_s < self._lease_ms / 1000:
                    self._link.call(self._reclaim_expired)
            except StoppedWaitingError:
                pass  # no failure: the worker ends, and the main thread says what is left behind
            except (LengthwiseError, redis.RedisError) as error:
                # The main thread meets the same refusal and ends the worker; leases then run out by themselves.
                log.warning("lease not renewed", error=str(error))
            self._closing.wait(self._lease_ms / 1000 / RENEWALS_A_LEASE)

    def close(self) -> None:
        """End the thread and its connection."""
        self._closing.set()
        if self.is_alive():
            self.join(timeout=1.0)
        self._link.close()

    def _prolong(self, claim_id: str, deadline_s: float) -> None:
        with self._lock:
            if claim_id in self._deadlines_s:  # dropped meanwhile? then it stays dropped
                self._deadlines_s[claim_id] = deadline_s

    def _holds(self, claim_id: str) -> bool:
        with self._lock:
            return claim_id in self._deadlines_s

    def _reclaim_expired(self) -> None:
        for claim_id in self._verbs.expired(self._keys, RECLAIMED_AT_ONCE):
            if self._holds(claim_id):
                continue  # its worker lives: an outage since the last renewal took longer than the lease
            back, buried = self._verbs.reclaim(
                self._keys, claim_id, self._crash_limit, self._worker, int(time.time() * 1000), self._dead_length
            )
            if back or buried:
                log.warning("claim of a dead worker taken back", claim=claim_id, tickets=back, buried=buried)
                with self._lock:
                    self._reclaimed += back
