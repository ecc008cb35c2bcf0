"""Is batched equal to unbatched, on this machine, with this build? Tried out at start; the answer is a certificate."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Literal

from worker.engine.prompt import Prompt

Score = Callable[[Sequence[Prompt]], Sequence[Sequence[float]]]

# Ticket lengths of the probes in tokens: from a word to a page, odd ones and neighbours of powers of two among them.
PROBE_LENGTHS = (1, 7, 16, 17, 48, 65, 100, 200)
# Probing stops when it has taken this long; the certificate says how much was compared.
BUDGET_S = 4.0


@dataclass(frozen=True)
class Certificate:
    """What the probes showed. `exact`: every score had the same bits alone and in every batch it was put into."""

    kind: Literal["exact", "close"]
    largest_difference: float  # of any log-probability, nats
    labels_differ: int
    compared: int  # scores of a probe in a batch, held against its scores alone

    def __str__(self) -> str:
        if self.kind == "exact":
            return f"exact ({self.compared} compared)"
        return f"close ({self.largest_difference:.2g}, {self.labels_differ} of {self.compared} labels differ)"


def certify(
    score: Score, probes: Sequence[Prompt], sizes: Sequence[int] | None = None, budget_s: float = BUDGET_S
) -> Certificate:
    """Score each probe alone, then in batches of several sizes and mixes, and compare bit for bit.

    `sizes` are the numbers of each question's labels, if there is more than one.
    """
    end_s = time.monotonic() + budget_s
    alone: dict[int, Sequence[float]] = {}
    largest, differ, compared = 0.0, 0, 0
    for batch in _batches(len(probes)):
        for index in set(batch) - set(alone):
            alone[index] = score([probes[index]])[0]
        for index, scores in zip(batch, score([probes[index] for index in batch]), strict=True):
            compared += 1
            largest = max(largest, difference(alone[index], scores))
            differ += winners(alone[index], sizes) != winners(scores, sizes)
        if time.monotonic() > end_s:
            break
    return Certificate("close" if largest > 0.0 else "exact", largest, differ, compared)


def random_probes(wrap: Callable[[Sequence[int]], Prompt], ordinary_ids: Sequence[int], room: int) -> list[Prompt]:
    """Probes of ordinary tokens in no order, as `wrap` makes prompts of them: nothing a ticket holds is stranger."""
    random = Random(1)  # noqa: S311 - probes, not secrets
    return [wrap(random.choices(ordinary_ids, k=min(length, room))) for length in PROBE_LENGTHS]


def _batches(count: int) -> Iterator[list[int]]:
    """Mixes that a queue may bring: all at once, extremes, equals, long ones around short ones."""
    everyone = list(range(count))
    yield everyone
    yield [0, count - 1]
    yield [count // 2] * 3
    yield [count - 1, *everyone[:3], count - 1]


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference, 0 only for equal bits; scores that are no number count as endlessly different."""
    gaps = [0.0 if a == b else abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(gap if gap < math.inf else math.inf for gap in gaps)


def best(scores: Sequence[float]) -> int:
    """The index of the highest score; of equal ones the first, so that a tie is always broken the same way."""
    return max(range(len(scores)), key=scores.__getitem__)


def winners(scores: Sequence[float], sizes: Sequence[int] | None = None) -> list[int]:
    """Of each question the index of its best label; the questions' scores lie side by side, `sizes` of each."""
    sizes = sizes or [len(scores)]
    ends = list(accumulate(sizes))
    return [best(scores[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
