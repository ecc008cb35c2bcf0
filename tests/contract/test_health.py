"""Every check of a server and a queue finds what it is for, on a real server set up badly, and changes nothing."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import redis
import structlog

from wire import Keys
from worker.embedded import embedded_server
from worker.errors import ConfigError, RedisUnavailableError
from worker.finding import Finding, Level
from worker.ports import Answer
from worker.queue.connection import connect
from worker.queue.contents import BATCHES_READ, cluster, judge_queue, key_types, kinds_of, lease, leftover_claims
from worker.queue.health import judge_safety, judge_server, read_info, require_safe, version
from worker.queue.rights import calls_of, rights

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

NEVER = threading.Event()
LEASE_MS = 30_000
OPERATORS_SCRIPTS = ("replay.lua",)


def server_findings(desk: Desk, ahead_s: float = 0.0) -> dict[str, Finding]:
    """What is found of the server, by this machine's clock set ahead."""
    found = judge_server(desk.redis, read_info(desk.redis, desk.keys), lambda: time.time() + ahead_s)
    return {finding.name: finding for finding in found}


def queue_findings(desk: Desk) -> dict[str, Finding]:
    """What is found of the queue."""
    found = judge_queue(desk.redis, read_info(desk.redis, desk.keys), desk.keys, LEASE_MS)
    return {finding.name: finding for finding in found}


def as_user(desk: Desk, *rules: str) -> str:
    """The server's URL for a user who may do only this."""
    desk.redis.execute_command("ACL", "SETUSER", "ann", "reset", "on", ">secret", *rules)
    return desk.url.replace("://", "://ann:secret@")


def rights_of(desk: Desk, *rules: str) -> Finding:
    """What is found of such a user's rights."""
    with connect(as_user(desk, *rules), client_name="") as client:
        return rights(client, desk.keys)


def test_a_good_server_and_queue_are_found_good(own_desk: Desk) -> None:
    """On a server as it should be, with a queue in use, no check finds anything to mend; and nothing is changed."""
    own_desk.redis.config_set("appendonly", "yes")
    own_desk.push(b"1", b"2", b"3")
    own_desk.claim(most=2)
    own_desk.commit(own_desk.outcome("b.1", {1: "t-1"}))
    before = own_desk.dump()
    findings = [
        *server_findings(own_desk).values(),
        rights(own_desk.redis, own_desk.keys),
        *queue_findings(own_desk).values(),
    ]
    assert {finding.level for finding in findings} <= {Level.OK, Level.INFO}, findings
    assert not any(finding.advice for finding in findings)
    assert own_desk.dump() == before


@pytest.mark.parametrize(
    ("policy", "limit", "level"),
    [
        ("noeviction", "100mb", Level.OK),
        ("noeviction", "0", Level.OK),
        ("allkeys-lru", "100mb", Level.LOSE),
        ("allkeys-lfu", "100mb", Level.LOSE),
        ("allkeys-random", "100mb", Level.LOSE),
        ("allkeys-lru", "0", Level.WARN),
        ("volatile-ttl", "100mb", Level.WARN),
        ("volatile-lru", "0", Level.WARN),
    ],
)
def test_eviction(own_desk: Desk, policy: str, limit: str, level: Level) -> None:
    """A policy that can delete the queue loses tickets; one that cannot as things stand is only to be mended."""
    own_desk.redis.config_set("maxmemory-policy", policy)
    own_desk.redis.config_set("maxmemory", limit)
    found = server_findings(own_desk)["eviction"]
    assert found.level is level
    assert policy in found.found
    assert ("noeviction" in found.advice) == (level is not Level.OK)


@pytest.mark.parametrize(("policy", "kept"), [("allkeys-lru", False), ("volatile-lru", True), ("noeviction", True)])
def test_what_is_said_of_eviction_is_so(own_desk: Desk, policy: str, kept: bool) -> None:
    """A full server deletes the whole queue under an allkeys policy, and refuses pushes under every other."""
    own_desk.redis.config_set("maxmemory-policy", policy)
    own_desk.redis.config_set("maxmemory", "3mb")
    pushed, refused = 0, False
    while not refused and own_desk.redis.llen(own_desk.keys.waiting) == pushed:
        try:
            own_desk.push(b"x" * 20_000)
            pushed += 1
        except redis.exceptions.OutOfMemoryError:
            refused = True
    assert pushed > 20
    assert (own_desk.redis.llen(own_desk.keys.waiting) == pushed) is kept


