"""The loop: claim > decode > tokenise > plan > score > commit.

It knows neither Redis nor the model; `worker.ports` says what it needs of them. While one claim's last batch is being
scored, the next claim is already fetched and tokenised: never more than one ahead, so that a crash leaves little.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

import structlog

from wire import BatchReport, DeadLetter
from worker.batch import Scorer, score_batch
from worker.engine.plan import Batch
from worker.intake import Load, take_in
from worker.observe.report import Place, Timing, account, build_report
from worker.pace import Pace
from worker.ports import Answer, Classifier, Outcome, Queue, Receipt
from worker.stop import Stop

Observer = Callable[[BatchReport, Receipt], None]

log = structlog.get_logger("lengthwise.drain")


@dataclass
class Drained:
    """What a worker did, summed up. `fenced` batches were taken over and published by somebody else."""

    published: int = 0
    duplicates: int = 0
    dead: int = 0
    retried: int = 0  # put back after an error; one ticket may be counted more than once
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
    error_limit: int = 1  # errors raised over a ticket until it is buried
    min_confidence: float = 0.0  # under it a ticket gets no label
    pace: Pace = field(default_factory=Pace)
    done: Drained = field(default_factory=Drained)
    _publish_ms: float = 0.0
    _reclaimed: int = 0  # taken back and not yet told in a report that was published
    _fenced: int = 0  # likewise: batches
    _put_back: bool = False  # a ticket to be tried again, which a look at the queue before that cannot have seen

    @property
    def _scorer(self) -> Scorer:
        return Scorer(self.classifier, self.worker, self.error_limit, self.min_confidence)

    def run(self) -> Drained:
        """Work until stopped or, in a burst, until nothing is left."""
        with _Ahead(self._next_load) as ahead:
            while not self.stop.is_set():
                load = ahead.take()
                if load is not None:
                    self._work_off(load, ahead)
                elif self._put_back:
                    self._put_back = False
                elif self.burst:
                    break
            self._hand_back(ahead.give_up())
        return self.done

    def _next_load(self) -> Load | None:
        claim = self.queue.claim(self.pace.size)
        return None if claim is None else take_in(claim, self.classifier, self.worker, self.max_ticket_bytes)

    def _work_off(self, load: Load, ahead: "_Ahead") -> None:
        finished = False
        try:
            for number, batch in enumerate(load.batches, start=1):
                if self.stop.is_set():
                    return
                # Not beside a ticket that was in a crash: the next claim would be in the same crash.
                if number == len(load.batches) and not any(ticket.crashes for ticket in load.claim.tickets):
                    ahead.fetch()
                # Rejects need no scoring; they are buried with the first batch.
                rejects = load.rejects if number == 1 else ()
                if not self._publish(load, batch, rejects, f"{load.claim.id}.{number}"):
                    # The next claim lay through the same time, and is larger than what is claimed from now on.
                    self._hand_back(ahead.give_up())
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
            scored = score_batch(load, batch, self._scorer, name)
        done_s, margin_ms = time.monotonic(), self.queue.lease_margin_ms(load.claim)
        dead = [*rejects, *scored.dead]
        self._reclaimed += self.queue.take_reclaimed()
        report = build_report(
            Place(name, self.worker, self.done.batches + 1, self._reclaimed, self._fenced),
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
                lease_margin_ms=margin_ms,
            ),
            len(scored.retry),
        )
        receipt = self.queue.commit(load.claim, Outcome(scored.labels, dead, report, scored.retry))
        self._publish_ms = (time.monotonic() - done_s) * 1000
        self._count(report, receipt)
        self.observe(report, receipt)
        self._keep_pace(len(load.claim.tickets), len(batch.indexes), report, receipt)
        return receipt.answer is not Answer.FENCED

    def _count(self, report: BatchReport, receipt: Receipt) -> None:
        if receipt.answer is Answer.FENCED:
            self.done.fenced += 1
            self._fenced += 1
            return
        self._reclaimed = self._fenced = 0
        self._put_back = self._put_back or report.retried > 0
        self.done.batches += 1
        self.done.published += receipt.published
        self.done.duplicates += receipt.duplicates
        self.done.dead += report.dead
        self.done.retried += report.retried

    def _keep_pace(self, claimed: int, tickets: int, report: BatchReport, receipt: Receipt) -> None:
        before, fenced = self.pace.size, receipt.answer is Answer.FENCED
        self.pace.note(claimed, tickets, report.score_ms, report.lease_margin_ms, fenced=fenced)
        if self.pace.size < before:
            margin_ms = round(report.lease_margin_ms)
            log.warning("claims made smaller", tickets=self.pace.size, lease_margin_ms=margin_ms, fenced=fenced)


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
