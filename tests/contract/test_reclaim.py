"""reclaim: what a dead worker owes is taken back once, and a ticket that kills its worker is buried."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import redis

from worker.queue.connection import connect
from worker.queue.verbs import Verbs

if TYPE_CHECKING:
    from tests.contract.conftest import Desk


def test_back_at_the_head_in_order(desk: Desk) -> None:
    """What was owed stands at the head again, in order; claim and lease are gone; the totals count it."""
    desk.push(b"one", b"two")
    desk.claim()
    desk.push(b"late")
    assert desk.crash() == (2, 0)
    assert desk.waiting() == [b"one", b"two", b"late"]
    assert desk.leases() == []
    assert not desk.redis.exists(desk.keys.claim("c"))
    assert desk.totals().reclaimed == 2


def test_ten_thousand_come_back_in_order(desk: Desk) -> None:
    """A claim of 10,000 is taken back whole and in order."""
    payloads = [b"ticket-%d" % number for number in range(10_000)]
    desk.push(*payloads)
    desk.claim(most=10_000)
    assert desk.crash() == (10_000, 0)
    assert desk.waiting() == payloads


def test_only_past_the_deadline(desk: Desk) -> None:
    """A lease that has not run out is not taken: the script itself looks, whatever its caller believed."""
    desk.push(b"one")
    desk.claim(lease_ms=60_000)
    before = desk.dump()
    assert desk.verbs.expired(desk.keys, 10) == []
    assert desk.reclaim() == (0, 0)
    assert desk.dump() == before


def test_by_redis_time_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose clock is a day ahead takes nothing that Redis holds leased, and one a day behind does."""
    desk.push(b"one")
    desk.claim(lease_ms=60_000)
    real_s = time.time()
    monkeypatch.setattr(time, "time", lambda: real_s + 86_400)
    assert desk.verbs.expired(desk.keys, 10) == []
    assert desk.reclaim() == (0, 0)
    desk.expire()
    monkeypatch.setattr(time, "time", lambda: real_s - 86_400)
    assert desk.verbs.expired(desk.keys, 10) == ["c"]
    assert desk.reclaim() == (1, 0)


def test_a_renewed_lease_is_not_taken(desk: Desk) -> None:
    """A lease renewed between a reaper's look and its grasp stays with its worker."""
    desk.push(b"one")
    desk.claim()
    desk.expire()
    assert desk.verbs.expired(desk.keys, 10) == ["c"]
    desk.renew("c")
    assert desk.reclaim() == (0, 0)
    assert desk.leases() == ["c"]


def test_the_oldest_of_the_expired(desk: Desk) -> None:
    """`expired` tells at most so many claims, the longest expired first, and none that lives."""
    for number in range(4):
        desk.push(b"%d" % number)
        desk.claim(f"c{number}")
    for claim_id, late_ms in (("c2", 300), ("c0", 200), ("c1", 100)):
        desk.redis.zadd(desk.keys.leases, {claim_id: desk.now_ms() - late_ms})
    assert desk.verbs.expired(desk.keys, 10) == ["c2", "c0", "c1"]
    assert desk.verbs.expired(desk.keys, 1) == ["c2"]


def test_the_crash_is_counted(desk: Desk) -> None:
    """Each crash counts for every ticket that was owed, and for no other; a commit clears the count."""
    desk.push(b"one", b"two")
    desk.claim("a")
    desk.crash("a")
    desk.push(b"three")
    tickets = desk.claim("b", most=10).tickets
    assert [ticket.crashes for ticket in tickets] == [1, 1, 0]
    desk.commit(desk.outcome("b.1", {1: "t-1"}), "b")
    desk.crash("b")
    assert sorted(desk.redis.hvals(desk.keys.attempts)) == [b"1", b"2"]


