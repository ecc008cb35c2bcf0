"""Reading what workers published: the tail of a stream, and what comes after it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

    `last` is how many of those already there are given first; None gives all. `on_gap` is told when entries were
    trimmed away after the reader began and before it came to them: how many, or None where that is not known (a server
    before Redis 7, entries deleted one by one, a stream begun anew).
    """

    def __init__(
        self,
        client: "redis.Redis",
        stream: str,
        kind: type[R],
        last: int | None = None,
        on_gap: Callable[[int | None], None] = lambda missed: None,
    ) -> None:
        self._redis, self._stream, self._kind, self._on_gap = client, stream, kind, on_gap
        self._position = "0-0"
        self._passed: int | None = 0  # entries ever added up to the position; None if the server does not count them
        self._begin(last)

    def available(self) -> Iterator[Any]:
        """What is there now and was not read yet."""
        while page := self._read():
            yield from page

    def follow(self) -> Iterator[Any]:
        """What is there, and then what comes, for ever."""
        while True:
            yield from self.available()
            self._redis.xread({self._stream: self._position}, count=1, block=_BLOCK_MS)  # what it gives is read above

    def _begin(self, last: int | None) -> None:
        """Go to where `last` entries stand behind."""
        count = None if last is None else last + 1
        info, newest = self._look(lambda pipeline: pipeline.xrevrange(self._stream, count=count or 1))
        if info and count and len(newest) == count:
            self._position = newest[-1][0].decode()
            self._passed = None if info.added is None else info.added - (count - 1)
        elif info:
            self._passed = info.gone

    def _read(self) -> list[Any]:
        info, reply = self._look(lambda pipeline: pipeline.xread({self._stream: self._position}, count=_PAGE))
        if info is None:
            return []
        self._tell_gap(info)
        entries = _entries_of(reply)
        if entries:
            self._position = entries[-1][0].decode()
        if len(entries) < _PAGE:  # that was the end
            self._passed = info.added
        elif self._passed is not None:
            self._passed += len(entries)
        return [from_fields(self._kind, fields) for _, fields in entries]

    def _look(self, read: Callable[[Any], Any]) -> tuple["_Info | None", Any]:
        """What the stream is like, None if there is none, and what was read, both at the same moment."""
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.xinfo_stream(self._stream)
            read(pipeline)
            info, reply = pipeline.execute(raise_on_error=False)
        for answer in (info, reply):
            if isinstance(answer, Exception) and "no such key" not in str(answer):
                raise answer
        return None if isinstance(info, Exception) else _Info.of(info), reply

    def _tell_gap(self, info: "_Info") -> None:
        position = _number(self._position)
        if info.first is not None and info.first <= position:
            return  # trimming begins at the oldest: what stands behind the position is whole
        if info.gone is None or self._passed is None:
            if info.first is not None and position > (0, 0):
                self._on_gap(None)
            return
        missed, self._passed = info.gone - self._passed, info.gone
        if missed:
            self._on_gap(missed if missed > 0 and info.last_deleted <= position else None)


@dataclass(frozen=True)
class _Info:
    """A stream at one moment. What older servers do not count is None."""

    first: tuple[int, int] | None  # None: it is empty
    added: int | None  # entries, ever
    gone: int | None  # of these, the ones that are not there any more
    last_deleted: tuple[int, int]  # by itself, not by trimming

    @classmethod
    def of(cls, info: dict[str, Any]) -> "_Info":
        first, added = info["first-entry"], info.get("entries-added")
        return cls(
            _number(first[0].decode()) if first else None,
            added,
            None if added is None else added - info["length"],
            _number(info.get("max-deleted-entry-id", b"0-0").decode()),
        )


def _number(entry_id: str) -> tuple[int, int]:
    """An entry's id as it is ordered."""
    at_ms, _, count = entry_id.partition("-")
    return int(at_ms), int(count)


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
