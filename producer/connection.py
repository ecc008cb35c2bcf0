"""The producer's connection: to one server, or to the right one of several behind Sentinel or Cluster.

The worker's is in `worker/queue/`, and neither may import the other: what both need to know is in `wire.place`.
"""

from typing import Any

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.connection import parse_url
from redis.exceptions import AuthenticationError, MovedError, NoPermissionError
from redis.retry import Retry

from wire.place import PLACE_URLS, Address, Finder, Place, parse_place
from wire.url import mask_url

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 30.0

# Until the nodes agree on who has a slot, which takes seconds at most, each may name another.
FIRST_PAUSE_S, LONGEST_PAUSE_S, REDIRECTIONS = 0.01, 0.5, 8


def connect(url: str) -> "redis.Redis":
    """A client that connects when it is first used, and repeats nothing: a repeated push is a second push.

    Except for what a cluster's node refused because another has the queue; that was not executed. Raises ValueError
    for a URL that is none, without its password.
    """
    options = {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": REPLY_TIMEOUT_S,
    }
    try:
        place = parse_place(url)
        return _open_place(place, options) if place else redis.Redis.from_url(url, **options)
    except ValueError:  # whose message may quote the password
        raise ValueError(
            f"{mask_url(url)} is no Redis URL; expected redis://, rediss:// or unix://, {PLACE_URLS}"
        ) from None


def _open_place(place: Place, options: dict[str, Any]) -> "redis.Redis":
    asking = {**parse_url(place.asking_url), **options}  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
    server = parse_url(place.server_url)  # type: ignore[no-untyped-call]  # likewise
    kind = _FoundTls if server.pop("connection_class", None) else _Found
    redirect = Retry(ExponentialBackoff(LONGEST_PAUSE_S, FIRST_PAUSE_S), REDIRECTIONS, (_MovedElsewhereError,))
    settings = {**server, **options, "retry": redirect, "finder": Finder(place), "asking": asking}
    return redis.Redis.from_pool(redis.ConnectionPool(kind, **settings))


class _MovedElsewhereError(redis.ConnectionError):
    """Another server has the slot. Nothing was executed, so it is safe to repeat, and the repetition goes there."""


class _Found(redis.Connection):
    """A connection that asks anew where to go each time it connects."""

    def __init__(self, *, finder: Finder, asking: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        self._finder, self._asking = finder, asking

    def _connect(self) -> Any:
        found = self._finder.find(self._ask)
        if found is None:
            raise redis.ConnectionError("none of the servers asked knows where the queue's server is")
        self.host, self.port = found
        return super()._connect()  # type: ignore[no-untyped-call]  # likewise

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except MovedError as error:
            self._finder.slot = error.slot_id
            raise _MovedElsewhereError(str(error)) from None

    def _ask(self, address: Address, words: tuple[str, ...]) -> Any:
        options = {**self._asking, "host": address[0], "port": address[1]}
        connection = options.pop("connection_class", redis.Connection)(**options)
        try:
            connection.send_command(*words)
            return connection.read_response()
        except (AuthenticationError, NoPermissionError):  # which waiting will not mend
            raise
        except redis.RedisError:
            return None
        finally:
            connection.disconnect()


class _FoundTls(_Found, redis.SSLConnection):
    pass
