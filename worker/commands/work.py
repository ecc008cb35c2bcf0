"""`lengthwise work`: one worker, from start to stop."""

import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

import click
import structlog

from wire import BatchReport, Keys
from worker.commands.options import (
    lease_option,
    log_level_option,
    model_option,
    queue_option,
    strategy_options,
    task_option,
    url_option,
)
from worker.drain import Drain, Drained
from worker.pace import Pace
from worker.ports import Answer, Identity, Receipt
from worker.queue.claims import QueueSettings, RedisQueue
from worker.queue.connection import StoppedWaitingError
from worker.queue.health import require_safe
from worker.queue.verbs import StreamLengths
from worker.stop import Stop, StoppedAtOnce

if TYPE_CHECKING:
    from worker.engine.classifier import Choices

log = structlog.get_logger("lengthwise.work")


@click.command()
@queue_option
@url_option
@task_option
@model_option
@click.option(
    "--drain-size", type=click.IntRange(1, 100_000), default=256, show_default=True, help="Most tickets a claim."
)
@lease_option
@click.option("--burst", is_flag=True, help="Exit when the queue is drained.")
@strategy_options
@click.option("--name", help="The worker's name.  [default: host, process id and a random part]")
@click.option(
    "--window",
    "window_s",
    type=click.FloatRange(0),
    default=24 * 3600.0,
    show_default=True,
    help="Seconds in which a ticket id is published once.",
)
@click.option(
    "--results-length", type=click.IntRange(0), default=1_000_000, show_default=True, help="Labels kept, about; 0: all."
)
@click.option(
    "--metrics-length",
    type=click.IntRange(0),
    default=100_000,
    show_default=True,
    help="Metrics entries kept, about; 0: all.",
)
@click.option(
    "--results-age",
    "results_age_s",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds labels are kept, about; 0: any. Old ones go when the next batch is published.",
)
@click.option(
    "--metrics-age",
    "metrics_age_s",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds metrics entries are kept, likewise.",
)
@click.option(
    "--dead-length", type=click.IntRange(0), default=0, show_default=True, help="Dead letters kept, about; 0: all."
)
@click.option(
    "--crash-limit",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Crashes after which a ticket is buried, if it was alone in the last.",
)
@click.option(
    "--error-limit",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Errors of the model after which a ticket is buried; until then it goes to the end of the queue.",
)
@click.option(
    "--max-ticket-bytes",
    type=click.IntRange(1),
    default=64 * 1024,
    show_default=True,
    help="Larger payloads become dead letters.",
)
@click.option("--force", is_flag=True, help="Start even on a server that would lose tickets; see `lengthwise doctor`.")
@click.option(
    "--min-confidence",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Publish no label (but its scores) where the best one is less probable.",
)
@click.option("--no-retry", is_flag=True, help="Exit with 69 when Redis is gone, instead of waiting for it.")
@log_level_option
def work(
    keys: Keys,
    url: str,
    task: str,
    model: str,
    drain_size: int,
    lease_s: float,
    burst: bool,
    strategy: str | None,
    dtype: str | None,
    device: str,
    threads: int | None,
    tokens: int | None,
    name: str | None,
    window_s: float,
    results_length: int,
    metrics_length: int,
    results_age_s: float,
    metrics_age_s: float,
    dead_length: int,
    crash_limit: int,
    error_limit: int,
    min_confidence: float,
    max_ticket_bytes: int,
    force: bool,
    no_retry: bool,
) -> None:
    """Label tickets from a queue until stopped.

    SIGTERM or Ctrl-C once: finish the batch and hand back the rest. Twice: hand back at once. Start as many workers
    side by side as you like; give each its share of the cores with --threads.
    """
    stop = Stop()
    stop.listen()
    worker = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    settings = QueueSettings(
        drain_size=drain_size,
        lease_ms=int(lease_s * 1000),
        window_ms=int(window_s * 1000),
        crash_limit=crash_limit,
        lengths=StreamLengths(
            results=results_length,
            metrics=metrics_length,
            dead=dead_length,
            results_age_ms=int(results_age_s * 1000),
            metrics_age_ms=int(metrics_age_s * 1000),
        ),
    )
    state: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "started_at_ms": int(time.time() * 1000)}
    require_safe(url, keys, stop, patient=not no_retry, force=force)
    with RedisQueue(url, keys, worker, settings, stop, patient=not no_retry, state=lambda: state) as queue:
        # Imported late: a queue that cannot be reached should say so at once, not after torch was loaded.
        from worker.engine import Classifier

        classifier = Classifier.load(
            task, model, strategy=strategy, dtype=dtype, device=device, threads=threads, tokens=tokens
        )
        identity = classifier.identity
        _log_start(worker, keys, identity, classifier.choices)
        state |= {"model": identity.model, "task": identity.task, "strategy": identity.strategy}
        drain = Drain(
            queue,
            classifier,
            worker,
            stop,
            burst=burst,
            max_ticket_bytes=max_ticket_bytes,
            observe=_log_batch,
            error_limit=error_limit,
            min_confidence=min_confidence,
            pace=Pace(drain_size, settings.lease_ms),
        )
        try:
            drain.run()
        except StoppedAtOnce:
            log.warning("stopped at once", worker=worker)
        except StoppedWaitingError as error:
            log.warning("stopped without redis", worker=worker, error=str(error))
        _log_end(worker, drain.done)
    stop.deafen()


def _log_start(worker: str, keys: Keys, identity: Identity, choices: "Choices") -> None:
    log.info(
        "ready",
        worker=worker,
        queue=keys.queue,
        model=identity.model,
        task=identity.task,
        strategy=identity.strategy,
        certificate=identity.certificate,
        dtype=choices.dtype,
        threads=choices.threads,
        tokens_a_batch=choices.tokens,
        fused=choices.fused,
        because=choices.reasons,
    )


def _log_batch(report: BatchReport, receipt: Receipt) -> None:
    """One line a batch: numbers and names, never a ticket's text."""
    if receipt.answer is Answer.FENCED:
        log.warning("batch fenced: another worker took the claim over", batch=report.batch, size=report.size)
        return
    log.info(
        "batch",
        batch=report.batch,
        size=report.size,
        published=receipt.published,
        duplicates=receipt.duplicates,
        dead=report.dead,
        abstained=report.abstained,
        retried=report.retried,
        tokens=report.tokens_computed,
        padding=round(report.padding_ratio, 3),
        score_ms=round(report.score_ms),
        closed=report.closed,
        depth=receipt.depth,
    )


def _log_end(worker: str, done: Drained) -> None:
    log.info(
        "ended",
        worker=worker,
        batches=done.batches,
        published=done.published,
        duplicates=done.duplicates,
        dead=done.dead,
        retried=done.retried,
        fenced=done.fenced,
    )
