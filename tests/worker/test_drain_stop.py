"""The loop asked to end: by one signal, by two, while it waits, scores or commits."""

import signal
from collections.abc import Iterator

import pytest

from tests.worker.stubs import MemoryQueue, StubClassifier, drain, tickets
from worker.drain import Drained
from worker.ports import Claim
from worker.stop import Stop, StoppedAtOnce


@pytest.fixture
def stop() -> Iterator[Stop]:
    """A Stop that hears real signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = Stop()
    stop.listen()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def signals(count: int) -> None:
    """Send this process SIGTERM so many times."""
    for _ in range(count):
        signal.raise_signal(signal.SIGTERM)


def test_one_signal_ends_the_batch_and_hands_back_the_rest(stop: Stop) -> None:
    """The first signal lets the batch be published; what was not scored lies at the head again, in order."""
    queue = MemoryQueue(tickets(*"abcdefgh"), drain_size=6)
    done = drain(queue, StubClassifier(during=lambda _: signals(1)), stop)
    assert done == Drained(published=2, batches=1)
    assert list(queue.waiting) == list(tickets(*"cdefgh"))
    assert not queue.owed


def test_a_claim_that_comes_after_the_signal_is_handed_back_unscored() -> None:
    """Stopped while the next claim is awaited or its predecessor's last batch scored: no new batch begins."""
    stop = Stop()
    classifier = StubClassifier(during=lambda number: stop.set() if number == 2 else None)
    queue = MemoryQueue(tickets(*"abcdefgh"))
    drain(queue, classifier, stop)
    assert len(classifier.passes) == 2
    assert queue.calls[-1] == "release 2"
    assert list(queue.waiting) == list(tickets(*"efgh"))


def test_a_stop_while_waiting_begins_no_batch() -> None:
    """An idle worker that is stopped hands back what its last look at the queue still brought."""
    stop, classifier = Stop(), StubClassifier()

    class Late(MemoryQueue):
        def claim(self, most: int | None = None) -> Claim | None:
            stop.set()
            return super().claim(most)

    queue = Late(tickets("a", "b"))
    drain(queue, classifier, stop)
    assert not classifier.passes
    assert list(queue.waiting) == list(tickets("a", "b"))


def test_a_second_signal_while_scoring_hands_back_at_once(stop: Stop) -> None:
    """The pass is broken off and nothing of it published. The later claim goes back first: the order is the old one."""
    queue = MemoryQueue(tickets(*"abcdefgh"))
    with pytest.raises(StoppedAtOnce):
        drain(queue, StubClassifier(during=lambda number: signals(2) if number == 2 else None), stop)
    assert [label.id for label in queue.labels] == ["a", "b"]
    assert queue.calls[-2:] == ["release 2", "release 1"]
    assert list(queue.waiting) == list(tickets(*"cdefgh"))
    assert not queue.owed


def test_a_second_signal_never_tears_a_commit(stop: Stop) -> None:
    """Signals that come while a batch is published let that be finished, and then the rest is handed back."""
    queue = MemoryQueue(tickets(*"abcd"), during_commit=lambda: signals(3))
    assert drain(queue, stop=stop) == Drained(published=2, batches=1)
    assert list(queue.waiting) == list(tickets(*"cd"))
