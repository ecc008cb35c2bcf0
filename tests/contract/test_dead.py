"""Dead letters: read in pages, put back once and whole, deleted; whatever else stands in the stream."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import redis

from wire import DeadLetter
from wire.records import to_fields
from worker.errors import ConfigError, RedisUnavailableError
from worker.queue.connection import Link
from worker.queue.dead import CHUNK, PAGE, Choice, Counts, DeadLetters, Tally

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

ALL = Choice()
BYTES = bytes(range(256))


def open_letters(desk: Desk, url: str | None = None, *, patient: bool = False) -> DeadLetters:
    """The dead letters of a desk's queue, over a connection of their own."""
    return DeadLetters(Link(url or desk.url, threading.Event(), patient=patient), desk.keys)


@pytest.fixture
def letters(desk: Desk) -> DeadLetters:
    """The dead letters of the queue on the shared server."""
    return open_letters(desk)


def bury(desk: Desk, *payloads: bytes, reason: str = "not_json") -> list[str]:
    """Dead letters as a commit writes them; gives their ids."""
    entries = []
    for payload in payloads:
        fields = to_fields(DeadLetter(payload=payload, reason=reason, detail="why", attempts=1, at_ms=3, worker="w"))
        entries.append(desk.redis.xadd(desk.keys.dead, dict(zip(fields[::2], fields[1::2], strict=True))).decode())
    return entries


def lose_reply(client: Any, command: str) -> list[str]:
    """Let the reply to the next `command` be lost: the server has done it. Gives what was lost, to be looked at."""
    answer, lost = client.parse_response, list[str]()

    def parse_response(connection: Any, name: str, **options: Any) -> Any:
        reply = answer(connection, name, **options)
        if name == command and not lost:
            lost.append(name)
            connection.disconnect()
            raise redis.ConnectionError("the reply was lost")
        return reply

    client.parse_response = parse_response
    return lost


def all_of(tallies: Iterator[Tally]) -> Tally:
    """The sum of all steps."""
    return sum(tallies, Tally())


def test_put_back_byte_for_byte(desk: Desk, letters: DeadLetters) -> None:
    """What was buried by a commit stands at the tail of the list, byte for byte and in order, and is dead no more."""
    desk.push(BYTES, b"two")
    desk.claim()
    desk.commit(desk.outcome("b", dead={1: "not_utf8", 2: "not_json"}))
    desk.push(b"waited")
    assert letters.counts() == Counts(dead=2, waiting=1)
    assert all_of(letters.replay(ALL)) == Tally(done=2)
    assert desk.waiting() == [b"waited", BYTES, b"two"]
    assert letters.counts() == Counts(dead=0, waiting=3)


def test_what_is_gone_is_not_put_back(desk: Desk, letters: DeadLetters) -> None:
    """A letter that was put back or dropped before is counted as gone, and pushed no second time."""
    one, two = bury(desk, b"one", b"two")
    assert all_of(letters.replay(Choice([one, one]))) == Tally(done=1)
    assert all_of(letters.drop(Choice([two]))) == Tally(done=1)
    assert all_of(letters.replay(Choice([one, two, "7-7"]))) == Tally(gone=3)
    assert all_of(letters.drop(Choice([one]))) == Tally(gone=1)
    assert desk.waiting() == [b"one"]


def test_a_lost_reply_puts_back_once(desk: Desk) -> None:
    """A replay whose reply is lost has happened, and its repetition pushes nothing: by us or by the patient link."""
    ids = bury(desk, b"one", b"two")
    all_of(open_letters(desk).replay(Choice(["1-1"])))  # the script is loaded now
    for patient in (False, True):
        letters = open_letters(desk, patient=patient)
        lost = lose_reply(letters._redis, "EVALSHA")
        if patient:
            assert all_of(letters.replay(Choice(ids))) == Tally(gone=2)
        else:
            with pytest.raises(RedisUnavailableError):
                all_of(letters.replay(Choice(ids[:1])))
            assert desk.waiting() == [b"one"]
            assert all_of(letters.replay(Choice(ids[:1]))) == Tally(gone=1)
        assert lost == ["EVALSHA"]
    assert desk.waiting() == [b"one", b"two"]
    assert desk.dead() == []


