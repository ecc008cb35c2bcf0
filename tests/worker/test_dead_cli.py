"""`lengthwise dead`: what is shown, what is put back or deleted, how it is told, and how it ends."""

import base64
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

import worker
from wire import DeadLetter, Keys
from wire.records import to_fields
from worker import cli
from worker.queue.dead import DeadLetters

CHECKOUT = Path(worker.__file__).parents[1]
NOWHERE = "redis://:hunter2@127.0.0.1:1/0"
KEYS = Keys("tickets")
SECRET = "my ticket"


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


class Dead:
    """`lengthwise dead` in this process, against one server."""

    def __init__(self, capsys: pytest.CaptureFixture[str], url: str, client: Any) -> None:
        self._capsys, self._url, self.redis = capsys, url, client

    def __call__(self, *arguments: str, **environment: str) -> Ended:
        """Run it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["lengthwise", "dead", *arguments])
            patch.setenv("REDIS_URL", self._url)
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                cli.main()
        assert isinstance(ended.value.code, int)
        done = Ended(ended.value.code, *self._capsys.readouterr())
        assert arguments[0] == "show" or SECRET not in done.out + done.err
        return done

    def bury(self, payload: bytes = SECRET.encode(), reason: str = "not_json", **others: Any) -> str:
        """Write a dead letter as a commit does, and give its id."""
        plain = DeadLetter(payload=payload, reason=reason, detail="why", attempts=2, at_ms=0, worker="w")
        fields = to_fields(msgspec.structs.replace(plain, **others))
        return str(self.redis.xadd(KEYS.dead, dict(zip(fields[::2], fields[1::2], strict=True))).decode())

    def foreign(self, **fields: Any) -> str:
        """Write an entry that is no dead letter, and give its id."""
        return str(self.redis.xadd(KEYS.dead, fields).decode())

    def waiting(self) -> list[bytes]:
        """The list, oldest first."""
        return list(self.redis.lrange(KEYS.waiting, 0, -1))


@pytest.fixture
def dead(capsys: pytest.CaptureFixture[str], redis_url: str, redis_client: Any) -> Dead:
    """The command on an empty database."""
    return Dead(capsys, redis_url, redis_client)


def test_list_for_people(dead: Dead) -> None:
    """A line a letter, the newest last, without its text, and how many there are of each reason."""
    dead.bury(reason="too_large", at_ms=86_400_000)
    dead.bury(b"x" * 1500, detail="no closing brace")
    head, first, second, summary = dead("list").out.splitlines()
    assert head.split() == ["id", "when", "reason", "attempts", "bytes", "detail"]
    assert first.split()[1:] == ["1970-01-02T00:00:00Z", "too_large", "2", "9", "why"]
    assert second.split()[1:] == ["1970-01-01T00:00:00Z", "not_json", "2", "1,500", "no", "closing", "brace"]
    assert summary == "dead letters in 'tickets': 2 (1 too_large, 1 not_json); shown: 2 of 2 that match"
    assert dead("list", "--queue", "other") == Ended(0, "dead letters in 'other': 0\n", "")


def test_list_the_newest_of_a_reason(dead: Dead) -> None:
    """--reason may be repeated, --last counts those that match, and the summary tells of all."""
    ids = [dead.bury(reason=reason) for reason in ("a", "b", "a", "c", "b")]
    ended = dead("list", "--reason", "a", "--reason", "b", "--last", "3", "--json")
    assert [line["id"] for line in ended.lines] == [ids[1], ids[2], ids[4]]
    assert json.loads(ended.err) == {"dead": 5, "by_reason": {"a": 2, "b": 2, "c": 1}, "matching": 4, "shown": 3}
    assert dead("list", "--last", "0").out.startswith("dead letters in 'tickets': 5 (")
    assert "shown: 0 of 0" in dead("list", "--reason", "typo").out


def test_list_as_json(dead: Dead) -> None:
    """One object a letter with everything but the payload, which comes as base64 when it is asked for."""
    entry_id = dead.bury(bytes(range(256)), detail="why \x9b\u202e")
    (line,) = dead("list", "--json").lines
    shown = {"id": entry_id, "at_ms": 0, "reason": "not_json", "attempts": 2, "bytes": 256, "worker": "w"}
    assert line == shown | {"detail": "why \x9b\u202e"}
    ended = dead("list", "--json", "--payload")
    assert ended.out.isascii()
    assert base64.b64decode(ended.lines[0]["payload"]) == bytes(range(256))


def test_no_text_moves_the_cursor(dead: Dead) -> None:
    """Whatever stands in an entry, what people are shown has no control characters and keeps to its lines."""
    wild = "\x1b[2J\nx\u202e\x9b"
    ids = [dead.bury(wild.encode(), wild, detail=wild, worker=wild), dead.foreign(**{wild: wild})]
    shown = [dead("list"), *(dead("show", one) for one in ids)]
    assert [len(one.out.splitlines()) for one in shown] == [4, 8, 4]
    assert all(line.isprintable() for one in shown for line in one.out.splitlines())


def test_a_malformed_entry_is_shown_as_such(dead: Dead) -> None:
    """A foreign entry is listed and shown with what is wrong with it, and a time that cannot be as its number."""
    bare, late = dead.foreign(foo="bar"), dead.bury(at_ms=10**18)
    _, malformed, odd, _ = dead("list").out.splitlines()
    assert malformed.split()[:5] == [bare, "-", "malformed", "-", "-"]
    assert "missing required field `payload`" in malformed
    assert odd.split()[:2] == [late, str(10**18)]
    line, _ = dead("list", "--json", "--payload").lines
    assert (line["reason"], line["bytes"], line["payload"]) == ("malformed", None, None)
    assert "field foo bar" in dead("show", bare).out
    ended = dead("show", bare, "--payload")
    assert (ended.code, ended.out) == (64, "")
    assert "has no payload" in ended.err


def test_show(dead: Dead) -> None:
    """All about one letter, its text included; as JSON only where that is asked for."""
    entry_id = dead.bury()
    shown = [line.split(maxsplit=1) for line in dead("show", entry_id).out.splitlines()]
    assert ["payload", SECRET] in shown
    assert {"id", "reason", "detail", "when", "attempts", "worker", "bytes"} < {name for name, _ in shown}
    assert "payload" not in dead("show", entry_id, "--json").lines[0]
    (line,) = dead("show", entry_id, "--json", "--payload").lines
    assert base64.b64decode(line["payload"]) == SECRET.encode()
    ended = dead("show", "5-5")
    assert (ended.code, ended.out) == (64, "")
    assert "no dead letter 5-5 in queue 'tickets'" in ended.err


def test_the_payload_into_a_file(dead: Dead, redis_url: str, tmp_path: Path) -> None:
    """show --payload writes the bytes as they were pushed, and nothing else."""
    entry_id = dead.bury(bytes(range(256)) * 1000)
    file = tmp_path / "payload"
    with file.open("wb") as stream:
        command = [sys.executable, "-m", "worker.cli", "dead", "show", entry_id, "--payload", "--url", redis_url]
        subprocess.run(command, cwd=CHECKOUT, stdout=stream, check=True)
    assert file.read_bytes() == bytes(range(256)) * 1000


def test_into_a_pipe_that_closes(dead: Dead, redis_url: str) -> None:
    """`lengthwise dead list | head` is no error and complains of nothing."""
    for _ in range(1500):
        dead.bury()
    command = [sys.executable, "-m", "worker.cli", "dead", "list", "--url", redis_url, "--last", "1500"]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.wait(30), process.stderr.read()) == (0, b"")


def test_replay_for_people(dead: Dead) -> None:
    """What was put back is told with the counts before and after; a dry run tells the same and does nothing."""
    ids = [dead.bury(), dead.bury(reason="crashed"), dead.foreign(foo="bar")]
    before = dead.redis.dump(KEYS.dead)
    foreseen = dead("replay", "--all", "--dry-run").out.splitlines()
    assert (dead.redis.dump(KEYS.dead), dead.waiting()) == (before, [])
    told = [
        "put back: 2; gone before: 0; without a payload, left: 1",
        "dead letters: 3 before, 1 after",
        "waiting in 'tickets': 0 before, 2 after",
    ]
    assert foreseen == ["would be put back: 2; gone before: 0; without a payload, left: 1", *told[1:]]
    assert dead("replay", "--all").out.splitlines() == told
    assert dead.waiting() == [SECRET.encode()] * 2
    assert dead("replay", *ids).out.startswith("put back: 0; gone before: 2; without a payload, left: 1\n")


def test_drop_for_people(dead: Dead) -> None:
    """What was deleted is told with the count before and after; a dry run tells the same and does nothing."""
    for reason in ("a", "b", "a"):
        dead.bury(reason=reason)
    foreseen = dead("drop", "--reason", "a", "--dry-run").out
    assert foreseen == "would be deleted: 2; gone before: 0\ndead letters: 3 before, 1 after\n"
    assert dead.redis.xlen(KEYS.dead) == 3
    ended = dead("drop", "--reason", "a")
    assert ended == Ended(0, "deleted: 2; gone before: 0\ndead letters: 3 before, 1 after\n", "")
    assert dead.redis.xlen(KEYS.dead) == 1
    assert dead.waiting() == []


@pytest.mark.parametrize("dry_run", [True, False])
def test_told_to_machines(dead: Dead, dry_run: bool) -> None:
    """--json tells both as one object, of a dry run what would be."""
    ids = [dead.bury() for _ in range(3)]
    flags = ["--json", *(["--dry-run"] if dry_run else [])]
    (replayed,) = dead("replay", ids[0], "5-5", *flags).lines
    left = 3 if dry_run else 2
    assert replayed == {
        "action": "replay",
        "queue": "tickets",
        "dry_run": dry_run,
        "done": 1,
        "gone": 1,
        "without_payload": 0,
        "dead_before": 3,
        "dead_after": 2,
        "waiting_before": 0,
        "waiting_after": 1,
        "error": None,
    }
    (dropped,) = dead("drop", "--all", "--limit", "1", *flags).lines
    assert (dropped["done"], dropped["dead_before"], dropped["dead_after"]) == (1, left, left - 1)
    assert dropped["waiting_before"] == dropped["waiting_after"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_queue_that_is_full_ends_with_75(dead: Dead, dry_run: bool) -> None:
    """Past --max-depth nothing is put back unless everything fits; --limit asks for what does."""
    dead.redis.rpush(KEYS.waiting, "waited")
    for _ in range(3):
        dead.bury()
    flags = ["--max-depth", "3", *(["--dry-run"] if dry_run else [])]
    ended = dead("replay", "--all", "--json", *flags)
    assert ended.code == 75
    assert "holds 1 of at most 3 tickets: 3 were refused, 0 were pushed before" in ended.err
    assert (ended.lines[0]["done"], ended.lines[0]["dead_after"]) == (0, 3)
    assert "holds 1 of at most 3" in ended.lines[0]["error"]
    assert len(dead.waiting()) == 1
    assert dead("replay", "--all", "--limit", "2", *flags).code == 0
    assert dead("replay", "--reason", "nosuch", "--max-depth", "1").code == 0
    assert len(dead.waiting()) == (1 if dry_run else 3)


def test_filled_up_meanwhile(dead: Dead, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another producer fills the queue between the look and the replay, what fitted is told, and it ends with 75."""
    for _ in range(3):
        dead.bury()
    foresee = DeadLetters.foresee

    def and_then_another_comes(*arguments: Any, **options: Any) -> Any:
        tally = foresee(*arguments, **options)
        dead.redis.rpush(KEYS.waiting, "another")
        return tally

    monkeypatch.setattr(DeadLetters, "foresee", and_then_another_comes)
    ended = dead("replay", "--all", "--max-depth", "3")
    assert ended.code == 75
    assert ended.out.startswith("put back: 2;")
    assert "dead letters: 3 before, 1 after\n" in ended.out
    assert "holds 3 of at most 3 tickets: 1 were refused, 2 were pushed before" in ended.err
    assert "Not finished" in ended.out


