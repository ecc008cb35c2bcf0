"""`lengthwise bench`: the published experiment on the user's own machine, and beyond it."""

import gc
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from worker.commands.options import log_level_option, model_option, task_option, threads_option
from worker.commands.texts import read_texts
from worker.draw import draw
from worker.engine.task import Task, load_task
from worker.errors import UsageError
from worker.figures import or_dash, write_json

if TYPE_CHECKING:
    from worker.engine.ways import Run

WAYS = ("single-all", "single", "padded-global", "padded-unsorted", "padded-sorted", "padded-sorted-prefix", "packed")
EACH_QUESTION = "packed-each-question"
_LEGEND = (
    "same, bits: labels and scores equal to the same arithmetic one ticket at a time; as f32: labels equal to "
    "single-all, which is float32; peak: share of the machine's matrix-product peak in the way's dtype"
)
# A way is run until it was run so often or took so long; the median counts.
_MOST_RUNS, _ENOUGH_S = 3, 60.0


class Row(msgspec.Struct, kw_only=True):
    """One way of doing it. Shares are 0-1; what does not apply, or was not asked for, is null."""

    way: str
    dtype: str
    tickets: int
    tickets_per_s: float
    ratio: float | None  # to single-all
    padding_overhead: float  # padding tokens / computed tokens
    tokens_real: int  # instruction + ticket + answer cue, for every ticket
    tokens_computed: int
    tokens_saved: int  # by the prefix and by equal tickets
    agreement: float  # labels equal to the same arithmetic one ticket at a time
    agreement_f32: float | None  # labels equal to stock transformers in float32, one at a time: single-all
    bit_equal: float  # tickets all of whose scores have the bits they have one at a time
    roofline: float  # share of the matrix-product peak that the layers' products reach
    peak_mb: float | None


class Report(msgspec.Struct, kw_only=True):
    """What `--json` writes."""

    machine: str
    model: str
    threads: int
    peak_gflops: dict[str, float]  # by dtype
    rows: list[Row]


@click.command()
@click.option(
    "--tickets",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Your tickets, JSONL or CSV.  [default: the sample]",
)
@click.option(
    "--limit", type=click.IntRange(1), default=120, show_default=True, help="At most so many, evenly over the lengths."
)
@click.option("--ways", default=",".join(WAYS), show_default="all", help="Which ways, by name, with commas.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of all ways but single-all.  [default: the faster one]"
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to a file."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw them into a PNG file.")
@click.option(
    "--queue",
    "queue_url",
    is_flag=False,
    flag_value="",
    metavar="[URL]",
    help="Measure the queue instead: workers without a model on a server of their own, or on the one at URL.",
)
@model_option
@task_option
@threads_option
@log_level_option
def bench(
    file: Path | None,
    limit: int,
    ways: str,
    dtype: str | None,
    json_file: Path | None,
    plot: Path | None,
    queue_url: str | None,
    model: str,
    task: str,
    threads: int | None,
) -> None:
    """Measure ways of labelling the same tickets, one after the other, in one process.

    Let nothing else run on the machine meanwhile. The ways: single-all (one at a time, float32, every logit: the
    baseline), single (last logit only), padded-global, padded-unsorted and padded-sorted (batches of 32, whole
    prompts), padded-sorted-prefix (the instruction run once), packed (what `work` does).
    """
    if queue_url is not None:
        from worker.bench_queue import bench_queue

        bench_queue(queue_url or os.environ.get("REDIS_URL"), json_file)
        return
    question = load_task(task)
    chosen = _known(ways.split(","), question)
    texts = read_texts(file, limit)
    console = Console(stderr=True)
    with console.status("preparing") as status:
        report = _measure_all(chosen, question, model, texts, dtype, threads, status.update)
    console.print(_table(report))
    if json_file:
        write_json(json_file, report)
    if plot:
        draw(report, plot)


def _known(ways: Sequence[str], task: Task) -> list[str]:
    """The ways asked for. Of a task with several questions each may be asked in a pass of its own, to compare."""
    there = (*WAYS, EACH_QUESTION) if task.questions else WAYS
    unknown = [way for way in ways if way not in there]
    if unknown:
        raise UsageError(f"--ways: no {', '.join(unknown)}; expected some of {', '.join(there)}")
    return list(ways)


