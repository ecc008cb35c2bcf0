"""`lengthwise dead`: what got no label and why; put it back, or delete it."""

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from producer.errors import QueueFullError
from wire import Keys
from worker.commands.letters import HEADER, Report, as_json_line, as_table_line, as_text, numbers, summary
from worker.commands.options import json_option, queue_option, url_option
from worker.commands.printable import printable, until_pipe_closes
from worker.errors import LengthwiseError, UsageError
from worker.queue.connection import Link
from worker.queue.dead import Choice, Counts, DeadLetters, Tally

F = TypeVar("F", bound=Callable[..., Any])

_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_LARGEST_ID_PART = 2**64 - 1


def _entry_id(text: str) -> str:
    parts = [int(part) for part in text.split("-")] if _ENTRY_ID.fullmatch(text) else []
    if not parts or max(parts) > _LARGEST_ID_PART:
        raise UsageError(
            f"'{printable(text)}' is no id of a dead letter: expected two numbers, such as 1718000000000-0, as "
            "`lengthwise dead list` shows them"
        )
    return f"{parts[0]}-{parts[1]}"


reason_option = click.option("--reason", "reasons", multiple=True, help="Only letters with this reason; repeatable.")


@click.group()
def dead() -> None:
    """Look at, put back and delete dead letters: payloads that got no label, kept byte for byte."""


@dead.command("list")
@queue_option
@url_option
@reason_option
@click.option("--last", type=click.IntRange(0), default=20, show_default=True, help="Show so many of the newest.")
@json_option
@click.option("--payload", "with_payload", is_flag=True, help="With --json: the payload too, as base64.")
def list_letters(keys: Keys, url: str, reasons: tuple[str, ...], last: int, as_json: bool, with_payload: bool) -> None:
    """List dead letters, the newest last, and how many there are of each reason.

    With --json, standard output has one object a letter, and standard error one with the numbers.
    """
    if with_payload and not as_json:
        raise UsageError("--payload needs --json; one letter's payload is shown by `lengthwise dead show ID`")
    with _dead_letters(url, keys) as letters, until_pipe_closes():
        survey = letters.survey(reasons, last)
        if survey.first and not as_json:
            click.echo(HEADER)
        shown = 0
        for entry in letters.scan(survey.first, survey.last) if survey.first else ():
            if not reasons or entry.reason in reasons:
                click.echo(as_json_line(entry, with_payload) if as_json else as_table_line(entry))
                shown += 1
        if as_json:
            click.echo(json.dumps(numbers(survey, shown)), err=True)
        else:
            click.echo(summary(survey, shown, keys.queue))


@dead.command()
@click.argument("entry_id", metavar="ID", type=_entry_id)
@queue_option
@url_option
@click.option("--payload", "with_payload", is_flag=True, help="Print the payload's bytes alone, exactly as pushed.")
@json_option
def show(entry_id: str, keys: Keys, url: str, with_payload: bool, as_json: bool) -> None:
    """Show one dead letter whole, its payload included.

    With --json the payload is left out, unless --payload asks for it as base64.
    """
    with _dead_letters(url, keys) as letters, until_pipe_closes():
        entry = letters.get(entry_id)
        if entry is None:
            raise UsageError(f"there is no dead letter {entry_id} in queue '{keys.queue}'")
        if as_json:
            click.echo(as_json_line(entry, with_payload))
        elif not with_payload:
            click.echo("\n".join(as_text(entry)))
        elif entry.payload is None:
            raise UsageError(f"entry {entry_id} is malformed and has no payload: {printable(entry.detail)}")
        else:
            click.echo(entry.payload, nl=False)


