"""The keeper: leases kept alive beside a busy worker, and what the dead left behind."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from worker.ports import Answer, Claim

if TYPE_CHECKING:
    from tests.contract.conftest import Desk


def some(claim: Claim | None) -> Claim:
    """A claim that there must be."""
    assert claim is not None
    return claim


def test_a_lost_claim_is_dropped(desk: Desk) -> None:
    """The next renewal tells the worker that its claim was taken over, however long it thought it had."""
    desk.push(b"one")
    with desk.queue() as queue:
        claim = some(queue.claim())
        desk.crash(claim.id)
        assert queue.lease_margin_ms(claim) > 20_000
        queue._keeper.renew()
        assert queue.lease_margin_ms(claim) < 0


def test_the_keeper_renews_while_the_worker_is_busy(desk: Desk) -> None:
    """A worker busy for longer than its lease keeps its claim: nobody can take it over, and it publishes."""
    desk.push(b"one")
    with desk.queue(lease_ms=300) as queue:
        claim = some(queue.claim())
        busy_until_s = time.monotonic() + 1.0
        while time.monotonic() < busy_until_s:
            time.sleep(0.05)
            assert desk.reclaim(claim.id) == (0, 0)
        assert queue.lease_margin_ms(claim) > 0
        assert queue.commit(claim, desk.outcome("b", {1: "t-1"})).answer is Answer.OK


def test_the_margin_is_never_too_large(desk: Desk) -> None:
    """The worker believes its lease ended no later than Redis does."""
    desk.push(b"one")
    with desk.queue(lease_ms=5000) as queue:
        claim = some(queue.claim())
        left_ms = desk.redis.zscore(desk.keys.leases, claim.id) - desk.now_ms()
        assert 0 < queue.lease_margin_ms(claim) <= left_ms + 1  # Redis' milliseconds are whole


def test_what_is_done_is_renewed_no_more(desk: Desk) -> None:
    """After its last part and after a hand-back a claim is not held any more, and no lease comes back."""
    desk.push(b"one")
    with desk.queue(lease_ms=300) as queue:
        claim = some(queue.claim())
        queue.commit(claim, desk.outcome("b", {1: "t-1"}))
        assert desk.eventually(lambda: queue.lease_margin_ms(claim) < 0)
        desk.push(b"two")
        handed_back = some(queue.claim())
        queue.release(handed_back)
        assert queue.lease_margin_ms(handed_back) < 0
        time.sleep(0.25)
        assert desk.leases() == []


def test_the_keeper_takes_back_what_the_dead_owe(desk: Desk) -> None:
    """A dead worker's claim comes back without anybody asking; it is counted once, and claimed by the living."""
    desk.push(b"one", b"two")
    desk.claim("dead", lease_ms=200)
    with desk.queue(lease_ms=300) as queue:
        assert desk.eventually(lambda: desk.waiting() == [b"one", b"two"])
        assert desk.eventually(lambda: queue.take_reclaimed() == 2)
        assert queue.take_reclaimed() == 0
        assert [ticket.crashes for ticket in some(queue.claim()).tickets] == [1, 1]


def test_the_keeper_takes_nothing_from_its_own_worker(desk: Desk) -> None:
    """A lease that ran out in an outage, just after a renewal, is renewed in the next round: no crash is counted."""
    desk.push(b"one")
    with desk.queue() as queue:
        claim = some(queue.claim())
        desk.expire(claim.id)
        queue._keeper._reclaim_expired()
        assert desk.waiting() == []
        queue._keeper.renew()
        assert desk.reclaim(claim.id) == (0, 0)


def test_an_outage_longer_than_the_lease_is_no_crash(own_desk: Desk) -> None:
    """When the server comes back after longer than a lease, the living renew theirs before anybody takes them back."""
    own_desk.push(b"one")
    server_pid = own_desk.redis.info("server")["process_id"]
    with own_desk.queue("other", lease_ms=1200):  # its keeper looks for expired leases every 400 ms
        own_desk.claim("c", lease_ms=1200)
        os.kill(server_pid, signal.SIGSTOP)
        time.sleep(1.8)
        os.kill(server_pid, signal.SIGCONT)
        time.sleep(0.2)
        assert own_desk.renew("c") == [True]
        assert own_desk.redis.hlen(own_desk.keys.attempts) == 0
