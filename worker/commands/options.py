"""Options that several commands share, so that they are spelled and explained alike."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from wire import Keys
from worker.engine.catalogue import DEFAULT_MODEL
from worker.engine.task import DEFAULT_TASK
from worker.errors import UsageError
from worker.log import LEVELS, configure

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_URL = "redis://localhost:6379/0"


def _keys(context: click.Context, parameter: click.Parameter, name: str) -> Keys:
    try:
        return Keys(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _configure(context: click.Context, parameter: click.Parameter, level: str) -> str:
    configure(level)
    return level


queue_option = click.option(
    "--queue", "keys", default="tickets", show_default=True, callback=_keys, help="Name of the queue: the Redis list."
)
url_option = click.option(
    "--url", envvar="REDIS_URL", default=DEFAULT_URL, show_default=True, help="Redis to use; also REDIS_URL."
)
task_option = click.option(
    "--task", default=DEFAULT_TASK, show_default=True, help="Task to ask: a built-in one's name, or a TOML file."
)
model_option = click.option(
    "--model", default=DEFAULT_MODEL, show_default=True, help="Model: a name, a folder, or a Hugging Face id."
)
lease_option = click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(0.2),
    default=30.0,
    show_default=True,
    help="Seconds a claim is held without a sign of life of its worker.",
)
threads_option = click.option(
    "--threads", type=click.IntRange(1), help="Processor threads for the model.  [default: measured, up to all cores]"
)
dtype_option = click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), help="Arithmetic.  [default: the faster one here, measured]"
)


def strategy_options(command: F) -> F:
    """How tickets are run through the model; what is not given is chosen by measurement."""
    options = (
        click.option(
            "--strategy",
            type=click.Choice(["packed", "padded", "single"]),
            help="How tickets are run.  [default: the first that changes no label in a batch]",
        ),
        dtype_option,
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, mps."),
        threads_option,
        click.option("--tokens", type=click.IntRange(1), help="Most tokens a batch.  [default: measured]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
log_level_option = click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default="info",
    show_default=True,
    callback=_configure,
    expose_value=False,
    help="Least important log line to write.",
)