def test_a_replica(own_desk: Desk) -> None:
    """A replica is no place for a queue, and the finding names its master."""
    assert server_findings(own_desk)["role"].level is Level.OK
    own_desk.redis.replicaof("127.0.0.1", 1)
    found = server_findings(own_desk)["role"]
    assert found.level is Level.LOSE
    assert "127.0.0.1:1" in found.found


def test_persistence(own_desk: Desk) -> None:
    """What a restart or a crash would forget is said, and is to be mended where it is more than seconds."""
    for settings, level, says in (
        ({"save": ""}, Level.WARN, "forgets every ticket"),
        ({"save": "3600 1"}, Level.WARN, "snapshots alone (save 3600 1)"),
        ({"appendonly": "yes", "appendfsync": "always"}, Level.OK, "always"),
        ({"appendfsync": "everysec"}, Level.INFO, "about a second"),
        ({"appendfsync": "no"}, Level.INFO, "some 30 s"),
    ):
        for name, value in settings.items():
            own_desk.redis.config_set(name, value)
        found = server_findings(own_desk)["persistence"]
        assert (found.level, says in found.found) == (level, True), found


def test_memory(own_desk: Desk) -> None:
    """A server that has less than a tenth of its memory left is to be mended; a full one too."""
    own_desk.push(*[b"x" * 10_000] * 1000)
    used = int(own_desk.redis.info("memory")["used_memory"])
    for limit, level in ((0, Level.OK), (used * 2, Level.OK), (int(used * 1.05), Level.WARN), (used // 2, Level.WARN)):
        own_desk.redis.config_set("maxmemory", limit)
        assert server_findings(own_desk)["memory"].level is level, limit


@pytest.mark.parametrize(
    ("ahead_s", "level", "says"),
    [(0.0, Level.OK, ""), (1.5, Level.WARN, "1.50 s ahead"), (-90.0, Level.WARN, "90.00 s behind")],
)
def test_clocks(desk: Desk, ahead_s: float, level: Level, says: str) -> None:
    """A difference of more than a second is told with its direction."""
    found = server_findings(desk, ahead_s)["clock"]
    assert (found.level, says in found.found) == (level, True), found


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"redis_version": "6.0.16"}, Level.LOSE),
        ({"redis_version": "6.2.0"}, Level.OK),
        ({"redis_version": "10.0.1"}, Level.OK),
        ({"redis_version": "255.255.255"}, Level.OK),
        ({"redis_version": "7.2.4", "valkey_version": "7.1.9"}, Level.LOSE),
        ({"redis_version": "7.2.4", "valkey_version": "8.0.0-rc1"}, Level.OK),
        ({}, Level.INFO),
    ],
)
def test_versions(info: dict[str, Any], level: Level) -> None:
    """The floor is Redis 6.2 and Valkey 7.2, compared as numbers; a version that is not told is no fault."""
    assert version(info).level is level


def test_what_is_forbidden_is_not_seen_and_no_fault(own_desk: Desk) -> None:
    """Where INFO, CONFIG, TIME and all reading are refused, every check says that it cannot see, and none fails."""
    own_desk.redis.config_set("maxmemory", "100mb")
    own_desk.redis.config_set("maxmemory-policy", "allkeys-lru")
    with connect(as_user(own_desk, "+ping"), client_name="") as client:
        info = read_info(client, own_desk.keys)
        found = [*judge_server(client, info), rights(client, own_desk.keys)]
        found += judge_queue(client, info, own_desk.keys, LEASE_MS)
    seen = {one.name: one.level for one in found if not one.found.startswith("cannot see: ")}
    assert seen == {"rights": Level.WARN}
    assert {one.level for one in found if one.name != "rights"} == {Level.INFO}
    require_safe(as_user(own_desk, "+ping"), own_desk.keys, NEVER, patient=False, force=False)


