"""Workers that hold the interpreter for longer than their lease: taken over, fenced, told in the metrics, slower then.

Real processes on a real server; only the model is a stub, whose pass takes so long a ticket.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.processes import CHECKOUT
from wire import BatchReport, DeadLetter, Keys, Label
from worker.queue.streams import StreamReader, read_totals

LEASE_S, TICKET_S, DRAIN_SIZE = 1.0, 0.15, 16
ENOUGH_S = 60.0
wait_until = partial(processes.wait_until, within_s=ENOUGH_S)

# `PyDLL` calls without letting go of Python's lock: no other thread runs, so none renews a lease. `time.sleep` does.
STUB = f"""
import ctypes, sys, time
import worker.engine
from worker.engine.plan import Limits, plan
from worker.engine.prompt import Prompt
from worker.ports import Costs, Identity, Scored

class Anything:
    def __getattr__(self, name):
        return "any"

class Slow:
    choices = Anything()
    questions, costs, identity = {{"category": ("a", "b")}}, Costs(0, True), Identity("m", "t", "s", "c")
    load = classmethod(lambda cls, *args, **options: cls())
    tokenise = staticmethod(lambda texts: [Prompt(tuple(text.encode())) for text in texts])

    def plan(self, prompts):
        return plan([prompt.ids for prompt in prompts], Limits(64, 4096, False))

    def score(self, prompts):
        if HOLDS_THE_LOCK:
            ctypes.PyDLL(None).usleep(int(len(prompts) * {TICKET_S} * 1e6))
        else:
            time.sleep(len(prompts) * {TICKET_S} / 4)
        return Scored([(-0.1, -2.4)] * len(prompts), len(prompts))

worker.engine.Classifier = Slow
from worker.cli import main
main()
"""


@dataclass
class Running:
    """A worker's process and what it has said."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def said(self, event: str) -> list[dict[str, Any]]:
        """Its log lines that begin so."""
        lines = map(json.loads, self.log.read_text("utf-8").splitlines())
        return [line for line in lines if line["event"].startswith(event)]

    def end(self) -> None:
        """Stop it in an orderly way."""
        self.process.terminate()
        assert self.process.wait(ENOUGH_S) == 0, self.log.read_text("utf-8")


@contextmanager
def a_worker(url: str, name: str, folder: Path, holds_the_lock: bool = False) -> Iterator[Running]:
    """Run a worker, and wait until it is at work; it is killed at the end."""
    log = folder / f"{name}.log"
    options = ["--name", name, "--lease", str(LEASE_S), "--drain-size", str(DRAIN_SIZE)]
    command = [sys.executable, "-c", f"HOLDS_THE_LOCK = {holds_the_lock}\n{STUB}", "work", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env={**os.environ, "REDIS_URL": url}, stdout=out, stderr=subprocess.STDOUT
        )
    running = Running(process, log)
    try:
        wait_until(lambda: bool(running.said("ready")) or process.poll() is not None)
        assert process.poll() is None, log.read_text("utf-8")
        yield running
    finally:
        process.kill()
        process.wait()


class Tickets:
    """What went in and what came out. None has an id: the fence alone keeps a ticket from a second publication."""

    def __init__(self, client: Any) -> None:
        self.client, self.keys, self.pushed = client, Keys("tickets"), 0

    def push(self, count: int) -> None:
        """Put in so many, all different."""
        first, self.pushed = self.pushed, self.pushed + count
        self.client.rpush(self.keys.waiting, *(b'{"body": "n %d"}' % number for number in range(first, self.pushed)))

    def held_by(self, name: str) -> int:
        """How many tickets a worker owes."""
        return sum(self.client.hlen(key) for key in self.client.scan_iter(match=self.keys.claim(f"{name}-*")))

    def are_done(self) -> bool:
        """Whether every ticket has a label, and no worker owes any."""
        return len(self.labels()) >= self.pushed and not self.client.zcard(self.keys.leases)

    def labels(self) -> list[Label]:
        """All that was published."""
        return list(StreamReader(self.client, self.keys.results, Label).available())

    def reports(self, name: str) -> list[BatchReport]:
        """The metrics of one worker."""
        entries = StreamReader(self.client, self.keys.metrics, BatchReport).available()
        return [report for report in entries if report.worker == name]

    def check_each_was_published_once(self) -> None:
        """Not one lost, not one twice, none buried."""
        assert len({label.id for label in self.labels()}) == len(self.labels()) == self.pushed
        assert list(StreamReader(self.client, self.keys.dead, DeadLetter).available()) == []


@pytest.fixture
def tickets(redis_client: Any) -> Tickets:
    """An empty queue."""
    return Tickets(redis_client)


def test_a_pass_that_blocks_renewal_is_fenced_and_claims_get_smaller(
    tickets: Tickets, redis_url: str, tmp_path: Path
) -> None:
    """Batches that hold Python's lock longer than the lease are published by another worker, and by no one twice.

    The blocked worker tells how many in its next report. By what it measured it claims no more than half a lease's
    work from then on, and is not fenced again.
    """
    with a_worker(redis_url, "blocked", tmp_path, holds_the_lock=True) as blocked:
        with a_worker(redis_url, "other", tmp_path) as other:
            tickets.push(3 * DRAIN_SIZE)
            wait_until(lambda: bool(blocked.said("batch fenced")))
            wait_until(tickets.are_done)
            other.end()
        tickets.push(DRAIN_SIZE)
        wait_until(tickets.are_done)
        blocked.end()
    tickets.check_each_was_published_once()
    fenced, reports = blocked.said("batch fenced"), tickets.reports("blocked")
    assert sum(report.fenced for report in reports) == len(fenced) == read_totals(tickets.client, tickets.keys).fenced
    assert reports[0].fenced
    assert blocked.said("claims made smaller")
    assert reports[0].size * TICKET_S <= LEASE_S / 2
    assert max(report.size for report in reports) * TICKET_S < LEASE_S * 3 / 4
    assert len(fenced) <= 3  # on a busy machine; one is the rule


def test_a_stopped_process_is_fenced_when_it_goes_on(tickets: Tickets, redis_url: str, tmp_path: Path) -> None:
    """SIGSTOP in the midst of a batch: another worker publishes its tickets; after SIGCONT it publishes none of them.

    It lives on, tells of its fenced batch with the next one, and claims less at first.
    """
    with a_worker(redis_url, "stopped", tmp_path) as stopped:
        tickets.push(DRAIN_SIZE)
        wait_until(lambda: tickets.held_by("stopped") == DRAIN_SIZE)
        stopped.process.send_signal(signal.SIGSTOP)
        with a_worker(redis_url, "other", tmp_path) as other:
            wait_until(tickets.are_done)
            other.end()
        assert {label.worker for label in tickets.labels()} == {"other"}
        stopped.process.send_signal(signal.SIGCONT)
        wait_until(lambda: bool(stopped.said("batch fenced")))
        tickets.push(DRAIN_SIZE)
        wait_until(tickets.are_done)
        stopped.end()
    tickets.check_each_was_published_once()
    reports = tickets.reports("stopped")
    assert [report.fenced for report in reports] == [1] + [0] * (len(reports) - 1)
    assert reports[0].size < DRAIN_SIZE
