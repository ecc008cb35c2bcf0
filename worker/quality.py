"""How good labels are: accuracy, reliability, and what abstaining would buy (pure)."""

import math
from collections.abc import Sequence

import msgspec

_BINS = 10
_WORST = 10
_COVERAGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
_TWO_SIDED_95 = 1.96


class PerLabel(msgspec.Struct, kw_only=True):
    """One label's share of the errors. Precision is null where the label was never given, recall where it never is."""

    precision: float | None
    recall: float | None
    tickets: int


class Bin(msgspec.Struct, kw_only=True):
    """Labels of about the same confidence."""

    confidence: float  # their mean
    accuracy: float
    tickets: int


class Coverage(msgspec.Struct, kw_only=True):
    """What `--min-confidence` would do: the share of tickets that keep their label, and how many of those are right."""

    coverage: float
    min_confidence: float
    accuracy: float


class Quality(msgspec.Struct, kw_only=True):
    """Labels held against the truth. `confusion[true][given]` counts tickets."""

    tickets: int
    accuracy: float
    interval: tuple[float, float]  # of the accuracy, 95 %, after Wilson
    ece: float  # expected calibration error: mean distance of confidence and accuracy over ten bins
    per_label: dict[str, PerLabel]
    confusion: dict[str, dict[str, int]]
    reliability: list[Bin]
    coverage: list[Coverage]
    most_wrong: list[str]  # ids, the surest error first


def assess(
    ids: Sequence[str], truth: Sequence[str], labels: Sequence[str], log_probs: Sequence[Sequence[float]]
) -> Quality:
    """Hold scores `[tickets, labels]` against the true labels. Raises ValueError without any ticket."""
    if not truth:
        raise ValueError("expected at least one ticket")
    places = [max(range(len(labels)), key=scores.__getitem__) for scores in log_probs]
    given = [labels[place] for place in places]
    sure = [math.exp(scores[place]) for scores, place in zip(log_probs, places, strict=True)]
    right = [one == true for one, true in zip(given, truth, strict=True)]
    wrong = sorted((index for index, good in enumerate(right) if not good), key=lambda index: -sure[index])
    bins = _bins(sure, right)
    confusion = {true: dict.fromkeys(labels, 0) for true in labels}
    for true, one in zip(truth, given, strict=True):
        confusion[true][one] += 1
    return Quality(
        tickets=len(truth),
        accuracy=sum(right) / len(right),
        interval=wilson(sum(right), len(right)),
        ece=sum(part.tickets * abs(part.confidence - part.accuracy) for part in bins) / len(right),
        per_label={label: _per_label(label, confusion) for label in labels},
        confusion=confusion,
        reliability=bins,
        coverage=_coverage(sure, right),
        most_wrong=[ids[index] for index in wrong[:_WORST]],
    )


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    z, share = _TWO_SIDED_95, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _per_label(label: str, confusion: dict[str, dict[str, int]]) -> PerLabel:
    hits, tickets = confusion[label][label], sum(confusion[label].values())
    times_given = sum(row[label] for row in confusion.values())
    return PerLabel(
        precision=hits / times_given if times_given else None,
        recall=hits / tickets if tickets else None,
        tickets=tickets,
    )


def _bins(sure: Sequence[float], right: Sequence[bool]) -> list[Bin]:
    bins: list[list[int]] = [[] for _ in range(_BINS)]
    for index, confidence in enumerate(sure):
        bins[min(_BINS - 1, int(confidence * _BINS))].append(index)
    return [
        Bin(
            confidence=sum(sure[index] for index in members) / len(members),
            accuracy=sum(right[index] for index in members) / len(members),
            tickets=len(members),
        )
        for members in bins
        if members
    ]


def _coverage(sure: Sequence[float], right: Sequence[bool]) -> list[Coverage]:
    order = sorted(range(len(sure)), key=lambda index: -sure[index])
    rows = []
    for coverage in _COVERAGES:
        threshold = sure[order[max(1, round(coverage * len(order))) - 1]] if coverage < 1 else 0.0
        # Rounded down, so that the figure typed in keeps the tickets it is said to keep.
        threshold = math.floor(threshold * 1e4) / 1e4
        kept = [index for index in order if sure[index] >= threshold]
        rows.append(
            Coverage(
                coverage=len(kept) / len(order),
                min_confidence=threshold,
                accuracy=sum(right[index] for index in kept) / len(kept),
            )
        )
    return rows
