"""Every way to end a worker, in every state: exit code, what is handed back, what is published, and how soon."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from tests import processes
from tests.processes import CHECKOUT, lives
from wire import Keys
from worker.embedded import EmbeddedServer, embedded_server

KEYS = Keys("tickets")
START_S = 30.0
wait_until = partial(processes.wait_until, within_s=START_S)
STOP_S = 3.0
HUNG_STOP_S = 20.0  # two replies are waited for, 5 s each, and this machine may be busy
SCORE_S = 0.6
FIRST_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# `lengthwise` with a classifier that needs no model: it sleeps through each pass, one ticket a batch.
STUB = f"""
import sys, time
import worker.engine
from worker.engine.plan import Limits, plan
from worker.engine.prompt import Prompt
from worker.ports import Costs, Identity, Scored

class Anything:
    def __getattr__(self, name):
        return "any"

class Stub:
    choices = Anything()
    questions, costs, identity = {{"category": ("a", "b")}}, Costs(0, True), Identity("m", "t", "s", "c")
    load = classmethod(lambda cls, *args, **options: cls())

    def tokenise(self, texts):
        return [Prompt(tuple(text.encode())) for text in texts]

    def plan(self, prompts):
        return plan([prompt.ids for prompt in prompts], Limits(1, 4096, False))

    def score(self, prompts):
        print("scoring", flush=True)
        end_s = time.monotonic() + {SCORE_S}
        while time.monotonic() < end_s:
            time.sleep(0.01)
        return Scored([(-0.1, -2.3)] * len(prompts), 1)

worker.engine.Classifier = Stub
from worker.cli import main
main()
"""


@dataclass
class Worker:
    """A worker's process and what it has said."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def said(self) -> str:
        """Everything it wrote so far."""
        return self.log.read_text("utf-8")

    def events(self) -> list[str]:
        """What it logged."""
        return [json.loads(line)["event"] for line in self.said().splitlines() if line.startswith("{")]

    def passes(self) -> int:
        """How many passes of the model it began."""
        return self.said().count("scoring")

    def ends(self, within_s: float = STOP_S) -> int:
        """Wait for its end, and give its exit code. Whatever is not a plain end fails here."""
        code = self.process.wait(within_s)
        assert "Traceback" not in self.said(), self.said()
        assert "this is a bug" not in self.said(), self.said()
        return code


