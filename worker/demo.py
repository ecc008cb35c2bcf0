"""`lengthwise demo`: everything at once on sample tickets, with a server, workers and a queue of its own."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import redis
from rich.console import Console
from rich.live import Live
from rich.table import Table

from producer import Producer
from producer.samples import load as load_samples
from wire import BatchReport, Keys, Label, Totals
from worker.commands.options import log_level_option, model_option
from worker.commands.texts import sample_text
from worker.demo_fit import fit_on_examples
from worker.embedded import embedded_server
from worker.engine.catalogue import CATALOGUE, fetch
from worker.engine.task import DEFAULT_TASK
from worker.errors import EXIT_BUG, LengthwiseError
from worker.figures import write_json
from worker.queue.connection import connect
from worker.queue.streams import StreamReader, depth, read_totals

AGREEMENT_SAMPLE = 32
_LOOK_EVERY_S = 0.2
_WORDS_SHOWN = 8
_SHARES = ("padding_overhead", "agreement", "accuracy", "accuracy_before")


class Summary(msgspec.Struct, kw_only=True):
    """What `--json` writes. `seconds` run from the first batch's start to the last one's end: no loading, no push."""

    tickets: int
    published: int
    dead: int
    duplicates: int
    lost: int
    seconds: float
    tickets_per_s: float
    padding_overhead: float  # padding tokens / computed tokens
    agreement: float  # share of a sample whose label is the same when run alone
    accuracy: float  # share of the published labels that are right
    accuracy_before: float | None  # by the model's own scores, on some of the tickets; null where nothing was fitted
    labels: dict[str, int]
    model: str
    strategy: str
    workers: int


@click.command()
@click.option("--tickets", type=click.IntRange(1), default=600, show_default=True, help="How many sample tickets.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="How many workers side by side.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the summary to a file."
)
@click.option("--url", envvar="REDIS_URL", help="Redis to use; also REDIS_URL.  [default: a server of its own]")
@click.option("--task", help="Task to ask.  [default: the built-in one, fitted to ninety examples first]")
@model_option
@log_level_option
def demo(tickets: int, workers: int, json_file: Path | None, url: str | None, task: str | None, model: str) -> None:
    """Fit a task to ninety examples, label sample tickets with it here and now, and show what happened."""
    console = Console(stderr=True)
    if model in CATALOGUE:
        fetch(model)  # once and here, where its progress can be seen, not in every worker
    samples, before = load_samples(tickets), None
    with ExitStack() as stack:
        if task is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lengthwise-demo-"))) / DEFAULT_TASK
            with console.status("fitting") as status:
                before = fit_on_examples(folder, model, samples, status.update)
            task = str(folder)
        own = not url
        url = url or stack.enter_context(embedded_server()).url
        client = stack.enter_context(connect(url))
        keys = stack.enter_context(_queue_of_its_own(client))
        with Producer(url, keys.queue) as producer:
            pushed = producer.push_many(samples).pushed
        processes = stack.enter_context(_workers(workers, url, keys, task, model, patient=not own))
        _watch(console, client, keys, processes, pushed)
        reports = list(StreamReader(client, keys.metrics, BatchReport).available())
        labels = list(StreamReader(client, keys.results, Label).available())
        totals = read_totals(client, keys)
        console.print(_first_labels(labels[:10], samples))
        with console.status("comparing with the unbatched run"):
            agreement = _agreement(samples, labels, task, model)
    accuracy = _accuracy(samples, labels)
    summary = _summarise(pushed, workers, totals, reports, labels, (agreement, accuracy, before))
    if json_file:
        write_json(json_file, summary)
    _show(console, summary)


@contextmanager
def _queue_of_its_own(client: "redis.Redis") -> Iterator[Keys]:
    """A queue under a fresh name, all of whose keys are gone afterwards: the server may be somebody's real one."""
    keys = Keys(f"lengthwise-demo-{secrets.token_hex(4)}")
    try:
        yield keys
    finally:
        for pattern in (keys.queue, f"{{{keys.queue}}}:*"):
            for key in client.scan_iter(match=pattern, count=1000):
                client.delete(key)


