"""Scores -> answers: the best label of each question, how sure, and whether to say it at all (pure)."""

import math
from collections.abc import Mapping, Sequence

from wire import Answer
from worker.engine.certify import best


def answers(
    questions: Mapping[str, Sequence[str]], log_probs: Sequence[float], min_confidence: float = 0.0
) -> dict[str, Answer]:
    """Of each question with its labels the answer; `log_probs` are all questions' scores side by side, nats.

    An answer less probable than `min_confidence` has no label. Scores that are no numbers must not come here.
    """
    found, start = {}, 0
    for question, labels in questions.items():
        found[question] = _answer(labels, log_probs[start : start + len(labels)], min_confidence)
        start += len(labels)
    return found


def _answer(labels: Sequence[str], log_probs: Sequence[float], min_confidence: float) -> Answer:
    winner = best(log_probs)
    runner_up = max((score for index, score in enumerate(log_probs) if index != winner), default=-math.inf)
    confidence = math.exp(log_probs[winner])
    return Answer(
        label=labels[winner] if confidence >= min_confidence else None,
        confidence=confidence,
        margin=_finite(log_probs[winner] - runner_up),
        scores={label: _finite(score) for label, score in zip(labels, log_probs, strict=True)},
    )


def _finite(value: float) -> float:
    """JSON has no infinity; the largest float stands for it."""
    return max(-1.7e308, min(1.7e308, value))
