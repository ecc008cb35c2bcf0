"""From scores to answers: the best label of each question, abstaining, and how both reach the streams."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from tests.worker.stubs import SURE, UNSURE, MemoryQueue, StubClassifier, tickets
from wire import Answer, BatchReport, Keys, Label
from worker.answers import answers
from worker.drain import Drain
from worker.engine.prompt import Prompt
from worker.ports import Scored
from worker.queue.claims import QueueSettings, RedisQueue
from worker.queue.streams import StreamReader, read_totals
from worker.stop import Stop

QUESTIONS = {"category": ("red", "blue", "other"), "urgent": ("yes", "no")}


def logs(*probabilities: float) -> list[float]:
    """Their logarithms."""
    return [math.log(one) if one else -math.inf for one in probabilities]


def test_each_question_has_its_own_scores() -> None:
    """The scores lie side by side in the questions' order; each answer is by its own part of them."""
    found = answers(QUESTIONS, logs(0.2, 0.7, 0.1, 0.4, 0.6))
    assert list(found) == ["category", "urgent"]
    assert (found["category"].label, found["urgent"].label) == ("blue", "no")
    assert found["category"].confidence == pytest.approx(0.7)
    assert found["urgent"].margin == pytest.approx(math.log(0.6 / 0.4))
    assert found["urgent"].scores == pytest.approx({"yes": math.log(0.4), "no": math.log(0.6)})


def test_an_answer_that_is_not_probable_enough_has_no_label() -> None:
    """Each question is judged by itself. What is left out is the label alone: scores and confidence stay."""
    scores = logs(0.2, 0.7, 0.1, 0.4, 0.6)
    sure, unsure = answers(QUESTIONS, scores, 0.65).values()
    assert (sure.label, unsure.label) == ("blue", None)
    plain = answers(QUESTIONS, scores)["urgent"]
    assert msgspec.structs.replace(unsure, label="no") == plain


def test_the_limit_itself_is_enough() -> None:
    """A confidence of exactly the limit keeps its label; zero, the default, keeps every label."""
    scores = logs(0.25, 0.5, 0.25)
    confidence = answers({"q": "abc"}, scores)["q"].confidence
    assert answers({"q": "abc"}, scores, confidence)["q"].label == "b"
    assert answers({"q": "abc"}, scores, math.nextafter(confidence, 1))["q"].label is None
    assert answers({"q": "ab"}, logs(0.5, 0.5), 0.0)["q"].label == "a"


def test_answers_are_json() -> None:
    """A probability of zero is a large negative number: JSON has no infinity. A tie goes to the first label."""
    certain, tied = answers(QUESTIONS, logs(0, 1, 0, 0.5, 0.5)).values()
    assert (certain.confidence, tied.label, tied.margin) == (1.0, "yes", 0.0)
    assert msgspec.json.decode(msgspec.json.encode(certain), type=Answer) == certain
    assert all(map(math.isfinite, (certain.margin, *certain.scores.values())))


@dataclass
class TwoQuestions(StubClassifier):
    """The stub with a second question, whose answer is `yes` for a text with an exclamation mark."""

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        """The stub's scores, and two more beside them."""
        scored = super().score(prompts)
        urgent = [logs(0.9, 0.1) if 33 in prompt.ids else logs(0.45, 0.55) for prompt in prompts]
        rows = zip(scored.log_probs, urgent, strict=True)
        return Scored([[*one, *more] for one, more in rows], scored.tokens_computed)


def test_a_worker_publishes_answers_and_abstains(redis_url: str, redis_client: Any) -> None:
    """Through a real server: an entry under the limit has no `label` field but its scores; it is counted, not lost.

    The further questions' answers stand beside it, each with or without a label of its own.
    """
    keys, stop = Keys("tickets"), Stop()
    redis_client.rpush(keys.waiting, *tickets("red!", "tie", "blue"))
    with RedisQueue(redis_url, keys, "w", QueueSettings(), stop) as queue:
        drain = Drain(queue, TwoQuestions(questions=dict(QUESTIONS)), "w", stop, burst=True, min_confidence=0.6)
        assert drain.run().published == 3
    labels = {label.id: label for label in StreamReader(redis_client, keys.results, Label).available()}
    assert {name: (label.label, label.abstained) for name, label in labels.items()} == {
        "red!": ("red", 0),
        "tie": (None, 1),
        "blue": ("blue", 0),
    }
    assert labels["tie"].confidence == pytest.approx(0.45)
    assert labels["tie"].scores["blue"] == labels["tie"].scores["other"] > labels["tie"].scores["red"] == UNSURE
    more = {name: label.answers for name, label in labels.items()}
    urgent = {name: one["urgent"].label for name, one in more.items() if one}
    assert urgent == {"red!": "yes", "tie": None, "blue": None}
    entries = [fields for _, fields in redis_client.xrange(keys.results)]
    assert [b"label" in fields for fields in entries if fields[b"id"] == b"tie"] == [False]
    reports = list(StreamReader(redis_client, keys.metrics, BatchReport).available())
    assert sum(report.abstained for report in reports) == read_totals(redis_client, keys).abstained == 1
    assert all(report.size == sum(report.labels.values()) + report.abstained for report in reports)


def test_without_a_limit_nothing_abstains() -> None:
    """The default publishes the best label however unsure, and a task of one question has no further answers."""
    queue = MemoryQueue(deque(tickets("tie", "red")))
    Drain(queue, StubClassifier(), "w", Stop(), burst=True).run()
    assert {label.label for label in queue.labels} == {"blue", "red"}
    assert {(label.abstained, label.answers) for label in queue.labels} == {(0, None)}
    assert max(label.scores["red"] for label in queue.labels) == SURE
