"""The dead letters of a queue: read in pages, put back, deleted."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from wire import DeadLetter, Keys
from wire.records import from_fields
from worker.queue.connection import Link
from worker.queue.verbs import Verbs

# Entries read at a time. Their payloads come along, and the reason of many is that it was too large.
PAGE = 100
# Letters a script or a delete takes at a time: Redis does nothing else meanwhile.
CHUNK = 100

# The reason shown and filtered by for an entry that none of ours wrote.
MALFORMED = "malformed"


@dataclass(frozen=True)
class Buried:
    """One entry of the dead stream. `letter` is None where it is malformed, and `fault` then says how."""

    id: str
    fields: Mapping[bytes, bytes]
    letter: DeadLetter | None
    fault: str = ""

    @property
    def reason(self) -> str:
        """Why it is here."""
        return self.letter.reason if self.letter else MALFORMED

    @property
    def detail(self) -> str:
        """The reason in a sentence."""
        return self.letter.detail if self.letter else self.fault

    @property
    def payload(self) -> bytes | None:
        """The bytes as they were pushed; a malformed entry may have none."""
        return self.fields.get(b"payload")


@dataclass(frozen=True)
class Counts:
    """How many letters are dead, and how many tickets wait."""

    dead: int
    waiting: int


@dataclass(frozen=True)
class Choice:
    """Which letters are meant: those with these ids, else all; of them those with these reasons, else all.

    `limit` counts the letters that can be acted on.
    """

    ids: Collection[str] = ()
    reasons: Collection[str] = ()
    limit: int | None = None


@dataclass(frozen=True)
class Tally:
    """What became of the letters that were chosen."""

    done: int = 0
    gone: int = 0  # no longer in the stream, or never
    without_payload: int = 0  # malformed, so there is nothing to put back
    refused: int = 0  # the list of waiting tickets may not get longer

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.done + other.done,
            self.gone + other.gone,
            self.without_payload + other.without_payload,
            self.refused + other.refused,
        )


@dataclass
class Survey:
    """The whole stream in numbers, and where the newest of the matching letters are: from `first` to `last`."""

    by_reason: Counter[str] = field(default_factory=Counter)
    matching: int = 0
    first: str | None = None
    last: str | None = None


class DeadLetters:
    """One queue's dead letters. Everything is safe to repeat when its answer was lost.

    Raises RedisUnavailableError when there is no Redis and ConfigError when the keys are of another type.
    """

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link, self._keys = link, keys
        self._redis: Any = link.redis  # redis-py's own types mix the answers of its two kinds of client
        self._verbs = Verbs(link.redis)

    def counts(self) -> Counts:
        """How many there are now."""
        dead: int = self._link.call(lambda: self._redis.xlen(self._keys.dead))
        waiting: int = self._link.call(lambda: self._redis.llen(self._keys.waiting))
        return Counts(dead, waiting)

    def get(self, entry_id: str) -> Buried | None:
        """One letter; None if it is not there."""
        return next(iter(self._page(entry_id, entry_id)), None)

    def scan(self, first: str = "-", last: str | None = None) -> Iterator[Buried]:
        """The letters between two ids, both included, oldest first and a page at a time.

        Without `last`, up to the newest of when it began: a letter that is put back may be buried anew meanwhile, and
        would be met for ever.
        """
        end = last or self._newest_id()
        while page := self._page(first, end) if end else []:
            yield from page
            if page[-1].id == end:
                return
            first = f"({page[-1].id}"

    def survey(self, reasons: Collection[str], newest: int) -> Survey:
        """Count all letters by reason, and find the `newest` of those with one of `reasons` (none given: of all)."""
        survey, ids = Survey(), deque[str](maxlen=newest)
        for entry in self.scan():
            survey.by_reason[entry.reason] += 1
            if not reasons or entry.reason in reasons:
                survey.matching += 1
                ids.append(entry.id)
        if ids:
            survey.first, survey.last = ids[0], ids[-1]
        return survey

    def foresee(self, choice: Choice, *, needs_payload: bool) -> Tally:
        """What a replay (which needs a payload) or a drop of this choice would do now. Changes nothing."""
        done = gone = without_payload = 0
        for _, entry in self._chosen(choice, needs_payload=needs_payload):
            if entry is None:
                gone += 1
            elif needs_payload and entry.payload is None:
                without_payload += 1
            else:
                done += 1
        return Tally(done, gone, without_payload)

    def replay(self, choice: Choice, max_depth: int | None = None) -> Iterator[Tally]:
        """Put letters back at the tail of the list, oldest first; one tally a step.

        Ends with the first step that is refused a letter because `max_depth` tickets wait.
        """
        for ids in _chunks(entry_id for entry_id, _ in self._chosen(choice, needs_payload=True)):
            tally = Tally(*self._link.call(partial(self._verbs.replay, self._keys, ids, max_depth or 0)))
            yield tally
            if tally.refused:
                return

    def drop(self, choice: Choice) -> Iterator[Tally]:
        """Delete letters; one tally a step."""
        for ids in _chunks(entry_id for entry_id, _ in self._chosen(choice, needs_payload=False)):
            dropped: int = self._link.call(partial(self._redis.xdel, self._keys.dead, *ids))
            yield Tally(dropped, gone=len(ids) - dropped)

    def _chosen(self, choice: Choice, *, needs_payload: bool) -> Iterator[tuple[str, Buried | None]]:
        """Ids with what is there under them: None for one that was asked for and is gone."""
        asked = ((entry_id, self.get(entry_id)) for entry_id in dict.fromkeys(choice.ids))
        left = choice.limit
        for entry_id, entry in asked if choice.ids else ((entry.id, entry) for entry in self.scan()):
            if entry is not None and choice.reasons and entry.reason not in choice.reasons:
                continue
            if left == 0:
                return
            yield entry_id, entry
            if left is not None and entry is not None and not (needs_payload and entry.payload is None):
                left -= 1

    def _newest_id(self) -> str | None:
        newest = self._link.call(lambda: self._redis.xrevrange(self._keys.dead, count=1))
        return newest[0][0].decode() if newest else None

    def _page(self, first: str, last: str) -> list[Buried]:
        entries = self._link.call(lambda: self._redis.xrange(self._keys.dead, first, last, PAGE))
        return [_read(entry_id.decode(), fields) for entry_id, fields in entries]


def _read(entry_id: str, fields: Mapping[bytes, bytes]) -> Buried:
    try:
        return Buried(entry_id, fields, from_fields(DeadLetter, fields))
    except msgspec.ValidationError as error:
        return Buried(entry_id, fields, None, str(error))


def _chunks(ids: Iterable[str]) -> Iterator[list[str]]:
    ids = iter(ids)
    while chunk := list(islice(ids, CHUNK)):
        yield chunk