def test_config_alone_forbidden(own_desk: Desk) -> None:
    """A managed service refuses CONFIG GET: what loses tickets is seen all the same, and refused to such a user too."""
    own_desk.redis.config_set("maxmemory", "100mb")
    own_desk.redis.config_set("maxmemory-policy", "allkeys-lru")
    url = as_user(own_desk, "~*", "+@all", "-config", "-client")
    with connect(url, client_name="") as client:
        found = {one.name: one for one in judge_server(client, read_info(client, own_desk.keys))}
    with pytest.raises(ConfigError, match="eviction"):
        require_safe(url, own_desk.keys, NEVER, patient=False, force=False)
    assert found["eviction"].level is Level.LOSE
    assert found["persistence"].level is Level.INFO
    assert "cannot see" in found["persistence"].found


def test_the_rights_asked_for_are_all_that_scripts_use(desk: Desk) -> None:
    """Every command in a script that workers run is among those that are asked for."""
    files = [file for file in (resources.files("worker.queue") / "lua").iterdir() if file.name not in OPERATORS_SCRIPTS]
    source = "".join(file.read_text("utf-8") for file in files)
    used = set(re.findall(r"redis\.p?call\('(\w+)'", source))
    assert len(used) > 15
    assert used <= {call[0] for call in calls_of(desk.keys)}


def test_the_rights_asked_for_are_enough(own_desk: Desk) -> None:
    """A user who had nothing and was given what is advised, commands and then keys, can do all that a worker does."""
    url = as_user(own_desk, "+ping")
    with connect(url, client_name="") as client:
        for _ in ("commands", "keys"):
            own_desk.redis.execute_command(*rights(client, own_desk.keys).advice.split())
        assert rights(client, own_desk.keys).level is Level.OK
    own_desk.push(b"1", b"2", b"3")
    with own_desk.queue(url=url, drain_size=2) as queue:
        claim = queue.claim()
        assert claim is not None
        assert queue.commit(claim, own_desk.outcome("b.1", {1: "t-1"})).answer is Answer.OK
        assert queue.release(claim) == 1
        rest = queue.claim()
        assert rest is not None
        assert queue.commit(rest, own_desk.outcome("b.2", {2: "t-2"}, dead={1: "not_json"})).answer is Answer.OK
        assert queue.claim() is None  # having waited
    own_desk.push(b"4")
    own_desk.claim("abandoned", lease_ms=-1)
    poor = type(own_desk)(url)
    assert poor.reclaim("abandoned") == (1, 0)
    poor.redis.close()


@pytest.mark.parametrize("missing", ["blmove", "hset", "xadd", "zrangebyscore", "client|setname", "script|load"])
def test_a_missing_right_is_named(own_desk: Desk, missing: str) -> None:
    """The one command that is missing is named, with the line that adds it, and that line mends it."""
    found = rights_of(own_desk, "~*", "+@all", f"-{missing}")
    assert found.level is Level.WARN
    assert found.found == f"user ann may not use the commands {missing}"
    assert found.advice == f"ACL SETUSER ann +{missing}"
    own_desk.redis.execute_command(*found.advice.split())
    with connect(own_desk.url.replace("://", "://ann:secret@"), client_name="") as client:
        assert rights(client, own_desk.keys).level is Level.OK


def test_rights_are_found_without_scripts(own_desk: Desk) -> None:
    """A user who may not run scripts, and every user of Redis 6.2, is asked about in a transaction never executed."""
    own_desk.push(b"1")
    before = own_desk.dump()
    found = rights_of(own_desk, "~*", "+@all", "-evalsha", "-blmove")
    assert found.found == "user ann may not use the commands blmove, evalsha"
    assert own_desk.dump() == before


def test_no_way_to_ask(own_desk: Desk) -> None:
    """Where neither scripts nor transactions are allowed, all that a worker needs is advised."""
    found = rights_of(own_desk, "~*", "+@all", "-evalsha", "-multi")
    assert found.level is Level.WARN
    assert "evalsha" in found.found
    own_desk.redis.execute_command(*found.advice.split())
    with connect(own_desk.url.replace("://", "://ann:secret@"), client_name="") as client:
        assert rights(client, own_desk.keys).level is Level.OK


