"""Stopping in stages: the first signal lets the batch end and hands back the rest, the second hands back at once."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StoppedAtOnce(BaseException):
    """Raised in the midst of scoring by a second signal. No Exception: no handler for failures may swallow it."""


class Stop:
    """Set once the worker is asked to end.

    Made of a pipe and not of threading.Event, whose lock a signal handler must not take: it may interrupt the very code
    that holds it, and would wait for ever.
    """

    def __init__(self) -> None:
        self._is_set = self._interruptible = False
        self._read_end, self._write_end = os.pipe()

    def is_set(self) -> bool:
        """Whether the worker is to end."""
        return self._is_set

    def set(self) -> None:
        """Ask the worker to end. May be called from a signal handler, from any thread, and again."""
        if not self._is_set:
            self._is_set = True
            os.write(self._write_end, b"!")  # never read: everybody who waits, now or later, sees it

    def wait(self, timeout_s: float) -> bool:
        """Sleep until it is set, at most `timeout_s`; whether it is set."""
        return bool(select.select([self._read_end], [], [], timeout_s)[0])

    def listen(self) -> None:
        """Take SIGTERM and SIGINT. Only the main thread may call this."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def deafen(self) -> None:
        """Ignore what still comes: all is done, and an interpreter that winds up would die of it with another code."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Where a second signal may break in. Nowhere else: a commit or a hand-back is not to be torn."""
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_set and self._interruptible:
            raise StoppedAtOnce
        self.set()