def test_a_lost_reply(dead: Dead) -> None:
    """A replay whose reply is lost ends with 69 and says that it may be repeated; repeated, it pushes nothing twice."""
    entry_id = dead.bury()
    dead("replay", "5-5")  # the script is loaded now
    answer: Any = redis.Redis.parse_response

    def parse_response(client: Any, connection: Any, name: str, **options: Any) -> Any:
        reply = answer(client, connection, name, **options)
        if name == "EVALSHA":
            connection.disconnect()
            raise redis.ConnectionError("the reply was lost")
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis.Redis, "parse_response", parse_response)
        ended = dead("replay", entry_id)
    assert ended.code == 69
    assert "put back: 0;" in ended.out
    assert "To repeat it is safe" in ended.out
    assert "the reply was lost" in ended.err
    assert dead.waiting() == [SECRET.encode()]
    assert dead("replay", entry_id, "--json").lines[0]["gone"] == 1
    assert dead.waiting() == [SECRET.encode()]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["drop"], "expected which letters are meant, got nothing"),
        (["replay", "--dry-run"], "expected which letters are meant, got nothing"),
        (["drop", "--all", "5-5"], "expected either ids or --all, got both"),
        (["replay", "5"], "'5' is no id of a dead letter: expected two numbers"),
        (["drop", "5-5", "\x1b[2J-1"], "'\ufffd[2J-1' is no id of a dead letter"),
        (["show", f"5-{2**64}"], "is no id of a dead letter"),
        (["show"], "Missing argument 'ID'"),
        (["list", "--payload"], "--payload needs --json"),
        (["list", "--last", "-1"], "'--last'"),
        (["drop", "--all", "--limit", "0"], "'--limit'"),
        (["drop", "--all", "--max-depth", "5"], "No such option"),
        (["replay", "--all", "--max-depth", "0"], "'--max-depth'"),
        (["replay", "--all", "--queue", "a b"], "expected 1-200 characters without braces"),
    ],
)
def test_usage_errors_end_with_64(dead: Dead, arguments: list[str], says: str) -> None:
    """What makes no sense is a usage error that says what was expected, and no Redis is asked."""
    ended = dead(*arguments, REDIS_URL=NOWHERE)
    assert (ended.code, ended.out) == (64, "")
    assert says in ended.err


