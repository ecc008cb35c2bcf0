"""Tickets into the queue: many a round trip, never past the cap, and always known how many went in."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from types import TracebackType
from typing import Self, cast

from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError, ResponseError

from producer.connection import connect
from producer.errors import QueueFullError, RedisUnavailableError, RefusedTicketError
from producer.prepare import Prepared, TicketLike, prepare
from wire.keys import Keys
from wire.url import mask_url

DEFAULT_URL = "redis://localhost:6379/0"
CHUNK_SIZE = 500

_SCRIPT = files("producer").joinpath("lua/push.lua").read_text("utf-8")
_ANSWERS = (ResponseError, AuthenticationError, BusyLoadingError)


@dataclass(frozen=True, slots=True)
class PushReceipt:
    """What a push did. `depth` is how many tickets waited right after its last step; None where it had nothing to do.

    `ids_made` of the `pushed` tickets brought no id and were given one.
    """

    pushed: int = 0
    ids_made: int = 0
    depth: int | None = None


class Producer:
    """Puts tickets into one queue. `url` defaults to REDIS_URL, else to a Redis on this machine.

    A ticket is a `wire.Ticket` or a mapping with a `body`; one without an id is given one, for without it a worker
    cannot tell a duplicate. Nothing is ever pushed twice by itself: no command is repeated when its reply is lost.
    A push that you repeat after an error may put tickets in twice; workers publish the same id once inside their
    window, so push again with the same ids.

    With `max_depth`, a push that would take the queue past it raises QueueFullError. Raises ValueError for a queue
    name, a URL or a number that cannot be.
    """

    def __init__(
        self,
        url: str | None = None,
        queue: str = "tickets",
        *,
        max_depth: int | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        if chunk_size < 1 or (max_depth is not None and max_depth < 1):
            raise ValueError(f"expected chunk_size and max_depth of at least 1, got {chunk_size} and {max_depth}")
        url = url or os.environ.get("REDIS_URL") or DEFAULT_URL
        self.queue = queue
        self.max_depth = max_depth
        self.chunk_size = chunk_size
        self.masked_url = mask_url(url)
        self._key = Keys(queue).waiting
        self._client = connect(url)
        self._greeted = False

    def push(self, *tickets: TicketLike) -> list[str]:
        """Push these tickets and return their ids, by which their labels are found. Raises as `push_many`."""
        prepared = list(prepare(tickets))
        self._push(iter(prepared), len(prepared))
        return [one.id for one in prepared]

    def push_many(
        self,
        tickets: Iterable[TicketLike],
        *,
        expected: int | None = None,
        on_chunk: Callable[[PushReceipt], None] | None = None,
    ) -> PushReceipt:
        """Push any number of tickets, `chunk_size` at a time, in flat memory. Each chunk goes in whole or not at all.

        A collection is checked whole before its first chunk: RefusedTicketError for a bad ticket, QueueFullError if
        it cannot fit. Of an iterator the chunks before the trouble stay pushed, and the error tells how many;
        `expected`, its length where known, lets it be refused before the first. Several chunks are several steps:
        another producer may fill the queue between two of them, and QueueFullError then comes with `pushed` over 0.
        `on_chunk` is called with the running sums. Raises RedisUnavailableError, with what is pushed for certain.
        """
        if isinstance(tickets, Collection):
            expected = sum(1 for _ in prepare(tickets))
        return self._push(prepare(tickets), expected, on_chunk)

    def close(self) -> None:
        """Close the connection; a later push opens a new one."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _push(
        self,
        prepared: Iterator[Prepared],
        expected: int | None,
        on_chunk: Callable[[PushReceipt], None] | None = None,
    ) -> PushReceipt:
        done = PushReceipt()
        self._check_room(expected)
        while chunk := self._next_chunk(prepared, done):
            done = self._push_chunk(chunk, done, expected)
            if on_chunk:
                on_chunk(done)
        return done

    def _next_chunk(self, prepared: Iterator[Prepared], done: PushReceipt) -> list[Prepared]:
        try:
            return list(islice(prepared, self.chunk_size))
        except RefusedTicketError as error:
            error.pushed = done.pushed
            raise

    def _push_chunk(self, chunk: list[Prepared], done: PushReceipt, expected: int | None) -> PushReceipt:
        cap = "" if self.max_depth is None else str(self.max_depth)
        with self._redis_errors(done.pushed, len(chunk)):
            # One command, not a redis-py pipeline: its errors quote the arguments, which here are tickets.
            reply = self._client.eval(_SCRIPT, 1, self._key, cap, *(one.payload for one in chunk))
        pushed, depth = cast(list[int], reply)
        if not pushed:
            raise self._full(depth, done.pushed, len(chunk), expected)
        return PushReceipt(done.pushed + pushed, done.ids_made + sum(one.id_made for one in chunk), depth)

    def _check_room(self, expected: int | None) -> None:
        """Greet Redis once, so that a server that is not there is told from a lost reply; see that all can fit."""
        if self._greeted and self.max_depth is None:
            return
        with self._redis_errors():
            depth = self._client.llen(self._key)
        self._greeted = True
        if self.max_depth is not None and expected is not None and depth + expected > self.max_depth:
            raise self._full(depth, 0, expected, expected)

    def _full(self, depth: int, pushed: int, chunk: int, expected: int | None) -> QueueFullError:
        refused = chunk if expected is None else expected - pushed
        cap = cast(int, self.max_depth)
        return QueueFullError(
            self.queue, depth=depth, cap=cap, pushed=pushed, refused=refused, known_total=expected is not None
        )

    @contextmanager
    def _redis_errors(self, pushed: int = 0, at_stake: int = 0) -> Iterator[None]:
        try:
            yield
        except _ANSWERS as error:  # so nothing was pushed, for certain
            self._client.close()  # a server that is read-only by now may have a successor, to be found anew
            raise RedisUnavailableError(f"Redis at {self.masked_url} refused: {_brief(error)}", pushed) from error
        except RedisError as error:
            cause = f"no Redis answers at {self.masked_url}: {_brief(error)}"
            hint = "Start one with `lengthwise server`, or set REDIS_URL."
            raise RedisUnavailableError(f"{cause}\n{hint}", pushed, at_stake) from error


def _brief(error: RedisError) -> str:
    """Redis' own words, without the arguments that it quotes in some of them, nor the place in our script."""
    return str(error).partition(", with args")[0].partition(" script: ")[0]
