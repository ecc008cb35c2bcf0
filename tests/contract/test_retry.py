"""Tickets over which an error was raised: tried again by anybody, counted apart from crashes, forgotten when done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
import redis

from tests.worker.stubs import StubClassifier
from worker.drain import Drain, Drained
from worker.engine.prompt import Prompt
from worker.ports import Answer, Outcome, Scored
from worker.stop import Stop

if TYPE_CHECKING:
    from tests.contract.conftest import Desk


def retry(outcome: Outcome, *indexes: int) -> Outcome:
    """The same batch with these tickets to be tried again."""
    report = msgspec.structs.replace(outcome.report, retried=len(indexes))
    return replace(outcome, report=report, retry=indexes)


def test_it_goes_to_the_end_with_its_error_counted(desk: Desk) -> None:
    """Byte for byte behind all others, in the same commit; whoever claims it next is told of the error."""
    desk.push(b"\xff\x00 one", b"two", b"three")
    desk.claim("a", most=2)
    receipt = desk.commit(retry(desk.outcome("a.1", {2: "t-2"}), 1), "a")
    assert (receipt.answer, receipt.published, receipt.depth) == (Answer.OK, 1, 2)
    assert desk.waiting() == [b"three", b"\xff\x00 one"]
    assert [(ticket.errors, ticket.crashes, ticket.attempt) for ticket in desk.claim("b").tickets] == [
        (0, 0, 1),
        (1, 0, 2),
    ]
    assert desk.claim("b").tickets[1].errors == 1  # a lost reply, and the same again
    assert desk.leases() == ["b"]
    assert desk.totals().retried == 1
    assert desk.reports()[0].retried == 1


def test_another_worker_tries_again(desk: Desk) -> None:
    """A worker that cannot score a ticket and ends leaves it to the next one, whose label is its second attempt."""
    desk.push(b'{"id": "t-1", "body": "boom"}')
    stop = Stop()
    with desk.queue("first") as queue:
        first = Drain(queue, StubClassifier(during=lambda _: stop.set()), "first", stop, error_limit=2)
        assert first.run() == Drained(retried=1, batches=1)
    with desk.queue("second") as queue:
        second = Drain(queue, Sound(), "second", Stop(), burst=True, error_limit=2)
        assert second.run() == Drained(published=1, batches=1)
    assert [(label.worker, label.attempt) for label in desk.labels()] == [("second", 2)]


class Sound(StubClassifier):
    """A classifier that fails over nothing."""

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        """Every text is red."""
        return Scored([(-0.1, -3.0, -3.0)] * len(prompts), sum(len(prompt.ids) for prompt in prompts))


def test_errors_and_crashes_are_counted_apart(desk: Desk) -> None:
    """Neither adds to the other: an error halves no claim and clears no crash, a crash is no error."""
    desk.push(b"one")
    for number in range(2):
        desk.claim(f"crashed-{number}")
        desk.crash(f"crashed-{number}", crash_limit=9)
        desk.claim(f"failed-{number}")
        desk.commit(retry(desk.outcome(f"failed-{number}.1"), 1), f"failed-{number}")
    (ticket,) = desk.claim("a").tickets
    assert (ticket.crashes, ticket.errors, ticket.attempt) == (2, 2, 5)
    desk.release("a")
    desk.push(b"two")
    desk.redis.hdel(desk.keys.attempts, *[field for field in desk.redis.hkeys(desk.keys.attempts) if b":" not in field])
    assert [ticket.errors for ticket in desk.claim("b", most=2).tickets] == [2, 0]


@pytest.mark.parametrize("fate", ["label", "dead", "crash"])
def test_its_errors_are_forgotten_with_its_fate(desk: Desk, fate: str) -> None:
    """Labelled or buried, by a commit or for its crashes: the same payload later begins anew, and nothing is left."""
    desk.push(b"one")
    desk.claim("a")
    desk.commit(retry(desk.outcome("a.1"), 1), "a")
    desk.claim("b")
    if fate == "crash":
        assert desk.crash("b", crash_limit=1) == (0, 1)
    else:
        desk.commit(desk.outcome("b.1", *([{1: "t-1"}] if fate == "label" else [{}, {1: "engine_error"}])), "b")
    assert not desk.redis.exists(desk.keys.attempts)


def test_a_fenced_commit_counts_no_error(desk: Desk) -> None:
    """A batch that was taken over puts nothing back and counts nothing; a repeated one does it once."""
    desk.push(b"one")
    desk.claim("a")
    outcome = retry(desk.outcome("a.1"), 1)
    desk.crash("a")
    assert desk.commit(outcome, "a").answer is Answer.FENCED
    assert (desk.waiting(), desk.totals().retried) == ([b"one"], 0)
    desk.claim("b")
    outcome = retry(desk.outcome("b.1"), 1)
    assert [desk.commit(outcome, "b").answer for _ in range(2)] == [Answer.OK, Answer.ALREADY]
    assert desk.waiting() == [b"one"]
    assert [ticket.errors for ticket in desk.claim("c").tickets] == [1]


def test_a_full_redis_takes_it_back(own_desk: Desk) -> None:
    """The commit of nothing but tickets to be tried again goes through when no write that grows does."""
    own_desk.push(b"one " + b"x" * 5000, b"two")
    own_desk.claim("a")
    own_desk.redis.config_set("maxmemory", "1")
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        own_desk.push(b"three")
    assert own_desk.commit(retry(own_desk.outcome("a.1"), 1, 2), "a").answer is Answer.OK
    assert [payload[:3] for payload in own_desk.waiting()] == [b"one", b"two"]


def test_fenced_batches_add_up_in_the_totals(desk: Desk) -> None:
    """What each report tells of fenced batches is summed over all workers."""
    desk.push(b"one", b"two")
    desk.claim("a")
    for index, fenced in ((1, 2), (2, 1)):
        outcome = desk.outcome(f"a.{index}", {index: None})
        desk.commit(replace(outcome, report=msgspec.structs.replace(outcome.report, fenced=fenced)), "a")
    assert [report.fenced for report in desk.reports()] == [2, 1]
    assert desk.totals().fenced == 3
