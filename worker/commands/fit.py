"""`lengthwise fit`: labelled tickets -> a task folder with a fitted head."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec.structs import replace
from rich.console import Console

from worker.card import FitReport, card, learning_told
from worker.commands.labelled import Labelled, check_counts, check_known, read_labelled
from worker.commands.options import dtype_option, log_level_option, model_option, threads_option
from worker.commands.prior import fit_prior
from worker.commands.quality_table import show_quality
from worker.commands.texts import read_texts
from worker.engine.tap import told
from worker.engine.task import DEFAULT_TASK, HEAD_FILE, TASK_FILE, Task, check_task, load_task
from worker.errors import UsageError
from worker.figures import write_json
from worker.fitting import Prefer
from worker.quality import Quality, assess

if TYPE_CHECKING:
    from worker.engine import Classifier
    from worker.engine.fitter import FittedTask, Outcome

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
# Of a batch while a task is fitted: its measurement would take longer than it saves.
_TOKENS = 1024
_REPORT_FILE, _CARD_FILE = "report.json", "README.md"


@click.command()
@click.argument("labelled", type=_FILE, required=False)
@click.option(
    "--unlabelled",
    type=_FILE,
    help="Fit no head, but a prior, to tickets without labels. With LABELLED, in the prompt form that labels best.",
)
@click.option(
    "--task",
    help="Task whose labels are fitted.  [default: the built-in one if it has the file's labels, else one of theirs]",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to write.  [TASK-fitted]")
@click.option("--force", is_flag=True, help="Write over a task that is there.")
@click.option("--split", help='Only lines whose field "split" says so.')
@click.option(
    "--prefer",
    type=click.Choice(["accuracy", "balanced", "speed"]),
    default="balanced",
    show_default=True,
    help="What to give up: nothing, or one or two standard errors of accuracy for an earlier end of the pass.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw confusion and reliability (PNG).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
@model_option
@dtype_option
@threads_option
@log_level_option
def fit(
    labelled: Path | None,
    unlabelled: Path | None,
    task: str | None,
    out: Path | None,
    force: bool,
    split: str | None,
    prefer: Prefer,
    plot: Path | None,
    as_json: bool,
    model: str,
    dtype: str | None,
    threads: int | None,
) -> None:
    """Fit a task to your own labelled tickets: JSONL or CSV with a body and a label, some thirty of each label.

    The model runs over them once; what of it is read, and how much of the model must be run for that, is chosen by
    cross-validation. Use the folder it writes as --task of any command.
    """
    console, began_s = Console(stderr=True), time.monotonic()
    examples = read_labelled(labelled, split) if labelled else None
    if unlabelled:
        question = _task_for(examples, labelled, task) if examples and labelled else _named(task or DEFAULT_TASK)
        texts, options = read_texts(unlabelled, None), {"dtype": dtype, "threads": threads, "tokens": _TOKENS}
        fit_prior(console, question, model, texts, examples, _folder(out, question, force), options)
        return
    if labelled is None or examples is None:
        raise UsageError("expected a file of labelled tickets, or --unlabelled FILE")
    check_counts(examples.labels, labelled)
    question = _task_for(examples, labelled, task)
    folder = _folder(out, question, force)
    with console.status("loading the model") as status:
        outcome, zero_shot, classifier = _fit(question, examples, model, prefer, dtype, threads, status.update)
    report = _report(outcome, zero_shot, examples, classifier, time.monotonic() - began_s)
    _save(folder, outcome.fitted, report)
    if plot:
        from worker.draw import draw_quality

        draw_quality(report.fitted, f"{report.model}, {report.examples} examples", plot)
    if as_json:
        click.echo(msgspec.json.encode(report))
        return
    _show(console, report, folder)


def _task_for(examples: Labelled, file: Path, named: str | None) -> Task:
    """The task that has the labels; one made of them where none was named and the built-in one has others."""
    if named is not None:
        task = _named(named)
        check_known(examples.labels, list(task.labels), file)
        return task
    built_in = load_task(DEFAULT_TASK)
    if set(examples.labels) <= set(built_in.labels):
        return built_in
    labels = dict.fromkeys(sorted(set(examples.labels)), "")
    task = Task(name=file.stem, instruction="Sort each support ticket into its category.", labels=labels)
    check_task(task, f"made of {file}")
    return task


def _named(name: str) -> Task:
    """The task without the head that it may have."""
    task = load_task(name)
    return replace(task, head=None, form="plain" if task.form == "bare" else task.form)


def _folder(out: Path | None, task: Task, force: bool) -> Path:
    folder = out or Path(f"{task.name}-fitted")
    there = [name for name in (TASK_FILE, HEAD_FILE, _REPORT_FILE, _CARD_FILE) if (folder / name).exists()]
    if there and not force:
        raise UsageError(
            f"{folder} has {', '.join(there)} already; name another folder with --out, or write over it with --force"
        )
    return folder


def _fit(
    task: Task,
    examples: Labelled,
    model: str,
    prefer: Prefer,
    dtype: str | None,
    threads: int | None,
    tell: Callable[[str], None],
) -> tuple["Outcome", Quality, "Classifier"]:
    from worker.engine import Classifier
    from worker.engine.fitter import fit_task

    classifier = Classifier.load(task, model, dtype=dtype, threads=threads, tokens=_TOKENS)
    tell("labelling the examples without a head")
    scores = [list(one.scores.values()) for one in classifier.classify(examples.texts)]
    zero_shot = assess(examples.ids, examples.labels, list(task.labels), scores)
    return fit_task(classifier, examples.texts, examples.labels, prefer, tell), zero_shot, classifier


def _report(
    outcome: "Outcome", zero_shot: Quality, examples: Labelled, classifier: "Classifier", seconds: float
) -> FitReport:
    chosen, facts = outcome.fit.chosen, outcome.fitted.fitted.facts
    layers = classifier.loaded.model.config.get_text_config().num_hidden_layers
    return FitReport(
        task=outcome.fitted.task.name,
        model=facts.model,
        model_hash=facts.model_hash,
        dtype=facts.dtype,
        examples=len(examples.ids),
        reads=told(chosen.taps),
        layers=f"{chosen.depth} of {layers}",
        form=chosen.form,
        strength=chosen.strength,
        temperature=round(outcome.fit.temperature, 3),
        zero_shot=zero_shot,
        fitted=assess(examples.ids, examples.labels, list(facts.labels), outcome.fit.log_probs.tolist()),
        learning_curve=outcome.curve,
        seconds=round(seconds, 1),
    )


def _save(folder: Path, fitted: "FittedTask", report: FitReport) -> None:
    fitted.save(folder)
    write_json(folder / _REPORT_FILE, report)
    (folder / _CARD_FILE).write_text(card(report), "utf-8")


def _show(console: Console, report: FitReport, folder: Path) -> None:
    show_quality(console, report.fitted, f"{report.examples} examples, each labelled by a head that had not seen it")
    console.print(
        f"before, by the model's own scores: {report.zero_shot.accuracy:.1%} right\n"
        f"reads {report.reads}: runs {report.layers} layers, prompt form {report.form}\n"
        f"{learning_told(report.learning_curve)}\n"
        f"written to {folder} in {report.seconds:.0f} s. "
        f"Use it: lengthwise work --task {folder} --model {report.model}",
        markup=False,
        soft_wrap=True,
    )
