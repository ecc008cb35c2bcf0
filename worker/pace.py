"""How many tickets to claim, so that a claim outlives a worker that cannot renew its lease (pure).

A thread renews leases. It cannot while a pass keeps Python's lock to itself, nor while the machine stops the process.
Then only a claim that is done in time is of use: what takes longer is taken over and labelled by somebody else.
"""

import math
from dataclasses import dataclass, field

# Shares of a lease. Renewed every third of it, a claim has two thirds left or more; what has less was not renewed.
GOOD_MARGIN, BAD_MARGIN = 1 / 2, 1 / 4
# A claim made smaller is to be done within this share: a renewal may have been due when it began.
EXPECTED_SHARE = 1 / 2
GROWTH = 5 / 4


@dataclass
class Pace:
    """The size of the next claim. Told of every batch; read by the claiming thread, which needs no lock for one int."""

    drain_size: int = 256  # the most, as configured
    lease_ms: float = 30_000.0
    ms_a_ticket: float = 0.0  # of the last batch that had any; 0 before the first
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.drain_size

    def note(self, claimed: int, tickets: int, took_ms: float, margin_ms: float, *, fenced: bool) -> None:
        """Learn from a batch of `tickets`, out of a claim of `claimed`: how long it took, what its lease had left then.

        Only a claim as large as allowed, and still in good time, is a reason to allow larger ones.
        """
        if tickets:
            self.ms_a_ticket = took_ms / tickets
        if fenced or margin_ms < BAD_MARGIN * self.lease_ms:
            self.size = max(1, min(self.size // 2, self._done_in_time()))
        elif claimed >= self.size and margin_ms >= GOOD_MARGIN * self.lease_ms:
            self.size = min(self.drain_size, math.ceil(self.size * GROWTH))

    def _done_in_time(self) -> int:
        if not self.ms_a_ticket:
            return self.size
        return int(min(self.size, EXPECTED_SHARE * self.lease_ms / self.ms_a_ticket))
