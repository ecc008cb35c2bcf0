"""Whether the user in the URL may do what a worker does, asked without doing any of it."""

import json
import re
from collections.abc import Sequence
from typing import Any

import redis
from redis.exceptions import NoPermissionError

from wire import Keys
from worker.finding import Finding, Level, hidden
from worker.queue.contents import kinds_of

Call = tuple[str, ...]

_SCRIPT: Call = ("EVALSHA", "0" * 40, "0")  # without a key

# The server's own check, asked in a script, needs no right that a worker does not need anyway; ACL DRYRUN is an
# administrator's.
_ASK = """
if not redis.acl_check_cmd then return false end
local denied = {}
for number, call in ipairs(cjson.decode(ARGV[1])) do
  if not redis.acl_check_cmd(unpack(call)) then denied[#denied + 1] = number - 1 end
end
return denied
"""


def calls_of(keys: Keys) -> list[Call]:
    """Each command a worker sends or a script calls, well formed and on a key it is used on."""
    claim, waiting, leases = keys.claim("any"), keys.waiting, keys.leases
    return [
        ("PING",),
        ("TIME",),
        ("CLIENT", "SETNAME", "any"),
        ("SCRIPT", "LOAD", "return 1"),
        _SCRIPT,
        *((*_SCRIPT[:2], "1", key) for key in (*kinds_of(keys), claim)),
        ("BLMOVE", waiting, waiting, "LEFT", "LEFT", "1"),
        ("LLEN", waiting),
        ("LRANGE", waiting, "0", "0"),
        ("LINDEX", waiting, "0"),
        ("LPOP", waiting, "1"),
        ("LPUSH", waiting, "any"),
        ("RPUSH", waiting, "any"),
        ("TYPE", waiting),
        ("EXISTS", claim),
        ("HSET", claim, "1", "any"),
        ("HGET", claim, "1"),
        ("HGETALL", claim),
        ("HLEN", claim),
        ("HDEL", claim, "1"),
        ("DEL", claim),
        ("ZADD", leases, "1", "any"),
        ("ZREM", leases, "any"),
        ("ZSCORE", leases, "any"),
        ("ZRANGE", leases, "0", "0"),
        ("ZRANGEBYSCORE", keys.workers, "0", "1"),
        ("HSET", keys.worker_states, "any", "any"),
        ("ZREMRANGEBYSCORE", keys.published, "0", "1"),
        ("ZADD", keys.commits, "1", "any"),
        ("HMGET", keys.attempts, "any", "any"),
        ("HINCRBY", keys.totals, "any", "1"),
        ("XADD", keys.results, "*", "any", "any"),
        ("XADD", keys.metrics, "*", "any", "any"),
        ("XADD", keys.dead, "*", "any", "any"),
        ("XTRIM", keys.results, "MINID", "0"),
    ]


def rights(client: "redis.Redis", keys: Keys) -> Finding:
    """The commands and keys that are missing, and the line that adds them."""
    options = client.connection_pool.connection_kwargs
    user, calls = options.get("username") or "default", calls_of(keys)
    if options.get("db"):
        calls.append(("SELECT", str(options["db"])))
    refused = denied = None
    try:
        denied = _ask_by_script(client, calls)
    except NoPermissionError as error:
        refused = error
    try:
        denied = _ask_by_queueing(client, calls) if denied is None else denied
    except NoPermissionError as error:
        if not refused:
            return hidden("rights", str(error))
    if denied is None:  # no script may be run, which a worker must; what keys are missing is seen once it may
        return Finding("rights", Level.WARN, f"{refused}; nothing more can be seen", grant(user, keys, calls, []))
    if not denied:
        return Finding("rights", Level.OK, f"user {user} may do all that a worker does")
    return _judge(user, keys, denied)


def _judge(user: str, keys: Keys, denied: Sequence[Call]) -> Finding:
    # Whoever may run a script, but not with this key, may not use the key. Its other calls tell nothing more.
    closed = [] if _SCRIPT in denied else [call[-1] for call in denied if call[0] == _SCRIPT[0]]
    commands = sorted({name_of(call) for call in denied if not {*call} & {*closed}})
    lacks = [f"the keys {', '.join(closed)}"] * bool(closed) + [f"the commands {', '.join(commands)}"] * bool(commands)
    return Finding(
        "rights", Level.WARN, f"user {user} may not use {', nor '.join(lacks)}", grant(user, keys, denied, closed)
    )


def grant(user: str, keys: Keys, calls: Sequence[Call], closed: Sequence[str]) -> str:
    """The line that allows the user these calls and closed keys, and takes nothing away.

    A key is not named without need: where a user has all keys, the server refuses to add one.
    """
    queue = re.sub(r"([*?\[\]\\])", r"\\\1", keys.waiting)  # the keys are patterns there
    patterns = [f"~{queue}"] * (keys.waiting in closed) + [f"~{{{queue}}}:*"] * bool({*closed} - {keys.waiting})
    commands = sorted({name_of(call) for call in calls})
    return " ".join(["ACL SETUSER", user, *patterns, *(f"+{name}" for name in commands)])


def name_of(call: Call) -> str:
    """The command as ACL rules name it: `client|setname` where it has a subcommand."""
    return "|".join(call[:2] if call[0] in ("CLIENT", "SCRIPT") else call[:1]).lower()


def _ask_by_script(client: "redis.Redis", calls: Sequence[Call]) -> list[Call] | None:
    """The calls that are denied; None where the server, older than 7.0, cannot tell a script."""
    numbers: Any = client.register_script(_ASK)(args=[json.dumps(calls)])
    return None if numbers is None else [calls[number] for number in numbers]


def _ask_by_queueing(client: "redis.Redis", calls: Sequence[Call]) -> list[Call]:
    """The calls that are denied: a transaction checks each when it is queued, and this one is thrown away."""
    pool = client.connection_pool
    connection = pool.get_connection()
    try:
        _tell(connection, "MULTI")
        denied = [call for call in calls if _is_denied(connection, call)]
        _tell(connection, "DISCARD")
    finally:
        # Whatever happened, no transaction is left open on it.
        connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        pool.release(connection)
    return denied


def _is_denied(connection: Any, call: Call) -> bool:
    try:
        _tell(connection, *call)
    except NoPermissionError:
        return True
    except redis.ResponseError:
        pass  # full, read-only or another server's slot: that is asked after the rights
    return False


def _tell(connection: Any, *words: str) -> Any:
    connection.send_command(*words)
    return connection.read_response()
