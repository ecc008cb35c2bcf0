"""One batch scored: prompts in, labels and dead letters out. No queue, no torch."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from wire import DeadLetter, Label
from worker.answers import answers
from worker.engine.plan import Batch
from worker.intake import Load, bury
from worker.ports import Classifier

# What torch, its backends and the C library say. A pass that ends so may be too large.
_NO_MEMORY = ("out of memory", "not enough memory", "allocate memory")

log = structlog.get_logger("lengthwise.batch")


@dataclass(frozen=True)
class ScoredBatch:
    """Labels and dead letters under their tickets' indexes in the claim, and the indexes of those to be tried again."""

    labels: Sequence[tuple[int, str | None, Label]]
    dead: Sequence[tuple[int, DeadLetter]]
    retry: Sequence[int]
    tokens_computed: int


@dataclass(frozen=True)
class Scorer:
    """Who labels, and how: no label under `min_confidence`, and a burial at a ticket's `error_limit`-th error."""

    classifier: Classifier
    worker: str
    error_limit: int = 1
    min_confidence: float = 0.0


def score_batch(load: Load, batch: Batch, scorer: Scorer, name: str) -> ScoredBatch:
    """Score every row of the batch once and give each of its tickets the row's label."""
    scores_of, tokens_computed = _score_rows(load, [row[0] for row in batch.rows], scorer.classifier)
    labels: list[tuple[int, str | None, Label]] = []
    dead: list[tuple[int, DeadLetter]] = []
    retry: list[int] = []
    for row in batch.rows:
        scores = scores_of[row[0]]
        for position in row:
            claimed, ticket = load.tickets[position]
            if not isinstance(scores, _Failure):
                label = _label(load, position, scores, scorer, name)
                labels.append((claimed.index, ticket.id if ticket.has_own_id else None, label))
            elif claimed.errors + 1 < scorer.error_limit:
                retry.append(claimed.index)
            else:
                dead.append((claimed.index, bury(claimed, scores.reason, scores.detail, scorer.worker)))
    return ScoredBatch(labels, dead, retry, tokens_computed)


@dataclass(frozen=True)
class _Failure:
    """Why a ticket got no scores."""

    reason: str
    detail: str


def _score_rows(
    load: Load, positions: Sequence[int], classifier: Classifier
) -> tuple[dict[int, Sequence[float] | _Failure], int]:
    """The scores of each prompt, under its position. One pass as planned; several if batches were shrunk since."""
    found: dict[int, Sequence[float] | _Failure] = {}
    tokens_computed = 0
    for part in classifier.plan([load.prompts[position] for position in positions]):
        together = [positions[index] for index in part.indexes]
        scores, tokens = _score_together(load, together, classifier)
        found.update(zip(together, scores, strict=True))
        tokens_computed += tokens
    return found, tokens_computed


def _score_together(
    load: Load, positions: Sequence[int], classifier: Classifier
) -> tuple[list[Sequence[float] | _Failure], int]:
    """Scores of each prompt, in their order. A batch that fails is halved until the ticket at fault is alone."""
    prompts = [load.prompts[position] for position in positions]
    try:
        scored = classifier.score(prompts)
    except Exception as error:  # noqa: BLE001 - whatever a model raises is that ticket's fate, not the worker's
        # The type alone: a message might quote the ticket.
        kind, no_memory = type(error).__name__, _is_out_of_memory(error)
        log.warning("scoring failed", tickets=len(positions), error=kind, out_of_memory=no_memory)
    else:
        return [_checked(scores) for scores in scored.log_probs], scored.tokens_computed
    # Not inside the handler: as long as it holds the error, the failed pass's tensors stay in memory.
    if len(positions) == 1:
        return [_Failure("engine_error", f"scoring failed with {kind}")], len(prompts[0].ids)
    half = len(positions) // 2
    first, first_tokens = _score_together(load, positions[:half], classifier)
    second, second_tokens = _score_together(load, positions[half:], classifier)
    scores = [*first, *second]
    # A ticket that fails alone as well is at fault itself, and no reason to score all others in small batches.
    if no_memory and not any(isinstance(score, _Failure) for score in scores):
        classifier.shrink(prompts)
    return scores, first_tokens + second_tokens


def _is_out_of_memory(error: Exception) -> bool:
    """By name and message, since torch is not known here: its own class, or a plain RuntimeError on a CPU."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"}:
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)


def _checked(scores: Sequence[float]) -> Sequence[float] | _Failure:
    # -inf is a probability of zero and fine, as long as not every label has it.
    if any(math.isnan(score) or score == math.inf for score in scores) or max(scores) == -math.inf:
        return _Failure("non_finite", "the model gave scores that are no numbers")
    return scores


def _label(load: Load, position: int, scores: Sequence[float], scorer: Scorer, batch: str) -> Label:
    claimed, ticket = load.tickets[position]
    identity = scorer.classifier.identity
    (_, main), *others = answers(scorer.classifier.questions, scores, scorer.min_confidence).items()
    return Label(
        id=ticket.id,
        label=main.label,
        confidence=main.confidence,
        margin=main.margin,
        scores=main.scores,
        abstained=int(main.label is None),
        answers=dict(others) or None,
        model=identity.model,
        task=identity.task,
        batch=batch,
        worker=scorer.worker,
        attempt=claimed.attempt,
        truncated_tokens=load.prompts[position].truncated,
        pushed_at_ms=ticket.pushed_at_ms,
        labelled_at_ms=int(time.time() * 1000),
    )
