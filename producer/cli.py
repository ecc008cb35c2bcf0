"""`lengthwise push`: files and standard input into the queue."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, cast

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from producer.errors import EXIT_DATA, ProducerError, RedisUnavailableError, UsageError
from producer.push import DEFAULT_URL, Producer, PushReceipt
from producer.sources import Kind, Parsed, Reject, SourceLine, guess_kind, read_source
from wire.ticket import Ticket

REJECTS_SHOWN = 20


@dataclass
class Outcome:
    """What became of the input so far. Only the first rejects are kept, the others counted."""

    receipt: PushReceipt = field(default_factory=PushReceipt)
    uncertain: int = 0
    rejected: int = 0
    shown: list[tuple[str, Reject]] = field(default_factory=list)
    error: str | None = None

    def reject(self, name: str, reject: Reject) -> None:
        """Count a line that is no ticket."""
        self.rejected += 1
        if self.rejected <= REJECTS_SHOWN:
            self.shown.append((name, reject))


@dataclass
class Input:
    """The files of one push, read in order and in flat memory. `-` is standard input."""

    names: tuple[str, ...]
    kind: Kind | None
    _finished_bytes: int = 0
    _stream: BinaryIO | None = None

    @property
    def size(self) -> int | None:
        """Bytes to read in all; None where some of it is a stream, which can be read only once."""
        return sum(map(os.path.getsize, self.names)) if all(map(_is_plain_file, self.names)) else None

    @property
    def position(self) -> int:
        """Bytes read so far, where `size` is known."""
        return self._finished_bytes + (self._stream.tell() if self._stream else 0)

    def count(self) -> int | None:
        """How many tickets there are, by reading it all; None for a stream."""
        return None if self.size is None else sum(isinstance(line, Parsed) for _, line in self.lines())

    def lines(self) -> Iterator[tuple[str, SourceLine]]:
        """Every ticket and reject, with its file's name."""
        self._finished_bytes = 0
        for name in self.names:
            with click.open_file(name, "rb") as opened:
                self._stream = cast(BinaryIO, opened)
                yield from ((name, line) for line in read_source(self._stream, self.kind or guess_kind(name)))
                self._stream = None
            self._finished_bytes += os.path.getsize(name) if _is_plain_file(name) else 0


def _is_plain_file(name: str) -> bool:
    return name != "-" and os.path.isfile(name)


_FILES = click.Path(exists=True, dir_okay=False, allow_dash=True)


@click.command()
@click.argument("names", metavar="FILE...", nargs=-1, required=True, type=_FILES)
@click.option("--queue", default="tickets", show_default=True, help="The list to push to.")
@click.option("--url", envvar="REDIS_URL", default=DEFAULT_URL, show_default=True, show_envvar=True, help="The Redis.")
@click.option(
    "--max-depth", type=click.IntRange(min=1), help="Push nothing that would make the queue longer than this."
)
@click.option("--format", "kind", type=click.Choice(["jsonl", "csv"]), help="Default: csv for .csv, else jsonl.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object on standard output.")
def push(names: tuple[str, ...], queue: str, url: str, max_depth: int | None, kind: Kind | None, as_json: bool) -> None:
    """Push the tickets of each FILE to the queue; `-` is standard input.

    JSONL: one object a line with "body", optionally "id" and "subject". CSV: columns of those names. A ticket without
    an id is given one. Lines that are no tickets are listed at the end, and the others pushed.

    With --max-depth and plain files, nothing is pushed unless everything fits.

    Exit codes: 0 all pushed, 64 usage, 65 some lines were no tickets, 69 no Redis, 75 the queue is full.
    """
    outcome = Outcome()
    with _producer(url, queue, max_depth) as producer, _reported(queue, outcome, as_json):
        _push_all(producer, Input(names, kind), outcome)
    if outcome.rejected:
        sys.exit(EXIT_DATA)


@contextmanager
def _reported(queue: str, outcome: Outcome, as_json: bool) -> Iterator[None]:
    """Say what became of the input, however the push ends."""
    try:
        yield
    except ProducerError as error:
        outcome.error = str(error)
        raise
    finally:
        if as_json:
            click.echo(_as_json(queue, outcome))
        else:
            click.echo("\n".join(_summary(queue, outcome)), err=True)


def _producer(url: str, queue: str, max_depth: int | None) -> Producer:
    try:
        return Producer(url, queue, max_depth=max_depth)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _push_all(producer: Producer, source: Input, outcome: Outcome) -> None:
    expected = source.count() if producer.max_depth else None
    with _progress(source) as show:

        def on_chunk(receipt: PushReceipt) -> None:
            outcome.receipt = receipt
            show(receipt.pushed)

        try:
            producer.push_many(_tickets(source, outcome), expected=expected, on_chunk=on_chunk)
        except RedisUnavailableError as error:
            outcome.uncertain = error.uncertain
            raise
        except KeyboardInterrupt:
            outcome.uncertain = producer.chunk_size  # at most
            raise


def _tickets(source: Input, outcome: Outcome) -> Iterator[Ticket]:
    for name, line in source.lines():
        if isinstance(line, Parsed):
            yield line.ticket
        else:
            outcome.reject(name, line)


@contextmanager
def _progress(source: Input) -> Iterator[Callable[[int], None]]:
    """A bar over the input's bytes, or a moving one for a stream. Yields what tells it the tickets pushed so far."""
    console = Console(stderr=True)
    columns = (TextColumn("pushed {task.fields[pushed]:,}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        total = source.size
        task = progress.add_task("push", total=total, pushed=0)
        yield lambda pushed: progress.update(task, pushed=pushed, completed=None if total is None else source.position)


def _summary(queue: str, outcome: Outcome) -> Iterator[str]:
    receipt = outcome.receipt
    counts = f"ids made: {receipt.ids_made:,}; rejected: {outcome.rejected:,}"
    yield f"pushed {receipt.pushed:,} tickets to '{queue}'; {counts}"
    if outcome.uncertain:
        yield f"up to {outcome.uncertain:,} more may be in the queue: the answer to the last push was not heard"
    for name, reject in outcome.shown:
        yield f"  {click.format_filename(name)}:{reject.line}: {reject.reason}: {reject.detail}"
    if outcome.rejected > len(outcome.shown):
        yield f"  and {outcome.rejected - len(outcome.shown):,} more"


def _as_json(queue: str, outcome: Outcome) -> str:
    receipt = outcome.receipt
    rejects = [
        {"file": click.format_filename(name), "line": one.line, "reason": one.reason, "detail": one.detail}
        for name, one in outcome.shown
    ]
    fields = {
        "queue": queue,
        "pushed": receipt.pushed,
        "uncertain": outcome.uncertain,
        "ids_made": receipt.ids_made,
        "depth": receipt.depth,
        "rejected": outcome.rejected,
        "rejects": rejects,
        "error": outcome.error,
    }
    return msgspec.json.encode(fields).decode()
