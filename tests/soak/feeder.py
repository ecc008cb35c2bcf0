"""The producer of a campaign: pushes tickets during the faults, and keeps its receipts."""

import threading
import time
from dataclasses import dataclass, field
from random import Random

from producer import Producer, RedisUnavailableError
from tests.soak.stub import POISON, label_of

# Of chunks whose reply was lost so many are pushed again until it is known that they went in; the others are left.
REPEATED = 0.75
MOST_A_CHUNK = 400
WAVE_S = 3.0  # tickets come in waves, so that there is a backlog to be fought over
TWICE = 0.01  # of the tickets, pushed a second time on purpose

Chunk = list[dict[str, str]]


@dataclass
class Receipts:
    """What the producer knows about its pushes."""

    labels: dict[str, str] = field(default_factory=dict)  # id -> the label it must get, of every ticket ever pushed
    poison: set[str] = field(default_factory=set)
    certain: int = 0  # payloads that are in the queue, repetitions among them
    certain_ids: set[str] = field(default_factory=set)
    uncertain: list[list[str]] = field(default_factory=list)  # pushes whose reply was lost: all of them went in or none
    repeated: int = 0  # pushes that were done again after a lost reply
    refused: int = 0  # pushes that certainly did not happen


class Feeder(threading.Thread):
    """Pushes `tickets` tickets, spread over `seconds`, through the real producer."""

    def __init__(self, url: str, tickets: int, seconds: float, poison: int, seed: int) -> None:
        super().__init__(name="feeder", daemon=True)
        self.receipts = Receipts()
        self.failure: Exception | None = None
        self._url, self._tickets, self._seconds = url, tickets, seconds
        self._random = Random(seed)
        self._poisonous = set(self._random.sample(range(tickets // 20, tickets // 5), poison))

    def run(self) -> None:
        """The thread."""
        try:
            with Producer(self._url, chunk_size=10 * MOST_A_CHUNK) as producer:
                self._feed(producer)
        except Exception as error:  # noqa: BLE001 - told by the main thread
            self.failure = error

    def _feed(self, producer: Producer) -> None:
        started_s, number = time.monotonic(), 0
        while number < self._tickets:
            count = min(self._random.randint(1, MOST_A_CHUNK), self._tickets - number)
            chunk = [self._ticket(number + offset) for offset in range(count)]
            number += count
            twice = [ticket for ticket in chunk if self._random.random() < TWICE]
            if self._push(producer, chunk) and twice:
                self._push(producer, twice)
            due_s = self._seconds * number / self._tickets // WAVE_S * WAVE_S
            time.sleep(max(0.0, started_s + due_s - time.monotonic()))

    def _push(self, producer: Producer, chunk: Chunk) -> bool:
        """Whether it is known that the chunk went in."""
        ids = [ticket["id"] for ticket in chunk]
        while True:
            try:
                self.receipts.certain += producer.push_many(chunk).pushed
                self.receipts.certain_ids.update(ids)
                return True
            except RedisUnavailableError as error:
                if error.uncertain:
                    self.receipts.uncertain.append(ids)
                    if self._random.random() >= REPEATED:
                        return False
                    self.receipts.repeated += 1
                else:
                    self.receipts.refused += 1
                time.sleep(0.05)

    def _ticket(self, number: int) -> dict[str, str]:
        poison = number in self._poisonous
        body = f"{POISON if poison else 'ticket'} {number} " + "and so on " * int(self._random.expovariate(1 / 20))
        ticket = {"id": f"t-{number}", "subject": "soak", "body": body.strip()}
        self.receipts.labels[ticket["id"]] = label_of(f"soak\n{ticket['body']}")
        if poison:
            self.receipts.poison.add(ticket["id"])
        return ticket