def test_the_right_to_choose_a_database(own_desk: Desk) -> None:
    """A URL with a database needs one right more, which is named; one without does not."""
    url = as_user(own_desk, "~*", "+@all", "-select")
    with connect(url, client_name="") as client:
        assert rights(client, own_desk.keys).level is Level.OK
    with connect(f"{url}?db=1", client_name="") as client:
        found = rights(client, own_desk.keys)
        assert found.level is Level.WARN
        assert "select" in found.found
        own_desk.redis.execute_command(*found.advice.split())
        assert rights(client, own_desk.keys).level is Level.OK


@pytest.mark.parametrize("queue", ["tickets", "odd[*]name?"])
def test_a_missing_key_is_found(own_desk: Desk, queue: str) -> None:
    """A user who may run everything, on other keys, is told of these, even where a key's name is a pattern's."""
    own_desk.keys = Keys(queue)
    found = rights_of(own_desk, "~other", "+@all")
    assert found.found.startswith(f"user ann may not use the keys {queue}, {{{queue}}}:leases,")
    assert "commands" not in found.found
    own_desk.redis.execute_command(*found.advice.split())
    with connect(own_desk.url.replace("://", "://ann:secret@"), client_name="") as client:
        assert rights(client, own_desk.keys).level is Level.OK
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.llen("oddXname1")


def test_every_key_has_its_type(desk: Desk) -> None:
    """The table of types knows every key of a queue but its claims."""
    named = {name for name, value in vars(Keys).items() if isinstance(value, property)}
    assert set(kinds_of(desk.keys)) == {getattr(desk.keys, name) for name in named}


def test_a_key_of_another_type(desk: Desk) -> None:
    """A key that somebody else uses is named, with what it is and what it should be."""
    desk.redis.set(desk.keys.waiting, "mine")
    desk.redis.rpush(desk.keys.metrics, "mine")
    found = queue_findings(desk)
    assert found["key types"].level is Level.WARN
    assert "tickets is a string, expected a list" in found["key types"].found
    assert "{tickets}:metrics is a list, expected a stream" in found["key types"].found
    assert found["lease"].found.startswith("cannot see: ")
    desk.redis.flushdb()
    desk.push(b"1")
    assert key_types(desk.redis, desk.keys).level is Level.OK


def test_leftover_claims(desk: Desk) -> None:
    """Claims whose lease ran out are counted apart from those that are held."""
    desk.push(b"1", b"2")
    desk.claim("held", most=1)
    assert leftover_claims(desk.redis, desk.keys).level is Level.OK
    desk.claim("left", most=1, lease_ms=-1)
    found = leftover_claims(desk.redis, desk.keys)
    assert (found.level, found.found.startswith("1 of 2,")) == (Level.INFO, True)


def test_dead_letters(desk: Desk) -> None:
    """Dead letters are counted."""
    desk.push(b"1", b"2")
    desk.claim()
    assert queue_findings(desk)["dead letters"].level is Level.OK
    desk.commit(desk.outcome("b.1", dead={1: "not_json", 2: "no_body"}))
    found = queue_findings(desk)["dead letters"]
    assert (found.level, found.found) == (Level.INFO, "2")


def test_the_lease_against_the_longest_batch(desk: Desk) -> None:
    """A lease under three times the longest recent batch is to be mended; older batches do not count."""
    assert lease(desk.redis, desk.keys, 1000).level is Level.INFO
    desk.redis.xadd(desk.keys.metrics, {"score_ms": "99999.0"})
    for score_ms in [400.0] + [1.0] * (BATCHES_READ - 1):
        desk.redis.xadd(desk.keys.metrics, {"score_ms": str(score_ms)})
    assert lease(desk.redis, desk.keys, 1201).level is Level.OK
    found = lease(desk.redis, desk.keys, 1199)
    assert found.level is Level.WARN
    assert "0.40 s" in found.found
    assert "`lengthwise work --lease 2`" in found.advice