def choice_options(command: F) -> F:
    """Which letters are meant, as a `choice`, and how what becomes of them is told."""

    @functools.wraps(command)
    def with_choice(
        ids: tuple[str, ...], everything: bool, reasons: tuple[str, ...], limit: int | None, **others: Any
    ) -> Any:
        return command(choice=_choice(ids, everything, reasons, limit), **others)

    options = (
        click.argument("ids", metavar="[ID]...", nargs=-1, type=_entry_id),
        # Not from the environment: what is left there would meet every queue.
        click.option("--all", "everything", is_flag=True, allow_from_autoenv=False, help="All letters."),
        reason_option,
        click.option("--limit", type=click.IntRange(1), help="At most so many, the oldest first."),
        click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
        queue_option,
        url_option,
        json_option,
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), cast(F, with_choice))


@dead.command()
@choice_options
@click.option(
    "--max-depth", type=click.IntRange(min=1), help="Put back nothing that would make the queue longer than this."
)
def replay(choice: Choice, dry_run: bool, keys: Keys, url: str, as_json: bool, max_depth: int | None) -> None:
    """Put dead letters back at the end of the queue, and forget their crashes and errors.

    Name them by ID, or choose by --all or --reason. A letter is put back once, however often this is repeated. With
    --max-depth nothing is put back unless everything fits; --limit asks for less.

    Exit codes: 0 done, 64 usage, 69 no Redis, 75 the queue is full.
    """
    with _dead_letters(url, keys) as letters:
        report = Report("replay", keys.queue, dry_run, before=letters.counts())
        with _reported(letters, report, as_json):
            if dry_run or max_depth:
                expected = letters.foresee(choice, needs_payload=True)
            if max_depth and expected.done and report.before.waiting + expected.done > max_depth:
                raise _full(report, report.before, max_depth, expected)
            if dry_run:
                report.tally = expected
                return
            _carry_out(report, letters.replay(choice, max_depth))
            if max_depth and report.tally.refused:
                raise _full(report, letters.counts(), max_depth, expected)


@dead.command()
@choice_options
def drop(choice: Choice, dry_run: bool, keys: Keys, url: str, as_json: bool) -> None:
    """Delete dead letters for good.

    Name them by ID, or choose by --all or --reason.
    """
    with _dead_letters(url, keys) as letters:
        report = Report("drop", keys.queue, dry_run, before=letters.counts())
        with _reported(letters, report, as_json):
            if dry_run:
                report.tally = letters.foresee(choice, needs_payload=False)
            else:
                _carry_out(report, letters.drop(choice))


@contextmanager
def _dead_letters(url: str, keys: Keys) -> Iterator[DeadLetters]:
    link = Link(url, threading.Event(), patient=False, client_name="lengthwise-dead")
    try:
        yield DeadLetters(link, keys)
    finally:
        link.close()


def _choice(ids: tuple[str, ...], everything: bool, reasons: tuple[str, ...], limit: int | None) -> Choice:
    if ids and everything:
        raise UsageError("expected either ids or --all, got both")
    if not (ids or everything or reasons):
        raise UsageError(
            "expected which letters are meant, got nothing: name ids that `lengthwise dead list` shows, or choose by "
            "--reason, or --all"
        )
    return Choice(ids, reasons, limit)


@contextmanager
def _reported(letters: DeadLetters, report: Report, as_json: bool) -> Iterator[None]:
    """Say what was done, however it ends: with an error some of it may have been."""
    try:
        yield
    except (LengthwiseError, QueueFullError) as error:
        report.error = str(error)
        raise
    finally:
        if not report.dry_run:
            with suppress(LengthwiseError):
                report.after = letters.counts()
        click.echo(report.as_json() if as_json else report.as_text())


def _carry_out(report: Report, steps: Iterator[Tally]) -> None:
    """Take the steps, and show on a terminal how far they are."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.completed:,} dead letters"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        # How many of them are meant is known only at the end, so the bar just moves.
        task = progress.add_task(report.action, total=None)
        for tally in steps:
            report.tally += tally
            progress.update(task, completed=report.tally.done)


def _full(report: Report, counts: Counts, max_depth: int, expected: Tally) -> QueueFullError:
    done = report.tally.done
    return QueueFullError(
        report.queue,
        depth=counts.waiting,
        cap=max_depth,
        pushed=done,
        refused=expected.done - done,
        known_total=True,
    )
