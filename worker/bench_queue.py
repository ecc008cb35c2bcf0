"""`lengthwise bench --queue`: what the queue itself can do, with a stub in the model's place.

The workers are processes, as real ones are, and run the real loop over the real scripts. On a small machine Python is
what limits them; so what one core of the server could do is told too, from the processor time it took.
"""

import multiprocessing
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from math import log
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from producer import Producer
from wire import BatchReport, Keys
from worker.commands.texts import read_texts
from worker.drain import Drain
from worker.embedded import embedded_server
from worker.engine.plan import Batch, Limits, plan
from worker.engine.prompt import Prompt
from worker.figures import or_dash, write_json
from worker.ports import Costs, Identity, Receipt, Scored
from worker.queue.claims import QueueSettings, RedisQueue
from worker.queue.connection import connect
from worker.queue.meter import (
    count_commands,
    keys_of,
    memory_bytes,
    processor_s,
    script_runs,
    server_name,
    timed_scripts,
)
from worker.stop import Stop

WORKERS = (1, 4, 16, 64)
TICKETS = 20_000
DRAIN_SIZE = 256


class QueueRow(msgspec.Struct, kw_only=True):
    """One number of workers. What the server would not tell is null."""

    workers: int
    tickets: int
    pushed_per_s: float  # by one producer
    tickets_per_s: float  # from the first claim to the last commit
    server_tickets_per_s: float | None  # in a second of the server's processor time, of claims and commits
    commands_a_ticket: float  # push, claim and commit; those that scripts call too
    round_trips_a_ticket: float
    bytes_waiting: float | None  # of the server's memory, a ticket
    bytes_kept: float | None  # when it is published
    script_ms: dict[str, float]  # verb -> median run of its script
    longest_script_ms: dict[str, float]


class QueueReport(msgspec.Struct, kw_only=True):
    """What `--json` writes."""

    server: str
    drain_size: int
    rows: list[QueueRow]


def bench_queue(url: str | None, json_file: Path | None) -> None:
    """Measure on the server at `url`, or on an embedded one, and show the table. It leaves nothing in the server."""
    console = Console(stderr=True)
    with ExitStack() as stack:
        url = url or stack.enter_context(embedded_server()).url
        client = stack.enter_context(connect(url))
        report = QueueReport(server=server_name(client), drain_size=DRAIN_SIZE, rows=[])
        with console.status("preparing") as status:
            for count in WORKERS:
                status.update(f"{count} workers")
                report.rows.append(measure(url, count, TICKETS))
    console.print(_table(report))
    if json_file:
        write_json(json_file, report)


def measure(url: str, workers: int, tickets: int) -> QueueRow:
    """Push the tickets, drain them with so many workers, and take the server's own figures before and after."""
    keys = Keys(f"bench-{secrets.token_hex(6)}")
    with connect(url) as client, timed_scripts(client) as first_id:
        try:
            commands, trips = count_commands(client)
            pushed_s = _push(url, keys, tickets)
            waiting_bytes, cpu_s = memory_bytes(client, keys), processor_s(client)
            seconds = _drain(url, keys, workers, tickets)
            commands_after, trips_after = count_commands(client)
            cpu_s = processor_s(client) - cpu_s
            runs = script_runs(client, keys, first_id)
            kept_bytes = memory_bytes(client, keys)
        finally:
            client.delete(*keys_of(client, keys))
    return QueueRow(
        workers=workers,
        tickets=tickets,
        pushed_per_s=round(tickets / pushed_s),
        tickets_per_s=round(tickets / seconds),
        server_tickets_per_s=round(tickets / cpu_s) if cpu_s else None,
        commands_a_ticket=round((commands_after - commands) / tickets, 2),
        round_trips_a_ticket=round((trips_after - trips) / tickets, 4),
        bytes_waiting=waiting_bytes and round(waiting_bytes / tickets, 1),
        bytes_kept=kept_bytes and round(kept_bytes / tickets, 1),
        script_ms={verb: round(median(times), 3) for verb, times in runs.items()},
        longest_script_ms={verb: max(times) for verb, times in runs.items()},
    )


