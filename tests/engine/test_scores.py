"""Scores of the real model: every way gives the same, and none depends on a ticket's neighbours."""

from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import Any

import pytest
import torch

from worker.engine import Classifier, certify
from worker.engine.task import Task
from worker.errors import LengthwiseError

Load = Callable[[str, str], Classifier]

# Log-probabilities in nats. float32 differs by the order of summation alone, bfloat16 by its 8 bits in every layer.
FLOAT32, BFLOAT16 = 2e-4, 0.25
# What batches may change where the machine's kernels are not the same for all of them.
NEAR = 0.05


def scores_of(classifier: Classifier, texts: Sequence[str]) -> torch.Tensor:
    """Scores `[texts, labels]`, in the order of the texts."""
    return torch.tensor([list(result.scores.values()) for result in classifier.classify(texts)])


@pytest.mark.parametrize("strategy", ["packed", "padded"])
def test_float32_agrees_with_one_by_one(real: Load, tickets: list[str], strategy: str) -> None:
    """Prefix reuse, packing and padding change no score beyond float32's rounding, and no label."""
    texts = tickets[:6]
    batched, single = real(strategy, "float32").classify(texts), real("single", "float32").classify(texts)
    assert [result.label for result in batched] == [result.label for result in single]
    for one, other in zip(batched, single, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=FLOAT32)


def test_fused_bfloat16_stays_near_float32(loaded: Classifier, real: Load, tickets: list[str]) -> None:
    """Our own layers round and do nothing else: scores stay within bfloat16's precision of stock float32."""
    assert (loaded.choices.strategy, loaded.choices.fused) == ("packed", True)
    reference = scores_of(real("single", "float32"), tickets[:6])
    torch.testing.assert_close(scores_of(loaded, tickets[:6]), reference, atol=BFLOAT16, rtol=0)


def test_neighbours_and_order_change_no_bit(loaded: Classifier, tickets: list[str]) -> None:
    """The promise: in whatever order and mix tickets are scored, each has the very bits it has alone.

    Where the certificate says `close`, this machine cannot keep that, and scores are near instead.
    """
    assert loaded.certificate is not None
    tolerance = 0.0 if loaded.certificate.kind == "exact" else NEAR
    prompts = loaded.tokenise(tickets)
    expected = torch.tensor([loaded.score([prompt]).log_probs[0] for prompt in prompts])
    for size in (7, len(prompts)):
        order = Random(size).sample(range(len(prompts)), len(prompts))
        for start in range(0, len(order), size):
            indexes = order[start : start + size]
            scored = torch.tensor(loaded.score([prompts[index] for index in indexes]).log_probs)
            torch.testing.assert_close(scored, expected[indexes], atol=tolerance, rtol=0)


@pytest.mark.parametrize(("strategy", "dtype"), [("packed", "bfloat16"), ("padded", "float32"), ("single", "float32")])
def test_probabilities_add_up_to_one(refunds: Load, tickets: list[str], strategy: str, dtype: str) -> None:
    """Over the labels of a task, also of those with several tokens, probabilities add up to one."""
    total = scores_of(refunds(strategy, dtype), tickets[:4]).exp().sum(dim=1)
    torch.testing.assert_close(total, torch.ones(4))


@pytest.mark.parametrize("strategy", ["packed", "padded"])
def test_labels_of_several_tokens_equal_decoding_step_by_step(refunds: Load, tickets: list[str], strategy: str) -> None:
    """Branches in one pass give what one pass a token gives, shared first tokens and contained labels included."""
    reference = refunds("single", "float32")
    assert len(reference.prompter.tree.reads) == 4, "at the root, after `refund`, `refund request` and `login`"
    got, expected = (scores_of(way, tickets[:4]) for way in (refunds(strategy, "float32"), reference))
    torch.testing.assert_close(got, expected, atol=FLOAT32, rtol=0)


