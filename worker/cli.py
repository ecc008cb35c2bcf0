"""The `lengthwise` command. A subcommand's module is imported when it is run, so that help needs no torch."""

import importlib
import sys

import click

from worker.errors import EXIT_BUG, EXIT_USAGE

# name: (module, attribute, help in one line)
COMMANDS = {
    "demo": ("worker.demo", "demo", "Label 600 sample tickets here and now, and show what happened."),
    "push": ("producer.cli", "push", "Put tickets from files or standard input into a queue."),
    "work": ("worker.commands.work", "work", "Label tickets from a queue until stopped."),
    "results": ("worker.commands.results", "results", "Show labels as they are published."),
    "dead": ("worker.commands.dead", "dead", "Look at, put back and delete dead letters."),
    "fit": ("worker.commands.fit", "fit", "Fit a task to your own labelled tickets."),
    "evaluate": ("worker.commands.evaluate", "evaluate", "Hold labels against the truth, on labelled tickets."),
    "verify": ("worker.verify", "verify", "Show that batching changes no label, on your own tickets."),
    "bench": ("worker.bench", "bench", "Measure ways of labelling the same tickets on this machine."),
    "doctor": ("worker.commands.doctor", "doctor", "Check the surroundings of a worker, and say what to do."),
    "model": ("worker.commands.model", "model", "List, fetch and inspect models."),
    "server": ("worker.commands.server", "server", "Run a queue server, for a machine without Redis."),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name, and imports one when it is asked for it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        _name_variables(command, f"LENGTHWISE_{cmd_name.upper()}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, _, summary) in COMMANDS.items()])


def _name_variables(command: click.Command, prefix: str) -> None:
    """Give every option the environment variable of its own name; click would take the Python parameter's."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            _name_variables(inner, f"{prefix}_{name.upper()}")
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.envvar is None and parameter.allow_from_autoenv:
            parameter.envvar = f"{prefix}_{max(parameter.opts, key=len).lstrip('-').replace('-', '_').upper()}"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lengthwise")
def lengthwise() -> None:
    """Label support tickets from a Redis queue with a small language model, in length-sorted batches.

    Every option may be given as an environment variable too: --drain-size of `work` is LENGTHWISE_WORK_DRAIN_SIZE.
    """


def main() -> None:
    """Run the command and exit with its code: 0 done, 64 usage, 69 no Redis, 70 a bug, 78 configuration or model."""
    try:
        code = lengthwise(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE if isinstance(error, click.UsageError) else error.exit_code)
    except click.Abort:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - the last line of defence: everything becomes a message and a code
        code = getattr(error, "exit_code", None)
        if not isinstance(code, int):
            _show_bug(error)
            sys.exit(EXIT_BUG)
        click.echo(f"lengthwise: {error}", err=True)
        sys.exit(code)
    sys.exit(code if isinstance(code, int) else 0)


def _show_bug(error: Exception) -> None:
    """A traceback of places alone. The message stays out of it: it might quote a ticket."""
    import traceback

    click.echo("lengthwise: this is a bug. Where it happened:", err=True)
    click.echo("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__, err=True)


if __name__ == "__main__":
    main()
