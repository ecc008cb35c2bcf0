"""Stopping in stages."""

import os
import signal
import threading
import time

import pytest

from worker.stop import Stop, StoppedAtOnce


def test_a_signal_ends_a_wait() -> None:
    """SIGTERM while the main thread waits out an outage: the wait ends at once, and nothing locks up."""
    stop = Stop()
    previous = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        stop.listen()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began_s = time.monotonic()
        assert stop.wait(10.0)
        assert time.monotonic() - began_s < 5.0
    finally:
        signal.signal(signal.SIGTERM, previous[0])
        signal.signal(signal.SIGINT, previous[1])


def test_a_signal_may_interrupt_a_signal() -> None:
    """The handler takes no lock: called within itself, as a second signal does it, it returns."""
    stop = Stop()
    stop._on_signal(signal.SIGTERM, None)
    stop._on_signal(signal.SIGTERM, None)
    assert stop.is_set()
    assert stop.wait(0.0)


def test_the_second_signal_breaks_into_scoring_only() -> None:
    """A commit or a hand-back is never torn; a forward pass may be."""
    stop = Stop()
    stop._on_signal(signal.SIGTERM, None)
    with pytest.raises(StoppedAtOnce), stop.interruptible():
        stop._on_signal(signal.SIGTERM, None)
    stop._on_signal(signal.SIGTERM, None)


def test_waiting_in_vain_takes_the_time_given() -> None:
    """Without a signal a wait ends when its time is over, and says so."""
    assert not Stop().wait(0.01)
