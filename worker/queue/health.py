"""Whether a server is fit to keep a queue: one small function a question, each giving one finding.

What INFO tells is taken from INFO: managed services allow it, and most of them refuse CONFIG GET. What cannot be seen
is said to be so and is never a fault.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import redis
import structlog

from wire import Keys
from worker.errors import ConfigError
from worker.finding import Finding, Level, hidden
from worker.queue.connection import Link, StopSign, is_outage

Info = Mapping[str, Any]

REDIS_FLOOR, VALKEY_FLOOR = (6, 2), (7, 2)
FREE_SHARE = 0.1
CLOCK_LIMIT_S = 1.0

_NOT_IN_INFO = "the server's INFO does not tell, or this user may not ask for it"

log = structlog.get_logger("lengthwise.health")


def require_safe(url: str, keys: Keys, stop: StopSign, *, patient: bool, force: bool) -> None:
    """Raise ConfigError, naming all that would lose tickets on this server; with `force` only log it.

    Waits for a server that is gone, as a worker does, unless `patient` is False.
    """
    link = Link(url, stop, patient=patient, client_name="")  # no name: one call less that a user must be allowed
    try:
        info = link.call(lambda: read_info(link.redis, keys))
    finally:
        link.close()
    faults = [finding for finding in judge_safety(info) if finding.level is Level.LOSE]
    if faults and not force:
        told = " ".join(f"{fault.name}: {fault.found}. {fault.advice}." for fault in faults)
        raise ConfigError(f"this server would lose tickets. {told} `--force` starts all the same.")
    for fault in faults:
        log.warning("forced to start where tickets may be lost", check=fault.name, found=fault.found)


def read_info(client: "redis.Redis", keys: Keys) -> Info:
    """The server's INFO; empty where it may not be asked."""
    # In a cluster only a command with a key tells the client which of the servers holds the queue.
    _if_allowed(lambda: client.exists(keys.waiting))
    info: Info | None = _if_allowed(client.info)
    return info or {}


def judge_safety(info: Info) -> list[Finding]:
    """The checks that may find that tickets would be lost; a worker asks them before it starts."""
    return [version(info), role(info), eviction(info)]


def judge_server(client: "redis.Redis", info: Info, clock_s: Callable[[], float] = time.time) -> list[Finding]:
    """All that concerns the server whatever the queue. `clock_s` is this machine's wall clock."""
    return [
        *judge_safety(info),
        persistence(info, _setting(client, "save"), _setting(client, "appendfsync")),
        memory(info),
        clock(client, clock_s),
    ]


def version(info: Info) -> Finding:
    """Old servers lack commands the scripts use, and a script that ends halfway is not rolled back."""
    valkey, found = info.get("valkey_version"), info.get("valkey_version") or info.get("redis_version")
    if found is None:
        return hidden("version", _NOT_IN_INFO)
    name, floor = ("Valkey", VALKEY_FLOOR) if valkey else ("Redis", REDIS_FLOOR)
    if tuple(map(int, str(found).split(".")[:2])) >= floor:
        return Finding("version", Level.OK, f"{name} {found}")
    return Finding(
        "version",
        Level.LOSE,
        f"{name} {found}: a command it lacks would end a script halfway, and half a batch would stand",
        "Use Redis 6.2 or newer, or Valkey 7.2 or newer",
    )


def role(info: Info) -> Finding:
    """A replica takes no writes, or forgets those it took at the next synchronisation."""
    found = info.get("role")
    if found is None:
        return hidden("role", _NOT_IN_INFO)
    if found == "master":
        return Finding("role", Level.OK, "the master")
    return Finding(
        "role",
        Level.LOSE,
        f"a replica of {info.get('master_host')}:{info.get('master_port')}: it refuses writes, or forgets them when it "
        "next synchronises",
        "Name the master in --url or REDIS_URL",
    )


