"""Reading what workers published: the tail of a stream, and what comes after it."""

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import redis

from wire import Keys, Totals
from wire.records import from_fields

R = TypeVar("R", bound=msgspec.Struct)

# Ends before the socket timeout, and is what an interrupt may have to wait for.
_BLOCK_MS = 1000
_PAGE = 1000


class StreamReader:
    """The records of one stream, oldest first, each read once.

    `last` is how many of those already there are given first; None gives all.
    """

    def __init__(self, client: "redis.Redis", stream: str, kind: type[R], last: int | None = None) -> None:
        self._redis, self._stream, self._kind = client, stream, kind
        self._position = "0-0" if last is None else self._before_last(last)

    def available(self) -> Iterator[Any]:
        """What is there now and was not read yet."""
        while page := self._read(block_ms=None):
            yield from page

    def follow(self) -> Iterator[Any]:
        """What is there, and then what comes, for ever."""
        while True:
            yield from self._read(block_ms=_BLOCK_MS)

    def _read(self, block_ms: int | None) -> list[Any]:
        reply: Any = self._redis.xread({self._stream: self._position}, count=_PAGE, block=block_ms)
        entries = _entries_of(reply)
        if entries:
            self._position = entries[-1][0].decode()
        return [from_fields(self._kind, fields) for _, fields in entries]

    def _before_last(self, count: int) -> str:
        """The id after which `count` entries stand."""
        newest: Any = self._redis.xrevrange(self._stream, count=count + 1)
        return newest[count][0].decode() if len(newest) > count else "0-0"


def _entries_of(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """One stream's entries out of XREAD's reply: a list of pairs by RESP2, a mapping by RESP3."""
    if not reply:
        return []
    if isinstance(reply, dict):
        (pages,) = reply.values()
        return [entry for page in pages for entry in page]
    ((_, entries),) = reply
    return list(entries)


def read_totals(client: "redis.Redis", keys: Keys) -> Totals:
    """The queue's sums since it began; all zero for a queue that never was."""
    fields: Any = client.hgetall(keys.totals)
    return from_fields(Totals, fields)


def depth(client: "redis.Redis", keys: Keys) -> int:
    """How many tickets wait."""
    waiting: Any = client.llen(keys.waiting)
    return int(waiting)
