"""The loop: claim > decode > tokenise > plan > score > commit.

It knows neither Redis nor the model; `worker.ports` says what it needs of them. While one claim's last batch is being
scored, the next claim is already fetched and tokenised: never more than one ahead, so that a crash leaves little.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from wire import BatchReport, DeadLetter
from worker.batch import score_batch
from worker.engine.plan import Batch
from worker.intake import Load, take_in
from worker.observe.report import Place, Timing, account, build_report
from worker.ports import Answer, Classifier, Outcome, Queue, Receipt
from worker.stop import Stop

Observer = Callable[[BatchReport, Receipt], None]


@dataclass
class Drained:
    """What a worker did, summed up. `fenced` batches were taken over and published by somebody else."""

    published: int = 0
    duplicates: int = 0
    dead: int = 0
    batches: int = 0
    fenced: int = 0


@dataclass
class Drain:
    """One worker's life: construct it, `run` it, and read what it did."""

    queue: Queue
    classifier: Classifier
    worker: str
    stop: Stop  # set from outside: finish the batch, hand back the rest
    burst: bool = False  # end when the queue is empty, instead of waiting for more
    max_ticket_bytes: int = 64 * 1024
    observe: Observer = lambda report, receipt: None
    done: Drained = field(default_factory=Drained)
    _publish_ms: float = 0.0
    _reclaimed: int = 0  # taken back and not yet told in a report that was published

    def run(self) -> Drained:
        """Work until stopped or, in a burst, until nothing is left."""
        with _Ahead(self._next_load) as ahead:
            while not self.stop.is_set():
                load = ahead.take()
                if load is not None:
                    self._work_off(load, ahead)
                elif self.burst:
                    break
            self._hand_back(ahead.give_up())
        return self.done

    def _next_load(self) -> Load | None:
        claim = self.queue.claim()
        return None if claim is None else take_in(claim, self.classifier, self.worker, self.max_ticket_bytes)

    def _work_off(self, load: Load, ahead: "_Ahead") -> None:
        finished = False
        try:
            for number, batch in enumerate(load.batches, start=1):
                if self.stop.is_set():
                    return
                if number == len(load.batches):
                    ahead.fetch()
                # Rejects need no scoring; they are buried with the first batch.
                rejects = load.rejects if number == 1 else ()
                if not self._publish(load, batch, rejects, f"{load.claim.id}.{number}"):
                    self.done.fenced += 1
                    break
            finished = True
        finally:
            if not finished:
                # The later claim first, so that the earlier one's tickets come to lie in front of it.
                self._hand_back(ahead.give_up())
            self._hand_back(load)

    def _hand_back(self, load: Load | None) -> None:
        if load is not None:
            self.queue.release(load.claim)

    def _publish(self, load: Load, batch: Batch, rejects: Sequence[tuple[int, DeadLetter]], name: str) -> bool:
        """Score one batch and commit it. False if the claim was taken over meanwhile."""
        started_s = time.monotonic()
        with self.stop.interruptible():
            scored = score_batch(load, batch, self.classifier, self.worker, name)
        done_s = time.monotonic()
        dead = [*rejects, *scored.dead]
        self._reclaimed += self.queue.take_reclaimed()
        report = build_report(
            Place(name, self.worker, self.done.batches + 1, self._reclaimed),
            self.classifier.identity,
            batch.closed,
            [label for _, _, label in scored.labels],
            [letter for _, letter in dead],
            account(batch, load.prompts, self.classifier.costs, scored.tokens_computed),
            Timing(
                claimed_at_ms=load.claimed_at_ms,
                done_at_ms=int(time.time() * 1000),
                tokenise_ms=load.tokenise_ms / len(load.batches),
                score_ms=(done_s - started_s) * 1000,
                publish_ms=self._publish_ms,
                lease_margin_ms=self.queue.lease_margin_ms(load.claim),
            ),
        )
        receipt = self.queue.commit(load.claim, Outcome(scored.labels, dead, report))
        self._publish_ms = (time.monotonic() - done_s) * 1000
        self._count(report, receipt)
        self.observe(report, receipt)
        return receipt.answer is not Answer.FENCED

    def _count(self, report: BatchReport, receipt: Receipt) -> None:
        if receipt.answer is Answer.FENCED:
            return
        self._reclaimed = 0
        self.done.batches += 1
        self.done.published += receipt.published
        self.done.duplicates += receipt.duplicates
        self.done.dead += report.dead


class _Ahead:
    """The next load, fetched on a thread of its own."""

    def __init__(self, fetch: Callable[[], Load | None]) -> None:
        self._fetch = fetch
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lengthwise-intake")
        self._future: Future[Load | None] | None = None

    def __enter__(self) -> "_Ahead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)

    def fetch(self) -> None:
        """Begin to fetch the next load, unless that is under way."""
        if self._future is None:
            self._future = self._pool.submit(self._fetch)

    def take(self) -> Load | None:
        """The next load, waited for."""
        self.fetch()
        return self.give_up()

    def give_up(self) -> Load | None:
        """What was being fetched, if anything was, waited for."""
        future, self._future = self._future, None
        return None if future is None else future.result()