def test_the_cluster_node_that_holds_the_queue(desk: Desk) -> None:
    """In a cluster the server that holds the slot is fine, every other one names it, and a cluster's URL finds it."""
    assert queue_findings(desk)["cluster"].level is Level.OK
    ports = free_ports(2)
    settings = {"cluster-enabled": "yes", "maxmemory-policy": "noeviction"}
    with (
        embedded_server(port=ports[0], settings=settings) as one,
        embedded_server(port=ports[1], settings=settings) as other,
        connect(one.url) as holder,
        connect(other.url) as stranger,
        connect(f"redis+cluster://127.0.0.1:{ports[1]}") as anywhere,
    ):
        tell(stranger, "CLUSTER", "ADDSLOTSRANGE", 0, 0)
        tell(holder, "CLUSTER", "ADDSLOTSRANGE", 1, 16383)
        tell(holder, "CLUSTER", "MEET", "127.0.0.1", ports[1])
        assert desk.eventually(lambda: is_formed(stranger), within_s=20)
        assert cluster(holder, read_info(holder, desk.keys), desk.keys).level is Level.OK
        found = cluster(stranger, read_info(stranger, desk.keys), desk.keys)
        assert found.level is Level.WARN
        assert f"is at 127.0.0.1:{ports[0]}" in found.found
        assert read_info(anywhere, desk.keys)["run_id"] == read_info(holder, desk.keys)["run_id"]


def tell(client: Any, *words: str | int) -> Any:
    """Send a command that redis-py has no method for."""
    return client.execute_command(*words)


def is_formed(client: Any) -> bool:
    """Whether the server knows of the other that has the slots."""
    return b"cluster_state:ok" in tell(client, "CLUSTER", "INFO")


def free_ports(count: int) -> list[int]:
    """Ports nobody listens at, nor at those 10,000 above, which a cluster uses too; none that the kernel hands out."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(11_000, 21_000)
        if port not in found and not any(is_taken(one) for one in (port, port + 10_000)):
            found.append(port)
    return found


def is_taken(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_worker_is_refused_where_tickets_would_be_lost(own_desk: Desk) -> None:
    """Everything that would lose tickets is named in one message, nothing else is; `force` starts and warns."""
    require_safe(own_desk.url, own_desk.keys, NEVER, patient=False, force=False)
    own_desk.redis.config_set("maxmemory-policy", "allkeys-lru")
    own_desk.redis.config_set("maxmemory", "100mb")
    own_desk.redis.replicaof("127.0.0.1", 1)
    with pytest.raises(ConfigError, match=r"(?s)role: a replica.*eviction: allkeys-lru.*--force") as refusal:
        require_safe(own_desk.url, own_desk.keys, NEVER, patient=False, force=False)
    assert "persistence" not in str(refusal.value)
    with structlog.testing.capture_logs() as logged:
        require_safe(own_desk.url, own_desk.keys, NEVER, patient=False, force=True)
    assert [(line["log_level"], line["check"]) for line in logged] == [("warning", "role"), ("warning", "eviction")]


def test_a_worker_is_not_refused_for_what_loses_nothing(own_desk: Desk) -> None:
    """A server without persistence, which the demo's is, with foreign keys in the queue's place, refuses no worker."""
    own_desk.redis.set(own_desk.keys.waiting, "mine")
    assert server_findings(own_desk)["persistence"].level is Level.WARN
    assert [one.level for one in judge_safety(read_info(own_desk.redis, own_desk.keys))] == [Level.OK] * 3
    require_safe(own_desk.url, own_desk.keys, NEVER, patient=False, force=False)


def test_an_outage_is_no_finding(own_desk: Desk) -> None:
    """A server that is gone ends an impatient worker with its own error, and is waited for by a patient one."""
    gone = own_desk.url.replace(urlsplit(own_desk.url).path, "/nowhere.sock")
    with pytest.raises(RedisUnavailableError):
        require_safe(gone, own_desk.keys, NEVER, patient=False, force=True)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    began_s = time.monotonic()
    with pytest.raises(RedisUnavailableError):
        require_safe(gone, own_desk.keys, stop, patient=True, force=False)
    assert time.monotonic() - began_s > 0.2
