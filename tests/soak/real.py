"""The real model under fire: `lengthwise work` killed and replaced, its labels held against an undisturbed run's."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import redis

import producer
import worker
from producer import Producer
from tests.soak.audit import audit, read_books
from tests.soak.campaign import Outcome
from tests.soak.feeder import Receipts
from wire import Keys
from worker.embedded import embedded_server
from worker.queue.connection import connect

CHECKOUT = Path(worker.__file__).parents[1]
SAMPLES = Path(producer.__file__).parent / "samples" / "tickets.jsonl"
LEASE_S, MOST_S = 2.0, 240.0


@dataclass
class Shift:
    """`lengthwise work` processes on one queue."""

    url: str
    keys: Keys
    log: Path
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self) -> None:
        """One more worker, with the default model and one thread."""
        options = ["--queue", self.keys.queue, "--threads", "1", "--lease", str(LEASE_S), "--drain-size", "16"]
        with self.log.open("ab") as out:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "worker.cli", "work", *options],
                    cwd=CHECKOUT,
                    env={**os.environ, "REDIS_URL": self.url, "OMP_NUM_THREADS": "1"},
                    stdout=out,
                    stderr=out,
                )
            )

    def kill(self, number: int) -> None:
        """SIGKILL, and another in its place."""
        process = self.processes.pop(number)
        process.kill()
        process.wait()
        self.start()

    def end(self, within_s: float = 30.0) -> list[int]:
        """SIGTERM to all, and their exit codes."""
        for process in self.processes:
            process.terminate()
        return [process.wait(within_s) for process in self.processes]


def run_real(seed: int, tickets: int = 300, workers: int = 2, kills: int = 4) -> Outcome:
    """Label the same tickets twice, once in peace and once with kills; what differs is a fault."""
    with embedded_server() as server, connect(server.url) as client:
        calm = _label_all(server.url, client, server.folder, "calm", tickets, workers, lambda shift, share: None)
        pending, dice = [(number + 1) / (kills + 1) for number in range(kills)], Random(seed)

        def kill_now_and_then(shift: Shift, share: float) -> None:
            if pending and share >= pending[0]:
                pending.pop(0)
                shift.kill(dice.randrange(workers))

        storm = _label_all(server.url, client, server.folder, "storm", tickets, workers, kill_now_and_then)
    different = [ticket_id for ticket_id, label in calm.labels.items() if storm.labels.get(ticket_id) != label]
    figures: dict[str, float] = {
        "real tickets": tickets,
        "real workers killed": kills - len(pending),
        "real tickets reclaimed": storm.reclaimed,
        "labels equal to an undisturbed run": tickets - len(different),
        "scores equal to an undisturbed run, bit for bit": sum(
            storm.scores.get(ticket_id) == scores for ticket_id, scores in calm.scores.items()
        ),
        "real seconds, undisturbed": round(calm.seconds, 1),
        "real seconds, with kills": round(storm.seconds, 1),
    }
    return Outcome(figures, [*calm.faults, *storm.faults, *(f"{one!r} got another label" for one in different)])


@dataclass
class _Labelled:
    labels: dict[str, str]
    scores: dict[str, dict[str, float]]
    reclaimed: int
    seconds: float
    faults: list[str]


def _label_all(
    url: str,
    client: Any,
    folder: Path,
    queue: str,
    tickets: int,
    workers: int,
    disturb: Callable[[Shift, float], None],
) -> _Labelled:
    keys, started_s = Keys(queue), time.monotonic()
    receipts = _push(url, queue, tickets)
    with _shift(Shift(url, keys, folder / f"{queue}.log"), workers) as shift:
        while (left := _left(client, keys)) and time.monotonic() - started_s < MOST_S:
            disturb(shift, client.xlen(keys.results) / tickets)
            time.sleep(0.1)
        codes = shift.end()
    seconds = time.monotonic() - started_s
    books = read_books(client, keys, folder)
    faults = [f"{queue}: {fault}" for fault in audit(books, receipts, ())]
    if left or any(codes):
        faults.append(f"{queue}: {left} tickets left, exit codes {codes}; its log ends\n{_last_words(shift.log)}")
    return _Labelled(
        {label.id: str(label.label) for label in books.results},
        {label.id: label.scores for label in books.results},
        books.totals.reclaimed,
        seconds,
        faults,
    )


def _push(url: str, queue: str, tickets: int) -> Receipts:
    samples = [json.loads(line) for line in SAMPLES.read_text("utf-8").splitlines()[:tickets]]
    with Producer(url, queue) as pusher:
        certain = pusher.push_many([{"id": one["id"], "body": one["body"]} for one in samples]).pushed
    return Receipts(certain=certain, certain_ids={one["id"] for one in samples})


@contextmanager
def _shift(shift: Shift, workers: int) -> Iterator[Shift]:
    try:
        for _ in range(workers):
            shift.start()
        yield shift
    finally:
        for process in shift.processes:
            process.kill()
            process.wait()


def _left(client: Any, keys: Keys) -> int:
    with suppress(redis.ConnectionError):
        return int(client.llen(keys.waiting) + client.zcard(keys.leases))
    return 1


def _last_words(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-10:])
