"""What a fitted head reads: the ticket's own tokens, after some layers, the same by every strategy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from worker.engine import Classifier
from worker.engine.features import features
from worker.engine.fuse import fuse
from worker.engine.model import LoadedModel, load_model
from worker.engine.packed import Packed
from worker.engine.padded import Padded, Single
from worker.engine.prompt import Prompter
from worker.engine.reading import cut, layers_of
from worker.engine.tap import POOLINGS, Tap, told
from worker.engine.task import Task, load_task
from worker.errors import ConfigError

Tiny = Callable[..., str]

TAPS = tuple(Tap(depth, pooling) for depth in (1, 2) for pooling in POOLINGS)
NO_TEXT = ["", "  \n"]


def prompter_of(loaded: LoadedModel, taps: tuple[Tap, ...] = TAPS) -> Prompter:
    """The built-in task's prompts for taps."""
    return Prompter(load_task("support"), loaded.tokenizer, loaded.window, taps)


def read(loaded: LoadedModel, kind: Any, texts: list[str], taps: tuple[Tap, ...] = TAPS) -> torch.Tensor:
    """What the taps read, `[texts, taps, width]`."""
    prompter = prompter_of(loaded, taps)
    with torch.inference_mode():
        strategy = kind(loaded.model, prompter.prefix_ids, prompter.reading)
        states, _ = strategy.hidden([prompt.ids for prompt in prompter.prompts(texts)])
    return torch.as_tensor(states)


def test_taps_read_the_tickets_own_tokens(tiny: Tiny, tickets: list[str]) -> None:
    """Held against transformers' own hidden states of the whole prompt, cut to the ticket by counting."""
    loaded = load_model(tiny("llama"), torch.float32)
    prompter = prompter_of(loaded)
    found = read(loaded, Single, tickets[:3])
    for prompt, states in zip(prompter.prompts(tickets[:3]), found, strict=True):
        ids = torch.tensor([[*prompter.prefix_ids, *prompt.ids]])
        start, end = len(prompter.prefix_ids) + len(prompter.lead_ids), ids.shape[1] - len(prompter.tail_ids)
        with torch.inference_mode():
            hooked = loaded.model(ids, use_cache=False, output_hidden_states=True).hidden_states
        for tap, state in zip(TAPS, states, strict=True):
            whole = hooked[tap.depth][0]
            own = whole[start:end]
            expected = {"mean": own.mean(dim=0), "max": own.amax(dim=0), "last": whole[-1]}[tap.pooling]
            torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


def test_every_strategy_reads_the_same(tiny: Tiny, tickets: list[str]) -> None:
    """Packed and padded give what one at a time gives, of tickets without a word too."""
    texts = [*tickets[:8], *NO_TEXT]
    alone = read(load_model(tiny("llama"), torch.float32), Single, texts)
    assert alone.isfinite().all()
    for kind in (Packed, Padded):
        together = read(load_model(tiny("llama"), torch.float32), kind, texts)
        torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-3)


def test_nothing_follows_a_ticket_that_is_read_for_itself(tiny: Tiny, tickets: list[str]) -> None:
    """Without a tap on the last token there is no answer cue to run, and the means are the same as with it."""
    loaded = load_model(tiny("llama"), torch.float32)
    means = tuple(tap for tap in TAPS if tap.pooling != "last")
    assert prompter_of(loaded, means).tail_ids == ()
    assert prompter_of(loaded).tail_ids
    with_cue = read(loaded, Single, tickets[:4])[:, [number for number, tap in enumerate(TAPS) if tap in means]]
    torch.testing.assert_close(read(loaded, Single, tickets[:4], means), with_cue, rtol=1e-4, atol=1e-4)


def test_a_ticket_without_words_has_something_to_read(tiny: Tiny) -> None:
    """Where nothing stands around a ticket that is read for itself, an empty one still has a token."""
    loaded = load_model(tiny("llama"), torch.float32)
    means = (Tap(1, "mean"), Tap(2, "max"))
    assert prompter_of(loaded, means).lead_ids == prompter_of(loaded, means).tail_ids == ()
    for kind in (Single, Padded, Packed):
        assert read(loaded, kind, NO_TEXT, means).isfinite().all()


def test_layers_that_work_in_place_are_read_as_they_were(tiny: Tiny, tickets: list[str]) -> None:
    """Our own layers add to the stream they are given; what is read after an early one is not what came later."""
    loaded, ours = (load_model(tiny("llama"), torch.float32) for _ in range(2))
    with torch.inference_mode():
        assert fuse(ours.model)
    expected, found = read(loaded, Single, tickets[:4]), read(ours, Packed, tickets[:4])
    difference = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert difference.max() < 0.05, "more than bfloat16 rounds away"


