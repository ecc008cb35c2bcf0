"""One connection to Redis that outlives outages: it waits with backoff, says so once, and goes on."""

import random
import re
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AskError, ClusterDownError, MovedError, NoPermissionError, TryAgainError
from redis.retry import Retry

from wire.place import PLACE_URLS, parse_place
from wire.url import mask_url
from worker.errors import EXIT_DONE, ConfigError, RedisUnavailableError, UsageError
from worker.queue.outage import Outage
from worker.queue.places import open_place

T = TypeVar("T")

# A reply that takes longer than this is an outage. Blocking commands must end well before.
SOCKET_TIMEOUT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0

# Refusals that pass by themselves or that an operator mends while we wait. redis-py has a class for some, and takes
# the first word off their text; the others are known by that word.
_PASSING_ERRORS = (
    redis.OutOfMemoryError,
    redis.ReadOnlyError,
    TryAgainError,
    ClusterDownError,  # and MasterDownError, which is one
    AskError,  # a slot on its way to another node
)
# Redis 6.2 puts what a script met behind the script's name and line.
_PASSING_REFUSALS = re.compile(r"(?:.*: -)?(?:MISCONF|BUSY|NOREPLICAS|UNBLOCKED|OOM|READONLY) ")


def connect(url: str, client_name: str = "lengthwise") -> "redis.Redis":
    """A client for `url` that repeats nothing by itself: redis-py cannot know what is safe to repeat, our verbs can.

    The URL may name the sentinels or nodes of several servers (`wire.place`). Raises UsageError for one that is none.
    """
    options = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "client_name": client_name,
    }
    try:
        place = parse_place(url)
        return open_place(place, **options) if place else redis.Redis.from_url(url, **options)
    except ValueError:  # whose message may quote the password
        raise UsageError(
            f"{mask_url(url)} is no Redis URL; expected redis://, rediss:// or unix://, {PLACE_URLS}"
        ) from None


def unavailable(url: str, error: Exception) -> RedisUnavailableError:
    """The error for a user who has no Redis: what was asked, what it said, how to get one."""
    return RedisUnavailableError(
        f"no usable Redis at {mask_url(url)}: {error}. Start one with `lengthwise server`, or name yours with --url or "
        "REDIS_URL."
    )


class StoppedWaitingError(RedisUnavailableError):
    """The worker was asked to end while it waited for Redis: it does, and that is no failure."""

    exit_code = EXIT_DONE


def is_outage(error: redis.RedisError) -> bool:
    """Whether waiting may mend it: the server is gone, loading, full, read-only or busy.

    A password that is wrong will not be mended by waiting, nor will one that was changed while the worker was at work:
    it learns of a new one by being started again.
    """
    if isinstance(error, redis.AuthenticationError | MovedError):
        return False
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, *_PASSING_ERRORS)):
        return True
    return isinstance(error, redis.ResponseError) and bool(_PASSING_REFUSALS.match(str(error)))


def _explained(url: str, error: redis.RedisError) -> Exception:
    """What a user can do about a refusal that waiting will not mend; a bug stays what it is."""
    text = str(error)
    if isinstance(error, redis.AuthenticationError | NoPermissionError):
        return unavailable(url, error)
    if isinstance(error, MovedError):
        return ConfigError(f"{mask_url(url)} is a node of a cluster: name it as redis+cluster://")
    if "WRONGTYPE" in text:
        return ConfigError(f"{mask_url(url)}: {text}. Is the queue's name in use for something else?")
    return error


class StopSign(Protocol):
    """Whether the worker is to end; `worker.stop.Stop` and threading.Event both will do."""

    def is_set(self) -> bool:
        """Whether it is set."""

    def wait(self, timeout: float, /) -> bool:
        """Sleep until it is set, at most so many seconds; whether it is set."""


class Link:
    """A client and the patience to use it. Whatever is called through it must be safe to repeat.

    An outage is waited out. It ends the wait with StoppedWaitingError once `stop` is set, and with `patient=False`
    any outage is a RedisUnavailableError at once. Links of one worker share its `outage`.
    """

    def __init__(
        self,
        url: str,
        stop: StopSign,
        *,
        patient: bool = True,
        client_name: str = "lengthwise",
        outage: Outage | None = None,
    ) -> None:
        self.redis = connect(url, client_name)
        self._url, self._stop, self._patient = url, stop, patient
        self._outage = outage or Outage(url)
        # What was idle meanwhile may be dead without knowing, and would look like another outage.
        self._outage.at_end(self._drop_idle)

    def call(self, command: Callable[[], T]) -> T:
        """Run `command`, again after each outage, until it gets through."""
        me, pause_s = object(), FIRST_PAUSE_S
        try:
            while True:
                asked_at_s = time.monotonic()
                try:
                    result = command()
                except redis.RedisError as error:
                    self._raise_unless_patient(error)
                    self._outage.failed(me, error, asked_at_s)
                    if isinstance(error, redis.ReadOnlyError) or "-READONLY " in str(error):
                        self._drop_idle()  # the server's name may lead to another one by now
                    # Jitter, so that a fleet does not come back in step.
                    self._stop.wait(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, guards nothing
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                else:
                    self._outage.got_through(me)
                    return result
        finally:
            self._outage.gave_up(me)

    def close(self) -> None:
        """Give the connections back to the system."""
        self.redis.close()

    def _raise_unless_patient(self, error: redis.RedisError) -> None:
        if not is_outage(error):
            raise _explained(self._url, error) from error
        if self._stop.is_set():
            raise StoppedWaitingError(
                f"stopped while no usable Redis answered at {mask_url(self._url)}: {error}. What this worker held goes "
                "back to the queue when its lease has run out."
            ) from error
        if not self._patient:
            raise unavailable(self._url, error) from error

    def _drop_idle(self) -> None:
        self.redis.connection_pool.disconnect(inuse_connections=False)
