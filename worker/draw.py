"""Pictures of measurements, for people who would rather look."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.errors import ConfigError
from worker.quality import Quality

if TYPE_CHECKING:
    from worker.bench import Report

# More labels than this cannot be read beside a matrix.
_MOST_NAMED = 20


def draw(report: "Report", file: Path) -> None:
    """Draw tickets a second and padding of each way into a PNG file. Raises ConfigError without matplotlib."""
    pyplot = _pyplot()
    ways = [row.way for row in report.rows][::-1]
    figure, (speed, padding) = pyplot.subplots(1, 2, figsize=(11, 0.6 * len(ways) + 1.6), sharey=True)
    bars = speed.barh(ways, [row.tickets_per_s for row in report.rows][::-1], color="#2b6cb0")
    speed.bar_label(bars, fmt="%.1f", padding=3)
    speed.set_xlabel("tickets a second")
    bars = padding.barh(ways, [100 * row.padding_overhead for row in report.rows][::-1], color="#c05621")
    padding.bar_label(bars, fmt="%.1f %%", padding=3)
    padding.set_xlabel("padding, share of computed tokens")
    for axes in (speed, padding):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.15)
    figure.suptitle(f"{report.model}, {report.rows[0].tickets} tickets\n{report.machine}", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def draw_quality(quality: Quality, title: str, file: Path) -> None:
    """Draw the confusion matrix and the reliability of confidences into a PNG file. Raises ConfigError likewise."""
    pyplot = _pyplot()
    labels = list(quality.confusion)
    counts = [[quality.confusion[true][given] for given in labels] for true in labels]
    figure, (confusion, reliability) = pyplot.subplots(1, 2, figsize=(11, 5))
    confusion.imshow(counts, cmap="Blues")
    confusion.set(xlabel="given", ylabel="true")
    if len(labels) <= _MOST_NAMED:
        names = [_plain(label) for label in labels]
        confusion.set_xticks(range(len(names)), names, rotation=45, ha="right")
        confusion.set_yticks(range(len(names)), names)
        for row, line in enumerate(counts):
            for column, count in enumerate(line):
                dark = count > max(map(max, counts)) / 2
                confusion.text(column, row, count, ha="center", va="center", color="white" if dark else "black")
    reliability.plot([0, 1], [0, 1], color="#a0aec0", linestyle="--")
    sizes = [20 + 400 * part.tickets / quality.tickets for part in quality.reliability]
    reliability.scatter(
        [part.confidence for part in quality.reliability], [part.accuracy for part in quality.reliability], sizes
    )
    reliability.set(xlabel="confidence", ylabel="share that is right", xlim=(0, 1.02), ylim=(0, 1.02))
    figure.suptitle(f"{_plain(title)}: {quality.accuracy:.1%} right, calibration error {quality.ece:.1%}", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def _plain(text: str) -> str:
    """The text as matplotlib shows it, and not as a formula."""
    return text.replace("$", r"\$")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'lengthwise[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
