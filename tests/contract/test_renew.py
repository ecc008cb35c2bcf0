"""renew: leases that are held are prolonged, lost ones are told, and the worker is seen to live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

DAY_MS = 24 * 3600 * 1000


def test_what_is_held_is_prolonged(desk: Desk) -> None:
    """A held lease then ends the asked time from now, by Redis' clock."""
    desk.push(b"one")
    desk.claim(lease_ms=1000)
    before_ms = desk.now_ms()
    assert desk.renew("c", lease_ms=60_000) == [True]
    assert before_ms + 60_000 <= desk.redis.zscore(desk.keys.leases, "c") <= desk.now_ms() + 60_000


def test_what_is_lost_is_told_and_stays_lost(desk: Desk) -> None:
    """Claims that are done, taken over or never were get a no, each at its place, and no lease comes to be."""
    desk.push(b"one", b"two")
    desk.claim("lost", most=1)
    desk.crash("lost")
    desk.claim("held")
    assert desk.renew("lost", "held", "never-was") == [False, True, False]
    assert desk.leases() == ["held"]


def test_past_its_lease_but_not_taken_over(desk: Desk) -> None:
    """A claim past its lease that nobody took yet is still the worker's own, and is prolonged."""
    desk.push(b"one")
    desk.claim()
    desk.expire()
    assert desk.renew("c") == [True]
    assert desk.reclaim() == (0, 0)


def test_a_sign_of_life(desk: Desk) -> None:
    """Every renewal, of nothing too, writes when the worker was last seen and what it is doing."""
    before_ms = desk.now_ms()
    assert desk.renew(worker="w", state=b'{"pid":1}') == []
    assert desk.renew(worker="w", state=b'{"pid":2}') == []
    assert before_ms <= desk.redis.zscore(desk.keys.workers, "w") <= desk.now_ms()
    assert desk.redis.hgetall(desk.keys.worker_states) == {b"w": b'{"pid":2}'}


def test_workers_gone_for_a_day_are_forgotten(desk: Desk) -> None:
    """Who was not seen for a day is forgotten, state and all; who was seen a little later is not."""
    desk.renew(worker="gone")
    desk.renew(worker="resting")
    desk.redis.zadd(desk.keys.workers, {"gone": desk.now_ms() - DAY_MS, "resting": desk.now_ms() - DAY_MS + 60_000})
    desk.renew(worker="w")
    assert set(desk.redis.zrange(desk.keys.workers, 0, -1)) == {b"resting", b"w"}
    assert set(desk.redis.hkeys(desk.keys.worker_states)) == {b"resting", b"w"}


@pytest.mark.parametrize("name", ["leases", "workers", "worker_states"])
def test_a_wrong_type_changes_nothing(desk: Desk, name: str) -> None:
    """If any key is of another type the renewal fails before it writes anything."""
    desk.redis.set(getattr(desk.keys, name), "a string")
    before = desk.dump()
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.renew("c")
    assert desk.dump() == before