def test_a_poison_ticket_begins_anew(desk: Desk, letters: DeadLetters) -> None:
    """A replayed ticket has no crash and no error to its name, though a copy was counted since it was buried."""
    desk.push(b"poison", b"poison")
    for claim_id in "abc":
        desk.claim(claim_id, most=1)
        desk.crash(claim_id)
    assert [letter.reason for letter in desk.dead()] == ["crashed"]
    for claim_id in "de":
        desk.claim(claim_id, most=1)
        assert desk.crash(claim_id) == (1, 0)
    desk.claim("f")
    desk.commit(dataclasses.replace(desk.outcome("f"), retry=[1]), "f")
    assert sorted(desk.redis.hvals(desk.keys.attempts)) == [b"1", b"2"]  # an error, and two crashes

    assert all_of(letters.replay(ALL)) == Tally(done=1)
    assert not desk.redis.exists(desk.keys.attempts)
    (ticket,) = desk.claim("g", most=1).tickets
    assert (ticket.payload, ticket.crashes, ticket.errors) == (b"poison", 0, 0)
    assert desk.crash("g") == (1, 0)  # a third crash would have buried it


def test_a_full_redis_refuses_it_whole(own_desk: Desk) -> None:
    """On a full Redis a replay is refused and changes nothing; a drop goes through and makes room."""
    letters = open_letters(own_desk)
    ids = bury(own_desk, *(b"%d %s" % (number, b"x" * 2000) for number in range(300)))
    own_desk.redis.config_set("maxmemory", "1mb")
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        own_desk.push(b"ticket")
    before = own_desk.dump()
    with pytest.raises(RedisUnavailableError, match="maxmemory"):
        all_of(letters.replay(ALL))
    assert own_desk.dump() == before
    assert all_of(letters.drop(Choice(ids[:200]))) == Tally(done=200)
    assert letters.counts().dead == 100


def test_it_is_added_before_it_is_removed(own_desk: Desk) -> None:
    """A replay that is cut short leaves a letter in both places, never in neither: here by a user who may not XDEL."""
    bury(own_desk, b"one", b"two")
    own_desk.redis.execute_command("ACL", "SETUSER", "half", "on", ">pw", "~*", "&*", "+@all", "-xdel")
    letters = open_letters(own_desk, own_desk.url.replace("unix://", "unix://half:pw@"))
    with pytest.raises((redis.RedisError, RedisUnavailableError), match=r"(?i)permission|ACL"):
        all_of(letters.replay(ALL))
    assert own_desk.waiting() == [b"one"]
    assert [letter.payload for letter in own_desk.dead()] == [b"one", b"two"]


def test_never_past_the_depth(desk: Desk, letters: DeadLetters) -> None:
    """A replay ends at the most tickets that may wait, and what did not fit stays dead."""
    desk.push(b"waited")
    bury(desk, b"one", b"two", b"three")
    assert all_of(letters.replay(ALL, max_depth=3)) == Tally(done=2, refused=1)
    assert desk.waiting() == [b"waited", b"one", b"two"]
    assert [letter.payload for letter in desk.dead()] == [b"three"]
    assert all_of(letters.replay(ALL, max_depth=4)) == Tally(done=1)


def test_ends_at_the_first_refusal(desk: Desk, letters: DeadLetters) -> None:
    """A queue that is full ends the replay: no further step is tried, though workers make room meanwhile."""
    bury(desk, *(b"%d" % number for number in range(3 * CHUNK)))
    steps = []
    for tally in letters.replay(ALL, max_depth=CHUNK + 1):
        steps.append(tally)
        if tally.refused:
            desk.redis.delete(desk.keys.waiting)
    assert steps == [Tally(done=CHUNK), Tally(done=1, refused=CHUNK - 1)]


def test_buried_again_meanwhile(desk: Desk, letters: DeadLetters) -> None:
    """What a worker buries anew while a replay of all is under way is not put back by it again: it comes to an end."""
    bury(desk, *(b"%d" % number for number in range(CHUNK + 50)))
    done = 0
    for steps, tally in enumerate(letters.replay(ALL), start=1):
        done += tally.done
        bury(desk, *desk.waiting())
        desk.redis.delete(desk.keys.waiting)
        assert steps < 5
    assert done == letters.counts().dead == CHUNK + 50


def test_a_malformed_entry(desk: Desk, letters: DeadLetters) -> None:
    """A foreign entry is told as malformed, is left alone by a replay if it has no payload, and can be dropped."""
    bury(desk, b"one")
    for fields in ({"foo": "bar"}, {"payload": b"bare \xff", "reason": b"\xff"}, {"payload": "", "at_ms": "soon"}):
        desk.redis.xadd(desk.keys.dead, fields)
    bury(desk, b"two")
    assert [(entry.reason, entry.payload) for entry in letters.scan()] == [
        ("not_json", b"one"),
        ("malformed", None),
        ("malformed", b"bare \xff"),
        ("malformed", b""),
        ("not_json", b"two"),
    ]
    assert all("field" in entry.detail for entry in letters.scan() if entry.letter is None)
    assert all_of(letters.replay(Choice(limit=3))) == Tally(done=3, without_payload=1)
    assert desk.waiting() == [b"one", b"bare \xff", b""]
    assert all_of(letters.drop(Choice(reasons=["malformed"]))) == Tally(done=1)
    assert [entry.payload for entry in letters.scan()] == [b"two"]


