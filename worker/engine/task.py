"""What is asked of a ticket: instruction, labels, examples. One TOML file that a user edits."""

from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from worker.errors import ConfigError

DEFAULT_TASK = "support"
# The question that `labels` answers; `questions` have names of their own.
MAIN_QUESTION = "category"
TASK_FILE, HEAD_FILE = "task.toml", "head.safetensors"
Form = Literal["plain", "chat", "bare"]


class Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ticket with its label, shown to the model in front of the one it is asked about."""

    text: str
    label: str


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of a ticket; `labels` maps each possible answer to a line of description, which may be empty.

    `questions` are asked in the same pass beside it, each with labels of its own. `form` is how the ticket is put to
    the model: a completion (`plain`), its chat template (`chat`), or a completion that names no labels (`bare`), for a
    fitted `head`, which is a file that `lengthwise fit` made.
    """

    name: str
    instruction: str
    labels: dict[str, str]
    questions: dict[str, dict[str, str]] = {}
    examples: tuple[Example, ...] = ()
    form: Form = "plain"
    max_ticket_tokens: int = 1024  # longer tickets lose their middle
    head: str | None = None

    @property
    def asked(self) -> dict[str, dict[str, str]]:
        """Every question with its labels, the main one first: the order of all scores."""
        return {MAIN_QUESTION: self.labels, **self.questions}

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Every question's labels side by side: the order of all scores."""
        return tuple(label for labels in self.asked.values() for label in labels)

    @property
    def sizes(self) -> list[int]:
        """How many of `all_labels` are each question's."""
        return [len(labels) for labels in self.asked.values()]


def load_task(name_or_path: str) -> Task:
    """A built-in task by name, a TOML file by path, or a folder that `lengthwise fit` made.

    Raises ConfigError that says where and what to mend.
    """
    path = _find(name_or_path)
    try:
        task = msgspec.toml.decode(path.read_bytes(), type=Task)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"task file {path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task file {path}: cannot be read ({error})") from None
    check_task(task, str(path))
    # The head lies beside the file, wherever both are moved.
    return replace(task, head=str(path.parent / task.head)) if task.head else task


def builtin_tasks() -> list[str]:
    """The names of the tasks that come with the package."""
    folder = resources.files("worker.engine") / "tasks"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def check_task(task: Task, where: str) -> None:
    """Raise ConfigError for a task that is well-formed and still makes no sense."""
    if MAIN_QUESTION in task.questions:
        raise ConfigError(f"task {where}: [labels] is the question {MAIN_QUESTION!r}; give the other one another name")
    _check_labels("[labels]", task.labels, where)
    for question, labels in task.questions.items():
        _check_name("question", question, where)
        _check_labels(f"[questions.{question}]", labels, where)
    if task.form == "bare" and not task.head:
        raise ConfigError(f'task {where}: form = "bare" names no labels, so it needs a head; use "plain" or "chat"')
    for number, example in enumerate(task.examples, start=1):
        if example.label not in task.labels:
            raise ConfigError(
                f"task {where}: example {number} has the label {example.label!r}, expected one of "
                f"{', '.join(task.labels)}"
            )
    if task.max_ticket_tokens < 2:
        raise ConfigError(f"task {where}: max_ticket_tokens is {task.max_ticket_tokens}, expected at least 2")


def _check_labels(table: str, labels: dict[str, str], where: str) -> None:
    if len(labels) < 2:
        raise ConfigError(f"task {where}: expected at least two labels under {table}, found {len(labels)}")
    for label in labels:
        _check_name("label", label, where)


def _check_name(kind: str, name: str, where: str) -> None:
    if not name.strip() or name != name.strip() or not name.isprintable():
        raise ConfigError(f"task {where}: {kind} {name!r} is empty, or has white space around or controls in it")


def _find(name_or_path: str) -> Path:
    if name_or_path in builtin_tasks():
        return Path(str(resources.files("worker.engine") / "tasks" / f"{name_or_path}.toml"))
    path = Path(name_or_path)
    if path.is_dir():
        path /= TASK_FILE
    if not path.is_file():
        raise ConfigError(
            f"no task {name_or_path!r}: expected one of the built-in {', '.join(builtin_tasks())}, a TOML file, or a "
            f"folder with {TASK_FILE} in it"
        )
    return path
