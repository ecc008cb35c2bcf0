"""Hostile payloads through the real loop and queue: what becomes of each, and that no neighbour pays for it."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.soak.hostile import PUBLISHED, Hostile, hostile_payloads
from tests.soak.stub import StubClassifier
from worker.drain import Drain, Drained
from worker.stop import Stop

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

HOSTILE = hostile_payloads("")
ROWS, BATCH_S = 8, 0.02
# How much longer than without them a drain may take, for all of them together: decoding, moving and burying 11 MB.
EXTRA_S = 2.0


def drain(desk: Desk) -> tuple[Drained, float]:
    """Work the queue off, and tell how long it took from the first claim to the last commit."""
    with desk.queue(drain_size=64) as queue:
        started_s = time.monotonic()
        done = Drain(queue, StubClassifier(ROWS, BATCH_S), "w", Stop(), burst=True).run()
        return done, time.monotonic() - started_s


def ordinary(count: int) -> list[bytes]:
    """Tickets without malice, of different lengths."""
    return [b'{"id": "ok-%d", "body": "%s"}' % (number, b"word " * (number % 40)) for number in range(count)]


@pytest.mark.parametrize("one", HOSTILE, ids=[one.name for one in HOSTILE])
def test_each_has_its_fate_and_its_neighbours_theirs(desk: Desk, one: Hostile) -> None:
    """It is published under its own id or buried byte for byte with its reason; who came with it is labelled."""
    before, after = ordinary(2)
    desk.push(before, one.payload, after)
    with capture_logs() as logs:
        done, _ = drain(desk)
    assert {label.id for label in desk.labels()} == {"ok-0", "ok-1"} | ({one.id} if one.fate == PUBLISHED else set())
    assert [(letter.reason, letter.payload) for letter in desk.dead()] == (
        [] if one.fate == PUBLISHED else [(one.fate, one.payload)]
    )
    assert done.published + done.dead == 3
    assert all(len(letter.detail) < 200 for letter in desk.dead())
    assert not [entry for entry in logs if entry["log_level"] in ("error", "critical")]


def test_all_at_once_slow_nobody_down(desk: Desk) -> None:
    """Among 30 of them, 300 tickets get their labels, in a few batches more and in little more time than alone."""
    desk.push(*ordinary(300))
    alone, alone_s = drain(desk)
    desk.redis.flushdb()
    for number, payload in enumerate(ordinary(300)):
        desk.push(payload)
        if number % 10 == 0:
            desk.push(HOSTILE[number // 10].payload)
    among, among_s = drain(desk)
    fates = Counter(one.fate for one in HOSTILE)
    assert among.published == 300 + fates[PUBLISHED]
    assert Counter(letter.reason for letter in desk.dead()) == fates - Counter({PUBLISHED: fates[PUBLISHED]})
    assert among.batches <= alone.batches + 8
    assert among_s < alone_s + EXTRA_S


def test_an_id_stays_in_its_place(desk: Desk) -> None:
    """An id that looks like one of the queue's own keys, or like a reply, writes nothing but its own label."""
    named = [one for one in HOSTILE if one.fate == PUBLISHED]
    desk.push(*(one.payload for one in named))
    drain(desk)
    known = {getattr(desk.keys, name) for name, value in vars(type(desk.keys)).items() if type(value) is property}
    assert {key.decode() for key in desk.redis.keys("*")} <= known
    assert sorted(label.id for label in desk.labels()) == sorted(one.id for one in named)
    assert {member.decode() for member in desk.redis.zrange(desk.keys.published, 0, -1)} == {one.id for one in named}


def test_huge_ones_come_into_memory_one_by_one(own_desk: Desk) -> None:
    """With 16 payloads of 10 MB in front, a claim makes the server hold two more of them in memory at most, not all."""
    for _ in range(16):
        own_desk.push(HOSTILE[0].payload)
    own_desk.push(*ordinary(20))
    own_desk.redis.config_resetstat()  # the peak begins anew
    before = own_desk.redis.info("memory")["used_memory"]
    assert len(own_desk.claim(most=256).tickets) == 1
    assert own_desk.redis.info("memory")["used_memory_peak"] < before + 5 * len(HOSTILE[0].payload)
    done, _ = drain(own_desk)
    assert (done.published, done.dead) == (20, 15)
