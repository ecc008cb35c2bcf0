"""The facts of a batch, made into its metrics entry: buckets, the token ledger, waits."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import BatchReport, DeadLetter, Label
from worker.engine.plan import Batch, Limits, plan
from worker.engine.prompt import Prompt
from worker.observe.report import BUCKET_LIMITS_MS, Ledger, Place, Timing, account, bucket_counts, build_report
from worker.ports import Costs, Identity

LATENCIES = st.lists(st.integers(-(2**63), 2**64) | st.floats(-1e3, 1e6), max_size=40)
TOKENS = st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), max_size=30)

CLAIMED_AT_MS, DONE_AT_MS = 1_000_000, 1_000_600

COSTS = Costs(prefix_tokens=16, reuses_prefix=True)


def label(name: str | None, pushed_at_ms: int | None = None) -> Label:
    """A label of which only its name, None for one that abstained, and push time matter."""
    return Label(
        id="1",
        label=name,
        confidence=1.0,
        margin=0.0,
        scores={},
        abstained=int(name is None),
        model="m",
        task="t",
        batch="b",
        worker="w",
        pushed_at_ms=pushed_at_ms,
        labelled_at_ms=0,
    )


LETTER = DeadLetter(payload=b"", reason="not_json", detail="", attempts=1, at_ms=0, worker="w")


def report(
    labels: Sequence[Label], dead: Sequence[DeadLetter] = (), ledger: Ledger | None = None, retried: int = 0
) -> BatchReport:
    """The entry of a batch with these labels and dead letters."""
    return build_report(
        Place("c.1", "w", seq=7, reclaimed=3, fenced=2),
        Identity("m", "t", "padded", "exact"),
        "full",
        labels,
        dead,
        ledger or Ledger(0, 0, 0, 0, 0),
        Timing(CLAIMED_AT_MS, DONE_AT_MS, tokenise_ms=1.23456, score_ms=2.0, publish_ms=3.0, lease_margin_ms=-4.5),
        retried,
    )


def test_bucket_limits_never_change() -> None:
    """Powers of two from 10 ms, and one more for the rest: workers of all versions can be added up."""
    assert BUCKET_LIMITS_MS[:4] == (10, 20, 40, 80)
    assert (len(BUCKET_LIMITS_MS), BUCKET_LIMITS_MS[-1]) == (16, 327_680)
    assert bucket_counts([]) == [0] * 17


@pytest.mark.parametrize(
    ("latency_ms", "bucket"), [(-5, 0), (0, 0), (10, 0), (10.001, 1), (20, 1), (21, 2), (327_680, 15), (327_681, 16)]
)
def test_a_limit_belongs_to_its_bucket(latency_ms: float, bucket: int) -> None:
    """Limits are inclusive, clocks that disagree fall into the first bucket, what is too slow for all into the last."""
    counts = bucket_counts([latency_ms])
    assert counts.index(1) == bucket
    assert sum(counts) == 1


@given(LATENCIES, LATENCIES)
def test_buckets_can_be_added_up(one: list[float], other: list[float]) -> None:
    """Every latency is in exactly one bucket, and the sum of two histograms is the histogram of both."""
    both = bucket_counts([*one, *other])
    assert sum(both) == len(one) + len(other)
    assert [a + b for a, b in zip(bucket_counts(one), bucket_counts(other), strict=True)] == both
    for limit, below in zip(BUCKET_LIMITS_MS, (sum(both[: end + 1]) for end in range(16)), strict=True):
        assert below == sum(latency <= limit for latency in [*one, *other])


@given(TOKENS, st.integers(0, 50), st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_the_ledger_adds_up(ids: list[tuple[int, ...]], prefix: int, rows: int, budget: int, padded: bool) -> None:
    """Computed = prompt - saved prefix - saved duplicates + padding, each counted here another way.

    Packed, padding is none and what it saved is known; padded, it is what fills the rows and nothing was saved.
    """
    prompts = [Prompt(tokens) for tokens in ids]
    for batch in plan(ids, Limits(rows, budget, padded)):
        lengths = [len(prompts[row[0]].ids) for row in batch.rows]
        rectangle, real = max(lengths) * len(lengths), sum(lengths)
        computed = rectangle if padded else real
        ledger = account(batch, prompts, Costs(prefix, reuses_prefix=True), computed)
        assert ledger.computed == computed
        assert ledger.prompt == sum(prefix + len(prompts[index].ids) for index in batch.indexes)
        assert ledger.saved_prefix == prefix * len(lengths)
        assert ledger.saved_duplicates == ledger.prompt - ledger.saved_prefix - real
        assert computed == ledger.prompt - ledger.saved_prefix - ledger.saved_duplicates + ledger.padding
        assert ledger.padding == computed - real
        assert ledger.saved_packing == rectangle - computed
        assert 0 <= ledger.padding_ratio <= 1


def test_a_duplicate_saves_its_whole_prompt() -> None:
    """Of three equal tickets one is run: two instructions and two tickets are saved, by hand: 2 x (16 + 5)."""
    ledger = account(Batch(((0, 1, 2), (3,)), "drained"), [Prompt((1,) * 5)] * 3 + [Prompt((2,) * 7)], COSTS, 14)
    assert ledger == Ledger(prompt=3 * 21 + 23, computed=14, saved_prefix=32, saved_duplicates=42, saved_packing=0)
    assert (ledger.padding, ledger.padding_ratio) == (2, 2 / 14)


def test_one_pass_a_ticket_saves_and_pads_nothing() -> None:
    """Where the instruction is run for every ticket it is no saving, and long labels' tokens are no padding."""
    prompts = [Prompt((1,) * 5), Prompt((2,) * 7)]
    costs = Costs(prefix_tokens=16, reuses_prefix=False, branch_tokens=3)
    ledger = account(Batch(((0,), (1,)), "drained"), prompts, costs, 2 * (16 + 3) + 12)
    assert (ledger.prompt, ledger.saved_prefix, ledger.padding) == (50, 0, 0)


