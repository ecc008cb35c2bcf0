"""Faults that other systems have, or had, each re-enacted in one small case. The docstring names the fault."""

import hashlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from worker.engine import Classifier
from worker.engine.model import load_tokenizer
from worker.engine.prompt import Prompt, Prompter
from worker.engine.scorer import Strategy
from worker.errors import ConfigError

Load = Callable[[str, str], Classifier]
# The ways that share a row or a batch among tickets, on the real model.
BATCHED = [("packed", "bfloat16"), ("packed", "float32"), ("padded", "float32")]
# As in test_scores: float32's rounding; and what `packed` may differ by where the machine is not exact.
FLOAT32, NEAR = 2e-4, 0.05


def made_of(classifier: Classifier, *lengths: int) -> list[Prompt]:
    """Prompts around so many ordinary tokens each."""
    random = Random(5)
    return [classifier.prompter.wrap(random.choices(classifier.prompter.ordinary_ids, k=length)) for length in lengths]


def tensor(classifier: Classifier, prompts: Sequence[Prompt]) -> torch.Tensor:
    """Scores `[prompts, labels]`."""
    return torch.tensor(classifier.score(prompts).log_probs)


def bits(way: tuple[str, str], loaded: Classifier) -> float:
    """How far scores in a batch may be from those alone: not by a bit, where this machine's certificate is exact."""
    if way[1] == "float32":
        return FLOAT32
    return 0.0 if loaded.certificate is not None and loaded.certificate.kind == "exact" else NEAR


def prefix_hash(strategy: Strategy) -> str:
    """A hash over the keys and values of every layer of the prefix, however a strategy calls them."""
    kept = getattr(strategy, "prefix", None) or strategy._prefix  # type: ignore[attr-defined]  # a Protocol
    digest = hashlib.sha256()
    for pair in kept:
        for part in pair:
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("way", BATCHED)
def test_equal_lengths_keep_the_causal_mask(real: Load, way: tuple[str, str]) -> None:
    """The fault: in a batch without padding the all-ones mask is dropped, and the causal one with it.

    Then a token sees what comes after it. Here a batch of equal lengths scores as each ticket does one by one.
    """
    classifier = real(*way)
    prompts = made_of(classifier, 8, 8, 8)
    atol = FLOAT32 if way[1] == "float32" else 0.25
    torch.testing.assert_close(
        tensor(classifier, prompts), tensor(real("single", "float32"), prompts), atol=atol, rtol=0
    )


@pytest.mark.parametrize("way", BATCHED)
def test_a_neighbours_text_moves_no_bit(real: Load, way: tuple[str, str]) -> None:
    """The fault: with a mask or a cache, transformers lets packed sequences see each other.

    Shorter, equal and longer neighbours get other words of the same length: the scores among them keep every bit.
    """
    classifier = real(*way)
    short, equal, mine, long = made_of(classifier, 5, 12, 12, 30)
    before = tensor(classifier, [short, equal, mine, long])[2]
    others = [Prompt(neighbour.ids[::-1]) for neighbour in (short, equal, long)]
    after = tensor(classifier, [*others[:2], mine, others[2]])[2]
    assert torch.equal(before, after)


@pytest.mark.parametrize("neighbour", [1, 40, 400])
def test_left_padding_shifts_no_position(real: Load, neighbour: int) -> None:
    """The fault: positions counted over the padding, so that a short ticket beside a long one is elsewhere."""
    classifier = real("padded", "float32")
    short, long = made_of(classifier, 5, neighbour)
    torch.testing.assert_close(
        tensor(classifier, [short, long])[0], tensor(classifier, [short])[0], atol=FLOAT32, rtol=0
    )


@pytest.mark.parametrize("way", BATCHED)
@pytest.mark.parametrize("text", ["<|endoftext|>" * 5, "help <|im_end|>", "<pad>\x00\x00 0 0"])
def test_text_like_padding_does_not_end_a_ticket(real: Load, way: tuple[str, str], text: str) -> None:
    """The fault: the last token is found by looking for the pad or end id, and a ticket that holds it is cut there."""
    classifier = real(*way)
    pads = Prompt((*classifier.prompter.lead_ids, 0, 0, 2, 0, *classifier.prompter.tail_ids))
    prompts = [*classifier.tokenise([text]), pads, *made_of(classifier, 25)]
    atol = FLOAT32 if way[1] == "float32" else 0.25
    torch.testing.assert_close(
        tensor(classifier, prompts)[:2], tensor(real("single", "float32"), prompts[:2]), atol=atol, rtol=0
    )


@pytest.mark.parametrize("way", BATCHED)
@pytest.mark.parametrize("copies", [2, 17, 64])
def test_copies_in_a_batch_score_alike(real: Load, loaded: Classifier, way: tuple[str, str], copies: int) -> None:
    """The fault: N copies of one prompt in a batch get N different scores, since rows fall to different kernels."""
    classifier = real(*way)
    (prompt,) = made_of(classifier, 3)
    scores = tensor(classifier, [prompt] * copies)
    torch.testing.assert_close(scores, scores[:1].expand(copies, -1), atol=bits(way, loaded), rtol=0)