def eviction(info: Info) -> Finding:
    """A policy that may evict any key deletes the whole queue at once: the list is one key.

    The volatile ones evict only keys with an expiry, and a queue's keys have none.
    """
    policy, limit = info.get("maxmemory_policy"), info.get("maxmemory")
    advice = "Set maxmemory-policy to noeviction (CONFIG SET, and redis.conf or the service's parameters)"
    if policy is None:
        return hidden("eviction", _NOT_IN_INFO, "Make sure that maxmemory-policy is noeviction")
    if policy == "noeviction":
        return Finding("eviction", Level.OK, "noeviction")
    if policy.startswith("volatile-"):
        return Finding(
            "eviction", Level.WARN, f"{policy} deletes keys with an expiry, and the queue's have none", advice
        )
    if limit == 0:
        return Finding("eviction", Level.WARN, f"{policy} would delete queues once maxmemory is set; it is not", advice)
    return Finding("eviction", Level.LOSE, f"{policy} deletes queues whole when maxmemory is reached", advice)


def persistence(info: Info, save: str | None, fsync: str | None) -> Finding:
    """What a restart or a crash of the server forgets. `save` and `fsync` are settings, None where they are hidden."""
    appending = info.get("aof_enabled")
    advice = "CONFIG SET appendonly yes, and in redis.conf"
    if appending is None:
        return hidden("persistence", _NOT_IN_INFO)
    if appending:
        return _flushing(fsync)
    if save is None:
        return hidden("persistence", "no append-only file, and CONFIG GET may not tell of snapshots")
    if not save:
        return Finding("persistence", Level.WARN, "none: a restart of the server forgets every ticket", advice)
    return Finding(
        "persistence", Level.WARN, f"snapshots alone (save {save}): a crash forgets all since the last one", advice
    )


def _flushing(fsync: str | None) -> Finding:
    """The append-only file is on; how soon it is on the disk."""
    told = {
        "always": (Level.OK, "each write is on the disk before it is acknowledged"),
        "everysec": (Level.INFO, "a crash of the machine forgets about a second"),
        "no": (Level.INFO, "a crash of the machine forgets what its kernel had not yet written, some 30 s"),
        None: (Level.INFO, "cannot see how often it is flushed"),
    }
    level, meaning = told.get(fsync, (Level.INFO, "unknown to this version"))
    return Finding("persistence", level, f"append-only file, appendfsync {fsync or '?'}: {meaning}")


def memory(info: Info) -> Finding:
    """How near the server is to refusing what producers push; workers can drain a full one."""
    used, limit = info.get("used_memory"), info.get("maxmemory")
    if used is None or limit is None:
        return hidden("memory", _NOT_IN_INFO)
    if limit == 0:
        return Finding("memory", Level.OK, f"{_mib(used)} used, no maxmemory set: the machine's memory is the limit")
    free = max(0.0, 1 - used / limit)
    found = f"{_mib(used)} of maxmemory {_mib(limit)} used, {free:.0%} free"
    if free >= FREE_SHARE:
        return Finding("memory", Level.OK, found)
    return Finding(
        "memory", Level.WARN, found, "Raise maxmemory, add workers, or keep less (--results-length, --metrics-length)"
    )


def clock(client: "redis.Redis", clock_s: Callable[[], float]) -> Finding:
    """This machine's clock against the server's. Leases use the server's alone."""
    before_s = clock_s()
    reply: Any = _if_allowed(client.time)
    if reply is None:
        return hidden("clock", "this user may not ask for TIME")
    ahead_s = (before_s + clock_s()) / 2 - (reply[0] + reply[1] / 1e6)
    found = f"this machine's clock is {abs(ahead_s):.2f} s {'ahead of' if ahead_s > 0 else 'behind'} the server's"
    if abs(ahead_s) <= CLOCK_LIMIT_S:
        return Finding("clock", Level.OK, found)
    return Finding("clock", Level.WARN, f"{found}: reported waiting times are wrong by that", "Synchronise both by NTP")


def _setting(client: "redis.Redis", name: str) -> str | None:
    """A setting of the server; None where it hides it."""
    settings: Any = _if_allowed(lambda: client.config_get(name))
    return (settings or {}).get(name)


def _if_allowed(ask: Callable[[], Any]) -> Any:
    """The answer, or None where the server refuses the question. An outage stays an error."""
    try:
        return ask()
    except redis.ResponseError as error:
        if is_outage(error):
            raise
        return None


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
