"""commit: one batch is published whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import redis
from redis.crc import key_slot

from worker.ports import Answer, Receipt
from worker.queue.verbs import StreamLengths

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

EVERY_BYTE = bytes(range(256)) + b"\xff\xfe\x00not UTF-8\x00"


def test_everything_appears_together(desk: Desk) -> None:
    """One commit writes labels, dead letters and the metrics entry, and acknowledges the tickets."""
    desk.push(b"one", b"two", b"three")
    desk.claim()
    outcome = desk.outcome("b", {1: "t-1", 3: "t-3"}, dead={2: "not_json"})
    assert desk.commit(outcome) == Receipt(Answer.OK, published=2)
    assert desk.labels() == [label for _, _, label in outcome.labels]
    assert desk.dead() == [msgspec.structs.replace(outcome.dead[0][1], payload=b"two")]
    filled_in = {"published": 2, "total_published": 2, "total_dead": 1, "total_batches": 1}
    assert desk.reports() == [msgspec.structs.replace(outcome.report, **filled_in)]
    assert not desk.redis.exists(desk.keys.waiting, desk.keys.claim("c"), desk.keys.leases)


def test_in_parts(desk: Desk) -> None:
    """A claim may be committed a batch at a time, in any order; its lease stays until the last part, then all goes."""
    desk.push(b"one", b"two", b"three")
    desk.claim()
    for number, index in enumerate((2, 3), start=1):
        assert desk.commit(desk.outcome(f"b.{number}", {index: f"t-{index}"})).answer is Answer.OK
        assert desk.leases() == ["c"]
    assert desk.redis.hgetall(desk.keys.claim("c")) == {b"1": b"one"}
    assert desk.commit(desk.outcome("b.3", dead={1: "not_json"})).answer is Answer.OK
    assert desk.leases() == []
    assert not desk.redis.exists(desk.keys.claim("c"))
    assert [label.id for label in desk.labels()] == ["t-2", "t-3"]


@pytest.mark.parametrize("payload", [b"", EVERY_BYTE, b"\x00", "\U0001f984".encode(), b"x" * 300_000])
def test_a_dead_letter_is_byte_for_byte(desk: Desk, payload: bytes) -> None:
    """A buried payload is kept byte for byte, whatever bytes they are."""
    desk.push(payload)
    desk.claim()
    desk.commit(desk.outcome("b", dead={1: "not_utf8"}))
    assert [letter.payload for letter in desk.dead()] == [payload]


@pytest.mark.parametrize("labels", [{1: "t-1", 7: "t-7"}, {7: None}])
def test_an_index_not_owed_changes_nothing(desk: Desk, labels: dict[int, str | None]) -> None:
    """A batch with a ticket that the claim does not owe is an error, and nothing of the batch is written."""
    desk.push(b"one", b"two")
    desk.claim()
    before = desk.dump()
    with pytest.raises(redis.ResponseError, match="does not owe index 7"):
        desk.commit(desk.outcome("b", labels))
    with pytest.raises(redis.ResponseError, match="does not owe index 9"):
        desk.commit(desk.outcome("b", {1: "t-1"}, dead={9: "not_json"}))
    assert desk.dump() == before


ALL_KEYS = "claim leases commits results metrics dead published attempts totals waiting"


@pytest.mark.parametrize("name", ALL_KEYS.split())
def test_a_wrong_type_changes_nothing(desk: Desk, name: str) -> None:
    """If any key is of another type the commit fails before it writes anything."""
    desk.push(b"one", b"two")
    desk.claim(most=1)
    desk.redis.delete(key := desk.keys.claim("c") if name == "claim" else getattr(desk.keys, name))
    desk.redis.set(key, "a string")
    before = desk.dump()
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.commit(desk.outcome("b", {1: "t-1"}))
    assert desk.dump() == before


def test_totals_add_up(desk: Desk) -> None:
    """The totals are the sums over all batches, and each metrics entry tells them as they were after its batch."""
    desk.push(*(b"%d" % number for number in range(6)))
    desk.claim()
    desk.commit(desk.outcome("b.1", {1: "a", 2: "b"}, dead={3: "not_json"}))
    desk.commit(desk.outcome("b.2", {4: "a", 5: "c"}, dead={6: "not_json"}))
    sums = [(r.total_published, r.total_duplicates, r.total_dead, r.total_batches) for r in desk.reports()]
    assert sums == [(2, 0, 1, 1), (3, 1, 2, 2)]
    totals = desk.totals()
    assert (totals.published, totals.duplicates, totals.dead, totals.batches) == sums[-1]
    assert (totals.tokens_prompt, totals.tokens_computed) == (60, 42)


@pytest.mark.parametrize("limited", ["results", "metrics", "dead"])
def test_streams_are_trimmed_about(desk: Desk, limited: str) -> None:
    """A stream keeps at least its length and not much more; one with a length of 0 keeps everything."""
    lengths = msgspec.structs.replace(StreamLengths(results=0, metrics=0, dead=0), **{limited: 100})
    desk.push(*[b"x"] * 600)
    desk.claim(most=600)
    for number in range(1, 600, 2):
        desk.commit(desk.outcome(f"b{number}", {number: None}, {number + 1: "not_json"}), lengths=lengths)
    kept = {name: desk.redis.xlen(getattr(desk.keys, name)) for name in ("results", "metrics", "dead")}
    assert 100 <= kept.pop(limited) <= 200
    assert set(kept.values()) == {300}


def test_crashes_are_forgotten(desk: Desk) -> None:
    """Who got a label is no suspect any more: the same payload later begins without crashes."""
    desk.push(b"one")
    desk.claim("dead")
    desk.crash("dead")
    desk.claim()
    desk.commit(desk.outcome("b", {1: "t-1"}))
    assert not desk.redis.exists(desk.keys.attempts)


def test_every_key_is_declared_and_in_one_slot(desk: Desk) -> None:
    """Each script touches only keys it was called with, those of `wire.Keys`, all in one slot: as a cluster demands."""
    names = [name for name, value in vars(type(desk.keys)).items() if isinstance(value, property)]
    known = {getattr(desk.keys, name) for name in names} | {
        desk.keys.claim(claim_id) for claim_id in ("a0", "a1", "a2", "b")
    }
    assert {key_slot(key.encode()) for key in known} == {key_slot(b"tickets")}
    declared: set[str] = set()
    seen: set[str] = set()
    for from_script, words in commands_of_a_life(desk):
        if from_script:
            assert keys_of(desk, words) <= declared, words
        elif words[0].upper() == "EVALSHA":
            declared = set(words[3 : 3 + int(words[2])])
            seen |= declared
    assert seen == known


def commands_of_a_life(desk: Desk) -> Iterator[tuple[bool, list[str]]]:
    """Every command of a life with everything in it: whether a script gave it, and its words."""
    with desk.redis.monitor() as monitor:
        for number in range(3):
            desk.push(b"poison")
            desk.claim(f"a{number}")
            desk.crash(f"a{number}", crash_limit=number + 1)
        desk.push(b"one", b"two", b"three", b"four")
        desk.claim("b")
        desk.renew("b")
        desk.commit(desk.outcome("b.1", {1: "t-1", 2: "t-1"}, dead={3: "not_json"}), "b")
        desk.release("b")
        desk.redis.echo("the end")
        heard: list[Any] = []
        while not heard or "the end" not in heard[-1]["command"]:
            heard.append(monitor.next_command())
    return ((entry["client_type"] == "lua", entry["command"].split(" ")) for entry in heard)


def keys_of(desk: Desk, words: list[str]) -> set[str]:
    """The keys of one command, as the server itself tells them."""
    return set() if words[0].upper() == "TIME" else set(desk.redis.command_getkeys(*words))