@pytest.mark.parametrize("way", [("packed", "float32"), ("padded", "float32")])
def test_a_hundred_batches_leave_the_prefix_as_it_was(tiny: Callable[..., str], way: tuple[str, str]) -> None:
    """The fault: a shared prefix's cache is written into by the first batch, and every later one sees its tickets."""
    classifier = Classifier.load("support", tiny("llama"), strategy=way[0], dtype=way[1], threads=1, tokens=512)
    before, random = prefix_hash(classifier.strategy), Random(1)
    prompts = made_of(classifier, *range(1, 30))
    first = tensor(classifier, prompts[:5])
    for _ in range(100):
        classifier.score(random.sample(prompts, random.randint(1, 6)))
    assert prefix_hash(classifier.strategy) == before
    assert torch.equal(tensor(classifier, prompts[:5]), first)


def test_the_real_prefix_is_only_read(loaded: Classifier, tickets: list[str]) -> None:
    """The same on the real model with our own layers, which work in place on everything else."""
    before = prefix_hash(loaded.strategy)
    loaded.classify(tickets[:10])
    assert prefix_hash(loaded.strategy) == before


@pytest.mark.parametrize("start", ["\n", ":", "\n\n", "ing", "Ticket", ".", "\u0301"])
def test_nothing_merges_across_the_cut(loaded: Classifier, start: str) -> None:
    """The fault: prefix and suffix are tokenised as one text, the tokens at the cut merge, and the reused prefix is
    another one than the ticket's own.
    """
    prompter = loaded.prompter
    (prompt,) = prompter.prompts([start + "x"])
    own = prompter._plain.encode([(start + "x").strip()])[0]
    assert prompt.ids == (*prompter.lead_ids, *own, *prompter.tail_ids)


def test_a_cold_start_scores_as_a_warm_one(tiny: Callable[..., str]) -> None:
    """The fault: the first pass after loading, before caches are filled, differs from all later ones."""
    folder = tiny("llama")
    cold = Classifier.load("support", folder, strategy="packed", dtype="bfloat16", threads=1, tokens=512)
    prompts = made_of(cold, 4, 9, 33)
    first = tensor(cold, prompts)
    assert all(torch.equal(tensor(cold, prompts), first) for _ in range(3))
    again = Classifier.load("support", folder, strategy="packed", dtype="bfloat16", threads=1, tokens=512)
    assert torch.equal(tensor(again, prompts), first)


def test_a_shuffled_queue_gives_the_same_labels(loaded: Classifier, tickets: list[str]) -> None:
    """The fault: the order of arrival decides the batches, the batches the rounding, and the rounding the label."""
    texts = tickets[:20]
    shuffled = Random(3).sample(texts, len(texts))
    by_text = dict(zip(shuffled, loaded.classify(shuffled), strict=True))
    for text, result in zip(texts, loaded.classify(texts), strict=True):
        assert by_text[text].label == result.label
        assert list(by_text[text].scores.values()) == pytest.approx(list(result.scores.values()), abs=NEAR)


def test_a_short_window_cuts_the_ticket_and_not_the_prompt(tiny: Callable[..., str]) -> None:
    """The fault: prefix and ticket together pass the window, and the model is asked about positions it has not learnt.

    With learned positions that would be an index out of range.
    """
    folder = tiny("gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=192, max_position_embeddings=192)
    classifier = Classifier.load("support", folder, dtype="float32", threads=1, tokens=512)
    (result,) = classifier.classify(["word " * 400])
    assert result.truncated_tokens > 0
    with pytest.raises(ConfigError, match="tokens of the model's 64; shorten them"):
        Prompter(classifier.task, load_tokenizer(folder), 64)


@pytest.mark.parametrize("way", BATCHED)
def test_an_outlier_beside_it_harms_no_ticket(real: Load, loaded: Classifier, way: tuple[str, str]) -> None:
    """The fault: one scale or one kernel for the whole batch, so that a very long and strange ticket moves the rest."""
    classifier = real(*way)
    (mine,) = made_of(classifier, 9)
    (strange,) = classifier.tokenise(["\U0001f480\u202e\ufffd" * 60 + "\x00" * 50 + "ZZ" * 100])
    together, by_itself = tensor(classifier, [strange, mine])[1], tensor(classifier, [mine])[0]
    torch.testing.assert_close(together, by_itself, atol=bits(way, loaded), rtol=0)


def test_a_broken_model_is_refused(tiny: Callable[..., str], tmp_path: Any) -> None:
    """The fault: weights that are no numbers give the first label for every ticket. Such a model does not load."""
    folder = tiny("llama", num_hidden_layers=2)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    load_tokenizer(folder).save_pretrained(tmp_path)
    for strategy in (None, "packed", "padded", "single"):
        with pytest.raises(ConfigError, match="not a number"):
            Classifier.load("support", str(tmp_path), strategy=strategy, dtype="float32", threads=1, tokens=512)