def _measure_all(
    ways: Sequence[str],
    task: Task,
    model: str,
    texts: Sequence[str],
    dtype: str | None,
    threads: int | None,
    tell: Callable[[str], None],
) -> Report:
    import torch

    from worker.engine.machine import describe, faster_dtype, usable_cores

    threads = threads or usable_cores()
    torch.set_num_threads(threads)
    dtype = dtype or str(faster_dtype("cpu")[0]).removeprefix("torch.")
    report = Report(machine=describe("cpu"), model=model, threads=threads, peak_gflops={}, rows=[])
    peaks: dict[str, list[float]] = {}
    truth: Any = None
    alone: dict[str, Any] = {}
    for way in ways:
        way_dtype = "float32" if way == "single-all" else dtype
        tell(f"{way}: loading")
        row, log_probs, peak = _measure(way, task, model, texts, way_dtype, threads, alone, tell)
        peaks.setdefault(way_dtype, []).append(peak)
        if way == "single-all":
            truth = log_probs
        if truth is not None:
            row.ratio = row.tickets_per_s / report.rows[0].tickets_per_s if report.rows else 1.0
            row.agreement_f32 = _same_labels(log_probs, truth, task)
        report.rows.append(row)
        gc.collect()
    report.peak_gflops = {name: round(median(values), 1) for name, values in peaks.items()}
    return report


def _measure(
    way: str,
    task: Task,
    model: str,
    texts: Sequence[str],
    dtype: str,
    threads: int,
    alone_before: dict[str, Any],
    tell: Callable[[str], None],
) -> tuple[Row, Any, float]:
    """One way's figures, its log-probabilities, and the matrix-product peak around its runs.

    `alone_before` keeps stock transformers' scores one at a time, by dtype: all padded ways are held against them.
    """
    from worker.engine.ways import contestant_for, layer_weights, peak_gflops

    _forget_peak_memory()
    contestant = contestant_for(way, task, model, texts, dtype, threads)
    contestant.warm_up()
    runs: list[Run] = []
    peaks, spent_s = [peak_gflops(dtype, model)], 0.0
    while len(runs) < _MOST_RUNS and spent_s < _ENOUGH_S:
        tell(f"{way}: run {len(runs) + 1}")
        runs.append(contestant.run())
        peaks.append(peak_gflops(dtype, model))
        spent_s += runs[-1].seconds
    peak_mb = _peak_memory_mb()
    alone = alone_before.get(dtype) if not way.startswith("packed") else None
    if alone is None and way.startswith("single"):
        alone = runs[-1].log_probs  # it is one at a time already
    if alone is None:
        tell(f"{way}: comparing with one at a time")
        alone = contestant.run_alone()
    if not way.startswith("packed"):
        alone_before[dtype] = alone
    last, seconds, peak = runs[-1], median(run.seconds for run in runs), median(peaks)
    all_weights, left_out = layer_weights(model, contestant.layers)
    unread = last.tokens_computed - len(texts) if contestant.leaves_out else 0
    operations = 2 * (all_weights * last.tokens_computed - left_out * unread)
    row = Row(
        way=way,
        dtype=dtype,
        tickets=len(texts),
        tickets_per_s=round(len(texts) / seconds, 3),
        ratio=None,
        padding_overhead=round(1 - contestant.tokens_needed / last.tokens_computed, 4),
        tokens_real=contestant.tokens_real,
        tokens_computed=last.tokens_computed,
        tokens_saved=contestant.tokens_real - contestant.tokens_needed,
        agreement=_same_labels(last.log_probs, alone, task),
        agreement_f32=None,
        bit_equal=round((last.log_probs == alone).all(dim=1).float().mean().item(), 4),
        roofline=round(operations / seconds / 1e9 / peak, 3),
        peak_mb=peak_mb,
    )
    return row, last.log_probs, peak


def _same_labels(one: Any, other: Any, task: Task) -> float:
    """Share of tickets that get the same label for every question."""
    pairs = zip(one.split(task.sizes, dim=1), other.split(task.sizes, dim=1), strict=True)
    same = [mine.argmax(dim=1) == its.argmax(dim=1) for mine, its in pairs]
    return round(float(math.prod(same).float().mean()), 4)


def _forget_peak_memory() -> None:
    """Start the kernel's high-water mark of this process anew (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory_mb() -> float | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return round(int(line.split()[1]) / 1024, 1)


def _table(report: Report) -> Table:
    title = f"{report.model} on {report.machine}, {report.threads} threads"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, caption=_LEGEND)
    for heading in ("way", "tickets/s", "ratio", "padding", "same", "as f32", "bits", "peak"):
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(
            row.way,
            f"{row.tickets_per_s:.2f}",
            or_dash(row.ratio, "{:.2f} x"),
            f"{row.padding_overhead:.1%}",
            f"{row.agreement:.1%}",
            or_dash(row.agreement_f32, "{:.1%}"),
            f"{row.bit_equal:.1%}",
            f"{row.roofline:.0%}",
        )
    return table
