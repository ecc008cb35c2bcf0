"""Task files: one that is right loads, and every mistake is answered with the file, the place and what was expected."""

from pathlib import Path

import pytest

from worker.engine.task import DEFAULT_TASK, Example, Task, builtin_tasks, check_task, load_task
from worker.errors import ConfigError

GOOD = """
name = "mine"
instruction = "Sort."
[labels]
billing = "money"
other = ""
"""


def refusal(path: Path, text: str | bytes) -> str:
    """The message for a file with this content, which must name the file."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_task(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_the_built_in_task_loads() -> None:
    """Without a file there is a task that works, and it is listed."""
    task = load_task(DEFAULT_TASK)
    assert DEFAULT_TASK in builtin_tasks()
    assert list(task.labels) == ["billing", "technical", "account"]


def test_a_file_loads_with_its_defaults(tmp_path: Path) -> None:
    """Labels keep their order; what is left out has a value."""
    (tmp_path / "mine.toml").write_text(GOOD)
    assert load_task(str(tmp_path / "mine.toml")) == Task(
        name="mine", instruction="Sort.", labels={"billing": "money", "other": ""}, form="plain"
    )


def test_examples_are_read(tmp_path: Path) -> None:
    """An example is a text with one of the labels."""
    (tmp_path / "mine.toml").write_text(GOOD + '[[examples]]\ntext = "pay"\nlabel = "billing"\n')
    assert load_task(str(tmp_path / "mine.toml")).examples == (Example("pay", "billing"),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('colour = "red"\n' + GOOD, "unknown field `colour`"),
        (GOOD.replace('name = "mine"', ""), "missing required field `name`"),
        (GOOD.replace('"mine"', "7"), r"Expected `str`, got `int` - at `$.name`"),
        (GOOD.replace('"money"', "3"), r"Expected `str`, got `int` - at `$.labels"),
        ('max_ticket_tokens = "many"\n' + GOOD, r"Expected `int`, got `str` - at `$.max_ticket_tokens`"),
        ('form = "poem"\n' + GOOD, "Invalid enum value 'poem' - at `$.form`"),
        ("labels = 3\nname = 'x'\ninstruction = 'y'", "Expected `object`, got `int` - at `$.labels`"),
        ("max_ticket_tokens = 1\n" + GOOD, "max_ticket_tokens is 1, expected at least 2"),
        (GOOD.replace('other = ""', ""), "expected at least two labels under [labels], found 1"),
        (GOOD + '" padded " = ""', "label ' padded ' is empty, or has white space around"),
        (GOOD + '"" = ""', "label '' is empty"),
        (GOOD + '"a\\nb" = ""', r"controls in it"),
        (
            GOOD + '[[examples]]\ntext = "pay"\nlabel = "money"',
            "example 1 has the label 'money', expected one of billing",
        ),
        (GOOD + '[[examples]]\ntext = "pay"', "missing required field `label` - at `$.examples[0]`"),
        (GOOD + '[[examples]]\ntext = "a"\nlabel = "other"\nwhy = ""', "unknown field `why` - at `$.examples[0]`"),
        ("{ this is not TOML", "line 1"),
        (GOOD + 'billing = "twice"', "cannot overwrite a value"),
        (b"name = '\xff\xfe'", "UTF-8"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str | bytes, expected: str) -> None:
    """Whatever is wrong in a task file, the message names the file, the place and what was expected there."""
    assert expected.lower() in refusal(tmp_path / "task.toml", text).lower()


def test_a_missing_task_lists_what_there_is() -> None:
    """A name that is neither built in nor a file is answered with the built-in ones."""
    with pytest.raises(ConfigError, match=r"no task 'suport': .*built-in .*support.*, or a folder with task.toml"):
        load_task("suport")


def test_a_folder_is_no_task(tmp_path: Path) -> None:
    """A folder's path is refused as a missing file is."""
    with pytest.raises(ConfigError, match="TOML file"):
        load_task(str(tmp_path))


def test_a_task_made_in_python_is_checked_by_the_same_words() -> None:
    """`check_task` serves those who build a Task without a file."""
    with pytest.raises(ConfigError, match="task here: expected at least two labels"):
        check_task(Task(name="x", instruction="", labels={"one": ""}), "here")
