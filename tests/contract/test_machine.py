"""Any order of verbs by any workers, against a model of the list in a few lines of Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from worker.ports import Answer, Outcome

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

SLOTS = st.sampled_from("abc")


class Life(RuleBasedStateMachine):
    """Three claims at a time over one list. Every ticket has an id of its own.

    A claim that was handed back or taken over is over; its slot, of three, then goes to a claim with a new id.
    """

    desk: Desk

    @initialize()
    def begin(self) -> None:
        """An empty queue, and nothing known."""
        self.desk.redis.flushdb()
        self.pushed = 0
        self.waiting: list[bytes] = []
        self.owed: dict[str, dict[int, bytes]] = {}
        self.done: list[str] = []
        self.crashes: dict[bytes, int] = {}
        self.batches: list[tuple[str, Outcome]] = []
        self.ends = dict.fromkeys("abc", 0)

    @rule(count=st.integers(1, 6))
    def push(self, count: int) -> None:
        """New tickets come."""
        new = [b"t-%d" % number for number in range(self.pushed, self.pushed + count)]
        self.pushed += count
        self.waiting += new
        self.desk.push(*new)

    @rule(slot=SLOTS, most=st.integers(1, 5))
    def claim(self, slot: str, most: int) -> None:
        """A claim, or its repetition."""
        claim_id = self.id_of(slot)
        if claim_id not in self.owed:
            taken: list[bytes] = []
            room = most
            for payload in self.waiting:
                room = min(room, max(1, most >> self.crashes.get(payload, 0)))
                if len(taken) >= room:
                    break
                taken.append(payload)
            del self.waiting[: len(taken)]
            if taken:
                self.owed[claim_id] = dict(enumerate(taken, start=1))
        tickets = self.desk.claim(claim_id, most).tickets
        assert {ticket.index: ticket.payload for ticket in tickets} == self.owed.get(claim_id, {})
        assert [ticket.index for ticket in tickets] == sorted(ticket.index for ticket in tickets)
        assert all(ticket.crashes == self.crashes.get(ticket.payload, 0) for ticket in tickets)

    @rule(slot=SLOTS, most=st.integers(1, 5))
    def claim_late(self, slot: str, most: int) -> None:
        """A copy of a claim that is over comes late."""
        if self.ends[slot]:
            assert self.desk.claim(f"{slot}{self.ends[slot] - 1}", most).tickets == ()

    @rule(slot=SLOTS, data=st.data())
    def commit(self, slot: str, data: st.DataObject) -> None:
        """A batch of what a claim owes, or of a claim that was taken over."""
        claim_id = self.id_of(slot)
        owed = self.owed.get(claim_id, {})
        indexes = data.draw(st.sets(st.sampled_from(sorted(owed)), min_size=1)) if owed else {1}
        ids = {index: owed[index].decode() if owed else "nobody's" for index in sorted(indexes)}
        outcome = self.desk.outcome(f"batch-{len(self.batches)}-{claim_id}", ids)
        receipt = self.desk.commit(outcome, claim_id)
        if not owed:
            assert receipt.answer is Answer.FENCED
            return
        assert (receipt.answer, receipt.published, receipt.depth) == (Answer.OK, len(ids), len(self.waiting))
        self.batches.append((claim_id, outcome))
        for index, ticket_id in ids.items():
            self.crashes.pop(owed.pop(index), None)
            self.done.append(ticket_id)
        if not owed:
            del self.owed[claim_id]

    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        """A batch that was done, its reply having been lost."""
        if self.batches:
            claim_id, outcome = data.draw(st.sampled_from(self.batches))
            assert self.desk.commit(outcome, claim_id).answer is Answer.ALREADY

    @rule(slot=SLOTS)
    def release(self, slot: str) -> None:
        """A hand-back, perhaps of nothing."""
        claim_id = self.id_of(slot)
        back = list(self.owed.pop(claim_id, {}).values())
        self.waiting[:0] = back
        assert self.desk.release(claim_id) == len(back)
        self.ends[slot] += bool(back)

    @rule(slot=SLOTS, expired=st.booleans(), renewed=st.booleans())
    def reclaim(self, slot: str, expired: bool, renewed: bool) -> None:
        """A reaper comes by, in vain unless the lease ran out and was not renewed."""
        claim_id = self.id_of(slot)
        held = claim_id in self.owed
        if expired and held:
            self.desk.expire(claim_id)
        if renewed:
            assert self.desk.renew(claim_id) == [held]
        back = list(self.owed.pop(claim_id).values()) if held and expired and not renewed else []
        for payload in back:
            self.crashes[payload] = self.crashes.get(payload, 0) + 1
        self.waiting[:0] = back
        assert self.desk.reclaim(claim_id, crash_limit=1000) == (len(back), 0)
        self.ends[slot] += bool(back)

    def id_of(self, slot: str) -> str:
        """The claim id that is in use there."""
        return f"{slot}{self.ends[slot]}"

    @invariant()
    def order_is_kept(self) -> None:
        """The list is the model's, ticket for ticket."""
        assert self.desk.waiting() == self.waiting

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        """Every ticket is waiting, owed or published, at one place only."""
        stored = {name: self.desk.redis.hgetall(self.desk.keys.claim(name)) for name in map(self.id_of, "abc")}
        owed = {claim_id: {int(i): p for i, p in fields.items()} for claim_id, fields in stored.items() if fields}
        assert owed == self.owed
        assert set(self.desk.leases()) == set(self.owed)
        everywhere = [*self.desk.waiting(), *(payload for fields in owed.values() for payload in fields.values())]
        published = [fields[b"id"].decode() for _, fields in self.desk.redis.xrange(self.desk.keys.results)]
        assert published == self.done
        assert sorted([*(payload.decode() for payload in everywhere), *published]) == sorted(
            f"t-{number}" for number in range(self.pushed)
        )


def test_any_order_of_verbs(desk: Desk) -> None:
    """Whatever the order of claims, commits, hand-backs, crashes and renewals: none lost, none twice, order kept."""

    class LifeAtThisDesk(Life):
        pass

    LifeAtThisDesk.desk = desk
    run_state_machine_as_test(
        LifeAtThisDesk,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
