"""`lengthwise evaluate`: labels held against the truth."""

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from worker.commands.labelled import Labelled, check_known, read_labelled
from worker.commands.options import json_option, log_level_option, model_option, strategy_options, task_option
from worker.commands.printable import printable
from worker.commands.quality_table import show_quality
from worker.draw import draw_quality
from worker.engine.task import load_task
from worker.quality import Quality, assess

_SHOWN = 20


class Change(msgspec.Struct, kw_only=True):
    """A ticket that another task labels differently."""

    id: str
    truth: str
    label: str
    other: str


class Evaluation(Quality, kw_only=True):
    """What `--json` prints: the quality, and where it comes from."""

    task: str
    model: str
    strategy: str
    tickets_per_s: float
    compared_with: str | None = None
    compared_accuracy: float | None = None
    changes: tuple[Change, ...] = ()


@click.command()
@click.argument("labelled", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--split", help='Only lines whose field "split" says so.')
@click.option("--compare", help="Another task: show which tickets it labels differently.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw confusion and reliability (PNG).")
@task_option
@model_option
@strategy_options
@json_option
@log_level_option
def evaluate(
    labelled: Path,
    split: str | None,
    compare: str | None,
    plot: Path | None,
    task: str,
    model: str,
    strategy: str | None,
    dtype: str | None,
    device: str,
    threads: int | None,
    tokens: int | None,
    as_json: bool,
) -> None:
    """Label tickets whose labels are known, JSONL or CSV with body and label, and say how many are right."""
    tickets = read_labelled(labelled, split)
    for one in (task, compare) if compare else (task,):
        check_known(tickets.labels, list(load_task(one).labels), labelled)
    console = Console(stderr=as_json)
    with Console(stderr=True).status("labelling"):
        from worker.commands.run import run_task

        options = {"strategy": strategy, "dtype": dtype, "device": device, "threads": threads, "tokens": tokens}
        mine = run_task(task, model, tickets.texts, options)
        other = run_task(compare, model, tickets.texts, options) if compare else None
    found = Evaluation(
        **msgspec.structs.asdict(assess(tickets.ids, tickets.labels, mine.labels, mine.log_probs)),
        task=task,
        model=model,
        strategy=mine.strategy,
        tickets_per_s=round(len(tickets.texts) / mine.seconds, 2),
    )
    if other is not None:
        quality = assess(tickets.ids, tickets.labels, other.labels, other.log_probs)
        found.compared_with, found.compared_accuracy = compare, quality.accuracy
        found.changes = tuple(_changes(tickets, mine.given, other.given))
    if plot:
        draw_quality(found, f"{model}, {task}", plot)
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    show_quality(console, found, f"{len(tickets.ids)} tickets, task {task}, {model}")
    console.print(f"{found.tickets_per_s:.1f} tickets/s")
    if other is not None:
        _show_changes(console, found)


def _changes(tickets: Labelled, mine: Sequence[str], others: Sequence[str]) -> list[Change]:
    rows = zip(tickets.ids, tickets.labels, mine, others, strict=True)
    return [Change(id=id_, truth=truth, label=a, other=b) for id_, truth, a, b in rows if a != b]


def _show_changes(console: Console, found: Evaluation) -> None:
    tasks = escape(found.task), escape(found.compared_with or "")
    table = Table("ticket", "truth", *tasks, title="Labelled differently")
    for change in found.changes[:_SHOWN]:
        table.add_row(*map(escape, (printable(change.id), change.truth, change.label, change.other)))
    console.print(table)
    mine, other = (
        sum(getattr(change, side) == change.truth for change in found.changes) for side in ("label", "other")
    )
    console.print(
        f"{len(found.changes)} differ: {mine} of them right with {found.task}, {other} with {found.compared_with}; "
        f"{found.accuracy:.1%} and {found.compared_accuracy:.1%} of all",
        markup=False,
    )
