"""The loop when the model fails: over one ticket, for want of memory, with scores that are no numbers."""

import json
import time
import weakref

import pytest

from tests.worker.stubs import MemoryQueue, StubClassifier, drain, tickets
from worker.drain import Drained
from worker.engine import Classifier
from worker.engine.plan import Limits
from worker.engine.prompt import Prompt


def test_a_batch_that_raises_is_halved_until_the_culprit_is_alone() -> None:
    """One ticket that no model can read becomes a dead letter that does not quote it; its neighbours get labels."""
    queue, classifier = MemoryQueue(tickets("a", "boom", "red", "blue"), drain_size=8), StubClassifier(rows=8)
    drain(queue, classifier)
    assert [sorted(texts) for texts in classifier.passes] == [
        ["a", "blue", "boom", "red"],
        ["a", "red"],
        ["blue", "boom"],
        ["boom"],
        ["blue"],
    ]
    ((payload, letter),) = queue.buried
    assert json.loads(payload)["id"] == "boom"
    assert letter.reason == "engine_error"
    assert "boom" not in letter.detail
    assert {label.id: label.label for label in queue.labels} == {"a": "other", "red": "red", "blue": "blue"}


@pytest.mark.parametrize("word", ["nan", "inf", "none"])
def test_scores_that_are_no_numbers_are_never_a_label(word: str) -> None:
    """A score that is NaN or infinite, or a zero for every label, buries that ticket; its neighbour is labelled."""
    queue = MemoryQueue(tickets(word, "red"))
    drain(queue)
    assert [letter.reason for _, letter in queue.buried] == ["non_finite"]
    assert [label.id for label in queue.labels] == ["red"]


def test_a_text_that_cannot_be_tokenised_is_buried_alone() -> None:
    """A tokenizer that fails on one text costs that ticket, not its neighbours and not the worker."""
    queue = MemoryQueue(tickets("red 1", "spell", "blue 1"))
    drain(queue)
    assert sorted(label.id for label in queue.labels) == ["blue 1", "red 1"]
    ((payload, letter),) = queue.buried
    assert b"spell" in payload
    assert letter.reason == "engine_error"
    assert "RuntimeError" in letter.detail
    assert "spell" not in letter.detail


def test_a_ticket_is_buried_at_its_limit_of_errors() -> None:
    """Until then it goes to the end of the queue, behind the others; its label or dead letter tells the attempts."""
    queue, classifier = MemoryQueue(tickets("boom", "a", "b"), drain_size=1), StubClassifier()
    done = drain(queue, classifier, error_limit=3)
    assert classifier.passes == [["boom"], ["a"], ["b"], ["boom"], ["boom"]]
    ((_, letter),) = queue.buried
    assert (letter.reason, letter.attempts) == ("engine_error", 3)
    assert (done.published, done.dead, done.retried) == (2, 1, 2)
    reports = [outcome.report for outcome in queue.outcomes]
    assert [(report.size, report.retried, report.dead) for report in reports] == [
        (1, 1, 0), (1, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1),
    ]  # fmt: skip


def test_an_error_that_passes_costs_no_ticket() -> None:
    """What failed once gets its label later, in any batch, as its second attempt; scores that are no numbers alike."""
    queue = MemoryQueue(tickets("red 1", "red 2"))
    classifier = StubClassifier(rows=4)

    def fail_at_first(number: int) -> None:
        if number <= 3:  # both together, and each alone
            raise RuntimeError

    classifier.during = fail_at_first
    assert drain(queue, classifier, error_limit=2).retried == 2
    assert {(label.id, label.attempt) for label in queue.labels} == {("red 1", 2), ("red 2", 2)}
    queue = MemoryQueue(tickets("nan"))
    assert drain(queue, error_limit=2).retried == 1
    assert [letter.reason for _, letter in queue.buried] == ["non_finite"]


def test_crashes_do_not_count_as_errors() -> None:
    """A ticket that was in two crashes is not buried at its first error of two."""
    queue = MemoryQueue(tickets("boom"), crashes=2)
    assert drain(queue, error_limit=2).retried == 1
    ((_, letter),) = queue.buried
    assert letter.attempts == 2 + 2


