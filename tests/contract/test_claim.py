"""claim: tickets leave the list for a leased claim, oldest first."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import redis

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

THREE = (b"one", b"two", b"three")


def test_the_oldest_come_first(desk: Desk) -> None:
    """Tickets come oldest first, numbered from 1, byte for byte, and are off the list."""
    desk.push(b"one", b"\xff\x00\r\n", b"three")
    claim = desk.claim()
    assert [(ticket.index, ticket.payload, ticket.crashes) for ticket in claim.tickets] == [
        (1, b"one", 0),
        (2, b"\xff\x00\r\n", 0),
        (3, b"three", 0),
    ]
    assert desk.waiting() == []
    assert desk.redis.hgetall(desk.keys.claim("c")) == {b"1": b"one", b"2": b"\xff\x00\r\n", b"3": b"three"}


def test_up_to_so_many(desk: Desk) -> None:
    """A claim holds at most as many tickets as were asked for; the rest keep waiting, in order."""
    desk.push(*THREE)
    assert desk.take(most=2) == [b"one", b"two"]
    assert desk.waiting() == [b"three"]


@pytest.mark.parametrize(("most_bytes", "taken"), [(5, 1), (6, 2), (10, 2), (11, 3)])
def test_up_to_so_many_bytes(desk: Desk, most_bytes: int, taken: int) -> None:
    """A claim holds at most so many bytes, to the byte."""
    desk.push(*THREE)
    assert len(desk.claim(most_bytes=most_bytes).tickets) == taken


def test_at_least_one_however_large(desk: Desk) -> None:
    """A ticket larger than the byte limit is claimed all the same, alone."""
    desk.push(b"x" * 100_000, b"two")
    assert desk.take("big", most=2) == [b"x" * 100_000, b"two"]
    desk.release("big")
    assert len(desk.claim(most_bytes=10).tickets) == 1


def test_the_same_claim_again_pops_nothing_more(desk: Desk) -> None:
    """The same claim id again gives the same tickets and takes no others: a lost reply is safe to repeat."""
    desk.push(*THREE)
    first = desk.claim(most=2)
    assert desk.claim(most=2) == first
    assert desk.waiting() == [b"three"]


def test_the_same_claim_again_tells_the_crashes_again(desk: Desk) -> None:
    """A repeated claim tells its tickets' crashes like the first, and begins a new lease."""
    desk.push(b"one")
    desk.claim("dead")
    desk.crash("dead")
    first = desk.claim(lease_ms=1000)
    early = desk.redis.zscore(desk.keys.leases, "c")
    assert desk.claim(lease_ms=60_000) == first
    assert [ticket.crashes for ticket in first.tickets] == [1]
    assert desk.redis.zscore(desk.keys.leases, "c") > early + 30_000


def test_the_lease_is_in_redis_own_time(desk: Desk) -> None:
    """The lease ends the asked time from now, by Redis' clock."""
    desk.push(b"one")
    before_ms = desk.now_ms()
    desk.claim(lease_ms=5000)
    assert before_ms + 5000 <= desk.redis.zscore(desk.keys.leases, "c") <= desk.now_ms() + 5000


def test_an_empty_list_leaves_no_trace(desk: Desk) -> None:
    """Of an empty list nothing is claimed, no lease is written, and no key comes to be."""
    assert desk.claim().tickets == ()
    assert desk.dump() == {}


def test_ten_thousand_at_once(desk: Desk) -> None:
    """10,000 tickets fit into one claim, and handed back they have kept their order."""
    payloads = [b"ticket-%d" % number for number in range(10_000)]
    desk.push(*payloads)
    assert desk.take(most=10_000) == payloads
    assert desk.redis.llen(desk.keys.waiting) == 0
    assert desk.release() == 10_000
    assert desk.waiting() == payloads


@pytest.mark.parametrize("name", ["waiting", "claim", "leases", "attempts"])
def test_a_wrong_type_changes_nothing(desk: Desk, name: str) -> None:
    """If any key is of another type the claim fails before it writes anything."""
    if name != "waiting":
        desk.push(*THREE)
    desk.redis.set(desk.keys.claim("c") if name == "claim" else getattr(desk.keys, name), "a string")
    before = desk.dump()
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.claim()
    assert desk.dump() == before


def test_crashes_halve_the_claim(desk: Desk) -> None:
    """Tickets that were in k crashes come with at most N/2^k, until one is alone."""
    desk.push(*(b"%d" % number for number in range(16)))
    sizes = []
    for attempt in range(6):
        sizes.append(len(desk.claim(f"c{attempt}", most=16).tickets))
        desk.crash(f"c{attempt}", crash_limit=99)
    assert sizes == [16, 8, 4, 2, 1, 1]
    assert desk.waiting() == [b"%d" % number for number in range(16)]


def test_a_neighbour_is_bounded_too(desk: Desk) -> None:
    """A ticket without crashes in front of or behind one with k crashes is at most one of N/2^k."""
    desk.push(b"poison")
    for attempt in range(2):
        desk.claim(f"c{attempt}")
        desk.crash(f"c{attempt}")
    desk.push(b"behind-1", b"behind-2")
    desk.redis.lpush(desk.keys.waiting, b"front")
    assert desk.take("a", most=8) == [b"front", b"poison"]
    desk.release("a")
    assert desk.take("b", most=4) == [b"front"]
    assert desk.take("c", most=8) == [b"poison", b"behind-1"]


def test_two_claims_share_nothing(desk: Desk) -> None:
    """Every ticket is in one claim only, whoever claims."""
    desk.push(*(b"%d" % number for number in range(10)))
    taken = [desk.take(f"c{number}", most=3) for number in range(4)]
    assert list(itertools.chain(*taken)) == [b"%d" % number for number in range(10)]
    assert set(desk.leases()) == {"c0", "c1", "c2", "c3"}
