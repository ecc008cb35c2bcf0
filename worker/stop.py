"""Stopping in stages: the first signal lets the batch end and hands back the rest, the second hands back at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StoppedAtOnce(BaseException):
    """Raised in the midst of scoring by a second signal. No Exception: no handler for failures may swallow it."""


class Stop(threading.Event):
    """Set once the worker is asked to end."""

    def __init__(self) -> None:
        super().__init__()
        self._interruptible = False

    def listen(self) -> None:
        """Take SIGTERM and SIGINT. Only the main thread may call this."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Where a second signal may break in. Nowhere else: a commit or a hand-back is not to be torn."""
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set() and self._interruptible:
            raise StoppedAtOnce
        self.set()
