"""A short campaign: what `make soak` does at length. And what poison alone does."""

import os
from dataclasses import replace

from tests.soak.campaign import Plan, run

SEED = int(os.environ.get("SOAK_SEED", "1"))
# One poison ticket among few, for one worker that nothing else harms.
POISON_ALONE = Plan(
    tickets=100,
    workers=1,
    seconds=1,
    seed=0,
    kill_every=1e9,
    stop_every=1e9,
    server_kills=0,
    server_freezes=0,
    hostile_sets=0,
    faulty=0.0,
    lease=0.6,
    drain_size=16,
)


def test_a_short_campaign() -> None:
    """Workers killed and stopped, connections cut, the server killed: the promise is kept, ticket for ticket.

    Each is published once or dead with a legal reason, no batch is halved, order is kept within a claim, nothing is
    left behind, the counts are those of the producer's receipts, and a worker's memory does not grow.
    """
    outcome = run(
        Plan(
            6_000,
            workers=5,
            seconds=12,
            seed=SEED,
            server_kills=2,
            server_freezes=1,
            hostile_sets=1,
            drain_size=64,
            faulty=0.06,
        )
    )
    assert outcome.faults == [], outcome.figures
    assert outcome.figures["workers killed"] == 24
    assert outcome.figures["server restarts"] == 2
    assert outcome.figures["tickets reclaimed"] > 0


def test_poison_alone_is_buried() -> None:
    """A ticket that kills its worker is buried alone: no neighbour in the queue, nor what its worker holds beside."""
    innocents = 0.0
    for seed in range(3):
        outcome = run(replace(POISON_ALONE, seed=seed))
        assert outcome.faults == []
        assert outcome.figures["workers killed by poison"] > 0
        innocents += outcome.figures["dead letters of innocents killed three times"]
    assert innocents == 0
