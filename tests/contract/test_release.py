"""release: what a claim still owes goes back to where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

if TYPE_CHECKING:
    from tests.contract.conftest import Desk


def test_back_at_the_head_in_order(desk: Desk) -> None:
    """Tickets handed back stand in front of those pushed meanwhile, in their order; claim and lease are gone."""
    desk.push(b"one", b"two", b"three")
    desk.claim()
    desk.push(b"late")
    assert desk.release() == 3
    assert desk.waiting() == [b"one", b"two", b"three", b"late"]
    assert set(desk.dump()) == {b"tickets", b"{tickets}:commits"}


def test_only_what_is_still_owed(desk: Desk) -> None:
    """What was committed before stays done: only the rest is handed back."""
    desk.push(b"one", b"two", b"three")
    desk.claim()
    desk.commit(desk.outcome("b", {2: "t-2"}))
    assert desk.release() == 2
    assert desk.waiting() == [b"one", b"three"]


def test_later_first_restores_the_order(desk: Desk) -> None:
    """Two claims handed back, the later one first, restore the list exactly."""
    payloads = [b"%d" % number for number in range(9)]
    desk.push(*payloads)
    desk.claim("early", most=4)
    desk.claim("later", most=3)
    desk.release("later")
    desk.release("early")
    assert desk.waiting() == payloads


def test_again_is_nothing(desk: Desk) -> None:
    """Handing back a second time, or what never was, changes nothing and says 0."""
    desk.push(b"one")
    desk.claim()
    desk.release()
    before = desk.dump()
    assert desk.release() == 0
    assert desk.release("never-was") == 0
    assert desk.dump() == before


def test_not_after_it_was_taken_over(desk: Desk) -> None:
    """A claim that was reclaimed, and perhaps claimed by another, is not handed back by its old worker."""
    desk.push(b"one")
    desk.claim("old")
    desk.crash("old")
    desk.claim("new")
    before = desk.dump()
    assert desk.release("old") == 0
    assert desk.dump() == before


def test_not_after_it_was_done(desk: Desk) -> None:
    """A claim that was committed to the end has nothing to hand back."""
    desk.push(b"one")
    desk.claim()
    desk.commit(desk.outcome("b", {1: "t-1"}))
    before = desk.dump()
    assert desk.release() == 0
    assert desk.dump() == before


@pytest.mark.parametrize("name", ["waiting", "claim", "leases"])
def test_a_wrong_type_changes_nothing(desk: Desk, name: str) -> None:
    """If any key is of another type the hand-back fails before it writes anything."""
    desk.push(b"one")
    desk.claim()
    desk.redis.delete(key := desk.keys.claim("c") if name == "claim" else getattr(desk.keys, name))
    desk.redis.set(key, "a string")
    before = desk.dump()
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.release()
    assert desk.dump() == before