def test_all_is_never_meant_by_the_environment(dead: Dead) -> None:
    """--all must be written out: a variable that was left behind deletes nothing."""
    dead.bury()
    names = ("LENGTHWISE_DEAD_DROP_ALL", "LENGTHWISE_DEAD_DROP_EVERYTHING")
    assert dead("drop", **dict.fromkeys(names, "1")).code == 64
    assert dead.redis.xlen(KEYS.dead) == 1


@pytest.mark.parametrize("arguments", [["list"], ["show", "5-5"], ["replay", "--all", "--json"], ["drop", "--all"]])
def test_no_redis_ends_with_69(dead: Dead, arguments: list[str]) -> None:
    """Without a Redis the message says where it looked, without the password, and how to get one."""
    ended = dead(*arguments, REDIS_URL=NOWHERE)
    assert (ended.code, ended.out) == (69, "")
    assert "127.0.0.1:1" in ended.err
    assert "`lengthwise server`" in ended.err
    assert "hunter2" not in ended.err


@pytest.mark.parametrize("arguments", [["list"], ["show", "5-5"], ["replay", "--all"], ["drop", "--all"]])
def test_a_key_of_another_type_ends_with_78(dead: Dead, arguments: list[str]) -> None:
    """A queue name that is in use for something else is told as that."""
    dead.redis.set(KEYS.dead, "a string")
    ended = dead(*arguments)
    assert (ended.code, ended.out) == (78, "")
    assert "Is the queue's name in use for something else?" in ended.err


def test_quiet_without_a_terminal(dead: Dead, redis_url: str) -> None:
    """No progress is drawn where nobody looks."""
    dead.bury()
    command = [sys.executable, "-m", "worker.cli", "dead", "replay", "--all"]
    done = subprocess.run(
        command, cwd=CHECKOUT, env={**os.environ, "REDIS_URL": redis_url}, capture_output=True, check=True
    )
    assert done.stderr == b""