@contextmanager
def _workers(
    count: int, url: str, keys: Keys, task: str, model: str, *, patient: bool
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Real worker processes, with a fair share of the cores each. They end when the queue is drained.

    Not `patient`, they also end when the server does: ours goes when this process is killed, and never comes back.
    """
    threads = max(1, (os.cpu_count() or 1) // count)
    command = [sys.executable, "-m", "worker.cli", "work", "--burst", "--queue", keys.queue, "--task", task]
    command += ["--model", model, "--threads", str(threads), "--log-level", "warning"]
    command += [] if patient else ["--no-retry"]
    # By the environment: a URL may hold a password, and arguments can be read by everybody on the machine.
    environment = {**os.environ, "REDIS_URL": url}
    processes = [subprocess.Popen(command, env=environment) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _watch(
    console: Console, client: "redis.Redis", keys: Keys, processes: Sequence["subprocess.Popen[bytes]"], pushed: int
) -> None:
    """Show how it goes until every worker has ended. Raises LengthwiseError if one fails."""
    reader = StreamReader(client, keys.metrics, BatchReport)
    reports: list[BatchReport] = []
    with Live(console=console, refresh_per_second=8) as live:
        while any(process.poll() is None for process in processes):
            time.sleep(_LOOK_EVERY_S)
            reports += reader.available()
            live.update(_progress(depth(client, keys), read_totals(client, keys), pushed, reports))
            _raise_if_failed(processes)
    _raise_if_failed(processes)
    console.print()


def _raise_if_failed(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        if process.poll():
            error = LengthwiseError("a worker failed; what it said stands above")
            error.exit_code = process.returncode if process.returncode > 0 else EXIT_BUG
            raise error


def _progress(waiting: int, totals: Totals, pushed: int, reports: Sequence[BatchReport]) -> str:
    done = totals.published + totals.duplicates + totals.dead
    rate = totals.published / _busy_s(reports) if reports else 0.0
    return (
        f"waiting {waiting:>5}   done {done:>5} of {pushed}   {rate:6.1f} tickets/s   "
        f"padding {_padding_overhead(reports):5.1%}"
    )


def _busy_s(reports: Sequence[BatchReport]) -> float:
    """From the first batch's start to the last one's end, over all workers of one machine."""
    began_ms = min(report.at_ms - report.score_ms for report in reports)
    return max(0.001, (max(report.at_ms for report in reports) - began_ms) / 1000)


def _padding_overhead(reports: Sequence[BatchReport]) -> float:
    computed = sum(report.tokens_computed for report in reports)
    return sum(report.tokens_padding for report in reports) / computed if computed else 0.0


def _agreement(samples: Sequence[dict[str, str]], labels: Sequence[Label], task: str, model: str) -> float:
    """Share of tickets, spread evenly over the lengths, that get the same label when run alone with nothing reused."""
    from worker.engine import Classifier

    published = {label.id: label.label for label in labels}
    by_length = sorted(
        (sample for sample in samples if sample["id"] in published), key=lambda sample: len(sample["body"])
    )
    if not by_length:
        return 0.0
    chosen = by_length[:: max(1, len(by_length) // AGREEMENT_SAMPLE)]
    alone = Classifier.load(task, model)
    tickets = [sample_text(sample) for sample in chosen]
    same = [
        alone.classify([ticket])[0].label == published[sample["id"]]
        for sample, ticket in zip(chosen, tickets, strict=True)
    ]
    return sum(same) / len(same)


def _accuracy(samples: Sequence[dict[str, str]], labels: Sequence[Label]) -> float:
    """Share of the published labels that are the sample's own."""
    truth = {sample["id"]: sample["label"] for sample in samples}
    return sum(label.label == truth[label.id] for label in labels) / len(labels) if labels else 0.0


def _summarise(
    pushed: int,
    workers: int,
    totals: Totals,
    reports: Sequence[BatchReport],
    labels: Sequence[Label],
    checked: tuple[float, float, float | None],
) -> Summary:
    agreement, accuracy, before = checked
    seconds = _busy_s(reports) if reports else 0.0
    counts: dict[str, int] = {}
    for label in labels:
        counts[str(label.label)] = counts.get(str(label.label), 0) + 1
    return Summary(
        tickets=pushed,
        published=totals.published,
        dead=totals.dead,
        duplicates=totals.duplicates,
        lost=pushed - totals.published - totals.dead - totals.duplicates,
        seconds=round(seconds, 3),
        tickets_per_s=round(totals.published / seconds, 2) if seconds else 0.0,
        padding_overhead=round(_padding_overhead(reports), 4),
        agreement=round(agreement, 4),
        accuracy=round(accuracy, 4),
        accuracy_before=None if before is None else round(before, 4),
        labels=counts,
        model=reports[-1].model if reports else "",
        strategy=reports[-1].strategy if reports else "",
        workers=workers,
    )


def _first_labels(labels: Sequence[Label], samples: Sequence[dict[str, str]]) -> Table:
    bodies = {sample["id"]: sample["body"] for sample in samples}
    table = Table("id", "label", "confidence", "first words", title="The first labels", title_justify="left")
    for label in labels:
        words: Any = bodies[label.id].split()[:_WORDS_SHOWN]
        table.add_row(label.id, label.label, f"{label.confidence:.0%}", " ".join(words))
    return table


def _show(console: Console, summary: Summary) -> None:
    table = Table(title="What happened", show_header=False)
    for name, value in msgspec.structs.asdict(summary).items():
        if isinstance(value, float) and name in _SHARES:
            value = f"{value:.1%}"
        elif isinstance(value, dict):
            value = ", ".join(f"{label} {count}" for label, count in value.items())
        table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    console.print(
        "Try next:\n"
        "  lengthwise server              a queue of your own, in a second terminal\n"
        "  lengthwise push FILE.jsonl     your tickets into it, one JSON object a line\n"
        "  lengthwise work --burst        label them; then `lengthwise results`\n"
        "  lengthwise fit LABELLED.jsonl  learn your own labels from some thirty examples of each"
    )
