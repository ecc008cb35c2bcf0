import json
from pathlib import Path
from typing import Any

import click
import pytest
import redis
from click.testing import CliRunner, Result

from producer.cli import push
from producer.errors import QueueFullError, RedisUnavailableError, UsageError
from producer.push import Producer, PushReceipt

SECRET = "do-not-quote-me"


def run(redis_url: str, *args: str, stdin: str | None = None) -> Result:
    """The command's end, with REDIS_URL set."""
    return CliRunner().invoke(push, [*args], input=stdin, env={"REDIS_URL": redis_url})


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """Three good lines, one of them without an id, and two bad ones."""
    path = tmp_path / "mixed.jsonl"
    lines = ['{"id":1,"body":"a"}', f"{SECRET}", '{"body":"b"}', f'{{"subject":"{SECRET}"}}', '{"id":"c","body":"c"}']
    path.write_text("\n".join(lines))
    return str(path)


def test_good_files_are_pushed_in_order(redis_url: str, redis_client: redis.Redis, tmp_path: Path) -> None:
    """Files of both kinds are pushed in the order given; all good means exit 0 and a quiet standard output."""
    (tmp_path / "a.csv").write_text("body,plan\nfirst,pro\n")
    (tmp_path / "b.jsonl").write_text('{"body":"second"}\n')
    result = run(redis_url, str(tmp_path / "a.csv"), str(tmp_path / "b.jsonl"))
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "pushed 2 tickets to 'tickets'; ids made: 2; rejected: 0" in result.stderr
    assert [json.loads(one)["body"] for one in redis_client.lrange("tickets", 0, -1)] == ["first", "second"]


def test_rejects_are_named_and_the_rest_pushed(redis_url: str, redis_client: redis.Redis, mixed: str) -> None:
    """Bad lines end in exit 65 and are listed by file, line and reason, without their text; the others are pushed."""
    result = run(redis_url, mixed)
    assert result.exit_code == 65
    assert "pushed 3 tickets to 'tickets'; ids made: 1; rejected: 2" in result.stderr
    assert f"{mixed}:2: not_json:" in result.stderr
    assert f"{mixed}:4: missing_field:" in result.stderr
    assert SECRET not in result.output
    assert redis_client.llen("tickets") == 3


def test_json_is_one_object(redis_url: str, redis_client: redis.Redis, mixed: str) -> None:
    """--json prints one JSON object on standard output, with all counts, and nothing else anywhere."""
    result = run(redis_url, mixed, "--json", "--queue", "other")
    found = json.loads(result.stdout)
    rejects = [(one["file"], one["line"], one["reason"]) for one in found.pop("rejects")]
    assert rejects == [(mixed, 2, "not_json"), (mixed, 4, "missing_field")]
    assert found == {
        "queue": "other",
        "pushed": 3,
        "uncertain": 0,
        "ids_made": 1,
        "depth": 3,
        "rejected": 2,
        "error": None,
    }
    assert (result.exit_code, result.stderr) == (65, "")


def test_many_rejects_are_counted_not_listed(redis_url: str, redis_client: redis.Redis) -> None:
    """The first 20 rejects are listed, the others counted."""
    result = run(redis_url, "-", stdin="bad\n" * 33)
    assert result.stderr.count("not_json") == 20
    assert "and 13 more" in result.stderr


def test_standard_input(redis_url: str, redis_client: redis.Redis) -> None:
    """`-` is standard input: JSONL, or CSV when asked for."""
    assert run(redis_url, "-", stdin='{"body":"json"}\n').exit_code == 0
    assert run(redis_url, "-", "--format", "csv", stdin="body\ncsv\n").exit_code == 0
    assert [json.loads(one)["body"] for one in redis_client.lrange("tickets", 0, -1)] == ["json", "csv"]


def test_files_that_cannot_fit_are_refused_whole(redis_url: str, redis_client: redis.Redis, tmp_path: Path) -> None:
    """With --max-depth, plain files go in only if all their tickets fit; bad lines do not count."""
    path = tmp_path / "many.jsonl"
    path.write_text('{"body":"x"}\nbad\n' * 1200)
    result = run(redis_url, str(path), "--max-depth", "1199", "--json")
    assert isinstance(result.exception, QueueFullError)
    assert result.exception.exit_code == 75
    assert json.loads(result.stdout)["error"] == str(result.exception)
    assert redis_client.llen("tickets") == 0
    assert run(redis_url, str(path), "--max-depth", "1200").exit_code == 65
    assert redis_client.llen("tickets") == 1200


def test_redis_gone_midway(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When Redis goes away midway, the report tells what is pushed for certain and what is not known."""

    def fail(self: Producer, chunk: list[Any], done: PushReceipt, expected: int | None) -> PushReceipt:
        if done.pushed:
            raise RedisUnavailableError("gone", done.pushed, len(chunk))
        return real(self, chunk, done, expected)

    real = Producer._push_chunk
    monkeypatch.setattr(Producer, "_push_chunk", fail)
    path = tmp_path / "many.jsonl"
    path.write_text('{"body":"x"}\n' * 800)
    plain = run(redis_url, str(path))
    assert "pushed 500 tickets" in plain.stderr
    assert "up to 300 more may be in the queue" in plain.stderr
    found = json.loads(run(redis_url, str(path), "--json").stdout)
    assert (found["pushed"], found["uncertain"]) == (500, 300)
    assert "500 tickets were pushed for certain; of 300 more it is not known" in found["error"]


def test_no_redis_is_exit_69(mixed: str) -> None:
    """Without a server the command fails with an error of exit code 69 that names the URL, its password hidden."""
    result = run("redis://:pw@127.0.0.1:1/0", mixed)
    assert isinstance(result.exception, RedisUnavailableError)
    assert result.exception.exit_code == 69
    assert "redis://:***@127.0.0.1:1/0" in str(result.exception)


@pytest.mark.parametrize("args", [("--queue", "a b"), ("--url", "http://h"), ("--url", "redis://h:port")])
def test_nonsense_is_exit_64(args: tuple[str, str], mixed: str, redis_url: str) -> None:
    """A queue name or URL that cannot be is a usage error of exit code 64."""
    result = run(redis_url, mixed, *args)
    assert isinstance(result.exception, UsageError)
    assert result.exception.exit_code == 64


@pytest.mark.parametrize("args", [(), ("no-such-file",), ("-", "--max-depth", "0"), ("-", "--format", "xml")])
def test_click_refuses_the_rest(args: tuple[str, ...]) -> None:
    """What click itself can tell is wrong is its usage error, which the root command ends with 64."""
    with pytest.raises(click.UsageError):
        push.main([*args], standalone_mode=False)


def test_ctrl_c_says_what_was_pushed(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted push still tells how many tickets are in the queue."""

    def interrupt(self: Producer, chunk: list[Any], done: PushReceipt, expected: int | None) -> PushReceipt:
        if done.pushed:
            raise KeyboardInterrupt
        return real(self, chunk, done, expected)

    real = Producer._push_chunk
    monkeypatch.setattr(Producer, "_push_chunk", interrupt)
    path = tmp_path / "many.jsonl"
    path.write_text('{"body":"x"}\n' * 800)
    result = run(redis_url, str(path))
    assert result.exit_code != 0
    assert "pushed 500 tickets" in result.stderr
    assert "up to 500 more" in result.stderr
