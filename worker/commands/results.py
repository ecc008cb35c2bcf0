"""`lengthwise results`: labels as they are published."""

import os
import sys

import click
import msgspec
import redis

from wire import Keys, Label
from worker.commands.options import json_option, queue_option, url_option
from worker.queue.connection import connect, unavailable
from worker.queue.streams import StreamReader


@click.command()
@queue_option
@url_option
@click.option("--last", type=click.IntRange(0), default=20, show_default=True, help="Begin with so many of the newest.")
@click.option("--follow", is_flag=True, help="Go on with those to come, until Ctrl-C.")
@json_option
def results(keys: Keys, url: str, last: int, follow: bool, as_json: bool) -> None:
    """Show labels as they are published, the newest last."""
    show = _show_json if as_json else _show_line
    try:
        reader = StreamReader(connect(url), keys.results, Label, last)
        for label in reader.follow() if follow else reader.available():
            show(label)
    except redis.RedisError as error:
        raise unavailable(url, error) from error
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # `| head` has seen enough, and what is left to flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_json(label: Label) -> None:
    click.echo(msgspec.json.encode(label))


def _show_line(label: Label) -> None:
    note = f"  ({label.truncated_tokens} tokens cut)" if label.truncated_tokens else ""
    ticket = _printable(label.id)
    click.echo(f"{ticket:<36} {label.label:<24} {label.confidence:6.1%}  margin {label.margin:5.2f}{note}")


def _printable(text: str) -> str:
    """The text without what could move the cursor: anybody who may push chooses a ticket's id."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
