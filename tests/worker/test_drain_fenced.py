"""The loop when a claim was taken over: what it stops, tells, and claims from then on."""

import time
from collections import deque

from tests.worker.stubs import MemoryQueue, StubClassifier, drain, tickets
from worker.drain import Drain, Drained
from worker.pace import Pace
from worker.ports import Answer
from worker.stop import Stop


def test_fenced_ends_the_claim() -> None:
    """Once a claim was taken over, no more of it is scored; the next claim goes on, and the sequence has no gap."""
    queue = MemoryQueue(tickets(*"abcdef", "red"), drain_size=6, answers={"1.2": Answer.FENCED})
    classifier = StubClassifier()
    done = drain(queue, classifier)
    assert classifier.passes == [["a", "b"], ["c", "d"], ["red"]]
    assert (done.fenced, done.batches, done.published) == (1, 2, 3)
    assert [outcome.report.seq for outcome in queue.outcomes] == [1, 2]


def test_a_commit_that_was_done_already_is_no_failure() -> None:
    """ALREADY is a commit whose reply was lost: the claim goes on, and the batch counts."""
    queue = MemoryQueue(tickets(*"abcd"), answers={"1.1": Answer.ALREADY})
    assert drain(queue) == Drained(published=2, batches=2)
    assert queue.calls == ["claim 1", "commit 1.1", "commit 1.2"]


def test_what_was_taken_back_is_told_though_a_batch_was_fenced() -> None:
    """A report that was never published does not swallow the count: the next one has it."""
    queue = MemoryQueue(tickets("red 1", "red 2", "red 3"), drain_size=1, answers={"1.1": Answer.FENCED}, reclaimed=5)
    drain(queue)
    assert [outcome.report.reclaimed for outcome in queue.outcomes] == [5, 0]


def test_fenced_batches_are_told_in_the_next_report() -> None:
    """How many batches of a worker came too late is in the metrics, once, with its next batch that was published."""
    answers = dict.fromkeys(("1.1", "3.1"), Answer.FENCED)  # 2 was handed back: it had been fetched before
    queue = MemoryQueue(tickets(*(f"red {number}" for number in range(6))), drain_size=1, answers=answers)
    assert drain(queue).fenced == 2
    assert [outcome.report.fenced for outcome in queue.outcomes] == [2, 0, 0, 0]


def test_after_a_fence_less_is_claimed_and_what_was_fetched_goes_back() -> None:
    """The claim fetched meanwhile lay through the same time: it is handed back unscored, and claimed in small."""
    queue = MemoryQueue(tickets(*"abcdefghijklmnop"), drain_size=8, answers={"1.1": Answer.FENCED})

    def let_the_next_claim_be_fetched(number: int) -> None:
        end_s = time.monotonic() + (5 if number == 1 else 0)
        while "claim 2" not in queue.calls and time.monotonic() < end_s:
            time.sleep(0.001)

    classifier = StubClassifier(rows=8, during=let_the_next_claim_be_fetched)
    Drain(queue, classifier, "w", Stop(), burst=True, pace=Pace(8, lease_ms=30_000)).run()
    assert classifier.passes[0] == list("abcdefgh")
    assert queue.calls[:3] == ["claim 1", "claim 2", "commit 1.1"]
    assert queue.claim_sizes[:2] == [8, 8]
    assert queue.claim_sizes[2] == 4
    assert sorted(label.id for label in queue.labels) == list("ijklmnop")


def test_a_margin_that_was_nearly_gone_makes_claims_smaller() -> None:
    """Before a lease is ever lost; and a batch of rejects alone is no measure of a ticket's time."""
    payloads = deque([b"rubbish", *tickets(*(f"{number:02}" for number in range(20)))])
    queue = MemoryQueue(payloads, drain_size=4, margins_ms=[100.0])
    pace = Pace(4, lease_ms=1000)
    Drain(queue, StubClassifier(rows=4), "w", Stop(), burst=True, pace=pace).run()
    assert 2 in queue.claim_sizes[1:3]
    assert pace.size == 4  # good margins again
    assert len(queue.labels) == 20
