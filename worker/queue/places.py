"""A client for Sentinel and Cluster: one connection, which asks anew where to go each time it connects.

All of a queue's keys are on one server, so that server is all it needs: the rest of a client is as for a single one,
with as many connections and without a repetition of its own. redis-py's cluster client connects to every node when it
is made, and asks TIME of another one than holds the queue.
"""

from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.connection import parse_url
from redis.exceptions import AuthenticationError, MovedError, NoPermissionError
from redis.retry import Retry

from wire.place import Address, Finder, Place

# Until the nodes agree on who has a slot, which takes seconds at most, each may name another.
FIRST_PAUSE_S, LONGEST_PAUSE_S, REDIRECTIONS = 0.01, 0.5, 8


class MovedElsewhereError(redis.ConnectionError):
    """Another server has the slot. Nothing was executed, so it is safe to repeat, and the repetition goes there."""


def open_place(place: Place, **options: Any) -> "redis.Redis":
    """A client that repeats what was sent to the wrong cluster node and nothing else."""
    asking = {**parse_url(place.asking_url), **options}  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
    server = parse_url(place.server_url)  # type: ignore[no-untyped-call]  # likewise
    kind = _FoundTls if server.pop("connection_class", None) else _Found
    redirect = Retry(ExponentialBackoff(LONGEST_PAUSE_S, FIRST_PAUSE_S), REDIRECTIONS, (MovedElsewhereError,))
    settings = {**server, **options, "retry": redirect, "finder": Finder(place), "asking": asking}
    return redis.Redis.from_pool(redis.ConnectionPool(kind, **settings))


class _Found(redis.Connection):
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
            raise MovedElsewhereError(str(error)) from None

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
