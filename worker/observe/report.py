"""The facts of one batch, made into one entry of the metrics stream (pure)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from wire import BatchReport, DeadLetter, Label
from worker.engine.plan import Batch
from worker.engine.prompt import Prompt
from worker.ports import Costs, Identity

# Upper limits of the latency buckets, shared by every worker so that histograms can be added up; one more bucket
# takes what is slower still.
BUCKET_LIMITS_MS = tuple(10 * 2**power for power in range(16))


@dataclass(frozen=True)
class Ledger:
    """Where the tokens of one batch went. `computed == prompt - saved_prefix - saved_duplicates + padding`."""

    prompt: int
    computed: int
    saved_prefix: int
    saved_duplicates: int
    saved_packing: int

    @property
    def padding(self) -> int:
        """Tokens the model ran that belong to no ticket."""
        return self.computed - (self.prompt - self.saved_prefix - self.saved_duplicates)

    @property
    def padding_ratio(self) -> float:
        """Padding as a share of what was computed; 0 for an empty batch."""
        return self.padding / self.computed if self.computed else 0.0


def account(batch: Batch, prompts: Sequence[Prompt], costs: Costs, tokens_computed: int) -> Ledger:
    """The token ledger of a batch, of which the model ran `tokens_computed` tokens."""
    own = [len(prompts[row[0]].ids) + costs.branch_tokens for row in batch.rows]
    distinct = [length + (0 if costs.reuses_prefix else costs.prefix_tokens) for length in own]
    repeated = [length + costs.prefix_tokens for length, row in zip(own, batch.rows, strict=True) for _ in row[1:]]
    padded = max(distinct, default=0) * len(distinct)
    return Ledger(
        prompt=sum(own) + costs.prefix_tokens * len(own) + sum(repeated),
        computed=tokens_computed,
        saved_prefix=costs.prefix_tokens * len(own) if costs.reuses_prefix else 0,
        saved_duplicates=sum(repeated),
        saved_packing=max(0, padded - tokens_computed),
    )


@dataclass(frozen=True)
class Timing:
    """When and how long, for one batch. Real times by the worker's clock, in ms since the epoch."""

    claimed_at_ms: int
    done_at_ms: int
    tokenise_ms: float
    score_ms: float
    publish_ms: float
    lease_margin_ms: float


@dataclass(frozen=True)
class Place:
    """Which batch this is: of which worker, and the how manieth."""

    batch: str
    worker: str
    seq: int
    reclaimed: int
    fenced: int = 0


def build_report(
    place: Place,
    identity: Identity,
    closed: str,
    labels: Sequence[Label],
    dead: Sequence[DeadLetter],
    ledger: Ledger,
    timing: Timing,
    retried: int = 0,
) -> BatchReport:
    """One metrics entry. What only the commit can know is left for it to fill in."""
    pushed = [label.pushed_at_ms for label in labels if label.pushed_at_ms is not None]
    return BatchReport(
        batch=place.batch,
        worker=place.worker,
        seq=place.seq,
        at_ms=timing.done_at_ms,
        size=len(labels) + len(dead) + retried,
        dead=len(dead),
        labels=dict(Counter(label.label for label in labels if label.label is not None)),
        abstained=sum(label.abstained for label in labels),
        tokens_prompt=ledger.prompt,
        tokens_computed=ledger.computed,
        tokens_padding=ledger.padding,
        tokens_saved_prefix=ledger.saved_prefix,
        tokens_saved_duplicates=ledger.saved_duplicates,
        tokens_saved_packing=ledger.saved_packing,
        padding_ratio=round(ledger.padding_ratio, 6),
        wait_ms=max(0.0, float(timing.claimed_at_ms - min(pushed))) if pushed else None,
        tokenise_ms=round(timing.tokenise_ms, 3),
        score_ms=round(timing.score_ms, 3),
        publish_ms=round(timing.publish_ms, 3),
        closed=closed,
        latency_buckets=bucket_counts([timing.done_at_ms - at_ms for at_ms in pushed]),
        lease_margin_ms=round(timing.lease_margin_ms, 3),
        reclaimed=place.reclaimed,
        fenced=place.fenced,
        retried=retried,
        model=identity.model,
        task=identity.task,
        strategy=identity.strategy,
        certificate=identity.certificate,
    )


def bucket_counts(latencies_ms: Sequence[float]) -> list[int]:
    """How many latencies fall into each bucket; negative ones (clocks that disagree) into the first."""
    counts = [0] * (len(BUCKET_LIMITS_MS) + 1)
    for latency_ms in latencies_ms:
        counts[sum(latency_ms > limit for limit in BUCKET_LIMITS_MS)] += 1
    return counts