@pytest.mark.parametrize("payload", [b"poison", b"\xff\x00 no text \xfe"])
def test_alone_at_the_limit_it_is_buried(desk: Desk, payload: bytes) -> None:
    """A ticket alone in its last crash is buried with the reason, byte for byte, and forgotten otherwise."""
    desk.push(payload)
    for claim_id in "ab":
        desk.claim(claim_id)
        assert desk.crash(claim_id, crash_limit=3) == (1, 0)
    desk.claim("c")
    assert desk.crash("c", crash_limit=3) == (0, 1)
    (letter,) = desk.dead()
    assert (letter.payload, letter.reason, letter.attempts, letter.worker) == (payload, "crashed", 3, "reaper")
    assert letter.at_ms == pytest.approx(time.time() * 1000, abs=10_000)
    assert set(desk.dump()) == {b"{tickets}:dead", b"{tickets}:totals", b"{tickets}:commits"}
    assert desk.totals().dead == 1


@pytest.mark.parametrize(("dead_length", "kept"), [(0, range(301, 302)), (100, range(100, 202))])
def test_the_dead_are_trimmed_about(desk: Desk, dead_length: int, kept: range) -> None:
    """Burying trims the dead stream to about its length, and by default keeps everything."""
    for number in range(300):
        desk.redis.xadd(desk.keys.dead, {"payload": number})
    desk.push(b"poison")
    desk.claim(lease_ms=-1)
    assert desk.reclaim(crash_limit=1, dead_length=dead_length) == (0, 1)
    assert desk.redis.xlen(desk.keys.dead) in kept


def test_with_neighbours_it_is_not_buried(desk: Desk) -> None:
    """A ticket over its limit in company is not buried: a neighbour may have done it."""
    desk.push(b"one", b"two")
    desk.claim()
    assert desk.crash(crash_limit=1) == (2, 0)
    assert desk.dead() == []


def test_a_poison_ticket_takes_no_neighbour_along(desk: Desk) -> None:
    """Of a claim with one ticket that kills its worker, that one alone is buried and all others get done."""
    desk.push(
        *(b"good-%d" % number for number in range(5)), b"poison", *(b"good-%d" % number for number in range(5, 9))
    )
    done: list[bytes] = []
    for attempt in range(40):
        claim = desk.claim(f"c{attempt}", most=8)
        payloads = [ticket.payload for ticket in claim.tickets]
        if b"poison" in payloads:
            desk.crash(claim.id)
        elif payloads:
            desk.commit(desk.outcome(claim.id, {ticket.index: None for ticket in claim.tickets}), claim.id)
            done += payloads
    assert done == [b"good-%d" % number for number in range(9)]
    assert [letter.payload for letter in desk.dead()] == [b"poison"]
    assert not desk.redis.exists(desk.keys.attempts)


def test_two_reapers_take_it_once(desk: Desk) -> None:
    """Two workers that reclaim at once take a claim back once, and count one crash."""
    desk.push(*(b"%d" % number for number in range(20)))
    for number in range(20):
        desk.claim(f"c{number}", most=1)
        desk.expire(f"c{number}")
    barrier = threading.Barrier(2)

    def reap(_: int) -> int:
        with connect(desk.url) as client:
            verbs = Verbs(client)
            barrier.wait()
            return sum(verbs.reclaim(desk.keys, f"c{number}", 3, "r", 0, 0)[0] for number in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(reap, range(2))) == 20
    assert sorted(desk.waiting()) == sorted(b"%d" % number for number in range(20))
    assert set(desk.redis.hvals(desk.keys.attempts)) == {b"1"}


@pytest.mark.parametrize("name", ["waiting", "claim", "leases", "attempts", "dead", "totals"])
def test_a_wrong_type_changes_nothing(desk: Desk, name: str) -> None:
    """If any key is of another type the reclaim fails before it writes anything."""
    desk.push(b"one")
    desk.claim()
    desk.expire()
    desk.redis.delete(key := desk.keys.claim("c") if name == "claim" else getattr(desk.keys, name))
    desk.redis.set(key, "a string")
    before = desk.dump()
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.reclaim()
    assert desk.dump() == before
