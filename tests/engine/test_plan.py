"""Lengths -> batches: nothing lost, nothing twice, nothing over its limits."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.plan import Batch, Limits, plan

# Few different tokens and short prompts, so that equal ones are common.
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), max_size=40)
LIMITS = st.builds(Limits, rows=st.integers(1, 8), tokens=st.integers(1, 30), padded=st.booleans())


def lengths(batch: Batch, prompts: Sequence[Sequence[int]]) -> list[int]:
    """The length of each row's prompts."""
    return [len(prompts[row[0]]) for row in batch.rows]


def cost(batch: Batch, prompts: Sequence[Sequence[int]], *, padded: bool) -> int:
    """Tokens that are run for a batch."""
    rows = lengths(batch, prompts)
    return max(rows) * len(rows) if padded else sum(rows)


@given(PROMPTS, LIMITS)
def test_every_prompt_is_in_exactly_one_batch(prompts: list[tuple[int, ...]], limits: Limits) -> None:
    """No ticket is lost by planning, and none is scored or published twice."""
    indexes = [index for batch in plan(prompts, limits) for index in batch.indexes]
    assert sorted(indexes) == list(range(len(prompts)))


@given(PROMPTS, LIMITS)
def test_equal_prompts_share_a_row(prompts: list[tuple[int, ...]], limits: Limits) -> None:
    """The same tokens are run once, and different ones never share a row."""
    rows = [row for batch in plan(prompts, limits) for row in batch.rows]
    assert all(len({prompts[index] for index in row}) == 1 for row in rows)
    assert len(rows) == len(set(prompts))
    assert all(list(row) == sorted(row) for row in rows), "equal prompts keep their order of arrival"


@given(PROMPTS, LIMITS)
def test_no_batch_is_over_a_limit(prompts: list[tuple[int, ...]], limits: Limits) -> None:
    """The row limit holds always; the token budget, padding included, except for a prompt that is over it alone."""
    for batch in plan(prompts, limits):
        assert 1 <= len(batch.rows) <= limits.rows
        assert len(batch.rows) == 1 or cost(batch, prompts, padded=limits.padded) <= limits.tokens


@given(PROMPTS, LIMITS)
def test_batches_are_sorted_by_length(prompts: list[tuple[int, ...]], limits: Limits) -> None:
    """Rows come shortest first, within a batch and from batch to batch; equal lengths by arrival."""
    rows = [row for batch in plan(prompts, limits) for row in batch.rows]
    keys = [(len(prompts[row[0]]), row[0]) for row in rows]
    assert keys == sorted(keys)


@given(PROMPTS, LIMITS)
def test_closed_says_what_ended_a_batch(prompts: list[tuple[int, ...]], limits: Limits) -> None:
    """`full` at the row limit, `budget` if the next row would not have fitted, `drained` for the last one alone."""
    batches = plan(prompts, limits)
    for batch, following in pairwise(batches):
        assert batch.closed == ("full" if len(batch.rows) == limits.rows else "budget")
        if batch.closed == "budget":
            more = Batch((*batch.rows, following.rows[0]), "drained")
            assert cost(more, prompts, padded=limits.padded) > limits.tokens
    assert [batch.closed for batch in batches[-1:]] == (["drained"] if prompts else [])


@given(PROMPTS, LIMITS)
def test_results_find_their_way_back(prompts: list[tuple[int, ...]], limits: Limits) -> None:
    """Written back by the indexes of its rows, every result stands where its prompt stood."""
    results: list[int | None] = [None] * len(prompts)
    for batch in plan(prompts, limits):
        scores = [sum(prompts[row[0]]) for row in batch.rows]
        for row, score in zip(batch.rows, scores, strict=True):
            for index in row:
                results[index] = score
    assert results == [sum(prompt) for prompt in prompts]


def test_a_padded_row_costs_the_longest() -> None:
    """Padded, two short rows and a long one cost three long ones; packed, each its own length."""
    prompts = [(1,), (2,), (1, 2, 3, 4)]
    assert [lengths(batch, prompts) for batch in plan(prompts, Limits(9, 8, padded=True))] == [[1, 1], [4]]
    assert [lengths(batch, prompts) for batch in plan(prompts, Limits(9, 8, padded=False))] == [[1, 1, 4]]


@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (1, 0), (-1, 5), (5, -1)])
def test_limits_under_one_are_refused(rows: int, tokens: int) -> None:
    """A batch that can hold nothing would never end; the error says what came."""
    with pytest.raises(ValueError, match=rf"at least one row and one token, got {rows} and {tokens}"):
        plan([(1,)], Limits(rows, tokens, padded=False))
