"""What stands in a queue's keys that somebody should know of: one function a question, each giving one finding."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import redis
from redis.crc import key_slot

from wire import Keys
from wire.records import from_fields
from worker.finding import Finding, Level, hidden
from worker.queue.connection import is_outage
from worker.queue.health import Info

BATCHES_READ = 200
# A renewal that comes late by a whole batch must still find the lease: it is renewed three times while it lasts.
SHARE_OF_LEASE = 1 / 3


class _Timed(msgspec.Struct, frozen=True):
    """The one field of a metrics entry that is read here."""

    score_ms: float


def judge_queue(client: "redis.Redis", info: Info, keys: Keys, lease_ms: float) -> list[Finding]:
    """All that concerns this queue. A question that the server refuses gives a finding that says so."""
    questions: dict[str, Callable[[], Finding]] = {
        "cluster": lambda: cluster(client, info, keys),
        "key types": lambda: key_types(client, keys),
        "leftover claims": lambda: leftover_claims(client, keys),
        "dead letters": lambda: dead_letters(client, keys),
        "lease": lambda: lease(client, keys, lease_ms),
    }
    return [_answer(name, question) for name, question in questions.items()]


def kinds_of(keys: Keys) -> dict[str, str]:
    """Each key of a queue and the type it must have, where it is there; one must not be there."""
    return {
        keys.waiting: "list",
        keys.leases: "zset",
        keys.commits: "zset",
        keys.results: "stream",
        keys.metrics: "stream",
        keys.totals: "hash",
        keys.dead: "stream",
        keys.published: "zset",
        keys.attempts: "hash",
        keys.workers: "zset",
        keys.worker_states: "hash",
        keys.never: "none",
    }


def key_types(client: "redis.Redis", keys: Keys) -> Finding:
    """A key of another type stops every worker before it has written anything."""
    wrong = []
    for key, kind in kinds_of(keys).items():
        reply: Any = client.type(key)
        if (found := reply.decode()) not in ("none", kind):
            wrong.append(f"{key} is a {found}, expected a {kind}")
    if not wrong:
        return Finding("key types", Level.OK, "every key is what it should be, or is not there yet")
    return Finding("key types", Level.WARN, "; ".join(wrong), "Choose another --queue, or RENAME what is in its place")


def cluster(client: "redis.Redis", info: Info, keys: Keys) -> Finding:
    """One script touches many keys, so all must be in one slot, and this server must hold it."""
    if not info:
        return hidden("cluster", "INFO does not tell")
    if not info.get("cluster_enabled"):
        return Finding("cluster", Level.OK, "one server, no cluster")
    slots = {key_slot(key.encode()) for key in [*kinds_of(keys), keys.claim("any")]}
    if len(slots) > 1:
        return Finding("cluster", Level.WARN, f"the keys lie in slots {sorted(slots)}", "Report this: it is a bug")
    try:
        client.exists(keys.waiting)
    except redis.exceptions.MovedError as error:
        return Finding(
            "cluster",
            Level.WARN,
            f"slot {error.slot_id}, which has all the queue's keys, is at {error.host}:{error.port}",
            "Name that server in --url or REDIS_URL",
        )
    return Finding("cluster", Level.OK, f"all keys are in slot {slots.pop()}, which this server holds")


def leftover_claims(client: "redis.Redis", keys: Keys) -> Finding:
    """Claims whose worker no longer renews them."""
    seconds, micros = _ask(client.time())
    held, expired = (
        _ask(client.zcount(keys.leases, low, high))
        for low, high in (("-inf", "+inf"), ("-inf", f"({seconds * 1000 + micros // 1000}"))
    )
    if not expired:
        return Finding("leftover claims", Level.OK, f"none; {held} held by workers")
    return Finding(
        "leftover claims",
        Level.INFO,
        f"{expired} of {held}, left by workers that ended without a word",
        "Any running worker takes them back by itself",
    )


def dead_letters(client: "redis.Redis", keys: Keys) -> Finding:
    """Payloads that got no label."""
    count = _ask(client.xlen(keys.dead))
    if not count:
        return Finding("dead letters", Level.OK, "none")
    return Finding("dead letters", Level.INFO, str(count), "`lengthwise dead list` shows them with their reasons")


def lease(client: "redis.Redis", keys: Keys, lease_ms: float) -> Finding:
    """The longest recent batch against the lease."""
    entries = _ask(client.xrevrange(keys.metrics, count=BATCHES_READ))
    if not entries:
        return Finding("lease", Level.INFO, "no batch was measured on this queue yet")
    longest_ms = max(from_fields(_Timed, fields).score_ms for _, fields in entries)
    found = (
        f"the longest batch of the last {len(entries)} took {longest_ms / 1000:.2f} s, a lease is {lease_ms / 1000:g} s"
    )
    if longest_ms <= lease_ms * SHARE_OF_LEASE:
        return Finding("lease", Level.OK, found)
    least_s = math.ceil(longest_ms / SHARE_OF_LEASE / 1000)
    return Finding("lease", Level.WARN, found, f"`lengthwise work --lease {least_s}` or more, or smaller --tokens")


def _answer(name: str, question: Callable[[], Finding]) -> Finding:
    try:
        return question()
    except redis.ResponseError as error:
        if is_outage(error):
            raise
        return hidden(name, str(error))
    except msgspec.ValidationError as error:
        return hidden(name, f"an entry of another version: {error}")


def _ask(reply: Any) -> Any:
    """The reply: redis-py's types mix those of its two kinds of client."""
    return reply
