"""A campaign: many tickets, few workers, and everything that can go wrong. Then the books are audited."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.soak.audit import Books, audit, read_books
from tests.soak.crew import Crew, resident_mb
from tests.soak.feeder import Feeder
from tests.soak.hand import HandSettings
from tests.soak.hostile import Hostile, hostile_payloads
from tests.soak.place import Place
from tests.soak.proxy import Proxy
from wire import Keys

TICK_S = 0.05
# In the address, where redis-py takes it from: a half-open connection is given up sooner than the product's 5 s.
TIMEOUT_S = 1.5
KEYS = Keys("tickets")
MOST_GROWTH_MB = 5.0
ENOUGH_WRONG = 3  # workers that ended by themselves: the campaign has failed and need not go on


@dataclass(frozen=True)
class Plan:
    """How hard a campaign is. All times in seconds."""

    tickets: int
    workers: int
    seconds: float  # how long tickets and faults come; after that the rest is drained without faults
    seed: int
    kill_every: float = 0.5
    stop_every: float = 1.0
    lease: float = 1.5
    server_kills: int = 4
    server_freezes: int = 2
    poison: int = 1
    hostile_sets: int = 2
    faulty: float = 0.02  # share of requests that meet a fault on the wire
    drain_size: int = 128
    rows: int = 16
    batch: float = 0.005
    crash_limit: int = 3  # the product's own: a ticket alone in its claim when a third worker is killed is buried
    calm: float = 120.0  # the most that draining the rest may take


@dataclass
class Outcome:
    """What happened, and what was wrong with it."""

    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def run(plan: Plan, tell: Callable[[str], None] = lambda line: None) -> Outcome:
    """Run a campaign to its end. Everything it starts is gone when this returns."""
    with (
        tempfile.TemporaryDirectory(prefix="lw-", dir="/tmp") as name,
        Place(Path(name) / "server") as place,
        _listening(Proxy(place.port, plan.seed)) as proxy,
    ):
        return _Campaign(plan, Path(name), place, proxy, tell).run()


@contextmanager
def _listening(proxy: Proxy) -> Iterator[Proxy]:
    with proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


class _Campaign:
    def __init__(self, plan: Plan, folder: Path, place: Place, proxy: Proxy, tell: Callable[[str], None]) -> None:
        self._plan, self._folder, self._place, self._proxy, self._tell = plan, folder, place, proxy, tell
        self._random = Random(plan.seed)
        self._started_s = time.monotonic()
        url = f"redis://127.0.0.1:{proxy.port}/0?socket_timeout={TIMEOUT_S}"
        hand = HandSettings(int(plan.lease * 1000), plan.drain_size, plan.rows, plan.batch, plan.crash_limit)
        self._crew = Crew(url, folder, plan.workers, hand, plan.seed)
        self._feeder = Feeder(url, plan.tickets, plan.seconds, plan.poison, plan.seed)
        self._hostile: list[Hostile] = []
        self._own_mb: list[float] = []

    def run(self) -> Outcome:
        try:
            self._crew.fill_up()
            self._feeder.start()
            self._storm()
            self._calm()
            self._crew.dismiss()
            with self._place.client() as client:
                books = read_books(client, KEYS, self._folder)
            return self._outcome(books)
        finally:
            self._crew.kill_all()

    def _storm(self) -> None:
        """Faults, until the time is over and all tickets are in."""
        self._proxy.faulty = self._plan.faulty
        agenda = self._agenda()
        while (agenda or self._feeder.is_alive()) and len(self._crew.wrong_ends) < ENOUGH_WRONG:
            self._crew.wake()
            self._crew.fill_up()
            if agenda and agenda[0][0] <= self._seconds():
                agenda.pop(0)[1]()
            else:
                time.sleep(TICK_S)

    def _agenda(self) -> list[tuple[float, Callable[[], None]]]:
        """When what is done, in order of time."""
        plan, crew = self._plan, self._crew
        regular = [
            (plan.kill_every, crew.kill_one),
            (plan.stop_every, self._stop_one),
            (plan.seconds / 40, self._weigh),
        ]
        agenda = [(every * number, act) for every, act in regular for number in range(1, int(plan.seconds / every) + 1)]
        rare = (
            (plan.server_kills, 0.9, lambda: self._place.restart(self._random.uniform(0.0, plan.lease))),
            (plan.server_freezes, 0.9, lambda: self._place.freeze(self._random.uniform(0.5, 2.0) * TIMEOUT_S)),
            (plan.hostile_sets, 0.3, self._push_hostile),  # early: 10 MB in a hand are part of its warming up
        )
        for times, latest, act in rare:
            agenda += [(plan.seconds * self._random.uniform(0.1, latest), act) for _ in range(times)]
        return sorted(agenda, key=lambda item: item[0])

    def _calm(self) -> None:
        """No more faults: whatever is left must be worked off in bounded time."""
        self._proxy.faulty = 0.0
        self._crew.wake(all_of_them=True)
        end_s = time.monotonic() + (self._plan.calm if len(self._crew.wrong_ends) < ENOUGH_WRONG else 0.0)
        with self._place.client() as client:
            while (left := self._left(client)) and time.monotonic() < end_s:
                self._tell(f"to drain: {left}")
                self._crew.fill_up()
                self._weigh()
                time.sleep(0.5)

    def _left(self, client: Any) -> int:
        waiting, leases = client.llen(KEYS.waiting), client.zcard(KEYS.leases)
        return int(waiting + leases + self._proxy.held)

    def _stop_one(self) -> None:
        with self._place.client() as client:
            holders = [claim_id.decode().split("-")[0] for claim_id in client.zrange(KEYS.leases, 0, -1)]
        self._crew.stop_one(self._plan.lease * self._random.uniform(1.2, 2.5), holders)

    def _push_hostile(self) -> None:
        """Past the proxy, so that it is certain that they went in, once."""
        payloads = hostile_payloads(f"-hostile-{len(self._hostile)}")
        with self._place.client() as client:
            for one in payloads:
                client.rpush(KEYS.waiting, one.payload)
        self._hostile += payloads

    def _weigh(self) -> None:
        self._crew.weigh()
        self._own_mb.append(resident_mb(os.getpid()))
        self._tell(f"{self._seconds():.0f} s: {self._crew.kills} kills, {self._place.restarts} server restarts")

    def _seconds(self) -> float:
        return time.monotonic() - self._started_s

    def _outcome(self, books: Books) -> Outcome:
        crew, receipts = self._crew, self._feeder.receipts
        figures: dict[str, float] = {
            "tickets pushed": books.fates,
            "workers killed": crew.kills,
            "workers killed by poison": crew.suicides,
            "workers stopped beyond their lease": crew.stops,
            "workers started": crew.started,
            "server restarts": self._place.restarts,
            "server freezes": self._plan.server_freezes,
            **{f"requests on the wire: {fault}": count for fault, count in sorted(self._proxy.counts.items())},
            "pushes repeated after a lost reply": receipts.repeated,
            "pushes left uncertain": len(receipts.uncertain) - receipts.repeated,
            "published": len(books.results),
            "duplicates withheld": books.totals.duplicates,
            "dead letters": len(books.dead),
            "dead letters of innocents killed three times": books.innocents_buried(receipts),
            "tickets reclaimed": books.totals.reclaimed,
            "batches": len(books.reports),
            "commits fenced": books.answers["FENCED"],
            "commits done already": books.answers["ALREADY"],
            "survivor MB at the end": round(crew.survivor_mb[-1], 1) if crew.survivor_mb else 0.0,
            "survivor MB grown": round(crew.growth_mb(), 1),
            "campaign MB at the end": round(self._own_mb[-1], 1) if self._own_mb else 0.0,
            "seconds": round(self._seconds(), 1),
        }
        faults = [*crew.wrong_ends, *audit(books, receipts, self._hostile)]
        if self._feeder.failure:
            faults.append(f"the producer failed: {self._feeder.failure!r}")
        if crew.growth_mb() > MOST_GROWTH_MB:
            faults.append(f"the survivor grew by {crew.growth_mb():.1f} MB: {crew.survivor_mb}")
        if crew.suicides and not self._plan.poison:
            faults.append(f"{crew.suicides} workers were killed by somebody else")
        return Outcome(figures, faults)
