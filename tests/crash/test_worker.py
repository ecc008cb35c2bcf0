"""Real workers with the real model: killed, stopped, left idle, fed rubbish. No ticket may be lost or leak."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import redis

from tests import processes
from tests.processes import CHECKOUT
from wire import DeadLetter, Keys, Label, TicketError, decode_ticket
from worker.queue.streams import StreamReader

NASTY = CHECKOUT.parent / "shared" / "data" / "nasty.jsonl"
NASTY_STEP = 10  # every so many-eth of its 713 rows: 1 once the engine is fast enough

LEASE_S = 1.5
START_S = 120.0  # a cold start on a busy machine; the very first one fetches the model
WORK_S = 60.0
wait_until = partial(processes.wait_until, within_s=WORK_S)
STOP_S = 10.0
PICK_UP_S = 1.0
IDLE_S, IDLE_SHARE = 3.0, 0.02

MARKER = "x7Qmarker"  # in everything a customer writes, and nowhere else

# A worker whose model fails with the ticket's text in the message. No torch is needed for that.
FAILING = """
import sys
import worker.engine
from worker.engine.plan import Limits, plan
from worker.engine.prompt import Prompt
from worker.ports import Costs, Identity

class Anything:
    def __getattr__(self, name):
        return "any"

class Failing:
    choices = Anything()
    labels, costs, identity = ("a", "b"), Costs(0, True), Identity("m", "t", "s", "c")
    load = classmethod(lambda cls, *args, **options: cls())

    def tokenise(self, texts):
        if {fails!r} == "tokenise":
            raise ValueError(texts)
        return [Prompt(tuple(text.encode())) for text in texts]

    def plan(self, prompts):
        return plan([prompt.ids for prompt in prompts], Limits(32, 4096, False))

    def score(self, prompts):
        raise RuntimeError([bytes(prompt.ids).decode() for prompt in prompts])

worker.engine.Classifier = Failing
from worker.cli import main
main()
"""


@dataclass
class Worker:
    """A worker's process and what it has said."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def said(self) -> str:
        """Everything it wrote so far, to both streams."""
        return self.log.read_text("utf-8")

    def events(self) -> list[dict[str, Any]]:
        """Its log lines. Whatever is not JSON is an error here."""
        return [json.loads(line) for line in self.said().splitlines()]


@dataclass
class Queue:
    """One queue, seen from outside."""

    client: Any
    keys: Keys

    def push(self, *payloads: bytes) -> None:
        """Put payloads in as they are."""
        self.client.rpush(self.keys.waiting, *payloads)

    def labels(self) -> list[Label]:
        """Every label published."""
        return list(StreamReader(self.client, self.keys.results, Label).available())

    def dead(self) -> list[DeadLetter]:
        """Every dead letter."""
        return list(StreamReader(self.client, self.keys.dead, DeadLetter).available())

    def fates(self) -> int:
        """How many labels and dead letters there are."""
        return int(self.client.xlen(self.keys.results)) + int(self.client.xlen(self.keys.dead))

    def waiting(self) -> list[bytes]:
        """The payloads in the list, the oldest first."""
        found: Any = self.client.lrange(self.keys.waiting, 0, -1)
        return list(found)

    def owed(self, name: str = "") -> list[bytes]:
        """The payloads this worker holds; without a name, what all of them hold."""
        claims = self.client.scan_iter(match=self.keys.claim(f"{name}*"), count=1000)
        return [payload for claim in claims for payload in self.client.hvals(claim)]


def ticket(ticket_id: str, body: str, **fields: str) -> bytes:
    """A payload."""
    return json.dumps({"id": ticket_id, "body": body, **fields}).encode()


@contextmanager
def a_worker(queue: Queue, url: str, log: Path, *options: str, code: str | None = None) -> Iterator[Worker]:
    """Run a worker; it is killed at the end, so that a failed test leaves none behind."""
    entry = ["-m", "worker.cli"] if code is None else ["-c", code]
    command = [sys.executable, *entry, "work", "--queue", queue.keys.queue, "--threads", "1", "--lease", str(LEASE_S)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options], cwd=CHECKOUT, env={**os.environ, "REDIS_URL": url}, stdout=out, stderr=out
        )
    try:
        yield Worker(process, log)
    finally:
        process.kill()
        process.wait()


def ready(running: Worker) -> Worker:
    """Wait until the worker is at work, and give it back."""
    wait_until(lambda: '"event": "ready"' in running.said() or running.process.poll() is not None, within_s=START_S)
    assert running.process.poll() is None, running.said()
    return running


def stop(running: Worker) -> float:
    """Wait for the worker's orderly end, and tell how long it took."""
    began_s = time.monotonic()
    assert running.process.wait(STOP_S) == 0, running.said()
    return time.monotonic() - began_s


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[Any]:
    """A client of the module's database, emptied before and after."""
    with redis.Redis.from_url(server_url) as client:
        client.flushdb()
        yield client
        client.flushdb()


