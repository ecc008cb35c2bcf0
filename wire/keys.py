"""Every Redis key, made from one queue name.

The list bears the queue's plain name and its companions the same name as a hash tag, so that all of one queue's
keys share one cluster slot (`tickets` and `{tickets}:results` hash alike) and one script may touch them all.
"""

import re
from dataclasses import dataclass

# Braces would move the hash tag, and with it the slot; white space and control characters break every tool; and
# a lone surrogate, which is what Python makes of a command line that is no UTF-8, cannot be sent at all.
_QUEUE_NAME = re.compile(r"[^\s{}\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,200}")


@dataclass(frozen=True)
class Keys:
    """The keys of one queue.

    Raises ValueError for a name that is empty, over 200 characters, or has braces, white space, control characters
    or lone surrogates.
    """

    queue: str

    def __post_init__(self) -> None:
        if not _QUEUE_NAME.fullmatch(self.queue):
            raise ValueError(
                f"queue name {self.queue!r}: expected 1-200 characters without braces, white space or controls"
            )

    @property
    def waiting(self) -> str:
        """List of waiting tickets, oldest at the head. Anyone pushes, `claim` pops; lives until drained."""
        return self.queue

    def claim(self, claim_id: str) -> str:
        """Hash: index -> raw payload, what one claim still owes. Written by claim, emptied by commit or release."""
        return self._companion(f"claim:{claim_id}")

    @property
    def leases(self) -> str:
        """Sorted set: claim id -> deadline (Redis' time, ms). A claim id that is here is alive: this is the fence."""
        return self._companion("leases")

    @property
    def commits(self) -> str:
        """Sorted set: commit id -> time (ms). Lets a repeated commit be told from a fenced one; kept an hour."""
        return self._companion("commits")

    @property
    def results(self) -> str:
        """Stream, one entry a ticket (`records.Label`). Written by commit, trimmed to a length the user sets."""
        return self._companion("results")

    @property
    def metrics(self) -> str:
        """Stream, one entry a batch (`records.BatchReport`). Written by commit, trimmed likewise."""
        return self._companion("metrics")

    @property
    def totals(self) -> str:
        """Hash: counter -> sum since the queue began (`records.Totals`). Written by commit and reclaim; kept."""
        return self._companion("totals")

    @property
    def dead(self) -> str:
        """Stream of tickets that got no label (`records.DeadLetter`). Written by commit and reclaim; kept."""
        return self._companion("dead")

    @property
    def published(self) -> str:
        """Sorted set: ticket id -> time (ms). An id is published once inside the window; older ones are dropped."""
        return self._companion("published")

    @property
    def attempts(self) -> str:
        """Hash: SHA-1 of a payload -> crashes it was in, and `errors:` + SHA-1 -> errors raised over it.

        Crashes are counted by reclaim, errors by commit; commit clears both.
        """
        return self._companion("attempts")

    @property
    def workers(self) -> str:
        """Sorted set: worker name -> last heartbeat (Redis' time, ms). Written by every renew; dropped after a day."""
        return self._companion("workers")

    @property
    def worker_states(self) -> str:
        """Hash: worker name -> what it is doing, as JSON. Written and dropped with `workers`."""
        return self._companion("worker-states")

    @property
    def never(self) -> str:
        """No key: nobody writes it. Named with every script that several keys are for.

        While a cluster moves a slot, a script that removes a key's last member cannot write the key again and fails
        halfway: a lease is lost, half a batch is visible. A key that is missing from the start keeps the node from
        running it at all (TRYAGAIN), until the slot has moved.
        """
        return self._companion("never")

    def _companion(self, name: str) -> str:
        return f"{{{self.queue}}}:{name}"
