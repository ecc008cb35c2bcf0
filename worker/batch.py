"""One batch scored: prompts in, labels and dead letters out. No queue, no torch."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from wire import DeadLetter, Label
from worker.engine.certify import best
from worker.engine.plan import Batch
from worker.intake import Load, bury
from worker.ports import Classifier

log = structlog.get_logger("lengthwise.batch")


@dataclass(frozen=True)
class ScoredBatch:
    """Labels and dead letters under their tickets' indexes in the claim."""

    labels: Sequence[tuple[int, str | None, Label]]
    dead: Sequence[tuple[int, DeadLetter]]
    tokens_computed: int


def score_batch(load: Load, batch: Batch, classifier: Classifier, worker: str, name: str) -> ScoredBatch:
    """Score every row of the batch once and give each of its tickets the row's label."""
    log_probs, tokens_computed = _score_rows(load, [row[0] for row in batch.rows], classifier)
    labels: list[tuple[int, str | None, Label]] = []
    dead: list[tuple[int, DeadLetter]] = []
    for row, scores in zip(batch.rows, log_probs, strict=True):
        for position in row:
            claimed, ticket = load.tickets[position]
            if isinstance(scores, _Failure):
                dead.append((claimed.index, bury(claimed, scores.reason, scores.detail, worker)))
            else:
                label = _label(load, position, scores, classifier, worker, name)
                labels.append((claimed.index, ticket.id if ticket.has_own_id else None, label))
    return ScoredBatch(labels, dead, tokens_computed)


@dataclass(frozen=True)
class _Failure:
    """Why a ticket got no scores."""

    reason: str
    detail: str


def _score_rows(
    load: Load, positions: Sequence[int], classifier: Classifier
) -> tuple[list[Sequence[float] | _Failure], int]:
    """Scores of each prompt. A batch that fails is halved until the ticket at fault is alone."""
    if not positions:
        return [], 0
    try:
        scored = classifier.score([load.prompts[position] for position in positions])
    except Exception as error:  # noqa: BLE001 - whatever a model raises is that ticket's fate, not the worker's
        # The type alone: a message might quote the ticket.
        kind = type(error).__name__
        log.warning("scoring failed", tickets=len(positions), error=kind)
        if len(positions) == 1:
            return [_Failure("engine_error", f"scoring failed with {kind}")], len(load.prompts[positions[0]].ids)
        half = len(positions) // 2
        first, first_tokens = _score_rows(load, positions[:half], classifier)
        second, second_tokens = _score_rows(load, positions[half:], classifier)
        return [*first, *second], first_tokens + second_tokens
    return [_checked(scores) for scores in scored.log_probs], scored.tokens_computed


def _checked(scores: Sequence[float]) -> Sequence[float] | _Failure:
    # -inf is a probability of zero and fine, as long as not every label has it.
    if any(math.isnan(score) or score == math.inf for score in scores) or max(scores) == -math.inf:
        return _Failure("non_finite", "the model gave scores that are no numbers")
    return scores


def _label(
    load: Load, position: int, scores: Sequence[float], classifier: Classifier, worker: str, batch: str
) -> Label:
    claimed, ticket = load.tickets[position]
    winner = best(scores)
    runner_up = max((score for index, score in enumerate(scores) if index != winner), default=-math.inf)
    identity = classifier.identity
    return Label(
        id=ticket.id,
        label=classifier.labels[winner],
        confidence=math.exp(scores[winner]),
        margin=_finite(scores[winner] - runner_up),
        scores={label: _finite(score) for label, score in zip(classifier.labels, scores, strict=True)},
        model=identity.model,
        task=identity.task,
        batch=batch,
        worker=worker,
        attempt=claimed.crashes + 1,
        truncated_tokens=load.prompts[position].truncated,
        pushed_at_ms=ticket.pushed_at_ms,
        labelled_at_ms=int(time.time() * 1000),
    )


def _finite(value: float) -> float:
    """JSON has no infinity; the largest float stands for it."""
    return max(-1.7e308, min(1.7e308, value))
