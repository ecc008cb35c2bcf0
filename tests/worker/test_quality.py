"""Labels held against the truth: figures by hand, intervals from a table, and what abstaining would really do."""

import math
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from worker.answers import answers
from worker.commands.quality_table import show_quality
from worker.draw import draw_quality
from worker.quality import PerLabel, Quality, assess, wilson

LABELS = ("a", "b", "c")
# Truth, label given, confidence: one error, and a label that never comes.
TICKETS = (("a", "a", 0.92), ("a", "b", 0.82), ("b", "b", 0.86), ("b", "b", 0.55), ("a", "a", 0.96))
CONFIDENCES = st.floats(0.34, 1.0)


def scores(label: str, confidence: float) -> list[float]:
    """Log-probabilities of LABELS with this winner."""
    rest = max((1 - confidence) / 2, 1e-9)
    return [math.log(confidence if one == label else rest) for one in LABELS]


def quality_of(tickets: tuple[tuple[str, str, float], ...]) -> Quality:
    """What is made of tickets with ids from 1."""
    ids = [str(number) for number in range(1, len(tickets) + 1)]
    return assess(ids, [true for true, _, _ in tickets], LABELS, [scores(label, sure) for _, label, sure in tickets])


def test_figures_by_hand() -> None:
    """Accuracy 4 of 5; the confusion's rows are the truth; precision over what was given, recall over what is true."""
    found = quality_of(TICKETS)
    assert (found.tickets, found.accuracy, found.most_wrong) == (5, 0.8, ["2"])
    assert found.confusion == {
        "a": {"a": 2, "b": 1, "c": 0},
        "b": {"a": 0, "b": 2, "c": 0},
        "c": {"a": 0, "b": 0, "c": 0},
    }
    assert found.per_label == {
        "a": PerLabel(precision=1.0, recall=2 / 3, tickets=3),
        "b": PerLabel(precision=2 / 3, recall=1.0, tickets=2),
        "c": PerLabel(precision=None, recall=None, tickets=0),
    }


def test_the_calibration_error_by_hand() -> None:
    """Bins of a tenth: 0.55 right; 0.82 wrong and 0.86 right; 0.92 and 0.96 right: (0.45 + 2 x 0.34 + 2 x 0.06) / 5."""
    found = quality_of(TICKETS)
    assert found.ece == pytest.approx(0.25)
    assert [(part.accuracy, part.tickets) for part in found.reliability] == [(1.0, 1), (0.5, 2), (1.0, 2)]
    assert [part.confidence for part in found.reliability] == pytest.approx([0.55, 0.84, 0.94])


def test_a_certain_label_has_a_bin() -> None:
    """A probability of one belongs to the last bin, and is perfectly calibrated if it is right."""
    found = quality_of((("a", "a", 1.0), ("b", "b", 1.0)))
    assert (found.ece, len(found.reliability)) == (0.0, 1)


def test_what_abstaining_buys_by_hand() -> None:
    """Of five the surest four, three or two are kept: the error is the fourth, so with three all are right."""
    rows = {round(row.coverage, 2): row for row in quality_of(TICKETS).coverage}
    assert (rows[1.0].coverage, rows[1.0].accuracy) == (1.0, 0.8)
    assert rows[1.0].min_confidence == pytest.approx(0.55, abs=1e-4)
    assert (rows[0.8].coverage, rows[0.8].accuracy) == (0.8, 0.75)
    assert rows[0.8].min_confidence == pytest.approx(0.82, abs=1e-4)
    assert (rows[0.6].coverage, rows[0.6].accuracy) == (0.6, 1.0)
    assert rows[0.6].min_confidence == pytest.approx(0.86, abs=1e-4)
    assert (rows[0.4].coverage, rows[0.4].accuracy) == (0.4, 1.0)
    assert rows[0.4].min_confidence == pytest.approx(0.92, abs=1e-4)
    assert quality_of(TICKETS).coverage[0].min_confidence == 0.0


@given(st.lists(st.tuples(st.sampled_from(LABELS), st.sampled_from(LABELS), CONFIDENCES), min_size=1, max_size=40))
def test_the_table_tells_what_a_worker_would_do(tickets: list[tuple[str, str, float]]) -> None:
    """With a row's `min_confidence`, typed in as it is shown, exactly its share of tickets keeps a label, so accurate.

    It is at least the share that was asked for.
    """
    found, shown = quality_of(tuple(tickets)), [(label, sure) for _, label, sure in tickets]
    for row, wanted in zip(found.coverage, (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5), strict=True):
        typed = float(f"{row.min_confidence:.4f}")
        given = [answers({"category": LABELS}, scores(*rest), typed)["category"].label for rest in shown]
        kept = [(true, label) for (true, _, _), label in zip(tickets, given, strict=True) if label is not None]
        assert row.coverage == len(kept) / len(tickets) >= max(1, round(wanted * len(tickets))) / len(tickets)
        assert row.accuracy == sum(true == label for true, label in kept) / len(kept)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_wilson_is_the_tables(right: int, count: int, low: float, high: float) -> None:
    """The 95 % interval of published tables, inside 0 and 1 also for none and for all."""
    assert wilson(right, count) == pytest.approx((low, high), abs=2e-4)


def test_the_surest_errors_come_first() -> None:
    """At most ten ids of errors, by falling confidence, and no right one among them."""
    tickets = (*(("a", "b", 0.5 + number / 100) for number in range(14)), ("a", "a", 0.99))
    assert quality_of(tickets).most_wrong == [str(number) for number in range(14, 4, -1)]


def test_nothing_to_assess_is_refused() -> None:
    """No ticket has no accuracy."""
    with pytest.raises(ValueError, match="at least one ticket"):
        assess([], [], LABELS, [])


def shown(quality: Quality, title: str) -> str:
    """What the table looks like on a wide terminal."""
    out = StringIO()
    show_quality(Console(file=out, width=200), quality, title)
    return out.getvalue()


def test_the_table_shows_names_as_they_are() -> None:
    """Labels, titles and ids with brackets or dollars are no markup and no formula, and an id moves no cursor."""
    odd = ("[red]", "[/b]", "$\\frac$")
    quality = assess(["\x1b[2J", "[/x]"], odd[:2], odd, [scores("b", 0.9)] * 2)
    text = shown(quality, "task /tmp/[b]x")
    assert all(name in text for name in (*odd, "as [/b]", "task /tmp/[b]x"))
    assert "\x1b" not in text
    assert "surest errors: \N{REPLACEMENT CHARACTER}[2J" in text


def test_many_labels_are_shown_by_the_worst() -> None:
    """Beyond what fits, the twelve labels of the lowest recall are shown, without a confusion matrix."""
    names = [f"label {number}" for number in range(20)]
    truth = names * 2
    found = [[0.0 if one == (names[0] if true < "label 13" else true) else -9.0 for one in names] for true in truth]
    text = shown(assess([str(number) for number in range(40)], truth, names, found), "x")
    assert "the 12 labels of 20 with the lowest recall" in text
    assert "as label" not in text
    assert text.count("0.0%") >= 4


def test_a_picture_is_drawn_of_any_labels(tmp_path: Path) -> None:
    """A PNG with confusion and reliability, also of labels that look like formulas, and of too many to name."""
    pytest.importorskip("matplotlib")
    few = assess(["1", "2"], ["$\\frac$", "b"], ["$\\frac$", "b"], [[-0.1, -2.4]] * 2)
    many = [str(number) for number in range(30)]
    for name, quality in (("few.png", few), ("many.png", assess(["1"], ["3"], many, [[-3.4] * 30]))):
        draw_quality(quality, "cost $5 or $6_{", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