def test_an_empty_batch_has_an_empty_ledger() -> None:
    """A claim of rejects alone divides nothing by zero."""
    ledger = account(Batch((), "drained"), [], COSTS, 0)
    assert ledger == Ledger(0, 0, 0, 0, 0)
    assert ledger.padding_ratio == 0.0


def test_wait_is_the_longest_from_push_to_claim() -> None:
    """The oldest ticket that tells its push time counts; the time in the model does not."""
    found = report([label("a", CLAIMED_AT_MS - 40), label("a", CLAIMED_AT_MS - 900), label("b")])
    assert found.wait_ms == 900.0
    assert sum(found.latency_buckets) == 2
    assert found.latency_buckets == bucket_counts([640, 1500])


@pytest.mark.parametrize(
    ("pushed", "wait_ms"), [([None], None), ([], None), ([CLAIMED_AT_MS + 5000], 0.0), ([None, -(2**63)], 2.0**63)]
)
def test_wait_is_never_wrong_rather_than_unknown(pushed: list[int | None], wait_ms: float | None) -> None:
    """No push time, no wait; a clock ahead of ours means none, not a negative one; a mad time breaks nothing."""
    found = report([label("a", at_ms) for at_ms in pushed]).wait_ms
    assert found == (None if wait_ms is None else pytest.approx(wait_ms))


def test_an_abstained_ticket_is_counted_apart() -> None:
    """It is part of the size and of the latencies, and no label is counted for it."""
    found = report([label("b", CLAIMED_AT_MS), label(None, CLAIMED_AT_MS), label(None)], [LETTER])
    assert (found.size, found.abstained, found.labels, found.dead) == (4, 2, {"b": 1}, 1)
    assert sum(found.latency_buckets) == 2
    assert report([label("b")]).abstained == 0


def test_the_report_tells_the_facts() -> None:
    """Labels are counted by name, dead and retried into the size; the rest is passed on, the commit's part open."""
    found = report([label("b"), label("a"), label("b")], [LETTER], Ledger(100, 50, 60, 0, 7), retried=2)
    assert (found.size, found.dead, found.retried, found.labels) == (6, 1, 2, {"a": 1, "b": 2})
    assert (found.batch, found.worker, found.seq, found.reclaimed, found.fenced) == ("c.1", "w", 7, 3, 2)
    assert (found.model, found.task, found.strategy, found.certificate) == ("m", "t", "padded", "exact")
    assert (found.tokens_prompt, found.tokens_computed, found.tokens_saved_prefix) == (100, 50, 60)
    assert (found.tokens_padding, found.padding_ratio, found.tokens_saved_packing) == (10, 0.2, 7)
    assert (found.at_ms, found.tokenise_ms, found.score_ms, found.publish_ms) == (DONE_AT_MS, 1.235, 2.0, 3.0)
    assert (found.lease_margin_ms, found.closed) == (-4.5, "full")
    assert (found.published, found.depth, found.total_batches, found.oldest_age_ms) == (0, 0, 0, None)
