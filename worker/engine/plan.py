"""Lengths -> length-sorted batches under a token budget. Pure: no torch, no queue."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Closed = Literal["full", "budget", "drained"]


@dataclass(frozen=True)
class Batch:
    """Prompts to be scored together: each row lists the indexes of prompts with the very same tokens."""

    rows: tuple[tuple[int, ...], ...]
    closed: Closed  # what ended it: the row limit, the token budget, or the end of the claim

    @property
    def indexes(self) -> list[int]:
        """Every prompt of the batch, in the rows' order."""
        return [index for row in self.rows for index in row]


@dataclass(frozen=True)
class Limits:
    """What one batch may hold. A single prompt over the budget still gets a batch of its own."""

    rows: int
    tokens: int
    padded: bool  # whether a row costs the batch's longest row, or just its own tokens

    def under(self, lengths: Sequence[int]) -> "Limits":
        """Limits for batches that cost at most half of what one row or more of these lengths did."""
        cost = max(lengths) * len(lengths) if self.padded else sum(lengths)
        return replace(self, tokens=max(1, min(self.tokens, cost // 2)))


def plan(prompts: Sequence[Sequence[int]], limits: Limits) -> list[Batch]:
    """Cut the prompts (token ids), sorted by length, into batches. Each is in exactly one; equal ones share a row.

    Raises ValueError for limits under 1.
    """
    if limits.rows < 1 or limits.tokens < 1:
        raise ValueError(f"expected limits of at least one row and one token, got {limits.rows} and {limits.tokens}")
    batches: list[Batch] = []
    rows: list[tuple[int, ...]] = []
    tokens = 0
    for row in _distinct_rows(prompts):
        length = len(prompts[row[0]])
        # Sorted ascending, so the newcomer is the longest: padded, every row would cost what it costs.
        cost = (len(rows) + 1) * length if limits.padded else tokens + length
        if rows and (len(rows) == limits.rows or cost > limits.tokens):
            batches.append(Batch(tuple(rows), "full" if len(rows) == limits.rows else "budget"))
            rows, tokens = [], 0
        rows.append(row)
        tokens += length
    if rows:
        batches.append(Batch(tuple(rows), "drained"))
    return batches


def _distinct_rows(prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Indexes of equal prompts together, the shortest first; among equals the order of arrival."""
    same: dict[tuple[int, ...], list[int]] = {}
    for index, ids in enumerate(prompts):
        same.setdefault(tuple(ids), []).append(index)
    return [tuple(row) for _, row in sorted(same.items(), key=lambda item: len(item[0]))]
