"""The loop on its own: an in-memory queue and a stub classifier, through the two Protocols."""

import json
import math
import time
from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.stubs import LABEL_OF, SCORES, MemoryQueue, StubClassifier, drain, tickets
from worker.drain import Drain, Drained
from worker.ports import Answer
from worker.stop import Stop

BODIES = st.builds(lambda word, length: word + "." * length, st.sampled_from([*SCORES, "x", "boom"]), st.integers(0, 3))
PAYLOADS = st.lists(st.one_of(BODIES.map(lambda body: tickets(body)[0]), st.just(b"rubbish")), max_size=30)


@settings(deadline=None, max_examples=60)
@given(payloads=PAYLOADS, drain_size=st.integers(1, 9), rows=st.integers(1, 5))
def test_every_ticket_meets_its_fate_once(payloads: list[bytes], drain_size: int, rows: int) -> None:
    """Each payload gets the label of its own text or a dead letter, once, with never more than one claim ahead.

    Every report keeps the metrics' identity, none pads below zero, and the sequence has no gap.
    """
    queue = MemoryQueue(deque(payloads), drain_size)
    done = drain(queue, StubClassifier(rows))
    bodies = Counter(json.loads(payload)["body"].rstrip(".") for payload in payloads if payload != b"rubbish")
    expected = {word: count for word, count in bodies.items() if LABEL_OF.get(word if word != "x" else "other")}
    assert Counter(label.id.rstrip(".") for label in queue.labels) == expected
    assert all(LABEL_OF.get(label.id.rstrip("."), "other") == label.label for label in queue.labels)
    assert len(queue.buried) == len(payloads) - len(queue.labels)
    assert not queue.owed
    assert queue.most_held <= 2
    reports = [outcome.report for outcome in queue.outcomes]
    assert [report.seq for report in reports] == list(range(1, len(reports) + 1))
    assert done == Drained(published=len(queue.labels), dead=len(queue.buried), batches=len(reports))
    assert sum(report.size for report in reports) == len(payloads)
    for report in reports:
        saved = report.tokens_saved_prefix + report.tokens_saved_duplicates
        assert report.tokens_computed == report.tokens_prompt - saved + report.tokens_padding
        assert report.tokens_padding >= 0
    prompts = sum(16 + len(json.loads(payload)["body"]) for payload in payloads if payload != b"rubbish")
    assert sum(report.tokens_prompt for report in reports) == prompts


def test_batches_are_committed_one_by_one_and_the_next_claim_is_fetched_in_time() -> None:
    """Each batch is committed when it is scored. The next claim comes during a claim's last batch, and no sooner."""
    queue = MemoryQueue(tickets(*"abcdefgh"), drain_size=6)

    def linger(number: int) -> None:
        end_s = time.monotonic() + (5.0 if number == 3 else 0.05)  # a claim that comes too soon has time to do so
        while "claim 2" not in queue.calls and time.monotonic() < end_s:
            time.sleep(0.001)

    drain(queue, StubClassifier(during=linger))
    assert queue.calls == ["claim 1", "commit 1.1", "commit 1.2", "claim 2", "commit 1.3", "commit 2.1"]


def test_rejects_are_buried_with_the_first_batch() -> None:
    """What is no ticket goes with the first batch, with its reason and attempt; the others are labelled."""
    queue = MemoryQueue(deque([b"rubbish", *tickets("red", "blue."), b'{"id": 1}']), crashes=2)
    drain(queue, StubClassifier(rows=1))
    assert [len(outcome.dead) for outcome in queue.outcomes] == [2, 0]
    assert [(payload, letter.reason) for payload, letter in queue.buried] == [
        (b"rubbish", "not_json"),
        (b'{"id": 1}', "missing_field"),
    ]
    assert {letter.attempts for _, letter in queue.buried} == {label.attempt for label in queue.labels} == {3}


def test_a_claim_of_rejects_alone_is_one_empty_batch() -> None:
    """Rejects need no neighbour to be buried, and no pass of the model."""
    queue, classifier = MemoryQueue(deque([b"rubbish", b"[]"])), StubClassifier()
    assert drain(queue, classifier) == Drained(dead=2, batches=1)
    assert not classifier.passes
    assert not queue.owed


def test_ties_are_broken_by_the_order_of_the_labels() -> None:
    """The first of equal scores wins, with a margin of zero; a label's zero probability is no error."""
    queue = MemoryQueue(tickets("tie", "zero"))
    drain(queue)
    tie, zero = queue.labels
    assert (tie.label, tie.margin) == ("blue", 0.0)
    assert (zero.label, zero.confidence) == ("blue", 1.0)
    assert math.isfinite(zero.margin)
    assert all(map(math.isfinite, zero.scores.values()))


def test_equal_texts_are_scored_once() -> None:
    """Tickets with the very same text share a pass; each gets its label, and the saving is counted."""
    queue = MemoryQueue(deque(json.dumps({"id": name, "body": "red"}).encode() for name in "abc"))
    classifier = StubClassifier()
    drain(queue, classifier)
    assert classifier.passes == [["red"]]
    assert [(label.id, label.label) for label in queue.labels] == [("a", "red"), ("b", "red"), ("c", "red")]
    assert queue.outcomes[0].report.tokens_saved_duplicates == 2 * (16 + 3)


def test_an_id_is_checked_for_duplicates_only_where_the_ticket_brought_it() -> None:
    """A ticket without an id gets a content hash, and is not mistaken for a duplicate of its like."""
    queue = MemoryQueue(deque([b'{"body": "red"}', b'{"id": "own", "body": "blue"}']))
    drain(queue)
    assert [own_id for outcome in queue.outcomes for _, own_id, _ in outcome.labels] == [None, "own"]


def test_a_worker_waits_for_more_unless_it_is_a_burst() -> None:
    """An empty queue ends a burst, and nothing but a stop ends any other worker."""
    looks, stop = Counter[str](), Stop()

    def look() -> None:
        looks["empty"] += 1
        if looks["empty"] == 5:
            stop.set()

    queue = MemoryQueue(tickets("red"), when_empty=look)
    assert drain(queue).published == 1
    burst_looks = looks["empty"]
    Drain(queue, StubClassifier(), "w", stop).run()
    assert (burst_looks, looks["empty"]) == (1, 5)


def test_the_observer_and_the_size_cap() -> None:
    """Every batch is told, fenced ones too; a payload over the worker's own cap is buried, whatever its producer's."""
    told: list[tuple[str, Answer]] = []
    queue = MemoryQueue(tickets("red", "blue" + "." * 99), drain_size=1, answers={"1.1": Answer.FENCED})
    worker = Drain(
        queue,
        StubClassifier(),
        "w",
        Stop(),
        burst=True,
        max_ticket_bytes=99,
        observe=lambda report, receipt: told.append((report.batch, receipt.answer)),
    )
    worker.run()
    assert told == [("1.1", Answer.FENCED), ("3.1", Answer.OK)]  # 2 was fetched before it was known
    assert [letter.reason for _, letter in queue.buried] == ["too_large"]
