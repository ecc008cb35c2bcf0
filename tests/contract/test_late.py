"""A request that comes late: its sender gave it up and sent it again, and much has happened since."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from worker.ports import Answer

if TYPE_CHECKING:
    from tests.contract.conftest import Desk


def test_a_late_claim_brings_no_other_tickets_under_an_old_id(desk: Desk) -> None:
    """A worker that was taken over is fenced, though a late copy of its claim comes before its commit.

    Otherwise the labels of the old tickets would be published for new ones, and the new ones be lost.
    """
    desk.push(b"old-1", b"old-2", b"new-1", b"new-2")
    assert desk.take("x", most=2) == [b"old-1", b"old-2"]
    desk.crash("x")
    assert desk.take("y", most=4) == [b"old-1", b"old-2"]
    assert desk.take("x", most=2) == []
    assert desk.commit(desk.outcome("x.1", {1: "old-1", 2: "old-2"}), "x").answer is Answer.FENCED
    assert desk.waiting() == [b"new-1", b"new-2"]
    assert desk.labels() == []


@pytest.mark.parametrize("end", ["handed back", "taken over"])
def test_a_claim_id_is_good_once(desk: Desk, end: str) -> None:
    """Of a claim that was handed back or taken over the id claims nothing more, and leaves no lease behind."""
    desk.push(b"one", b"two")
    desk.take("x", most=1)
    desk.release("x") if end == "handed back" else desk.crash("x")
    waiting = desk.waiting()
    assert desk.take("x", most=2) == []
    assert desk.leases() == []
    assert desk.waiting() == waiting


def test_a_late_commit_publishes_nothing_twice(desk: Desk) -> None:
    """A copy of a commit that comes after the claim's end says ALREADY, and after a take-over FENCED."""
    desk.push(b"one", b"two")
    desk.take("x", most=1)
    outcome = desk.outcome("x.1", {1: "one"})
    desk.commit(outcome, "x")
    desk.take("y", most=1)
    desk.crash("y")
    before = desk.dump()
    assert desk.commit(outcome, "x").answer is Answer.ALREADY
    assert desk.commit(desk.outcome("y.1", {1: "two"}), "y").answer is Answer.FENCED
    assert desk.dump() == before
