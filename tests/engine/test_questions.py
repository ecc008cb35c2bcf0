"""Several questions in one pass: branches behind the same ticket."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from worker.engine import Classifier
from worker.engine.task import Task, check_task
from worker.errors import ConfigError

Tiny = Callable[..., str]

TRIAGE = Task(
    name="triage",
    instruction="Sort each support ticket.",
    labels={"billing": "", "technical": "", "account": ""},
    questions={"urgency": {"high": "money or data at risk", "low": ""}, "mood": {"angry": "", "calm": ""}},
)


def load(model: str, strategy: str) -> Classifier:
    """The task with a tiny model in float32."""
    return Classifier.load(TRIAGE, model, strategy=strategy, dtype="float32", threads=1, tokens=512)


def test_all_questions_are_answered_in_one_pass(tiny: Tiny, tickets: list[str]) -> None:
    """Each question's probabilities add up to one, and the model is run once for a batch."""
    classifier = load(tiny("llama"), "packed")
    calls: list[Any] = []
    classifier.loaded.model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    scored = classifier.score(classifier.tokenise(tickets[:5]))
    assert len(calls) == 1
    parts = torch.split(torch.tensor(scored.log_probs).exp(), classifier.sizes, dim=1)
    assert [part.shape[1] for part in parts] == [3, 2, 2]
    for part in parts:
        torch.testing.assert_close(part.sum(dim=1), torch.ones(5))


@pytest.mark.parametrize("strategy", ["packed", "padded"])
def test_a_question_does_not_see_the_others(strategy: str, tiny: Tiny, tickets: list[str]) -> None:
    """Every answer is the one that stock transformers gives when it is asked that question alone, step by step."""
    model = tiny("llama")
    texts = [*tickets[:6], ""]
    together, apart = load(model, strategy).classify(texts), load(model, "single").classify(texts)
    for one, other in zip(together, apart, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=1e-3)
        assert list(one.answers) == list(other.answers) == ["urgency", "mood"]
        for question in one.answers:
            assert one.answers[question].scores == pytest.approx(other.answers[question].scores, abs=1e-3)


def test_an_answer_is_that_of_the_whole_text(tiny: Tiny, tickets: list[str]) -> None:
    """By hand: prefix, ticket, the question's cue and the label's first token, with nothing of ours but the ids."""
    classifier = load(tiny("llama"), "packed")
    tokenizer, prompter = classifier.loaded.tokenizer, classifier.prompter
    classifier.loaded.model.set_attn_implementation("sdpa")
    (prompt,) = prompter.prompts(tickets[:1])
    cue = tokenizer("\nMood:", add_special_tokens=False)["input_ids"]
    firsts = [ids[0] for ids in prompter.label_ids["mood"].values()]
    with torch.inference_mode():
        logits = classifier.loaded.model(torch.tensor([[*prompter.prefix_ids, *prompt.ids, *cue]])).logits[0, -1]
    classifier.loaded.model.set_attn_implementation("lengthwise_packed")
    found = classifier.classify(tickets[:1])[0].answers["mood"].scores
    if len({*firsts}) == len(firsts):
        assert list(found.values()) == pytest.approx(logits[firsts].log_softmax(dim=0).tolist(), abs=1e-3)
    else:
        pytest.fail("the two moods begin alike to this tokenizer: choose others")


def test_each_question_may_abstain(tiny: Tiny, tickets: list[str]) -> None:
    """The limit holds for every answer apart, and scores are there all the same."""
    result = load(tiny("llama"), "packed").classify(tickets[:1], min_confidence=1.0)[0]
    assert result.label is None
    assert [answer.label for answer in result.answers.values()] == [None, None]
    assert set(result.answers["mood"].scores) == {"angry", "calm"}


@pytest.mark.parametrize(
    ("questions", "says"),
    [
        ({"category": {"a": "", "b": ""}}, "is the question 'category'"),
        ({"mood": {"calm": ""}}, r"two labels under \[questions.mood\]"),
        ({" mood": {"a": "", "b": ""}}, "question ' mood' is empty, or has white space"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(questions: dict[str, dict[str, str]], says: str) -> None:
    """The message names the question."""
    task = Task(name="t", instruction="i", labels={"a": "", "b": ""}, questions=questions)
    with pytest.raises(ConfigError, match=says):
        check_task(task, "t")
