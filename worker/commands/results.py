"""`lengthwise results`: labels as they are published."""

import click
import msgspec
import redis

from wire import Keys, Label
from worker.commands.options import json_option, queue_option, url_option
from worker.commands.printable import printable, until_pipe_closes
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
        with until_pipe_closes():
            reader = StreamReader(connect(url), keys.results, Label, last, _tell_gap)
            for label in reader.follow() if follow else reader.available():
                show(label)
    except redis.RedisError as error:
        raise unavailable(url, error) from error
    except KeyboardInterrupt:
        pass


def _tell_gap(missed: int | None) -> None:
    what = "labels may have been" if missed is None else "1 label was" if missed == 1 else f"{missed:,} labels were"
    click.echo(f"{what} trimmed away before being read: see --results-length and --results-age of `work`", err=True)


def _show_json(label: Label) -> None:
    click.echo(msgspec.json.encode(label))


def _show_line(label: Label) -> None:
    note = f"  ({label.truncated_tokens} tokens cut)" if label.truncated_tokens else ""
    ticket = printable(label.id)
    said = label.label or "(abstained)"
    click.echo(f"{ticket:<36} {said:<24} {label.confidence:6.1%}  margin {label.margin:5.2f}{note}")