def test_the_reference_is_the_models_own_next_token(real: Load, tickets: list[str]) -> None:
    """`single` itself is held against transformers' full logits over the whole vocabulary, at the last position."""
    classifier = real("single", "float32")
    model: Any = classifier.strategy._model  # type: ignore[attr-defined]  # Single's own
    tree = classifier.prompter.tree
    for text in tickets[:3]:
        ids = [*classifier.prompter.prefix_ids, *classifier.tokenise([text])[0].ids]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        first = logits[list(tree.choices[0])].log_softmax(dim=-1)
        roots = [path[0][1] for path in tree.paths]
        got = torch.tensor(classifier.score(classifier.tokenise([text])).log_probs[0])
        torch.testing.assert_close(got, first[roots], atol=FLOAT32, rtol=0)


def test_seventy_seven_labels(tickets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of 77 labels, most of several tokens, is one pass like any other."""
    topics = ["card", "transfer", "top up", "cash", "refund", "exchange rate", "identity"]
    problems = ["", " declined", " fee", " limit", " arrival", " not working", " pending", " status", " lost", " wrong"]
    labels = {f"{topic}{problem}": "" for topic in topics for problem in problems}
    labels |= {f"age limit {number}": "" for number in range(77 - len(labels))}
    monkeypatch.setattr(certify, "PROBE_LENGTHS", (1, 17))  # fewer than ever, to be done in time
    task = Task(name="many", instruction="Sort each ticket.", labels=labels)
    classifier = Classifier.load(task, strategy="packed", dtype="bfloat16", threads=1, tokens=512)
    found = scores_of(classifier, tickets[:5])
    assert found.shape == (5, 77)
    torch.testing.assert_close(found.exp().sum(dim=1), torch.ones(5))
    assert classifier.certificate is not None
    assert classifier.certificate.labels_differ == 0


@pytest.mark.parametrize(("strategy", "dtype"), [("packed", "bfloat16"), ("padded", "float32")])
def test_copies_get_the_same_scores(real: Load, tickets: list[str], strategy: str, dtype: str) -> None:
    """Equal tickets are one row and have one result, wherever they stand among others."""
    copies = real(strategy, dtype).classify([tickets[0], *tickets[1:4], tickets[0], tickets[0] + " "])
    assert copies[0] == copies[4] == copies[5]


def test_a_long_ticket_is_cut_and_says_so(loaded: Classifier) -> None:
    """A ticket over the limit is labelled by its head and tail, and the result says how many tokens are missing."""
    room = loaded.prompter.room
    long = "refund " * (room + 50)
    (result,) = loaded.classify([long])
    assert result.truncated_tokens == len(loaded.prompter._plain.encode([long.strip()])[0]) - room > 0
    assert sum(map(exp, result.scores.values())) == pytest.approx(1.0)


def test_results_are_in_the_order_of_the_texts(loaded: Classifier, tickets: list[str]) -> None:
    """`classify` sorts by length inside and answers in the order given; no text gives no result."""
    together, apart = loaded.classify(tickets[:9]), [loaded.classify([text])[0] for text in tickets[:9]]
    assert [result.label for result in together] == [result.label for result in apart]
    assert loaded.classify([]) == []


def test_a_result_is_what_its_docstring_says(loaded: Classifier, tickets: list[str]) -> None:
    """The label is the most probable one, confidence its probability, margin the distance to the next in nats."""
    (result,) = loaded.classify(tickets[:1])
    ranked = sorted(result.scores.values(), reverse=True)
    assert result.scores[str(result.label)] == ranked[0]
    assert result.confidence == pytest.approx(exp(ranked[0]))
    assert result.margin == pytest.approx(ranked[0] - ranked[1])
    assert (list(result.scores), result.truncated_tokens) == (["billing", "technical", "account"], 0)


def test_scores_that_are_no_numbers_are_no_label(tiny: Callable[..., str], tickets: list[str]) -> None:
    """Broken states come out as scores that are no numbers, for the worker to bury; `classify` raises."""
    classifier = Classifier.load("support", tiny("llama"), strategy="packed", dtype="float32", threads=1, tokens=512)
    with torch.inference_mode():
        classifier.head.rows.weight[0, 0] = float("nan")  # type: ignore[attr-defined]  # broken on purpose
    assert not torch.tensor(classifier.score(classifier.tokenise(tickets[:2])).log_probs).isfinite().any()
    with pytest.raises(LengthwiseError, match="not a number"):
        classifier.classify(tickets[:2])
