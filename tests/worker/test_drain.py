"""The loop on its own: an in-memory queue and a stub classifier, through the two Protocols."""

import json
import math
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire import DeadLetter, Label
from worker.drain import Drain, Drained
from worker.engine.plan import Batch, Limits, plan
from worker.engine.prompt import Prompt
from worker.ports import Answer, Claim, Claimed, Costs, Identity, Outcome, Receipt, Scored
from worker.stop import Stop, StoppedAtOnce

SURE, UNSURE = math.log(0.8), math.log(0.1)
# What the stub makes of a text that begins so; anything else is "other".
SCORES = {
    "red": (SURE, UNSURE, UNSURE),
    "blue": (UNSURE, SURE, UNSURE),
    "tie": (UNSURE, math.log(0.45), math.log(0.45)),
    "zero": (-math.inf, 0.0, -math.inf),
    "nan": (SURE, math.nan, UNSURE),
    "inf": (SURE, math.inf, UNSURE),
    "none": (-math.inf, -math.inf, -math.inf),
}
OTHER = (UNSURE, UNSURE, SURE)
LABEL_OF = {"red": "red", "blue": "blue", "tie": "blue", "zero": "blue", "other": "other"}
IDENTITY = Identity("stub", "colours", "padded", "exact")


@dataclass
class StubClassifier:
    """One token a byte. `during` is called inside every pass with the number of passes; a text with "boom" raises."""

    rows: int = 2
    during: Callable[[int], None] = lambda number: None
    passes: list[list[str]] = field(default_factory=list)
    labels: tuple[str, ...] = ("red", "blue", "other")
    costs: Costs = Costs(prefix_tokens=16, reuses_prefix=True)  # noqa: RUF009 - frozen
    identity: Identity = IDENTITY

    def tokenise(self, texts: Sequence[str]) -> list[Prompt]:
        """One token a byte; a text with "spell" cannot be tokenised."""
        if any("spell" in text for text in texts):
            raise RuntimeError(f"cannot tokenise {texts}")
        return [Prompt(tuple(text.encode())) for text in texts]

    def plan(self, prompts: Sequence[Prompt]) -> list[Batch]:
        """The real plan."""
        return plan([prompt.ids for prompt in prompts], Limits(rows=self.rows, tokens=10_000, padded=True))

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        """Padded to the longest."""
        texts = [bytes(prompt.ids).decode() for prompt in prompts]
        self.passes.append(texts)
        self.during(len(self.passes))
        if any("boom" in text for text in texts):
            raise RuntimeError(f"cannot score {texts}")
        scores = [next((SCORES[word] for word in SCORES if text.startswith(word)), OTHER) for text in texts]
        return Scored(scores, max(map(len, texts)) * len(texts))


@dataclass
class MemoryQueue:
    """A queue that checks what it is told: a commit or release of what is not owed is an AssertionError."""

    waiting: deque[bytes]
    drain_size: int = 4
    answers: dict[str, Answer] = field(default_factory=dict)  # by batch name, where it is not OK
    crashes: int = 0
    when_empty: Callable[[], None] = lambda: None
    during_commit: Callable[[], None] = lambda: None
    calls: list[str] = field(default_factory=list)
    owed: dict[str, dict[int, bytes]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    buried: list[tuple[bytes, DeadLetter]] = field(default_factory=list)
    most_held: int = 0
    reclaimed: int = 0

    def claim(self) -> Claim | None:
        """Up to `drain_size` from the head."""
        if not self.waiting:
            self.when_empty()
            return None
        name = str(1 + sum(call.startswith("claim") for call in self.calls))
        taken = {index: self.waiting.popleft() for index in range(1, 1 + min(self.drain_size, len(self.waiting)))}
        self.owed[name] = taken
        self.calls.append(f"claim {name}")
        self.most_held = max(self.most_held, len(self.owed))
        return Claim(name, tuple(Claimed(index, payload, self.crashes) for index, payload in taken.items()))

    def commit(self, claim: Claim, outcome: Outcome) -> Receipt:
        """Publish, unless `answers` has something else in store."""
        self.during_commit()
        self.calls.append(f"commit {outcome.report.batch}")
        answer = self.answers.get(outcome.report.batch, Answer.OK)
        if answer is Answer.FENCED:
            del self.owed[claim.id]
            return Receipt(answer)
        self.outcomes.append(outcome)
        owed = self.owed[claim.id]
        for index, _, label in outcome.labels:
            del owed[index]
            self.labels.append(label)
        self.buried += [(owed.pop(index), letter) for index, letter in outcome.dead]
        if not owed:
            del self.owed[claim.id]
        return Receipt(answer, published=len(outcome.labels) if answer is Answer.OK else 0)

    def release(self, claim: Claim) -> int:
        """Back to the head, in order."""
        left = self.owed.pop(claim.id, {})
        if left:
            self.calls.append(f"release {claim.id}")
        self.waiting.extendleft(reversed(left.values()))
        return len(left)

    def lease_margin_ms(self, claim: Claim) -> float:
        """Always enough."""
        return 1000.0

    def take_reclaimed(self) -> int:
        """What was set, once."""
        taken, self.reclaimed = self.reclaimed, 0
        return taken


def tickets(*texts: str) -> deque[bytes]:
    """Payloads with these bodies, and the body as id."""
    return deque(json.dumps({"id": text, "body": text}).encode() for text in texts)


def drain(queue: MemoryQueue, classifier: StubClassifier | None = None, stop: Stop | None = None) -> Drained:
    """Run a burst to its end."""
    return Drain(queue, classifier or StubClassifier(), "w", stop or Stop(), burst=True).run()


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
        def claim(self) -> Claim | None:
            stop.set()
            return super().claim()

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
    assert told == [("1.1", Answer.FENCED), ("2.1", Answer.OK)]
    assert [letter.reason for _, letter in queue.buried] == ["too_large"]


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


def test_what_was_taken_back_is_told_though_a_batch_was_fenced() -> None:
    """A report that was never published does not swallow the count: the next one has it."""
    queue = MemoryQueue(tickets("red 1", "red 2", "red 3"), drain_size=1, answers={"1.1": Answer.FENCED}, reclaimed=5)
    drain(queue)
    assert [outcome.report.reclaimed for outcome in queue.outcomes] == [5, 0]
