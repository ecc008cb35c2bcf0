"""The certificate: what it says of batched against unbatched is what was seen, and it is acted upon."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch

from worker.engine import Classifier
from worker.engine.certify import PROBE_LENGTHS, Certificate, certify, random_probes
from worker.engine.packed import Packed
from worker.engine.padded import Padded
from worker.engine.prompt import Prompt

PROBES = [Prompt(tuple(range(length))) for length in (1, 5, 9, 20)]


def faithful(batch: Sequence[Prompt]) -> list[list[float]]:
    """Scores that depend on the prompt alone."""
    return [[-0.1 * len(prompt.ids), -3.0] for prompt in batch]


def test_a_faithful_scorer_is_exact() -> None:
    """Equal bits in every batch make `exact`, with what was compared."""
    certificate = certify(faithful, PROBES)
    assert (certificate.kind, certificate.largest_difference, certificate.labels_differ) == ("exact", 0.0, 0)
    assert str(certificate) == f"exact ({certificate.compared} compared)"
    assert certificate.compared > len(PROBES)


@pytest.mark.parametrize("move", [1e-12, -0.25, 0.5])
def test_scores_that_depend_on_neighbours_are_close(move: float) -> None:
    """However little a batch moves a score, the certificate is `close` and names the largest move."""

    def score(batch: Sequence[Prompt]) -> list[list[float]]:
        return [[a + move * (len(batch) > 1), b] for a, b in faithful(batch)]

    certificate = certify(score, PROBES)
    assert certificate.kind == "close"
    assert certificate.largest_difference == pytest.approx(abs(move), rel=1e-3)
    assert certificate.labels_differ == 0
    assert str(certificate).startswith("close (")


def test_changed_labels_are_counted() -> None:
    """Every probe whose best label is another one in a batch is counted, each time it is compared."""

    def score(batch: Sequence[Prompt]) -> list[list[float]]:
        rows = faithful(batch)
        if len(batch) > 2:
            rows[0].reverse()
        return rows

    certificate = certify(score, PROBES)
    together = [[0], [1], [2], [2, 2, 2]]
    assert certificate.labels_differ >= 3, together
    assert certificate.largest_difference == pytest.approx(2.9)
    assert f"{certificate.labels_differ} of {certificate.compared} labels differ" in str(certificate)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("also_alone", [True, False])
def test_scores_that_are_no_numbers_are_never_exact(broken: float, *, also_alone: bool) -> None:
    """Not a number is not equal to itself: no certificate calls it exact."""

    def score(batch: Sequence[Prompt]) -> list[list[float]]:
        is_hit = also_alone or len(batch) > 1
        return [[broken if is_hit and len(prompt.ids) == 9 else -1.0, -2.0] for prompt in batch]

    certificate = certify(score, PROBES)
    if not also_alone or math.isnan(broken):
        assert (certificate.kind, certificate.largest_difference) == ("close", math.inf)


def test_scores_may_differ_between_calls() -> None:
    """A scorer that is not even the same twice is close: probes alone are not run again and again until they fit."""
    calls = count()
    assert certify(lambda batch: [[-1.0 - next(calls), -2.0] for _ in batch], PROBES).kind == "close"


def test_probing_ends_in_time() -> None:
    """A slow machine compares less, one whole batch at least, and says how much."""

    def slow(batch: Sequence[Prompt]) -> list[list[float]]:
        time.sleep(0.01)
        return faithful(batch)

    certificate = certify(slow, PROBES, budget_s=0.0)
    assert certificate.compared == len(PROBES)
    assert certificate.compared < certify(faithful, PROBES).compared


def test_probes_are_spread_over_lengths_and_fit() -> None:
    """From one token to a page, no control token, and none longer than there is room for."""
    probes = random_probes(lambda ids: Prompt(tuple(ids)), range(7, 400), room=100)
    assert [len(probe.ids) for probe in probes] == [min(length, 100) for length in PROBE_LENGTHS]
    assert all(token in range(7, 400) for probe in probes for token in probe.ids)


def test_the_real_certificate_is_not_a_lie(loaded: Classifier, tickets: list[str]) -> None:
    """What SmolLM2's certificate says holds for tickets that were no probes."""
    assert isinstance(loaded.certificate, Certificate)
    prompts = loaded.tokenise(tickets[:12])
    alone = torch.tensor([loaded.score([prompt]).log_probs[0] for prompt in prompts])
    together = torch.tensor(loaded.score(prompts).log_probs)
    assert loaded.certificate.labels_differ == 0
    assert loaded.certificate.kind == "close" or torch.equal(alone, together)
    assert str(loaded.certificate) == loaded.identity.certificate


Hidden = Callable[[Any, Sequence[Sequence[int]]], tuple[torch.Tensor, int]]


def disturbed(original: Hidden) -> Hidden:
    """A strategy's `hidden` with the fault that a batch of many turns the states around."""

    def hidden(self: Any, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
        states, tokens = original(self, prompts)
        return (-states if len(prompts) > 2 else states), tokens

    return hidden


def test_a_strategy_that_changes_labels_is_left(monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., str]) -> None:
    """If labels differ in a batch, the next strategy is taken, and why is said; in the end it is one by one."""
    monkeypatch.setattr(Packed, "hidden", disturbed(Packed.hidden))
    classifier = Classifier.load("support", tiny("llama"), dtype="float32", threads=1, tokens=512)
    assert classifier.choices.strategy == classifier.identity.strategy == "padded"
    assert classifier.certificate is not None
    assert classifier.certificate.labels_differ == 0
    assert "changes labels in a batch: close" in classifier.choices.reasons["packed"]
    monkeypatch.setattr(Padded, "hidden", disturbed(Padded.hidden))
    classifier = Classifier.load("support", tiny("llama"), dtype="float32", threads=1, tokens=512)
    assert (classifier.choices.strategy, str(classifier.certificate)[:5]) == ("single", "exact")


def test_a_strategy_that_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., str]) -> None:
    """Who names a strategy gets it, with a certificate that does not hide what it does."""
    monkeypatch.setattr(Packed, "hidden", disturbed(Packed.hidden))
    classifier = Classifier.load("support", tiny("llama"), strategy="packed", dtype="float32", threads=1, tokens=512)
    assert classifier.choices.strategy == "packed"
    assert classifier.certificate is not None
    assert classifier.certificate.labels_differ > 0
