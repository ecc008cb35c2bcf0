"""One connection to Redis that outlives outages: it waits with backoff, says so once, and goes on."""

import random
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import redis
import structlog
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, NoPermissionError, TryAgainError
from redis.retry import Retry

from wire.url import mask_url
from worker.errors import ConfigError, RedisUnavailableError, UsageError

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
)
_PASSING_REFUSALS = ("MISCONF", "BUSY", "NOREPLICAS", "UNBLOCKED")

log = structlog.get_logger("lengthwise.redis")


def connect(url: str, client_name: str = "lengthwise") -> "redis.Redis":
    """A client for `url` that repeats nothing by itself: redis-py cannot know what is safe to repeat, our verbs can.

    Raises UsageError for a URL that is none.
    """
    try:
        client: redis.Redis = redis.Redis.from_url(
            url,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            client_name=client_name,
        )
    except ValueError:  # whose message may quote the password
        raise UsageError(f"{mask_url(url)} is no Redis URL; expected redis://, rediss:// or unix://") from None
    return client


def unavailable(url: str, error: Exception) -> RedisUnavailableError:
    """The error for a user who has no Redis: what was asked, what it said, how to get one."""
    return RedisUnavailableError(
        f"no usable Redis at {mask_url(url)}: {error}. Start one with `lengthwise server`, or name yours with --url or "
        "REDIS_URL."
    )


def is_outage(error: redis.RedisError) -> bool:
    """Whether waiting may mend it: the server is gone, loading, full, read-only or busy."""
    if isinstance(error, redis.AuthenticationError):
        return False
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, *_PASSING_ERRORS)):
        return True
    return isinstance(error, redis.ResponseError) and str(error).startswith(_PASSING_REFUSALS)


def _explained(url: str, error: redis.RedisError) -> Exception:
    """What a user can do about a refusal that waiting will not mend; a bug stays what it is."""
    text = str(error)
    if isinstance(error, redis.AuthenticationError | NoPermissionError):
        return unavailable(url, error)
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

    `patient=False` raises RedisUnavailableError at the first outage; so does an outage once `stop` is set.
    """

    def __init__(self, url: str, stop: StopSign, *, patient: bool = True, client_name: str = "lengthwise") -> None:
        self.redis = connect(url, client_name)
        self._url, self._stop, self._patient = url, stop, patient

    def call(self, command: Callable[[], T]) -> T:
        """Run `command`, again after each outage, until it gets through."""
        out_since: float | None = None
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                result = command()
            except redis.RedisError as error:
                if not is_outage(error):
                    raise _explained(self._url, error) from error
                if not self._patient or self._stop.is_set():
                    raise unavailable(self._url, error) from error
                if out_since is None:
                    out_since = time.monotonic()
                    log.warning("redis gone", url=mask_url(self._url), error=str(error))
                # Jitter, so that a fleet does not come back in step.
                self._stop.wait(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, guards nothing
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                if out_since is not None:
                    log.info("redis back", url=mask_url(self._url), outage_s=round(time.monotonic() - out_since, 3))
                return result

    def close(self) -> None:
        """Give the connections back to the system."""
        self.redis.close()
