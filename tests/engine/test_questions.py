"""Several questions in one pass: branches behind the same ticket."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from worker.engine import Classifier
from worker.engine.catalogue import DEFAULT_MODEL
from worker.engine.fitter import fit_unlabelled
from worker.engine.model import load_tokenizer
from worker.engine.prompt import Prompter
from worker.engine.task import Task, check_task
from worker.engine.tree import ROOT, Branch, build_tree
from worker.errors import ConfigError

Tiny = Callable[..., str]
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
QUESTIONS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=3), st.lists(TOKENS, min_size=2, max_size=4, unique=True)
    ),
    min_size=1,
    max_size=3,
)

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
    parts = torch.split(torch.tensor(scored.log_probs).exp(), classifier.task.sizes, dim=1)
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


@given(QUESTIONS)
def test_a_question_has_the_tree_that_it_has_alone(questions: list[tuple[list[int], list[tuple[int, ...]]]]) -> None:
    """Side by side each question keeps its cue, its branchings and its labels' paths; none sees another's tokens."""
    branches = [Branch(cue, {str(number): ids for number, ids in enumerate(labels)}) for cue, labels in questions]
    together, read, path = build_tree(branches, 99), 0, 0
    for (cue, labels), branch in zip(questions, branches, strict=True):
        alone = build_tree([Branch((), branch.labels)], 99)
        for offset, node in enumerate(alone.reads):
            assert together.path_to(together.reads[read + offset]) == [*cue, *alone.path_to(node)]
            assert together.choices[read + offset] == alone.choices[offset]
        for ours, own in zip(together.paths[path : path + len(labels)], alone.paths, strict=True):
            assert [(at - read, choice) for at, choice in ours] == list(own)
        read, path = read + len(alone.reads), path + len(labels)
    assert (read, path) == (len(together.reads), len(together.paths))
    for node, seen in enumerate(together.sees()):
        assert [together.ids[other] for other, is_seen in enumerate(seen) if is_seen] == together.path_to(node)
    assert together.parents.count(ROOT) >= len(questions)


def test_a_chat_asks_each_question_by_name() -> None:
    """A chat's only question is the turn itself; of several each is asked, behind the template's own beginning."""
    tokenizer = load_tokenizer(DEFAULT_MODEL)
    several = Prompter(replace(TRIAGE, form="chat"), tokenizer, 4096)
    cues = [tokenizer.decode(several.tree.path_to(read)) for read in several.tree.reads]
    assert [cue.rpartition("\n")[2] for cue in cues] == ["Category:", "Urgency:", "Mood:"]
    assert all("<|im_start|>assistant" in cue for cue in cues)
    assert several.tail_ids == ()
    assert tokenizer.decode(Prompter(replace(TRIAGE, form="chat", questions={}), tokenizer, 4096).tail_ids).endswith(
        "\n"
    )


def test_a_prior_is_taken_off_each_question_apart(tiny: Tiny, tickets: list[str], tmp_path: Path) -> None:
    """Every question's probabilities add up to one again, and no label's mean lies far above its fellows'."""
    classifier = load(tiny("llama"), "packed")
    fit_unlabelled(classifier, tickets).save(tmp_path)
    fitted = Classifier.load(str(tmp_path), tiny("llama"), strategy="packed", threads=1, tokens=512)
    parts = [
        torch.split(torch.tensor(one.score(one.tokenise(tickets)).log_probs).exp(), one.task.sizes, dim=1)
        for one in (classifier, fitted)
    ]
    for before, after in zip(*parts, strict=True):
        torch.testing.assert_close(after.sum(dim=1), torch.ones(len(tickets)))
        assert after.mean(dim=0).max() < before.mean(dim=0).max()


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
