"""The Lua verbs as Python functions: arguments in, plain values out. No patience, no state."""

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
import redis

from wire import Keys
from wire.records import to_fields
from worker.ports import Answer, Claim, Claimed, Outcome, Receipt

if TYPE_CHECKING:
    from redis.commands.core import Script

# The commit adds these to the report itself.
_FILLED_BY_COMMIT = (
    "published",
    "duplicates",
    "depth",
    "oldest_age_ms",
    "total_published",
    "total_duplicates",
    "total_dead",
    "total_batches",
)

# What the commit adds to the totals hash as the report has it.
_ADDED_TO_TOTALS = ("tokens_prompt", "tokens_computed", "fenced", "retried", "abstained")


class Verbs:
    """The scripts in `lua/`, one method a verb, over one client. Each is safe to repeat after a lost reply."""

    def __init__(self, client: "redis.Redis") -> None:
        self._redis = client
        self._scripts: dict[str, Script] = {
            verb: client.register_script(_source(verb))
            for verb in ("claim", "renew", "commit", "release", "reclaim", "replay")
        }

    def digests(self) -> dict[str, str]:
        """The SHA-1 by which the server's logs name a script -> its verb."""
        return {script.sha: verb for verb, script in self._scripts.items()}

    def claim(self, keys: Keys, claim_id: str, most: int, most_bytes: int, lease_ms: int) -> Claim:
        """Up to `most` tickets of together `most_bytes`, but at least one where there is one."""
        flat = self._run(
            "claim",
            keys,
            [keys.waiting, keys.claim(claim_id), keys.leases, keys.attempts, keys.commits],
            [claim_id, most, most_bytes, lease_ms],
        )
        tickets = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
        return Claim(claim_id, tuple(Claimed(*ticket) for ticket in tickets))

    def renew(self, keys: Keys, lease_ms: int, worker: str, state: bytes, claim_ids: Sequence[str]) -> list[bool]:
        """Prolong the leases, and tell for each whether it was still held."""
        held = self._run(
            "renew", keys, [keys.leases, keys.workers, keys.worker_states], [lease_ms, worker, state, *claim_ids]
        )
        return [flag == 1 for flag in held]

    def commit(self, keys: Keys, claim_id: str, outcome: Outcome, window_ms: int, lengths: "StreamLengths") -> Receipt:
        """Publish one batch. The report's batch id is the commit's: the same one again is ALREADY."""
        answer, *counts = self._run(
            "commit",
            keys,
            [
                keys.claim(claim_id),
                keys.leases,
                keys.commits,
                keys.results,
                keys.metrics,
                keys.dead,
                keys.published,
                keys.attempts,
                keys.totals,
                keys.waiting,
            ],
            [
                *(claim_id, outcome.report.batch, window_ms, lengths.results, lengths.metrics, lengths.dead),
                *(_pack(outcome), lengths.results_age_ms, lengths.metrics_age_ms),
            ],
        )
        return Receipt(Answer(answer.decode()), *counts)

    def release(self, keys: Keys, claim_id: str) -> int:
        """Hand back what is owed; 0 if the claim is no longer held."""
        count: int = self._run(
            "release", keys, [keys.waiting, keys.claim(claim_id), keys.leases, keys.commits], [claim_id]
        )
        return count

    def expired(self, keys: Keys, most: int) -> list[str]:
        """Claims whose lease ran out by Redis' clock, the oldest first."""
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.time()
            pipeline.zrange(keys.leases, 0, most - 1, withscores=True)
            (seconds, micros), leases = pipeline.execute()
        now_ms = seconds * 1000 + micros // 1000
        return [claim_id.decode() for claim_id, deadline_ms in leases if deadline_ms < now_ms]

    def reclaim(
        self, keys: Keys, claim_id: str, crash_limit: int, worker: str, at_ms: int, dead_length: int
    ) -> tuple[int, int]:
        """Take back an expired claim. Gives tickets handed back and tickets buried."""
        back, buried = self._run(
            "reclaim",
            keys,
            [
                keys.waiting,
                keys.claim(claim_id),
                keys.leases,
                keys.attempts,
                keys.dead,
                keys.totals,
                keys.commits,
            ],
            [claim_id, crash_limit, worker, at_ms, dead_length],
        )
        return back, buried

    def replay(self, keys: Keys, entry_ids: Sequence[str], max_depth: int) -> list[int]:
        """Put dead letters back; a `max_depth` of 0 is none.

        Gives how many were put back, were gone, had no payload, and were refused by `max_depth`.
        """
        counts: list[int] = self._run("replay", keys, [keys.dead, keys.waiting, keys.attempts], [max_depth, *entry_ids])
        return counts

    def _run(self, verb: str, keys: Keys, names: Sequence[str], args: Sequence[Any]) -> Any:
        return self._scripts[verb](keys=[*names, keys.never], args=args)


class StreamLengths(msgspec.Struct, frozen=True, kw_only=True):
    """How many entries each stream keeps, and for how long, about; 0 keeps all. Old ones go with the next commit."""

    results: int = 1_000_000
    metrics: int = 100_000
    dead: int = 0
    results_age_ms: int = 0
    metrics_age_ms: int = 0


def _source(verb: str) -> str:
    folder = resources.files("worker.queue") / "lua"
    return (folder / "common.lua").read_text("utf-8") + (folder / f"{verb}.lua").read_text("utf-8")


def _pack(outcome: Outcome) -> bytes:
    """The batch as MessagePack. Redis' own reader knows strings but not the byte type, so everything is a string."""
    report = outcome.report
    return msgspec.msgpack.encode(
        {
            "labels": [(index, own_id or False, to_fields(label)) for index, own_id, label in outcome.labels],
            "dead": [(index, to_fields(letter, skip={"payload"})) for index, letter in outcome.dead],
            "report": to_fields(report, skip=_FILLED_BY_COMMIT),
            "retry": outcome.retry,
            "totals": [part for name in _ADDED_TO_TOTALS for part in (name, getattr(report, name))],
        }
    )
