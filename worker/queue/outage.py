"""What a worker's connections know together of an outage: it is told once when it begins and once when it ends."""

import threading
import time
from collections.abc import Callable

import structlog

from wire.url import mask_url

log = structlog.get_logger("lengthwise.redis")


class Outage:
    """Begins with the first call that fails, and ends when every call that failed has got through.

    Not when the first of them has: a full Redis takes a renewal while it refuses a commit. Calls are told apart by
    whatever object they bring. May be used from several threads.
    """

    def __init__(self, url: str) -> None:
        self._url = mask_url(url)
        self._lock = threading.Lock()
        self._waiting: set[object] = set()
        self._since_s: float | None = None
        self._ended_s = 0.0
        self._at_end: list[Callable[[], None]] = []

    def at_end(self, action: Callable[[], None]) -> None:
        """Do this after every outage."""
        self._at_end.append(action)

    def failed(self, call: object, error: Exception, asked_at_s: float) -> None:
        """A call failed and waits. One that was asked (monotonic time) before an outage's end is of that outage."""
        with self._lock:
            self._waiting.add(call)
            if self._since_s is None and asked_at_s > self._ended_s:
                self._since_s = time.monotonic()
                log.warning("redis gone", url=self._url, error=str(error))

    def got_through(self, call: object) -> None:
        """A call succeeded, be it the first time."""
        with self._lock:
            if call not in self._waiting:
                return
            self._waiting.remove(call)
            if self._waiting or self._since_s is None:
                return
            self._ended_s = time.monotonic()
            log.info("redis back", url=self._url, outage_s=round(self._ended_s - self._since_s, 3))
            self._since_s = None
        for action in self._at_end:
            action()

    def gave_up(self, call: object) -> None:
        """A call that may have failed waits no more."""
        with self._lock:
            self._waiting.discard(call)
