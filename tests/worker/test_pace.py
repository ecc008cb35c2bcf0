"""The size of claims: smaller when a lease was lost or nearly, back again slowly when leases hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.pace import Pace

LEASE_MS = 1000.0
NOTES = st.tuples(st.integers(1, 300), st.integers(0, 300), st.floats(0, 1e7), st.floats(-1e9, LEASE_MS), st.booleans())


@given(st.integers(1, 300), st.lists(NOTES, max_size=30))
def test_the_size_stays_between_one_and_the_drain_size(
    drain_size: int, notes: list[tuple[int, int, float, float, bool]]
) -> None:
    """Whatever happens, the worker claims something and never more than configured. It begins with that."""
    pace = Pace(drain_size, LEASE_MS)
    assert pace.size == drain_size
    for claimed, tickets, took_ms, margin_ms, fenced in notes:
        pace.note(claimed, tickets, took_ms, margin_ms, fenced=fenced)
        assert 1 <= pace.size <= drain_size


@given(st.integers(1, 300), st.floats(0.1, 1e6), st.floats(-1e6, LEASE_MS), st.booleans())
def test_after_a_lease_lost_or_nearly_the_next_claim_fits(
    tickets: int, took_ms: float, margin_ms: float, fenced: bool
) -> None:
    """By the time a ticket took, the next claim is done within half a lease or is one ticket; at most half as many."""
    pace = Pace(256, LEASE_MS)
    pace.note(256, tickets, took_ms, margin_ms, fenced=fenced)
    if fenced or margin_ms < LEASE_MS / 4:
        assert pace.size == 1 or pace.size * took_ms / tickets <= LEASE_MS / 2 * (1 + 1e-9)
        assert pace.size <= 128
    else:
        assert pace.size == 256


def test_what_fits_is_what_was_measured() -> None:
    """By hand: 16 tickets in 1,600 ms are 100 ms each, so five fit into half a lease of a second."""
    pace = Pace(16, LEASE_MS)
    pace.note(16, 16, 1600, -600, fenced=True)
    assert (pace.size, pace.ms_a_ticket) == (5, 100)


def test_a_fenced_batch_without_tickets_halves_and_measures_nothing() -> None:
    """A batch of rejects alone says nothing of the time a ticket, and divides nothing by zero."""
    pace = Pace(16, LEASE_MS)
    pace.note(8, 0, 5, 900, fenced=True)
    assert (pace.size, pace.ms_a_ticket) == (8, 0)
    pace.note(8, 8, 2000, -1, fenced=False)
    pace.note(8, 0, 5, 900, fenced=True)
    assert (pace.size, pace.ms_a_ticket) == (1, 250)


def test_it_grows_back_slowly_and_to_the_drain_size_alone() -> None:
    """A quarter more a claim with a good margin: from 1 to 256 in some twenty claims, and no further."""
    pace = Pace(256, LEASE_MS)
    pace.note(1, 1, 600_000, -1, fenced=True)
    sizes: list[int] = []
    while pace.size < 256 and len(sizes) < 100:
        sizes.append(pace.size)
        pace.note(pace.size, pace.size, 10, LEASE_MS * 2 / 3, fenced=False)
    assert sizes[:9] == [1, 2, 3, 4, 5, 7, 9, 12, 15]
    assert 15 <= len(sizes) <= 25
    pace.note(256, 256, 10, LEASE_MS, fenced=False)
    assert pace.size == 256


def test_a_claim_that_was_not_full_is_no_reason_to_grow() -> None:
    """What is left of a queue is done in no time, and says nothing of a claim as large as allowed."""
    pace = Pace(16, LEASE_MS)
    pace.note(16, 16, 1600, -600, fenced=True)
    pace.note(4, 4, 400, LEASE_MS, fenced=False)
    assert pace.size == 5
    pace.note(5, 2, 200, LEASE_MS, fenced=False)  # one batch of a full claim
    assert pace.size == 7
    pace.note(5, 3, 200, LEASE_MS, fenced=False)  # and another: growth is by the claim, not by the batch
    assert pace.size == 7


@pytest.mark.parametrize(("margin_ms", "size"), [(249, 2), (251, 5), (499, 5), (500, 7)])
def test_between_a_good_margin_and_a_bad_one_nothing_changes(margin_ms: float, size: int) -> None:
    """Under a quarter of the lease is bad, half of it is good; growth stops before it does harm."""
    pace = Pace(16, LEASE_MS)
    pace.note(16, 16, 1600, -600, fenced=True)
    pace.note(5, 5, 500, margin_ms, fenced=False)
    assert pace.size == size


@given(st.floats(0.1, 2 * LEASE_MS / 5), st.floats(0, 1 / 3))
def test_a_worker_that_renews_only_between_batches_is_fenced_once(ms_a_ticket: float, late: float) -> None:
    """A pass that blocks the interpreter all the time: after the first fence no claim outlasts its lease again.

    `late`: the share of the lease that had passed, since its last renewal, when the batch began.
    """
    pace, fences = Pace(256, LEASE_MS), 0
    for _ in range(100):
        took_ms = pace.size * ms_a_ticket
        margin_ms = LEASE_MS * (1 - late) - took_ms
        fences += margin_ms < 0
        pace.note(pace.size, pace.size, took_ms, margin_ms, fenced=margin_ms < 0)
    assert fences <= 1
