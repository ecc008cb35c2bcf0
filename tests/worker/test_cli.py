"""The `lengthwise` command: exit codes, messages that say how to mend it, output for people and for machines."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import redis

from tests.processes import CHECKOUT, Ended, lengthwise
from wire import Keys, Label
from wire.records import to_fields
from worker import cli
from worker.engine.task import load_task

NOWHERE = "redis://:hunter2@127.0.0.1:1/0"


def here(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    """Run the command in this process: for those that leave no trace in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lengthwise", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, *capsys.readouterr())


def label(number: int, ticket_id: str | None = None) -> Label:
    """A label to be read."""
    return Label(
        id=ticket_id or f"t{number}",
        label="billing",
        confidence=0.75,
        margin=1.5,
        scores={"billing": -0.25, "account": -1.75},
        model="m",
        task="support",
        batch="b.1",
        worker="w",
        truncated_tokens=number,
        labelled_at_ms=1000 + number,
    )


def publish(client: redis.Redis, *labels: Label) -> None:
    """Write labels as a commit does."""
    for one in labels:
        fields = to_fields(one)
        client.xadd(Keys("tickets").results, dict(zip(fields[::2], fields[1::2], strict=True)))


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Help names each command with its line, ends with 0, and every one of them can be imported."""
    ended = here(capsys, "--help")
    assert ended.code == 0
    listed = [line.split()[0] for line in ended.out.partition("Commands:\n")[2].splitlines() if line.startswith("  ")]
    assert listed == list(cli.COMMANDS)
    for name, (_, _, summary) in cli.COMMANDS.items():
        assert summary[:30] in ended.out
        assert here(capsys, name, "--help").code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "No such command 'nosuch'"),
        (["model", "nosuch"], "No such command 'nosuch'"),
        (["model", "pull", "nosuch"], "is not 'smollm2-135m'"),
        (["results", "--last", "-1"], "'--last'"),
        (["results", "--queue", "a b"], "expected 1-200 characters without braces"),
        (["results", "--nosuch"], "No such option"),
        (["push", "--queue", "a{b", "-"], "expected 1-200 characters without braces"),
    ],
)
def test_usage_errors_end_with_64(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    """A command, option or queue name that cannot be is a usage error, and the message names it."""
    ended = here(capsys, *arguments)
    assert (ended.code, ended.out) == (64, "")
    assert says in ended.err


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--drain-size", "0"], {}, "'--drain-size'"),
        ([], {"LENGTHWISE_WORK_DRAIN_SIZE": "0"}, "'--drain-size'"),
        ([], {"LENGTHWISE_WORK_LEASE": "no number"}, "'--lease'"),
        ([], {"LENGTHWISE_WORK_QUEUE": "a{b}"}, "expected 1-200 characters without braces"),
        (["--queue", "a{b}"], {}, "expected 1-200 characters without braces"),
        (["--strategy", "magic"], {}, "'--strategy'"),
    ],
)
def test_a_worker_with_a_bad_option_ends_with_64(
    arguments: list[str], environment: Mapping[str, str], says: str
) -> None:
    """A bad option ends the worker before it looks for a Redis, whether it came as a word or by the environment."""
    ended = lengthwise("work", "--no-retry", "--url", NOWHERE, *arguments, **environment)
    assert (ended.code, ended.out) == (64, "")
    assert says in ended.err


@pytest.mark.parametrize("command", [["work", "--no-retry"], ["results"]])
def test_no_redis_ends_with_69(command: list[str]) -> None:
    """Without a Redis the message says where it looked, without the password, and how to get one."""
    ended = lengthwise(*command, REDIS_URL=NOWHERE)
    assert (ended.code, ended.out) == (69, "")
    assert "127.0.0.1:1" in ended.err
    assert "`lengthwise server`" in ended.err
    assert "REDIS_URL" in ended.err
    assert "hunter2" not in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "nosuch"], "expected one of smollm2-135m, a folder with safetensors, or a Hugging Face id"),
        (["--task", "nosuch.toml"], "expected one of the built-in support, a TOML file"),
    ],
)
def test_a_worker_without_model_or_task_ends_with_78(redis_url: str, arguments: list[str], says: str) -> None:
    """A model or a task that is not there ends the worker with a sentence on what there is."""
    ended = lengthwise("work", "--burst", *arguments, REDIS_URL=redis_url)
    assert (ended.code, ended.out) == (78, "")
    assert says in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "t"\ninstruction = "i"\n[labels]\nonly = ""', "expected at least two labels under [labels], found 1"),
        ('name = "t"\nnonsense = 1', "unknown field `nonsense`"),
        ("name =", "Invalid value"),
    ],
)
def test_a_faulty_task_file_ends_with_78(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    """A task file that makes no sense is named, with what to mend in it."""
    file = tmp_path / "task.toml"
    file.write_text(text)
    ended = here(capsys, "model", "show", "--task", str(file))
    assert (ended.code, ended.out) == (78, "")
    assert str(file) in ended.err
    assert says in ended.err


def test_a_bug_ends_with_70_and_does_not_quote(capsys: pytest.CaptureFixture[str]) -> None:
    """Anything unforeseen ends with 70 and a traceback of places, without its message, which may hold a ticket."""

    def fails(*_: object) -> None:
        raise ValueError("my ticket")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.commands.results.StreamReader", fails)
        ended = here(capsys, "results", "--url", NOWHERE)
    assert (ended.code, ended.out) == (70, "")
    assert "this is a bug" in ended.err
    assert 'results.py", line' in ended.err
    assert ended.err.endswith("ValueError\n")
    assert "my ticket" not in ended.err.replace('raise ValueError("my ticket")', "")


def test_results_of_an_empty_queue(capsys: pytest.CaptureFixture[str], redis_url: str) -> None:
    """A queue without results is no error: nothing is printed."""
    assert here(capsys, "results", "--url", redis_url) == Ended(0, "", "")
    assert here(capsys, "results", "--url", redis_url, "--json") == Ended(0, "", "")


def test_results_as_json(capsys: pytest.CaptureFixture[str], redis_url: str, redis_client: redis.Redis) -> None:
    """--json prints one object a line with every field of the label, the newest last; --last counts from the end."""
    publish(redis_client, *map(label, range(25)))
    ended = here(capsys, "results", "--url", redis_url, "--json")
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert [line["id"] for line in lines] == [f"t{number}" for number in range(5, 25)]
    assert lines[0] == {name: getattr(label(5), name) for name in Label.__struct_fields__}
    last = here(capsys, "results", "--url", redis_url, "--json", "--last", "2")
    assert [json.loads(line)["id"] for line in last.out.splitlines()] == ["t23", "t24"]


def test_results_for_people(capsys: pytest.CaptureFixture[str], redis_url: str, redis_client: redis.Redis) -> None:
    """One line a label, and no id can move the cursor or make a line of its own."""
    publish(redis_client, label(0), label(3, "\x1b[2Jx\ny\u202e"))
    ended = here(capsys, "results", "--url", redis_url)
    plain, wild = ended.out.splitlines()
    assert plain.split() == ["t0", "billing", "75.0%", "margin", "1.50"]
    assert wild.isprintable()
    assert wild.startswith("\ufffd[2Jx\ufffdy\ufffd ")
    assert wild.endswith("(3 tokens cut)")


def test_results_into_a_pipe_that_closes(redis_url: str, redis_client: redis.Redis) -> None:
    """`lengthwise results | head` is no error and complains of nothing."""
    publish(redis_client, *map(label, range(1500)))
    command = [sys.executable, "-m", "worker.cli", "results", "--url", redis_url, "--last", "1500", "--json"]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.wait(30), process.stderr.read()) == (0, b"")


def test_model_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every model that comes by name is listed with its licence, and whether it is here: where, or how large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENGTHWISE_HOME", str(tmp_path))
        ended = here(capsys, "model", "list")
    assert ended == Ended(0, "smollm2-135m (default): SmolLM2-135M-Instruct, Apache-2.0: not fetched yet, 93 MB\n", "")


def test_model_show(capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt is shown whole, around a placeholder for the ticket, with the token ids of every label."""
    ended = here(capsys, "model", "show")
    assert ended.code == 0
    task = load_task("support")
    assert ended.out.startswith(task.instruction)
    assert "Ticket:\n<ticket>\nCategory:\n" in ended.out
    as_json = json.loads(here(capsys, "model", "show", "--json").out)
    assert as_json["prompt"] in ended.out
    assert list(as_json["labels"]) == list(task.labels)
    for name, shown in as_json["labels"].items():
        assert f"  {name}: {' '.join(shown['tokens'])}  {shown['ids']}" in ended.out
        assert "".join(shown["tokens"]) == f"\u0120{name}"
