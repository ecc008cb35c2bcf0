"""commit: fenced, repeated or duplicate, nothing is published twice; and what the report tells of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from wire import Ticket, encode_ticket
from worker.ports import Answer, Receipt

if TYPE_CHECKING:
    from tests.contract.conftest import Desk


def test_the_same_batch_again_is_already(desk: Desk) -> None:
    """A batch committed again is ALREADY, after its claim's last part too, and changes nothing."""
    desk.push(b"one", b"two")
    desk.claim()
    first, last = desk.outcome("b.1", {1: None}), desk.outcome("b.2", {2: None})
    for outcome in (first, last):
        assert desk.commit(outcome).answer is Answer.OK
        before = desk.dump()
        assert desk.commit(outcome) == Receipt(Answer.ALREADY)
        assert desk.commit(first) == Receipt(Answer.ALREADY)
        assert desk.dump() == before


def test_already_even_if_taken_over_since(desk: Desk) -> None:
    """A batch that was done is ALREADY, not FENCED, though the rest of its claim was taken over since."""
    desk.push(b"one", b"two")
    desk.claim()
    outcome = desk.outcome("b.1", {1: "t-1"})
    desk.commit(outcome)
    desk.crash()
    assert desk.commit(outcome) == Receipt(Answer.ALREADY)


@pytest.mark.parametrize("claimed_anew", [True, False])
def test_taken_over_is_fenced(desk: Desk, claimed_anew: bool) -> None:
    """After its claim was taken over a worker's commit is FENCED and changes nothing at all, anywhere."""
    desk.push(b"one", b"two")
    desk.claim("old")
    desk.crash("old")
    if claimed_anew:
        desk.claim("new")
    before = desk.dump()
    assert desk.commit(desk.outcome("b", {1: "t-1"}, dead={2: "not_json"}), "old") == Receipt(Answer.FENCED)
    assert desk.dump() == before


def test_handed_back_is_fenced(desk: Desk) -> None:
    """After its claim was handed back a commit is FENCED and changes nothing."""
    desk.push(b"one")
    desk.claim()
    desk.release()
    before = desk.dump()
    assert desk.commit(desk.outcome("b", {1: "t-1"})) == Receipt(Answer.FENCED)
    assert desk.dump() == before


def test_past_its_lease_but_not_taken_over(desk: Desk) -> None:
    """A lease that ran out but was not taken over still publishes: the fence is the takeover, not the clock."""
    desk.push(b"one")
    desk.claim()
    desk.expire()
    assert desk.commit(desk.outcome("b", {1: "t-1"})).answer is Answer.OK


def test_an_id_is_published_once(desk: Desk) -> None:
    """An id published inside the window is withheld, acknowledged all the same, and counted."""
    desk.push(b"one", b"again", b"other")
    desk.claim()
    desk.commit(desk.outcome("b.1", {1: "t-1"}))
    assert desk.commit(desk.outcome("b.2", {2: "t-1", 3: "t-3"})) == Receipt(Answer.OK, published=1, duplicates=1)
    assert [label.id for label in desk.labels()] == ["t-1", "t-3"]
    assert desk.leases() == []
    assert [(report.published, report.duplicates) for report in desk.reports()] == [(1, 0), (1, 1)]


def test_two_of_one_batch(desk: Desk) -> None:
    """Of two equal ids in one batch the first is published."""
    desk.push(b"one", b"again")
    desk.claim()
    outcome = desk.outcome("b", [(2, "t-1"), (1, "t-1")])
    assert desk.commit(outcome) == Receipt(Answer.OK, published=1, duplicates=1)
    assert desk.labels() == [outcome.labels[0][2]]


def test_after_the_window_again(desk: Desk) -> None:
    """Once the window has passed the id is published again, and counts from then; older ids are forgotten."""
    for number, (age_ms, published) in enumerate([(0, 1), (59_000, 0), (61_000, 1), (59_000, 0)]):
        desk.redis.zadd(desk.keys.published, {"t-1": desk.now_ms() - age_ms}, xx=True)
        desk.push(b"one")
        desk.claim(f"c{number}")
        receipt = desk.commit(desk.outcome(f"b{number}", {1: "t-1"}), f"c{number}", window_ms=60_000)
        assert (receipt.published, receipt.duplicates) == (published, 1 - published)
    desk.redis.zadd(desk.keys.published, {"old": desk.now_ms() - 61_000})
    desk.push(b"two")
    desk.claim()
    desk.commit(desk.outcome("b", {1: "t-2"}), window_ms=60_000)
    assert set(desk.redis.zrange(desk.keys.published, 0, -1)) == {b"t-1", b"t-2"}


def test_without_an_own_id_nothing_is_withheld(desk: Desk) -> None:
    """Tickets that bring no id are all published, equal ones too, and leave nothing in the window."""
    desk.push(b"same", b"same")
    desk.claim()
    outcome = desk.outcome("b", {1: None, 2: None})
    assert desk.commit(outcome) == Receipt(Answer.OK, published=2)
    assert not desk.redis.exists(desk.keys.published)


def test_commits_are_remembered_an_hour(desk: Desk) -> None:
    """What tells ALREADY from FENCED does not grow for ever: it is dropped after an hour, and not before."""
    desk.redis.zadd(desk.keys.commits, {"old": desk.now_ms() - 3_601_000, "young": desk.now_ms() - 3_590_000})
    desk.push(b"one")
    desk.claim()
    desk.commit(desk.outcome("b", {1: "t-1"}))
    assert set(desk.redis.zrange(desk.keys.commits, 0, -1)) == {b"young", b"b"}


def test_the_report_tells_what_waits(desk: Desk) -> None:
    """The report is filled in with the depth and with the age of the oldest waiting ticket."""
    pushed_at_ms = desk.now_ms() - 5000
    waiting = [encode_ticket(Ticket(id=f"t-{n}", body="b", pushed_at_ms=pushed_at_ms + n)) for n in range(3)]
    desk.push(b"one", *waiting)
    desk.claim(most=1)
    receipt = desk.commit(desk.outcome("b", {1: "t"}))
    (report,) = desk.reports()
    assert receipt.depth == report.depth == 3
    assert report.oldest_age_ms is not None
    assert 5000 <= report.oldest_age_ms < 10_000


@pytest.mark.parametrize(
    "head",
    [
        encode_ticket(Ticket(id="t", body="b")),
        encode_ticket(Ticket(id="t", body='"pushed_at_ms":1}')),
        encode_ticket(Ticket(id="t", body='x","pushed_at_ms":1}')),
        b'{"body":"b","note":{"pushed_at_ms":1}}',
        b'{"pushed_at_ms":1,"body":"b"}',
        b'{"body":"b","pushed_at_ms":"1"}',
        b"",
        None,
    ],
)
def test_no_text_forges_the_age(desk: Desk, head: bytes | None) -> None:
    """Without the producer's own last field there is no age: nothing inside a text or a nested object passes for it."""
    desk.push(b"one", *([] if head is None else [head]))
    desk.claim(most=1)
    desk.commit(desk.outcome("b", {1: "t"}))
    assert [report.oldest_age_ms for report in desk.reports()] == [None]


def test_a_clock_ahead_gives_no_negative_age(desk: Desk) -> None:
    """A producer whose clock is ahead makes its ticket's age 0."""
    desk.push(b"one", encode_ticket(Ticket(id="t", body="b", pushed_at_ms=desk.now_ms() + 60_000)))
    desk.claim(most=1)
    desk.commit(desk.outcome("b", {1: "t"}))
    assert [report.oldest_age_ms for report in desk.reports()] == [0]
