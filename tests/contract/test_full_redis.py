"""A Redis that is full and refuses to grow can still be drained, and waited for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import redis

from worker.ports import Answer, Claim, Outcome

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

TICKET_BYTES = 2000


def fill(desk: Desk, ballast: bool = False) -> int:
    """Push until the server refuses; or leave the list empty and fill it with something else. Gives the depth."""
    desk.redis.config_set("maxmemory", "3mb")
    number = 0
    while not refused(desk, "ballast" if ballast else desk.keys.waiting, b"%d %s" % (number, b"x" * TICKET_BYTES)):
        number += 1
    assert number > 100
    return int(desk.redis.llen(desk.keys.waiting))


def refused(desk: Desk, key: str, payload: bytes) -> bool:
    """Push once, and tell whether the server was too full for it."""
    try:
        desk.redis.rpush(key, payload)
    except redis.exceptions.OutOfMemoryError:
        return True
    return False


def all_done(desk: Desk, claim: Claim) -> Outcome:
    """Every ticket of a claim labelled, but the first, which is buried."""
    first, *others = [ticket.index for ticket in claim.tickets]
    return desk.outcome(claim.id, {index: f"{claim.id}/{index}" for index in others}, dead={first: "not_json"})


def test_every_verb_works(own_desk: Desk) -> None:
    """Claim, renew, commit, release and reclaim work on a full Redis, scripts not loaded before included."""
    desk = own_desk
    depth = fill(desk)
    claim = desk.claim(most=20)
    assert len(claim.tickets) == 20
    assert desk.renew("c") == [True]
    assert desk.renew("c", worker="another") == [True]
    assert desk.commit(desk.outcome("b.1", {1: "t-1"}, dead={2: "not_json"})).answer is Answer.OK
    assert desk.release() == 18
    desk.claim("d", most=20, lease_ms=-1)
    assert desk.reclaim("d") == (20, 0)
    assert [payload.split(b" ")[0] for payload in desk.waiting()] == [b"%d" % number for number in range(2, depth)]
    assert any(refused(desk, "ballast", b"x" * TICKET_BYTES) for _ in range(100))  # so it was full all the while


def test_drained_to_the_end(own_desk: Desk) -> None:
    """A worker drains a full Redis to its last ticket, and then waits for more."""
    depth = fill(own_desk)
    published = 0
    with own_desk.queue(drain_size=50) as queue:
        while claim := queue.claim():
            receipt = queue.commit(claim, all_done(own_desk, claim))
            assert receipt.answer is Answer.OK
            published += receipt.published
    assert published + len(own_desk.dead()) == depth
    assert own_desk.totals().published == published
    assert own_desk.redis.llen(own_desk.keys.waiting) == 0


def test_polling_takes_over(own_desk: Desk) -> None:
    """Where the blocking wait is refused the worker polls: an empty queue gives None, a new ticket is found soon."""
    fill(own_desk, ballast=True)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        own_desk.redis.execute_command("BLMOVE", "tickets", "tickets", "LEFT", "LEFT", 0.01)
    with ThreadPoolExecutor(1) as pool, own_desk.queue() as queue:
        started_s = time.monotonic()
        assert pool.submit(queue.claim).result(5) is None
        assert 0.2 < time.monotonic() - started_s < 2
        waiting = pool.submit(queue.claim)
        time.sleep(0.1)
        own_desk.redis.config_set("maxmemory", "0")
        own_desk.push(b"at last")
        pushed_s = time.monotonic()
        claim = waiting.result(5)
        assert claim is not None
        assert time.monotonic() - pushed_s < 0.25
