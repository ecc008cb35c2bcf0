"""The workers of a campaign: started, killed, stopped beyond their lease, replaced."""

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from statistics import median

from tests.soak.hand import HandSettings, work

# A server process that has imported everything and forks: a worker is there at once, and not after half a second.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.soak.hand"])

SURVIVOR = "survivor"
_KILLED = -signal.SIGKILL


class Crew:
    """`size` workers, one of which, the survivor, is killed by nothing but poison, which comes early."""

    def __init__(self, url: str, folder: Path, size: int, settings: HandSettings, seed: int) -> None:
        self._url, self._folder, self._size, self._settings = url, folder, size, settings
        self._random, self._numbers = Random(seed), count(1)
        self._members: dict[str, BaseProcess] = {}
        self._stopped: dict[str, float] = {}  # name -> when it goes on
        self.started = self.kills = self.stops = self.suicides = 0
        self.wrong_ends: list[str] = []
        self.survivor_mb: list[float] = []

    def fill_up(self) -> None:
        """Start who is missing. Whoever ended without being killed is noted: no worker may do so."""
        for name, process in list(self._members.items()):
            if process.exitcode is not None:
                self._bury(name, process)
        while len(self._members) < self._size:
            name = SURVIVOR if SURVIVOR not in self._members else f"w{next(self._numbers)}"
            process = _CONTEXT.Process(
                target=work, args=(self._url, self._folder, name, self._settings), name=name, daemon=True
            )
            process.start()
            if name == SURVIVOR:
                self.survivor_mb.clear()
            self.started += 1
            self._members[name] = process

    def kill_one(self) -> None:
        """SIGKILL to any but the survivor."""
        name = self._random.choice([name for name in self._members if name != SURVIVOR])
        process = self._members.pop(name)
        self._stopped.pop(name, None)
        process.kill()
        process.join()
        self.kills += 1

    def stop_one(self, seconds: float, holders: Sequence[str] = ()) -> None:
        """SIGSTOP for a while: to one of `holders`, who were just seen to hold a claim, or else to any."""
        name = self._random.choice([name for name in holders if name in self._members] or list(self._members))
        self._signal(name, signal.SIGSTOP)
        self._stopped[name] = time.monotonic() + seconds
        self.stops += 1

    def wake(self, all_of_them: bool = False) -> None:
        """SIGCONT to whose time is over."""
        for name, until_s in list(self._stopped.items()):
            if all_of_them or time.monotonic() > until_s:
                del self._stopped[name]
                self._signal(name, signal.SIGCONT)

    def weigh(self) -> None:
        """Note the survivor's resident size."""
        pid = self._members[SURVIVOR].pid if SURVIVOR in self._members else None
        if pid is not None:
            self.survivor_mb.append(resident_mb(pid))

    def dismiss(self, within_s: float = 20.0) -> None:
        """SIGTERM to all; each has to end in good order."""
        for name in self._members:
            self._signal(name, signal.SIGTERM)
        for name, process in list(self._members.items()):
            process.join(within_s)
            if process.exitcode != 0:
                self.wrong_ends.append(f"{name} answered SIGTERM with {process.exitcode}\n{self._last_words(name)}")
            del self._members[name]

    def kill_all(self) -> None:
        """Leave nothing behind, however the campaign ended."""
        for process in self._members.values():
            process.kill()
            process.join()

    def growth_mb(self) -> float:
        """What the survivor grew from the second third of its life to the last, by the medians: the first warms up."""
        third = len(self.survivor_mb) // 3
        return median(self.survivor_mb[-third:]) - median(self.survivor_mb[third : 2 * third]) if third else 0.0

    def _bury(self, name: str, process: BaseProcess) -> None:
        if process.exitcode == _KILLED:
            self.suicides += 1
        else:
            self.wrong_ends.append(f"{name} ended with {process.exitcode}\n{self._last_words(name)}")
        del self._members[name]
        self._stopped.pop(name, None)

    def _last_words(self, name: str) -> str:
        file = self._folder / f"{name}.log"
        return "\n".join(file.read_text("utf-8").splitlines()[-30:]) if file.exists() else ""

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self._members[name].pid if name in self._members else None
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def resident_mb(pid: int) -> float:
    """Resident size of a process, in MB; 0 for one that is gone."""
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return int(shown or 0) / 1024
