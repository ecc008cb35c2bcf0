"""One worker process of the campaign: the real drain loop over the real queue, with the stub for a model.

It writes a diary, one JSON line an event, so that what a killed worker saw is known after its death.
"""

import hashlib
import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.soak.stub import StubClassifier
from wire import BatchReport, Keys
from worker.drain import Drain
from worker.log import configure
from worker.pace import Pace
from worker.ports import Answer, Claim, Receipt
from worker.queue.claims import QueueSettings, RedisQueue
from worker.stop import Stop


class HandSettings(NamedTuple):
    """How every worker of a campaign works."""

    lease_ms: int
    drain_size: int
    rows: int  # most tickets a batch
    batch_s: float  # what a batch costs
    crash_limit: int


class Diary:
    """Lines appended to a file, each in one write: of a killed process at most the last one is torn."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: dict[str, Any]) -> None:
        """Write one line."""
        os.write(self._fd, msgspec.json.encode(event) + b"\n")


class DiaryQueue(RedisQueue):
    """The real queue; every claim is noted, its tickets in their order."""

    diary: Diary

    def claim(self, most: int | None = None) -> Claim | None:
        """As the real one."""
        asked_at_s = time.monotonic()
        claim = super().claim(most)
        if claim is not None:
            tickets = [(ticket.index, name_of(ticket.payload), ticket.crashes) for ticket in claim.tickets]
            self.diary.note({"claim": claim.id, "at_s": asked_at_s, "tickets": tickets})
        return claim


def name_of(payload: bytes) -> str:
    """A short name for a payload."""
    return hashlib.sha1(payload).hexdigest()[:16]


def work(url: str, folder: Path, name: str, settings: HandSettings) -> None:
    """Be one worker until SIGTERM. What it says goes to `NAME.log`, its diary to `NAME.diary`."""
    _end_with_the_campaign()
    os.dup2(os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    configure("warning")
    stop, diary = Stop(), Diary(folder / f"{name}.diary")
    stop.listen()

    def observe(report: BatchReport, receipt: Receipt) -> None:
        if receipt.answer is not Answer.OK:
            diary.note({"answer": receipt.answer.value, "batch": report.batch, "size": report.size})

    queue_settings = QueueSettings(
        lease_ms=settings.lease_ms, drain_size=settings.drain_size, crash_limit=settings.crash_limit
    )
    queue = DiaryQueue(url, Keys("tickets"), name, queue_settings, stop)
    queue.diary = diary
    with queue:
        classifier, pace = StubClassifier(settings.rows, settings.batch_s), Pace(settings.drain_size, settings.lease_ms)
        done = Drain(queue, classifier, name, stop, observe=observe, pace=pace).run()
    diary.note({"done": [done.published, done.duplicates, done.dead, done.batches, done.fenced]})


def _end_with_the_campaign() -> None:
    """A campaign that is itself killed must not leave patient workers behind."""
    campaign = multiprocessing.parent_process()
    assert campaign is not None

    def watch() -> None:
        wait([campaign.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