def test_the_pass_ends_at_the_deepest_tap(tiny: Tiny, tickets: list[str]) -> None:
    """Layers nobody reads are gone, and what the others say is what it was; a model with too few is refused."""
    whole, short = (load_model(tiny("llama"), torch.float32) for _ in range(2))
    taps = (Tap(2, "mean"), Tap(1, "last"))
    cut(short.model, taps)
    assert len(layers_of(short.model)) == 2
    for kind in (Single, Padded, Packed):
        torch.testing.assert_close(read(short, kind, tickets[:4], taps), read(whole, kind, tickets[:4], taps))
    with pytest.raises(ConfigError, match="reads after layer 9, and this model has 2"):
        cut(short.model, (Tap(9, "mean"),))


@pytest.mark.parametrize("kind", [Packed, Padded])
def test_a_shared_prefix_stays_as_it_was(kind: Any, tiny: Tiny, tickets: list[str]) -> None:
    """What is kept of the prefix is only read: the same after some batches, and a batch gives the same bits again."""
    loaded = load_model(tiny("llama"), torch.float32)
    prompter = prompter_of(loaded)
    prompts = [prompt.ids for prompt in prompter.prompts([*tickets[:6], *NO_TEXT])]
    with torch.inference_mode():
        strategy = kind(loaded.model, prompter.prefix_ids, prompter.reading)
        kept = strategy.prefix if kind is Packed else strategy._prefix
        before = [tensor.clone() for layer in kept for tensor in layer]
        first, _ = strategy.hidden(prompts)
        strategy.hidden(prompts[::-2])
        assert torch.equal(strategy.hidden(prompts)[0], first)
    assert before
    assert all(map(torch.equal, before, [tensor for layer in kept for tensor in layer]))


def test_features_are_in_the_order_of_the_texts(tiny: Tiny, tickets: list[str]) -> None:
    """Batches are sorted by length and equal texts run once: each text still gets its own states, of every depth."""
    classifier = Classifier.load(load_task("support"), tiny("llama"), dtype="float32", threads=1, tokens=512)
    texts = [*tickets[:7], tickets[0], ""]
    found = features(classifier, classifier.task, texts)
    assert {tap.depth for tap in found} == {1, 2, 3}
    assert torch.equal(found[TAPS[0]][0], found[TAPS[0]][7])
    expected = read(classifier.loaded, Packed, texts)
    for number, tap in enumerate(TAPS):
        torch.testing.assert_close(found[tap], expected[:, number], rtol=1e-3, atol=1e-3)


def test_a_model_of_unusual_make_is_refused(tiny: Tiny) -> None:
    """Where a model's layers cannot be found, nothing is guessed."""
    folder = tiny("gpt2", n_embd=64, n_layer=3, n_head=4, n_positions=2048)
    task = Task(name="t", instruction="i", labels={"a": "", "b": ""})
    classifier = Classifier.load(task, folder, strategy="single", dtype="float32", threads=1, tokens=512)
    with pytest.raises(ConfigError, match="unusual place: a head cannot be fitted to it"):
        features(classifier, task, ["x"])


def test_nothing_listens_after_a_pass(tiny: Tiny, tickets: list[str]) -> None:
    """The hooks are taken away, after a pass that failed too."""
    loaded = load_model(tiny("llama"), torch.float32)
    prompter = prompter_of(loaded)
    prompts = [prompt.ids for prompt in prompter.prompts(tickets[:2])]
    with torch.inference_mode():
        strategy = Packed(loaded.model, prompter.prefix_ids, prompter.reading)
        strategy.hidden(prompts)
        assert not any(layer._forward_hooks for layer in layers_of(loaded.model))
        loaded.model.base_model.layers[2].mlp = None
        with pytest.raises(TypeError):
            strategy.hidden(prompts)
    assert not any(layer._forward_hooks for layer in layers_of(loaded.model))


def test_a_fitted_head_has_the_same_bits_alone_and_in_any_batch(taught: Classifier, tickets: list[str]) -> None:
    """SmolLM2 in bfloat16: neighbours, order and number make no difference to a single bit, with or without words."""
    assert taught.certificate is not None
    assert taught.certificate.kind == "exact"
    texts = [*tickets[:20], *NO_TEXT]
    together = taught.classify(texts)
    backwards = taught.classify(texts[::-1])[::-1]
    alone = [taught.classify([text])[0] for text in texts]
    for one, other, third in zip(together, backwards, alone, strict=True):
        assert one.scores == other.scores == third.scores


def test_taps_in_words() -> None:
    """Grouped by what is read, the depths in their order."""
    assert told([Tap(1, "mean"), Tap(8, "last"), Tap(8, "mean")]) == "mean after layers 1, 8; last after layer 8"
