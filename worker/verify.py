"""`lengthwise verify`: batched against unbatched, on the user's own tickets."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from worker.commands.options import json_option, log_level_option, model_option, strategy_options, task_option
from worker.commands.texts import read_texts
from worker.engine.certify import difference, winners
from worker.ports import score_all

EXIT_DIFFERS = 1
# Upper limits of the margin histogram in nats; a margin under the largest difference could have flipped a label.
MARGIN_LIMITS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Verdict(msgspec.Struct, kw_only=True):
    """What `--json` prints."""

    tickets: int
    shortest_tokens: int
    longest_tokens: int
    labels_differ: int
    largest_difference: float  # of any log-probability, nats
    bit_equal: float  # share of tickets all of whose scores have the same bits alone and batched
    margins: dict[str, int]  # tickets by the margin of their main label, nats
    certificate: str
    strategy: str
    model: str


@click.command()
@click.option(
    "--tickets",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Your tickets, JSONL or CSV.  [default: the sample]",
)
@click.option("--limit", type=click.IntRange(1), help="At most so many, evenly over the lengths.")
@model_option
@task_option
@strategy_options
@json_option
@log_level_option
def verify(
    file: Path | None,
    limit: int | None,
    model: str,
    task: str,
    strategy: str | None,
    dtype: str | None,
    device: str,
    threads: int | None,
    tokens: int | None,
    as_json: bool,
) -> None:
    """Score tickets in batches and one at a time, and compare. Exits with 1 if any label differs."""
    texts = read_texts(file, limit)
    from worker.engine import Classifier

    classifier = Classifier.load(
        task, model, strategy=strategy, dtype=dtype, device=device, threads=threads, tokens=tokens
    )
    prompts = classifier.tokenise(texts)
    batched = score_all(classifier, prompts)
    alone = [
        classifier.score([prompt]).log_probs[0]
        for prompt in track(prompts, "one at a time", console=Console(stderr=True), disable=as_json, transient=True)
    ]
    pairs, sizes = list(zip(alone, batched, strict=True)), classifier.task.sizes
    lengths = [len(prompt.ids) + classifier.costs.prefix_tokens for prompt in prompts]
    verdict = Verdict(
        tickets=len(texts),
        shortest_tokens=min(lengths),
        longest_tokens=max(lengths),
        labels_differ=sum(winners(one, sizes) != winners(other, sizes) for one, other in pairs),
        largest_difference=max(difference(one, other) for one, other in pairs),
        bit_equal=round(sum(list(one) == list(other) for one, other in pairs) / len(texts), 4),
        margins=_histogram([_margin(scores[: len(classifier.labels)]) for scores in alone]),
        certificate=classifier.identity.certificate,
        strategy=classifier.identity.strategy,
        model=model,
    )
    if as_json:
        click.echo(msgspec.json.encode(verdict))
    else:
        _show(verdict)
    sys.exit(EXIT_DIFFERS if verdict.labels_differ else 0)


def _margin(scores: Sequence[float]) -> float:
    first, second = sorted(scores, reverse=True)[:2]
    return first - second


def _histogram(margins: Sequence[float]) -> dict[str, int]:
    counts = {f"under {limit:g}": 0 for limit in MARGIN_LIMITS} | {f"{MARGIN_LIMITS[-1]:g} and more": 0}
    names = list(counts)
    for margin in margins:
        counts[names[sum(margin >= limit for limit in MARGIN_LIMITS)]] += 1
    return counts


def _show(verdict: Verdict) -> None:
    table = Table(title="Batched against unbatched", show_header=False)
    table.add_row("tickets", f"{verdict.tickets}, prompts of {verdict.shortest_tokens}-{verdict.longest_tokens} tokens")
    table.add_row("labels that differ", str(verdict.labels_differ))
    table.add_row("largest score difference", f"{verdict.largest_difference:g} nats")
    table.add_row("bit-equal tickets", f"{verdict.bit_equal:.1%}")
    table.add_row("certificate", f"{verdict.strategy}: {verdict.certificate}")
    table.add_row("margins", "\n".join(f"{name}: {count}" for name, count in verdict.margins.items() if count))
    Console().print(table)
