"""Pictures of measurements, for people who would rather look."""

from pathlib import Path
from typing import TYPE_CHECKING

from worker.errors import ConfigError

if TYPE_CHECKING:
    from worker.bench import Report


def draw(report: "Report", file: Path) -> None:
    """Draw tickets a second and padding of each way into a PNG file. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'lengthwise[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

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
