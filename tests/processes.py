"""What tests do with processes: run the command, wait for something, see who is alive."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import worker

CHECKOUT = Path(worker.__file__).parents[1]


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def lengthwise(*arguments: str, **environment: str) -> Ended:
    """Run the command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "worker.cli", *arguments],
        cwd=CHECKOUT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def wait_until(condition: Callable[[], bool], *, within_s: float) -> None:
    """Look again and again until it is so; an AssertionError if it does not get so in time."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.005)


def lives(pid: int) -> bool:
    """Tell whether there is such a process. A dead one that nobody collects (in a container) does not count."""
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # just gone, or a system without /proc
        return not Path("/proc/self").exists()
