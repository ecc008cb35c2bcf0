"""The books after a campaign, and what must be true of them."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from tests.soak.feeder import Receipts
from tests.soak.hand import name_of
from tests.soak.hostile import PUBLISHED, Hostile
from wire import BatchReport, DeadLetter, Keys, Label, TicketError, Totals, decode_ticket
from worker.queue.streams import StreamReader, read_totals

CRASHED = "crashed"
CRASH_LIMIT = 3


@dataclass(frozen=True)
class Taken:
    """One claim as a worker saw it: index, name of the payload, crashes."""

    id: str
    tickets: Sequence[tuple[int, str, int]]


@dataclass(frozen=True)
class Books:
    """Everything that is there at the end."""

    results: Sequence[Label]
    reports: Sequence[BatchReport]
    dead: Sequence[DeadLetter]
    totals: Totals
    left: Mapping[str, int]  # what should be empty
    claims: Sequence[Taken]
    answers: Counter[str]  # other than OK, by the workers' diaries

    @property
    def fates(self) -> int:
        """Payloads that met theirs: published, withheld as duplicates, or buried."""
        return len(self.results) + self.totals.duplicates + len(self.dead)

    def innocents_buried(self, receipts: Receipts) -> int:
        """Tickets that did nothing but be alone in a claim when a worker was killed for the third time."""
        return sum(letter.reason == CRASHED and id_of(letter.payload) not in receipts.poison for letter in self.dead)


def read_books(client: Any, keys: Keys, folder: Path) -> Books:
    """Read the streams, what is left of the queue's other keys, and the workers' diaries."""
    claims, answers = _read_diaries(folder)
    return Books(
        results=list(StreamReader(client, keys.results, Label).available()),
        reports=list(StreamReader(client, keys.metrics, BatchReport).available()),
        dead=list(StreamReader(client, keys.dead, DeadLetter).available()),
        totals=read_totals(client, keys),
        left={
            "waiting": client.llen(keys.waiting),
            "claims": sum(1 for _ in client.scan_iter(match=keys.claim("*"), count=1000)),
            "leases": client.zcard(keys.leases),
            "crash counts": client.hlen(keys.attempts),
        },
        claims=claims,
        answers=answers,
    )


def audit(books: Books, receipts: Receipts, hostile: Sequence[Hostile]) -> Iterator[str]:
    """Say what is wrong with the books, a line a fault; nothing if all is well."""
    yield from _nothing_is_left(books)
    yield from _every_ticket_has_one_fate(books, receipts)
    yield from _counts_agree_with_receipts(books, receipts, len(hostile))
    yield from _hostile_have_theirs(books, hostile)
    yield from _no_half_batch(books)
    yield from _totals_add_up(books)
    yield from _order_is_kept(books.claims)


def id_of(payload: bytes) -> str:
    """The id in a payload, or an empty one for what is no ticket."""
    try:
        return decode_ticket(payload).id
    except TicketError:
        return ""


def _nothing_is_left(books: Books) -> Iterator[str]:
    yield from (f"left behind: {count} {what}" for what, count in books.left.items() if count)


def _every_ticket_has_one_fate(books: Books, receipts: Receipts) -> Iterator[str]:
    """Published once with its label, or dead for having crashed three workers; poison never published."""
    published = Counter(label.id for label in books.results)
    yield from (f"{ticket_id!r} published {count} times" for ticket_id, count in published.items() if count > 1)
    crashed = {id_of(letter.payload): letter.attempts for letter in books.dead if letter.reason == CRASHED}
    for ticket_id in receipts.certain_ids - published.keys() - crashed.keys():
        yield f"{ticket_id!r} is lost"
    for label in books.results:
        expected = receipts.labels.get(label.id)
        if expected is not None and label.label != expected:
            yield f"{label.id!r} got {label.label}, not {expected}"
    for ticket_id, attempts in crashed.items():
        if attempts < CRASH_LIMIT:
            yield f"{ticket_id!r} was buried after {attempts} crashes"
    for ticket_id in receipts.poison & receipts.certain_ids - crashed.keys():
        yield f"poison {ticket_id!r} was not buried"


def _counts_agree_with_receipts(books: Books, receipts: Receipts, hostile: int) -> Iterator[str]:
    least = receipts.certain + hostile
    most = least + sum(len(ids) for ids in receipts.uncertain)
    if not least <= books.fates <= most:
        yield f"{books.fates} fates, but the producer knows of {least} to {most} pushes"
    fated = {label.id for label in books.results} | {id_of(letter.payload) for letter in books.dead}
    for ids in receipts.uncertain:
        there = sum(ticket_id in fated for ticket_id in ids)
        if there not in (0, len(ids)):
            yield f"half a push: {there} of {len(ids)}"


def _hostile_have_theirs(books: Books, hostile: Sequence[Hostile]) -> Iterator[str]:
    reasons = {name_of(letter.payload): letter.reason for letter in books.dead}
    published = {label.id for label in books.results}
    for one in hostile:
        reason = reasons.get(name_of(one.payload), PUBLISHED if one.id in published else "lost")
        if reason not in (one.fate, CRASHED):  # they too may be alone when a worker is killed
            yield f"{one.name}: expected {one.fate}, found {reason}"


def _no_half_batch(books: Books) -> Iterator[str]:
    """A batch's metrics and its results come together and add up, and a worker's batches are numbered without gap."""
    results: dict[str, list[Label]] = defaultdict(list)
    for label in books.results:
        results[label.batch].append(label)
    sequences: dict[str, list[int]] = defaultdict(list)
    for report in books.reports:
        mine = results.pop(report.batch, [])
        sequences[report.batch.rpartition("-")[0]].append(report.seq)  # a worker, in one of its lives
        if len(mine) != report.published or report.published + report.duplicates + report.dead != report.size:
            yield f"half a batch: {report.batch} has {len(mine)} results and says {report.published} of {report.size}"
        if sum(report.labels.values()) != report.size - report.dead:
            yield f"batch {report.batch}: labels {report.labels} for {report.size - report.dead} tickets"
        if Counter(label.label for label in mine) - Counter(report.labels):
            yield f"batch {report.batch}: results have labels that its metrics do not count"
    yield from (f"results without metrics: batch {batch}" for batch in results)
    for worker, numbers in sequences.items():
        steps = [(before, after) for before, after in pairwise([0, *numbers]) if after != before + 1]
        if steps:
            yield f"{worker} numbered its batches with steps {steps[:5]}"


def _totals_add_up(books: Books) -> Iterator[str]:
    published = duplicates = dead = 0
    for number, report in enumerate(books.reports, start=1):
        published, duplicates, dead = (
            published + report.published,
            duplicates + report.duplicates,
            dead + report.dead,
        )
        if (report.total_published, report.total_duplicates, report.total_batches) != (published, duplicates, number):
            yield f"batch {report.batch}: the totals in its metrics are not the sums so far"
    crashed = sum(letter.reason == CRASHED for letter in books.dead)
    sums = (published, duplicates, dead + crashed, len(books.reports))
    totals = (books.totals.published, books.totals.duplicates, books.totals.dead, books.totals.batches)
    if sums != totals or sums[0] != len(books.results) or sums[2] != len(books.dead):
        yield f"sums {sums} over the metrics, totals {totals}, {len(books.results)} results, {len(books.dead)} dead"


def _order_is_kept(claims: Sequence[Taken]) -> Iterator[str]:
    """Tickets that were in one claim, and came back together, come in their old order.

    Length-sorted batches leave no order to results, and claims that are taken back may overtake each other; but one
    claim goes back to the head whole, so those of its tickets that are next claimed together have kept their order.
    """
    held: dict[str, tuple[int, int, int]] = {}  # payload -> number of the last claim, index in it, crashes then
    for number, claim in enumerate(claims):
        last_index: dict[int, int] = {}
        for index, payload, crashes in claim.tickets:
            before = held.get(payload)
            # Otherwise there was a claim between that no diary tells of, its worker killed, or that was noted late.
            if before is not None and 0 <= crashes - before[2] <= 1:
                if before[1] < last_index.get(before[0], -1):
                    yield f"claim {claim.id}: tickets of an earlier claim out of order"
                last_index[before[0]] = before[1]
            held[payload] = (number, index, crashes)


def _read_diaries(folder: Path) -> tuple[list[Taken], Counter[str]]:
    """All claims in the order in which workers asked for them, and the answers."""
    events = [event for file in folder.glob("*.diary") for event in _events(file)]
    claims = sorted((event for event in events if "claim" in event), key=lambda event: event["at_s"])
    answers = Counter(event["answer"] for event in events if "answer" in event)
    return [Taken(event["claim"], event["tickets"]) for event in claims], answers


def _events(file: Path) -> Iterator[dict[str, Any]]:
    lines = file.read_bytes().split(b"\n")[:-1]  # without what a killed worker may have begun
    yield from (msgspec.json.decode(line) for line in lines)
