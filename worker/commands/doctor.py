"""`lengthwise doctor`: what is wrong around a worker, and what to do."""

import sys
from collections.abc import Sequence

import click
import msgspec
import redis

from wire import Keys
from wire.url import mask_url
from worker.commands.options import json_option, lease_option, model_option, queue_option, url_option
from worker.doctor import judge_machine
from worker.finding import Finding, Level, exit_code
from worker.queue.connection import connect, unavailable
from worker.queue.contents import judge_queue
from worker.queue.health import judge_server, read_info
from worker.queue.rights import rights

COLOURS = {Level.OK: "green", Level.INFO: "blue", Level.WARN: "yellow", Level.LOSE: "red"}


@click.command()
@queue_option
@url_option
@model_option
@lease_option
@click.option("--quick", is_flag=True, help="Leave out what loads torch: cores and arithmetic.")
@json_option
def doctor(keys: Keys, url: str, model: str, lease_s: float, quick: bool, as_json: bool) -> None:
    """Check the surroundings of a worker: the server, the queue, this machine. Nothing is changed.

    Exits with 0 if all is well, 1 if something is to be mended that loses nothing, 2 if tickets would be lost
    (`lengthwise work` then refuses to start), 69 without a Redis.
    """
    findings = [*_judge_redis(url, keys, lease_s * 1000), *judge_machine(model, quick=quick)]
    if as_json:
        click.echo(msgspec.json.encode(findings))
    else:
        _show(findings, f"queue {keys.queue} at {mask_url(url)}")
    sys.exit(exit_code(findings))


def _judge_redis(url: str, keys: Keys, lease_ms: float) -> list[Finding]:
    client = connect(url, client_name="")  # no name: whether it may be set is one of the questions
    try:
        info = read_info(client, keys)
        return [*judge_server(client, info), rights(client, keys), *judge_queue(client, info, keys, lease_ms)]
    except redis.RedisError as error:
        raise unavailable(url, error) from error
    finally:
        client.close()


def _show(findings: Sequence[Finding], what: str) -> None:
    click.echo(what)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = click.style(f"{finding.level.value:<4}", fg=COLOURS[finding.level], bold=finding.level is Level.LOSE)
        click.echo(f"  {mark}  {finding.name:<{width}}  {finding.found}")
        if finding.advice:
            click.echo(f"  {'':<4}  {'':<{width}}  -> {finding.advice}")
