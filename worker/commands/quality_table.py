"""Quality of labels as tables for a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from worker.commands.printable import printable
from worker.figures import share
from worker.quality import Quality

# More labels than this have no confusion matrix that fits.
_MOST_LABELS = 12
_WORST_LABELS = 12


def show_quality(console: Console, quality: Quality, title: str) -> None:
    """Print accuracy, labels, confusion and what abstaining would buy."""
    low, high = quality.interval
    console.print(f"[bold]{escape(title)}[/bold]")
    console.print(
        f"{quality.accuracy:.1%} right (95 %: {low:.1%} to {high:.1%}), expected calibration error {quality.ece:.1%}"
    )
    console.print(_labels(quality))
    console.print(_coverage(quality))
    if quality.most_wrong:
        console.print(f"surest errors: {', '.join(map(printable, quality.most_wrong))}", markup=False)


def _labels(quality: Quality) -> Table:
    """One row a label, the worst first where not all fit; its row of the confusion matrix where that fits."""
    order = list(quality.per_label)
    with_confusion = len(order) <= _MOST_LABELS
    if not with_confusion:
        order = sorted(order, key=lambda label: quality.per_label[label].recall or 0.0)[:_WORST_LABELS]
    given = [escape(f"as {label}") for label in order] if with_confusion else []
    table = Table("label", "tickets", "precision", "recall", *given)
    for label in order:
        one = quality.per_label[label]
        counts = [str(quality.confusion[label][other]) for other in order] if with_confusion else []
        table.add_row(escape(label), str(one.tickets), share(one.precision), share(one.recall), *counts)
    if not with_confusion:
        table.caption = f"the {len(order)} labels of {len(quality.per_label)} with the lowest recall"
    return table


def _coverage(quality: Quality) -> Table:
    table = Table("tickets labelled", "of these right", "--min-confidence")
    for row in quality.coverage:
        table.add_row(f"{row.coverage:.0%}", f"{row.accuracy:.1%}", f"{row.min_confidence:.4f}")
    return table