@pytest.fixture
def queue(client: Any, request: pytest.FixtureRequest) -> Queue:
    """A queue of the test's own."""
    return Queue(client, Keys(request.node.name.partition("[")[0]))


@pytest.fixture(scope="module")
def live_queue(client: Any) -> Queue:
    """The queue of `live`."""
    return Queue(client, Keys("live"))


@pytest.fixture(scope="module")
def live(live_queue: Queue, server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that many tests use, since its start is what takes long. It lives to the end."""
    log = tmp_path_factory.mktemp("live") / "log"
    with a_worker(live_queue, server_url, log, "--drain-size", "4", "--name", "live") as running:
        yield ready(running)
        assert running.process.poll() is None, running.said()


def test_a_killed_workers_tickets_are_finished_by_another(
    live: Worker, live_queue: Queue, server_url: str, tmp_path: Path
) -> None:
    """kill -9 with a claim in hand: its tickets get their labels from another worker, every ticket once, none lost.

    Labels that the dead worker owed tell of the second attempt; no claim and no lease is left behind.
    """
    before = live_queue.fates()
    ids = [f"kill-{number}" for number in range(120)]
    with a_worker(live_queue, server_url, tmp_path / "log", "--drain-size", "4", "--name", "victim") as victim:
        ready(victim)
        live_queue.push(*(ticket(name, f"the app shows error {name}") for name in ids))
        wait_until(lambda: any(label.worker == "victim" for label in live_queue.labels()))
        wait_until(lambda: _is_caught_with_tickets(victim, live_queue))
        owed = live_queue.owed("victim")
        victim.process.kill()
        wait_until(lambda: live_queue.fates() >= before + len(ids))
    labels = [label for label in live_queue.labels() if label.id.startswith("kill-")]
    assert sorted(label.id for label in labels) == sorted(ids)
    taken_over = [label for label in labels if label.id in {json.loads(payload)["id"] for payload in owed}]
    assert owed
    assert all(label.worker == "live" and label.attempt >= 2 for label in taken_over)
    wait_until(lambda: not live_queue.owed())
    assert live_queue.client.zcard(live_queue.keys.leases) == 0
    assert live_queue.waiting() == []


def _is_caught_with_tickets(running: Worker, queue: Queue) -> bool:
    """Stop the process in its tracks; let it go on if it holds nothing just now."""
    running.process.send_signal(signal.SIGSTOP)
    time.sleep(0.05)
    if queue.owed("victim"):
        return True
    running.process.send_signal(signal.SIGCONT)
    return False


def test_one_sigterm_finishes_the_batch_and_hands_back_the_rest(queue: Queue, server_url: str, tmp_path: Path) -> None:
    """SIGTERM in the middle: exit 0 within seconds; what has no label lies in the list, in its old order."""
    payloads = [ticket(str(number), f"n {number}") for number in range(400)]
    queue.push(*payloads)
    with a_worker(queue, server_url, tmp_path / "log", "--drain-size", "80") as running:
        wait_until(lambda: queue.fates() > 0, within_s=START_S)
        running.process.terminate()
        stop(running)
    labelled = {label.id for label in queue.labels()}
    assert 0 < len(labelled) == queue.fates() < len(payloads)
    assert queue.waiting() == [payload for payload in payloads if json.loads(payload)["id"] not in labelled]
    assert not queue.owed()
    assert queue.client.zcard(queue.keys.leases) == 0
    assert running.events()[-1]["event"] == "ended"


def test_two_sigterms_hand_back_at_once(queue: Queue, server_url: str, tmp_path: Path) -> None:
    """A second SIGTERM breaks a long batch off: exit 0, nothing published, all in the list as if nothing had been."""
    payloads = [ticket(str(number), f"{number} my invoice is wrong " * 300) for number in range(8)]
    with a_worker(queue, server_url, tmp_path / "log", "--tokens", "16384") as running:  # one batch for all of them
        ready(running)
        queue.push(*payloads)
        wait_until(lambda: bool(queue.owed()))
        time.sleep(0.3)  # into the forward pass
        running.process.terminate()
        time.sleep(0.2)
        running.process.terminate()
        stop(running)
    assert [event["event"] for event in running.events()][-2:] == ["stopped at once", "ended"]
    assert queue.fates() == 0
    assert queue.waiting() == payloads
    assert not queue.owed()


def test_rubbish_is_buried_with_its_reason_and_nothing_is_logged_of_it(live: Worker, live_queue: Queue) -> None:
    """Bad payloads become dead letters, byte for byte; good ones among them get labels. No log line quotes any."""
    rubbish = {
        f"{MARKER}": "not_json",
        f'"{MARKER}"': "not_object",
        f'{{"id": "1", "subject": "{MARKER}"}}': "missing_field",
        f'{{"body": ["{MARKER}"]}}': "wrong_type",
        f'{{"id": "{MARKER * 100}", "body": "b"}}': "bad_id",
        f'{{"body": "{MARKER * 8000}"}}': "too_large",
        f'{{"body": "{MARKER}", "x": {"[" * 9999}': "too_deep",
        f'{{"body": "\\ud800 {MARKER}"}}': "not_json",
    }
    good = [ticket(f"good-{number}", f"I was charged twice {number} {MARKER}", subject=MARKER) for number in range(6)]
    nameless = json.dumps({"body": MARKER, "subject": MARKER, "customer": MARKER}).encode()
    known = {letter.payload for letter in live_queue.dead()}
    before = live_queue.fates()
    bad = [payload.encode() for payload in rubbish]
    bad.append(f'{{"body": "{MARKER}'.encode() + b'\xff"}')
    live_queue.push(*bad[:5], *good, nameless, *bad[5:])
    wait_until(lambda: live_queue.fates() >= before + len(bad) + len(good) + 1)
    found = {letter.payload: letter.reason for letter in live_queue.dead() if letter.payload not in known}
    expected = {payload.encode(): reason for payload, reason in rubbish.items()}
    assert found == {**expected, bad[-1]: "not_utf8"}
    labels = {label.id: label.label for label in live_queue.labels()}
    assert all(labels[f"good-{number}"] for number in range(6))
    assert labels[decode_ticket(nameless).id]
    assert live.process.poll() is None
    assert MARKER not in live.said()
    assert "ready" in {event["event"] for event in live.events()}  # and every line was JSON


@pytest.mark.parametrize("fails", ["score", "tokenise"])
def test_a_failing_model_does_not_log_the_text(queue: Queue, server_url: str, tmp_path: Path, fails: str) -> None:
    """An engine that raises with the ticket in its message: the type is told, the text not, in no log or traceback.

    What cannot be scored is buried at its limit of errors; what cannot be tokenised is not tried again.
    """
    queue.push(*(ticket(f"{fails}-{number}", f"{MARKER} {number}") for number in range(5)))
    source = FAILING.replace("{fails!r}", repr(fails))
    with a_worker(queue, server_url, tmp_path / "log", "--burst", "--error-limit", "3", code=source) as running:
        assert running.process.wait(START_S) == 0, running.said()
    said = running.said()
    assert MARKER not in said
    letters = queue.dead()
    assert [letter.reason for letter in letters] == ["engine_error"] * 5
    assert {letter.attempts for letter in letters} == {3 if fails == "score" else 1}
    assert all(("RuntimeError" if fails == "score" else "ValueError") in letter.detail for letter in letters)
    assert all(MARKER not in letter.detail for letter in letters)
    queue.client.flushdb()


def test_hostile_texts_do_not_hurt(live: Worker, live_queue: Queue) -> None:
    """Each payload of the nasty collection gets its label if it is a ticket, else a dead letter. The worker lives."""
    if not NASTY.is_file():
        pytest.skip("no ../shared/data here")
    payloads = NASTY.read_bytes().splitlines()[::NASTY_STEP]
    before = live_queue.fates()
    published, buried = {label.id for label in live_queue.labels()}, len(live_queue.dead())
    live_queue.push(*payloads)
    wait_until(lambda: live_queue.fates() >= before + len(payloads), within_s=START_S)
    ids, reasons = _expected(payloads)
    assert sorted(label.id for label in live_queue.labels() if label.id not in published) == sorted(ids)
    assert sorted(letter.reason for letter in live_queue.dead()[buried:]) == sorted(reasons)
    assert live.process.poll() is None


def _expected(payloads: Sequence[bytes]) -> tuple[list[str], list[str]]:
    """The ids of those that are tickets, and the reasons why the others are not."""
    ids, reasons = [], []
    for payload in payloads:
        try:
            ids.append(decode_ticket(payload).id)
        except TicketError as error:
            reasons.append(error.reason)
    return ids, reasons


def test_an_idle_worker_picks_up_soon(live: Worker, live_queue: Queue) -> None:
    """From the push of a ticket to its label, on an empty queue, it takes a fraction of a second."""
    took_s = []
    for number in range(5):
        before, pushed_s = live_queue.fates(), time.monotonic()
        live_queue.push(ticket(f"soon-{number}", "hello"))
        wait_until(lambda before=before: live_queue.fates() > before)  # type: ignore[misc]  # a default binds it
        took_s.append(time.monotonic() - pushed_s)
        time.sleep(0.1 * number)  # at another moment of its waiting each time
    assert median(took_s) < PICK_UP_S, took_s


def test_an_idle_worker_idles(live: Worker) -> None:
    """A worker with nothing to do takes next to no processor time."""
    stat = Path(f"/proc/{live.process.pid}/stat")
    if not stat.exists():
        pytest.skip("no /proc here")

    def used_s() -> float:
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before_s = used_s()
    time.sleep(IDLE_S)
    assert used_s() - before_s < IDLE_S * IDLE_SHARE
