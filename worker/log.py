"""Logs for people on a terminal, JSON lines for everything else. To stderr, so that stdout stays for results."""

import logging
import sys

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str = "info") -> None:
    """Set up structlog for this process. Tracebacks carry no local variables: a ticket's text may be among them."""
    on_terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(on_terminal),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _renderers(on_terminal: bool) -> list[structlog.typing.Processor]:
    if on_terminal:
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    plain = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(plain), structlog.processors.JSONRenderer()]