@contextmanager
def a_worker(url: str, log: Path, *options: str) -> Iterator[Worker]:
    """Run a worker with the stub; it is killed at the end, so that a failed test leaves none behind."""
    words = [sys.executable, "-c", STUB, "work", "--lease", "2", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(words, cwd=CHECKOUT, env={**os.environ, "REDIS_URL": url}, stdout=out, stderr=out)
    try:
        yield Worker(process, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server that a test may stop and kill. It keeps what it acknowledged, and comes back in its folder."""
    with tempfile.TemporaryDirectory(prefix="lw-", dir="/tmp") as name, server_in(Path(name)) as server:
        yield server


@contextmanager
def server_in(folder: Path) -> Iterator[EmbeddedServer]:
    """A server whose data is in this folder."""
    with embedded_server(folder=folder, appendonly=True, settings={"appendfsync": "always"}) as server:
        yield server


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[Any]:
    """Its client."""
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a worker writes."""
    return tmp_path / "log"


def push(client: Any, count: int) -> list[bytes]:
    """So many tickets, as they wait afterwards. Each is a batch: texts that are alike would be scored together."""
    payloads = [json.dumps({"id": f"t-{number}", "body": "b" * (number + 1)}).encode() for number in range(count)]
    client.rpush(KEYS.waiting, *payloads)
    return payloads


def left(client: Any) -> list[bytes]:
    """What waits."""
    return list(client.lrange(KEYS.waiting, 0, -1))


def nothing_held(client: Any) -> bool:
    """Whether no claim and no lease is left."""
    return not client.exists(KEYS.leases) and not list(client.scan_iter(match=KEYS.claim("*")))


def ready(running: Worker) -> Worker:
    """Wait until the worker is at work, and give it back."""
    wait_until(lambda: "ready" in running.events() or running.process.poll() is not None)
    assert running.process.poll() is None, running.said()
    return running


@pytest.mark.parametrize("number", FIRST_SIGNALS)
def test_idle(server: EmbeddedServer, client: Any, log: Path, number: signal.Signals) -> None:
    """A signal to a worker that waits for tickets ends it within the wait, exit code 0."""
    with a_worker(server.url, log) as running:
        ready(running)
        time.sleep(0.2)
        running.process.send_signal(number)
        assert running.ends() == 0
        assert running.events()[-1] == "ended"
    assert nothing_held(client)


@pytest.mark.parametrize("number", FIRST_SIGNALS)
def test_scoring(server: EmbeddedServer, client: Any, log: Path, number: signal.Signals) -> None:
    """One signal in a pass: that batch is published, the others are handed back in order, exit code 0."""
    payloads = push(client, 5)
    with a_worker(server.url, log) as running:
        wait_until(lambda: running.passes() == 1)
        running.process.send_signal(number)
        assert running.ends(SCORE_S + STOP_S) == 0
    one_published_and_the_rest_handed_back(client, payloads)


def one_published_and_the_rest_handed_back(client: Any, payloads: list[bytes]) -> None:
    """One batch with its metrics entry, the others in the list in their order, no claim."""
    ((_, fields),) = client.xrange(KEYS.results)
    assert client.xlen(KEYS.metrics) == 1
    assert left(client) == [payload for payload in payloads if json.loads(payload)["id"] != fields[b"id"].decode()]
    assert nothing_held(client)


@pytest.mark.parametrize("number", FIRST_SIGNALS)
def test_scoring_twice(server: EmbeddedServer, client: Any, log: Path, number: signal.Signals) -> None:
    """A second signal breaks the pass off: nothing is published, all is handed back in order, at once, exit code 0."""
    payloads = push(client, 5)
    with a_worker(server.url, log) as running:
        wait_until(lambda: running.passes() == 1)
        running.process.send_signal(number)
        time.sleep(0.1)
        running.process.send_signal(number)
        assert running.ends() == 0
        assert running.events()[-2:] == ["stopped at once", "ended"]
    assert client.xlen(KEYS.results) == 0
    assert left(client) == payloads
    assert nothing_held(client)


def hold(pid: int) -> None:
    """Stop a process in its tracks: a server falls silent, and a verb is under way for as long as we like."""
    os.kill(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    """Let it go on."""
    os.kill(pid, signal.SIGCONT)


def test_claiming(server: EmbeddedServer, client: Any, log: Path) -> None:
    """A signal while a claim is under way: what it brings is handed back unlabelled, in order, exit code 0."""
    with a_worker(server.url, log) as running:
        ready(running)
        hold(running.process.pid)
        payloads = push(client, 5)
        hold(server.pid)
        go_on(running.process.pid)
        time.sleep(0.3)
        running.process.terminate()
        time.sleep(0.2)
        go_on(server.pid)
        assert running.ends() == 0
    assert left(client) == payloads
    assert client.xlen(KEYS.results) == 0
    assert nothing_held(client)


def test_publishing(server: EmbeddedServer, client: Any, log: Path) -> None:
    """A signal while a commit is under way: it is published whole, the rest is handed back, exit code 0."""
    payloads = push(client, 5)
    with a_worker(server.url, log) as running:
        wait_until(lambda: running.passes() == 1)
        hold(server.pid)
        time.sleep(SCORE_S + 0.2)  # the pass is over, the commit waits
        running.process.terminate()
        time.sleep(0.2)
        go_on(server.pid)
        assert running.ends() == 0
    one_published_and_the_rest_handed_back(client, payloads)


@pytest.mark.parametrize("number", FIRST_SIGNALS)
@pytest.mark.parametrize("times", [1, 2])
def test_redis_is_down(server: EmbeddedServer, log: Path, number: signal.Signals, times: int) -> None:
    """A signal while the worker waits for a Redis that died: it ends at once with 0 and says why; its claim is kept."""
    with redis.Redis.from_url(server.url) as client:
        push(client, 5)
    with a_worker(server.url, log) as running:
        wait_until(lambda: running.passes() == 1)
        os.kill(server.pid, signal.SIGKILL)
        server.supervisor.wait(5)
        wait_until(lambda: "redis gone" in running.events())
        time.sleep(SCORE_S)
        for _ in range(times):
            running.process.send_signal(number)
            time.sleep(0.1)
        assert running.ends() == 0
        assert running.events()[-2:] == ["stopped without redis", "ended"]
    kept_and_taken_over(server.folder, log)


def kept_and_taken_over(folder: Path, log: Path) -> None:
    """When the server is back, another worker finishes what the first one held: no ticket is lost."""
    with ExitStack() as stack:
        server = stack.enter_context(server_when_free(folder))
        client: Any = stack.enter_context(redis.Redis.from_url(server.url))
        assert client.zcard(KEYS.leases) == 1
        running = stack.enter_context(a_worker(server.url, log))
        wait_until(lambda: client.xlen(KEYS.results) == 5)
        running.process.terminate()
        assert running.ends() == 0
        assert nothing_held(client)


@contextmanager
def server_when_free(folder: Path) -> Iterator[EmbeddedServer]:
    """A server of the same data in a folder of its own: the first one's lock is held until the test's end."""
    with tempfile.TemporaryDirectory(prefix="lw-", dir="/tmp") as name:
        subprocess.run(["cp", "-r", f"{folder}/appendonlydir", name], check=True)
        with server_in(Path(name)) as server:
            yield server


def test_redis_hangs(server: EmbeddedServer, log: Path) -> None:
    """A signal while Redis is silent: the worker ends with 0 when it has waited for its replies, and no later."""
    with redis.Redis.from_url(server.url) as client:
        push(client, 5)
    with a_worker(server.url, log) as running:
        wait_until(lambda: running.passes() == 1)
        hold(server.pid)
        try:
            time.sleep(SCORE_S + 0.2)
            running.process.terminate()
            assert running.ends(HUNG_STOP_S) == 0
        finally:
            go_on(server.pid)


@pytest.mark.parametrize("number", FIRST_SIGNALS)
def test_redis_never_was(log: Path, tmp_path: Path, number: signal.Signals) -> None:
    """A signal before Redis has answered even once: exit code 0, for it was asked for, and no traceback."""
    with a_worker(f"unix://{tmp_path}/nobody", log) as running:
        wait_until(lambda: "redis gone" in running.events())
        running.process.send_signal(number)
        assert running.ends() == 0
        assert "stopped while no usable Redis answered" in running.said()


def test_redis_never_was_and_no_retry(log: Path, tmp_path: Path) -> None:
    """With --no-retry and without a signal a Redis that is not there is exit code 69, at once."""
    with a_worker(f"unix://{tmp_path}/nobody", log, "--no-retry") as running:
        assert running.ends(START_S) == 69
        assert "lengthwise server" in running.said()


def test_redis_dies_and_no_retry(server: EmbeddedServer, log: Path) -> None:
    """With --no-retry a Redis that dies in the midst of work is exit code 69 too."""
    with a_worker(server.url, log, "--no-retry") as running:
        ready(running)
        os.kill(server.pid, signal.SIGKILL)
        assert running.ends() == 69


def test_a_wrong_password(server: EmbeddedServer, client: Any, log: Path) -> None:
    """A password that Redis refuses is exit code 69 at once, however patient, and is not repeated."""
    client.config_set("requirepass", "right")
    with a_worker(server.url.replace("://", "://:wr0ng@", 1), log) as running:
        assert running.ends(START_S) == 69
        assert "invalid username-password" in running.said()
        assert "wr0ng" not in running.said()


# Starts what follows it, tells its pid, and lives until it is killed.
PARENT = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(60)"


def test_a_daemon_whose_parent_dies_goes_on(server: EmbeddedServer, client: Any, log: Path) -> None:
    """A worker's parent is nothing to it: when that is killed the worker labels on, and still obeys its signals."""
    words = [sys.executable, "-c", PARENT, sys.executable, "-c", STUB, "work"]
    environment = {**os.environ, "REDIS_URL": server.url}
    with (
        log.open("wb") as err,
        subprocess.Popen(words, cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE, stderr=err) as parent,
    ):
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            wait_until(lambda: b'"ready"' in log.read_bytes())
            parent.kill()
            parent.wait()
            push(client, 1)
            wait_until(lambda: client.xlen(KEYS.results) == 1)
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: b'"ended"' in log.read_bytes(), within_s=STOP_S)
        finally:
            kill(pid)


def kill(pid: int) -> None:
    """End a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# `lengthwise demo` with workers that have the stub: what starts an interpreter with -m gets it.
DEMO = """
import os, sys
import worker.demo
from worker.demo import demo
worker.demo.CATALOGUE = {}
sys.executable = os.environ["STUB_PYTHON"]
demo(["--tickets", "500", "--task", "support"], standalone_mode=False)
"""
STUB_PYTHON = """#!/bin/sh
if [ "$1" = -m ]; then
    shift 2
    echo $$ >> "$STUB_PIDS"
    exec "$REAL_PYTHON" -c "$STUB" "$@"
fi
exec "$REAL_PYTHON" "$@"
"""


def test_a_killed_demo_leaves_no_worker(tmp_path: Path) -> None:
    """When `demo` is killed its server goes with it, and its workers soon after, in the midst of their work."""
    script, pids = tmp_path / "python", tmp_path / "pids"
    script.write_text(STUB_PYTHON)
    script.chmod(0o700)
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    environment |= {"STUB_PYTHON": str(script), "STUB_PIDS": str(pids), "REAL_PYTHON": sys.executable, "STUB": STUB}
    with (tmp_path / "log").open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", DEMO], cwd=CHECKOUT, env=environment, stdout=out, stderr=out)
    said = (tmp_path / "log").read_text
    try:
        wait_until(lambda: "scoring" in said() or process.poll() is not None)
        assert process.poll() is None, said()
    finally:
        process.kill()
        process.wait()
    (pid,) = (int(line) for line in pids.read_text().split())
    try:
        wait_until(lambda: not lives(pid), within_s=10)
    finally:
        kill(pid)