def test_what_is_tried_again_ends_a_burst_no_sooner_than_its_fate() -> None:
    """A ticket put back by the last batch was not there when the next claim was fetched: the burst looks again."""
    queue, classifier = MemoryQueue(tickets("boom")), StubClassifier()

    def let_the_next_claim_look(number: int) -> None:
        end_s = time.monotonic() + 5
        while not looked and time.monotonic() < end_s:
            time.sleep(0.001)

    looked: list[bool] = []
    queue.when_empty = lambda: looked.append(True)
    classifier.during = let_the_next_claim_look
    drain(queue, classifier, error_limit=2)
    assert len(classifier.passes) == 2
    assert not queue.waiting


class OutOfMemoryError(RuntimeError):
    """Called as torch's own is; the loop knows it by name."""


NO_MEMORY = [
    MemoryError(),
    OutOfMemoryError("Allocation on device 0 would exceed allowed memory"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000000 bytes."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("MPS backend out of memory"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: f"{type(error).__name__}-{str(error)[:12]}")
def test_a_batch_without_memory_is_halved_and_the_next_ones_are_smaller(error: Exception) -> None:
    """No ticket is lost to it. Batches planned before are cut too, so memory runs out no more than it must."""
    texts = [f"{number:02}" for number in range(40)]
    queue = MemoryQueue(tickets(*texts), drain_size=40)
    classifier = StubClassifier(rows=16, rows_in_memory=4, no_memory=error)
    done = drain(queue, classifier)
    assert (done.published, done.dead, done.retried) == (40, 0, 0)
    assert sorted(label.id for label in queue.labels) == texts
    sizes = [len(texts) for texts in classifier.passes]
    assert sizes[:3] == [16, 8, 4]
    assert sizes.count(8) == 2  # the second half of the first batch; from then on all fit
    assert max(sizes[sizes.index(8, 2) + 1 :]) == 4


@pytest.mark.parametrize("error", [ValueError(), MemoryError()])
def test_a_ticket_that_fails_alone_leaves_the_batches_their_size(error: Exception) -> None:
    """A ticket that no model can read, even for want of memory, is no reason to score others in small batches."""
    queue, classifier = MemoryQueue(tickets("blank", *map(str, range(15))), drain_size=8), StubClassifier(rows=8)

    def fail_over_one(number: int) -> None:
        if "blank" in classifier.passes[-1]:
            raise error

    classifier.during = fail_over_one
    assert drain(queue, classifier) == Drained(published=15, dead=1, batches=2)
    assert len(classifier.passes[-1]) == 8


def test_an_error_of_another_kind_leaves_the_batches_their_size() -> None:
    """A pass that failed for some other reason, and whose halves did not, says nothing of the size."""
    queue, classifier = MemoryQueue(tickets(*map(str, range(10, 26))), drain_size=8), StubClassifier(rows=8)

    def fail_once(number: int) -> None:
        if number == 1:
            raise RuntimeError("a kernel was not launched")

    classifier.during = fail_once
    assert drain(queue, classifier).published == 16
    assert [len(texts) for texts in classifier.passes] == [8, 4, 4, 8]


@pytest.mark.parametrize(
    ("padded", "lengths", "tokens"), [(False, [3, 5], 4), (True, [3, 5], 5), (False, [1], 1), (False, [900], 100)]
)
def test_smaller_limits(padded: bool, lengths: list[int], tokens: int) -> None:
    """Half of what did not fit, by the strategy's own price of a batch; one token at least, never more than before."""
    assert Limits(8, 100, padded).under(lengths) == Limits(8, tokens, padded)


def test_nothing_of_a_failed_pass_is_in_memory_while_its_halves_run() -> None:
    """An error holds on to the frames it came through, and they to the tensors: it is let go of before the retry."""

    class Tensor:
        """Something large, alive for as long as the pass's frame is."""

    passes: list[weakref.ref[Tensor]] = []

    def fill_memory(number: int) -> None:
        tensor = Tensor()
        assert all(earlier() is None for earlier in passes), "a failed pass is still in memory"
        passes.append(weakref.ref(tensor))
        if number == 1:
            raise MemoryError

    queue = MemoryQueue(tickets("red 1", "red 2"))
    assert drain(queue, StubClassifier(during=fill_memory)).published == 2
    assert len(passes) == 3


def test_the_real_classifier_shrinks_likewise() -> None:
    """Its next plan has batches of at most half the tokens that did not fit. No model is needed for that."""
    classifier = object.__new__(Classifier)
    classifier.limits = Limits(rows=512, tokens=1024, padded=False)
    prompts = [Prompt((number, 0, 0, 0)) for number in range(64)]
    assert len(classifier.plan(prompts)) == 1
    classifier.shrink(prompts)
    assert [len(batch.rows) for batch in classifier.plan(prompts)] == [32, 32]