class _Stub:
    """A classifier that costs nothing. Every ticket is a row of its own, and a claim one batch."""

    questions: ClassVar = {"category": ("billing", "technical", "account")}
    costs = Costs(prefix_tokens=64, reuses_prefix=True)
    identity = Identity("stub", "bench", "packed", "exact")
    _scores = (log(0.7), log(0.2), log(0.1))

    def tokenise(self, texts: Sequence[str]) -> list[Prompt]:
        return [Prompt((number,)) for number in range(len(texts))]

    def plan(self, prompts: Sequence[Prompt]) -> list[Batch]:
        return plan([prompt.ids for prompt in prompts], Limits(rows=DRAIN_SIZE, tokens=10**9, padded=False))

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        return Scored([self._scores] * len(prompts), len(prompts))

    def shrink(self, prompts: Sequence[Prompt]) -> None:
        pass


def _push(url: str, keys: Keys, tickets: int) -> float:
    """Seconds it took one producer."""
    bodies = islice(cycle(read_texts(None, None)), tickets)
    batch = [{"id": f"bench-{number}", "body": body} for number, body in enumerate(bodies)]
    with Producer(url, keys.queue) as producer:
        started_s = time.monotonic()
        producer.push_many(iter(batch))
        return time.monotonic() - started_s


def _drain(url: str, keys: Keys, workers: int, tickets: int) -> float:
    """Seconds from the first claim to the last commit of all workers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ready, ends = context.Barrier(workers + 1), context.SimpleQueue()
    crew = [
        context.Process(target=_work, args=(url, keys.queue, f"bench-{number}", ready, ends), daemon=True)
        for number in range(workers)
    ]
    try:
        for process in crew:
            process.start()
        ready.wait(timeout=120)
        started_s = time.monotonic()  # the same clock in every process of a machine
        done: list[tuple[int, float]] = [ends.get() for _ in crew]
    finally:
        for process in crew:
            process.join(5)
            process.kill()
    published = sum(count for count, _ in done)
    if published != tickets:
        raise RuntimeError(f"expected {tickets} tickets to be published, counted {published}")
    return max(end_s for _, end_s in done) - started_s


def _work(url: str, queue: str, name: str, ready: Any, ends: Any) -> None:
    """One worker: wait for the others, drain, and tell how many it published and when it was done."""
    last_s = 0.0

    def observe(report: BatchReport, receipt: Receipt) -> None:
        nonlocal last_s
        last_s = time.monotonic()

    stop = Stop()
    with RedisQueue(url, Keys(queue), name, QueueSettings(drain_size=DRAIN_SIZE), stop, patient=False) as work:
        drain = Drain(work, _Stub(), name, stop, burst=True, observe=observe)
        ready.wait()
        published = drain.run().published
    ends.put((published, last_s))


def _table(report: QueueReport) -> Table:
    table = Table(
        title=f"{report.server}, claims of {report.drain_size}, one batch a claim",
        caption=(
            "drain/s: tickets claimed and committed; a core: the same for each second of the server's processor time; "
            "cmds, trips: commands and round trips a ticket; kept: bytes of the server's memory for one that is "
            "published; commit: median run of that script, and max the longest of any, ms"
        ),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("workers", "push/s", "drain/s", "a core", "cmds", "trips", "kept", "commit", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(
            str(row.workers),
            f"{row.pushed_per_s:,.0f}",
            f"{row.tickets_per_s:,.0f}",
            or_dash(row.server_tickets_per_s, "{:,.0f}"),
            f"{row.commands_a_ticket:.1f}",
            f"{row.round_trips_a_ticket:.3f}",
            or_dash(row.bytes_kept, "{:.0f}"),
            or_dash(row.script_ms.get("commit"), "{:.1f}"),
            or_dash(max(row.longest_script_ms.values(), default=None), "{:.1f}"),
        )
    return table
