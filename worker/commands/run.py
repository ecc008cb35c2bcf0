"""A task run over texts, for commands that look at all scores at once."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.engine import Classifier


@dataclass(frozen=True)
class Ran:
    """The main question's scores of each text, `[texts, labels]`, and the time from texts to scores."""

    labels: tuple[str, ...]
    given: list[str]
    log_probs: list[list[float]]
    strategy: str
    seconds: float


def run_task(task: str, model: str, texts: Sequence[str], options: Mapping[str, Any]) -> Ran:
    """Load a classifier and label the texts with it."""
    classifier = Classifier.load(task, model, **options)
    classifier.classify(texts[:1])  # what is done once should not count
    began_s = time.perf_counter()
    found = classifier.classify(texts)
    seconds = time.perf_counter() - began_s
    log_probs = [list(one.scores.values()) for one in found]
    return Ran(classifier.labels, [str(one.label) for one in found], log_probs, classifier.identity.strategy, seconds)
