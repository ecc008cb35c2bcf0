"""What is asked of a ticket: instruction, labels, examples. One TOML file that a user edits."""

from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from worker.errors import ConfigError

DEFAULT_TASK = "support"
_FORMS = Literal["plain", "chat"]


class Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ticket with its label, shown to the model in front of the one it is asked about."""

    text: str
    label: str


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question with its possible answers; `labels` maps each to a line of description, which may be empty."""

    name: str
    instruction: str
    labels: dict[str, str]
    examples: tuple[Example, ...] = ()
    form: _FORMS = "plain"
    max_ticket_tokens: int = 1024  # longer tickets lose their middle


def load_task(name_or_path: str) -> Task:
    """A built-in task by name, or a TOML file by path. Raises ConfigError that says where and what to mend."""
    path = _find(name_or_path)
    try:
        task = msgspec.toml.decode(path.read_bytes(), type=Task)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"task file {path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task file {path}: cannot be read ({error})") from None
    check_task(task, str(path))
    return task


def builtin_tasks() -> list[str]:
    """The names of the tasks that come with the package."""
    folder = resources.files("worker.engine") / "tasks"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def check_task(task: Task, where: str) -> None:
    """Raise ConfigError for a task that is well-formed and still makes no sense."""
    if len(task.labels) < 2:
        raise ConfigError(f"task {where}: expected at least two labels under [labels], found {len(task.labels)}")
    for label in task.labels:
        if not label.strip() or label != label.strip() or not label.isprintable():
            raise ConfigError(f"task {where}: label {label!r} is empty, or has white space around or controls in it")
    for number, example in enumerate(task.examples, start=1):
        if example.label not in task.labels:
            raise ConfigError(
                f"task {where}: example {number} has the label {example.label!r}, expected one of "
                f"{', '.join(task.labels)}"
            )
    if task.max_ticket_tokens < 2:
        raise ConfigError(f"task {where}: max_ticket_tokens is {task.max_ticket_tokens}, expected at least 2")


def _find(name_or_path: str) -> Path:
    if name_or_path in builtin_tasks():
        return Path(str(resources.files("worker.engine") / "tasks" / f"{name_or_path}.toml"))
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            f"no task {name_or_path!r}: expected one of the built-in {', '.join(builtin_tasks())}, or a TOML file"
        )
    return path
