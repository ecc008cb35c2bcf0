"""A server's own figures about what it did for one queue: commands, processor time, memory, runs of the scripts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from wire import Keys
from worker.queue.verbs import Verbs

# What a worker or producer sends; all other commands are called by scripts. TIME and ZRANGE go in one pipeline.
_SENT = ("evalsha", "eval", "blmove", "zrange", "llen", "ping", "script|load", "client|setname", "client|setinfo")
# What is sent to measure.
_OWN = ("info", "config|set", "config|get", "slowlog|get", "memory|usage")
_SLOWLOG = {"slowlog-log-slower-than": "0", "slowlog-max-len": "100000"}


def server_name(client: Any) -> str:
    """Which server it is, and its version."""
    info = client.info("server")
    return f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"


def keys_of(client: Any, keys: Keys) -> list[bytes]:
    """Every key of the queue that may be there."""
    return [keys.waiting.encode(), *client.scan_iter(match=f"{{{keys.queue}}}:*", count=1000)]


def memory_bytes(client: Any, keys: Keys) -> float | None:
    """What all keys of the queue take, measured whole, not by samples; None where the server does not tell."""
    try:
        return float(sum(client.memory_usage(key, samples=0) or 0 for key in keys_of(client, keys)))
    except redis.ResponseError:
        return None


def processor_s(client: Any) -> float:
    """Processor time that the server's main thread has taken so far."""
    info = client.info("cpu")
    return float(sum(info.get(f"{name}_main_thread", info[name]) for name in ("used_cpu_user", "used_cpu_sys")))


def count_commands(client: Any) -> tuple[int, int]:
    """Commands run so far, those called by scripts too, and round trips."""
    stats = client.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): int(entry["calls"]) for name, entry in stats.items()}
    commands = sum(count for name, count in calls.items() if name not in _OWN)
    return commands, sum(calls.get(name, 0) for name in _SENT)


@contextmanager
def timed_scripts(client: Any) -> Iterator[int | None]:
    """Have the server log every command's time; afterwards its settings are the old ones.

    Gives the first entry to read, or None on a server that lets nobody change its settings.
    """
    before: dict[str, str] = {}
    first_id = None
    try:
        before = client.config_get(*_SLOWLOG)
        for name, value in _SLOWLOG.items():
            client.config_set(name, value)
        newest = client.slowlog_get(1)
        first_id = newest[0]["id"] if newest else 0
    except redis.ResponseError:
        pass
    try:
        yield first_id
    finally:
        for name, value in before.items():
            client.config_set(name, value)


def script_runs(client: Any, keys: Keys, first_id: int | None) -> dict[str, list[float]]:
    """Verb -> milliseconds of each run of its script on this queue, since `timed_scripts`."""
    runs: dict[str, list[float]] = {}
    if first_id is None:
        return runs
    verbs, mine = Verbs(client).digests(), keys.queue.encode()
    for entry in client.slowlog_get(100_000):
        words = entry["command"].split(b" ", 2)
        if entry["id"] >= first_id and words[0].upper() == b"EVALSHA" and mine in entry["command"]:
            runs.setdefault(verbs.get(words[1].decode(), "other"), []).append(entry["duration"] / 1000)
    return runs