def test_the_largest_id_there_is(desk: Desk, letters: DeadLetters) -> None:
    """An entry with the last id that Redis knows ends a scan like any other."""
    desk.redis.xadd(desk.keys.dead, {"foo": "bar"}, id=f"{2**64 - 1}-{2**64 - 1}")
    assert len(list(letters.scan())) == 1


def test_read_in_pages(desk: Desk, letters: DeadLetters) -> None:
    """Any number of letters is read whole and in order, at most a page at a time."""
    ids = bury(desk, *(b"%d" % number for number in range(2 * PAGE + 50)))
    desk.redis.config_resetstat()
    assert [entry.id for entry in letters.scan()] == ids
    assert desk.redis.info("commandstats")["cmdstat_xrange"]["calls"] == 3
    assert [entry.id for entry in letters.scan(ids[10], ids[PAGE + 20])] == ids[10 : PAGE + 21]


def test_the_choice(desk: Desk, letters: DeadLetters) -> None:
    """Ids, reasons and a limit choose together, the oldest first."""
    a1, b1, a2, b2, a3 = (bury(desk, name.encode(), reason=name[0])[0] for name in ("a1", "b1", "a2", "b2", "a3"))
    assert all_of(letters.replay(Choice(reasons=["a"], limit=2))) == Tally(done=2)
    assert desk.waiting() == [b"a1", b"a2"]
    assert all_of(letters.drop(Choice([a1, b2, a3], reasons=["b"]))) == Tally(done=1, gone=1)
    assert [entry.id for entry in letters.scan()] == [b1, a3]
    assert all_of(letters.drop(Choice([a1, a2, b1, a3], limit=1))) == Tally(done=1, gone=2)
    assert [entry.id for entry in letters.scan()] == [a3]


@pytest.mark.parametrize("replays", [True, False])
def test_foreseen(desk: Desk, letters: DeadLetters, replays: bool) -> None:
    """What is foreseen is what then happens, and to foresee it changes nothing."""
    ids = bury(desk, b"one", b"two", b"three")
    ids += [desk.redis.xadd(desk.keys.dead, {"foo": "bar"}).decode(), "7-7"]
    for choice in (Choice(ids, limit=2), Choice(reasons=["malformed", "crashed"]), ALL):
        before = desk.dump()
        foreseen = letters.foresee(choice, needs_payload=replays)
        assert desk.dump() == before
        assert all_of(letters.replay(choice) if replays else letters.drop(choice)) == foreseen


def test_a_survey(desk: Desk, letters: DeadLetters) -> None:
    """All letters are counted by reason, whatever is asked for, and the newest that match are found."""
    ids = [bury(desk, b"x", reason=reason)[0] for reason in "abaab"]
    survey = letters.survey(["a"], newest=2)
    assert (survey.by_reason, survey.matching) == ({"a": 3, "b": 2}, 3)
    assert (survey.first, survey.last) == (ids[2], ids[3])
    assert letters.survey([], newest=0).first is None
    assert letters.survey(["c"], newest=9).matching == 0


def test_no_letters(letters: DeadLetters) -> None:
    """A queue that never was has no dead letters, which is no error."""
    assert letters.counts() == Counts(dead=0, waiting=0)
    assert list(letters.scan()) == []
    assert letters.get("1-1") is None
    assert all_of(letters.replay(ALL)) == all_of(letters.drop(ALL)) == Tally()


@pytest.mark.parametrize("name", ["waiting", "dead", "attempts"])
def test_a_wrong_type_changes_nothing(desk: Desk, letters: DeadLetters, name: str) -> None:
    """If any key is of another type the replay fails before it writes anything."""
    ids = bury(desk, b"one")
    desk.redis.delete(getattr(desk.keys, name))
    desk.redis.set(getattr(desk.keys, name), "a string")
    before = desk.dump()
    with pytest.raises(redis.ResponseError, match=r"WRONGTYPE key .*: expected a \w+, found a string"):
        desk.verbs.replay(desk.keys, ids, 0)
    with pytest.raises(ConfigError, match="WRONGTYPE"):
        all_of(letters.replay(Choice(ids)))
    assert desk.dump() == before
