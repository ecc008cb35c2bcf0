"""Labelled examples' features -> a linear head: which taps, how strongly regularised, how sure (pure: numpy alone).

Which taps a head reads is chosen by stratified cross-validation. The accuracy that is told is that of each example by
a head that was fitted without it, on taps chosen by the results of the other folds. The heads behind those results did
see the example: of pure noise, 60 examples of three labels, some 38 % are told to be right instead of 33 %. Only folds
within folds, at twice the work, would take that away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from worker.engine.tap import Tap
from worker.engine.task import Form

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Features = Mapping[Tap, Floats]  # of each tap `[examples, width]`
Prefer = Literal["accuracy", "balanced", "speed"]

# Folds are drawn several times: one draw of ninety examples moves accuracies by more than depths differ.
_FOLDS, _DRAWS = 5, 2
# Of more examples than this, some are enough to choose taps and strength by; the head is fitted to all.
_ENOUGH = 600
# Weights of the penalty that are tried, after the taps were chosen with the middle one.
_STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_MIDDLE = 0.1
# How many standard errors of accuracy may be given up for an earlier end of the pass.
_GIVEN_UP = {"accuracy": 0.0, "balanced": 1.0, "speed": 2.0}
# Shares of the examples whose accuracy makes the learning curve.
_SHARES = (0.25, 0.5, 0.75, 1.0)
_TEMPERATURES = np.geomspace(0.2, 5.0, 60)


@dataclass(frozen=True)
class Candidate:
    """Taps that a head may read together, in one prompt form, and what came out for examples it had not seen."""

    form: Form
    taps: tuple[Tap, ...]
    strength: float
    log_probs: Floats  # `[draws, examples, labels]`, each by the head that was fitted without the example's fold
    right: Floats  # `[examples]`, in what share of the draws
    loss: Floats  # `[examples]`, nats: minus the true label's log-probability, mean over the draws

    @property
    def depth(self) -> int:
        """Layers that must be run."""
        return max(tap.depth for tap in self.taps)


@dataclass(frozen=True)
class Fit:
    """A fitted head and what is known of it. `log_probs` are of examples it had not seen, calibrated."""

    chosen: Candidate
    weight: Floats  # `[labels, taps x width]`, standardisation and temperature folded in
    bias: Floats  # `[labels]`
    temperature: float
    log_probs: Floats


def fit_head(materials: Mapping[Form, Features], labels: Ints, prefer: Prefer) -> Fit:
    """Choose taps, strength and temperature by cross-validation, and fit the head to all examples.

    `materials` are the features of the examples in each prompt form; `labels` count from 0, each twice at least.
    """
    from threadpoolctl import threadpool_limits

    # Hundreds of small regressions: threads would cost more than they bring.
    with threadpool_limits(1):
        return _fit_head(materials, labels, prefer)


def _fit_head(materials: Mapping[Form, Features], labels: Ints, prefer: Prefer) -> Fit:
    some = _some(labels)
    few = {form: {tap: states[some] for tap, states in features.items()} for form, features in materials.items()}
    draws = [_folds(labels[some], draw) for draw in range(_DRAWS)]
    candidates = [
        _try_out(form, features, labels[some], draws, taps, _MIDDLE)
        for form, features in few.items()
        for taps in _combinations(sorted({tap.depth for tap in features}))
    ]
    chosen = _choose(candidates, prefer, np.ones(len(some), dtype=bool))
    tuned = min(
        (_try_out(chosen.form, few[chosen.form], labels[some], draws, chosen.taps, one) for one in _STRENGTHS),
        key=lambda one: one.loss.mean(),
    )
    features, unseen = materials[tuned.form], _unseen(candidates, tuned, prefer, draws[0])
    if len(some) < len(labels):
        tuned = _try_out(tuned.form, features, labels, [_folds(labels, 0)], tuned.taps, tuned.strength)
        # Those beyond had no part in the choice.
        unseen = _put(tuned.log_probs[0], some, unseen)
    temperature = _temperature(tuned.log_probs, labels)
    weight, bias = _fold_in(_joined(features, tuned.taps), labels, tuned.strength, temperature)
    return Fit(tuned, weight, bias, temperature, _log_softmax(unseen / temperature))


def learning_curve(features: Features, labels: Ints, chosen: Candidate) -> list[tuple[int, float]]:
    """How many examples were learnt from, and the share of the others that were labelled right, cross-validated."""
    fold, inputs = _folds(labels, 0), _rotated(_standardised(_joined(features, chosen.taps))[0])
    # Of each label the same share is kept. One fold tells enough where there are many examples.
    place = _places(labels) / np.bincount(labels)[labels]
    folds = int(fold.max()) + 1 if len(labels) <= _ENOUGH else 1
    curve = []
    for share in _SHARES:
        used, right = [], np.zeros(len(labels), dtype=bool)
        for number in range(folds):
            held_out = fold == number
            kept = ~held_out & ((place < share) | _first_of_each(labels, ~held_out))
            used.append(int(kept.sum()))
            model = _regress(inputs[kept], labels[kept], chosen.strength)
            right[held_out] = model.predict(inputs[held_out]) == labels[held_out]
        curve.append((round(float(np.mean(used))), float(right[fold < folds].mean())))
    return curve


def _some(labels: Ints) -> Ints:
    """The places of at most about `_ENOUGH` examples, evenly over the labels, two of each at least."""
    share = min(1.0, _ENOUGH / len(labels))
    place = _places(labels)
    counts = np.bincount(labels)[labels]
    return np.flatnonzero(place < np.maximum(np.round(share * counts), 2))


def _places(labels: Ints) -> Ints:
    """Each example's place in an arbitrary order of those with its label, from 0."""
    random, place = np.random.default_rng(0), np.zeros(len(labels), dtype=np.int64)
    for label in range(int(labels.max()) + 1):
        own = np.flatnonzero(labels == label)
        place[own] = random.permutation(len(own))
    return place


def fit_prior(log_probs: Floats) -> Floats:
    """What a model says of any ticket at all: the log of the labels' mean probabilities, `[tickets, labels]` in."""
    prior: Floats = np.logaddexp.reduce(log_probs, axis=0) - np.log(len(log_probs))
    return prior


def _combinations(depths: Sequence[int]) -> list[tuple[Tap, ...]]:
    """Taps that are tried together, by where the pass ends.

    What earlier layers say costs nothing more, and with all of it the accuracy hardly depends on the depth; the last
    position says more where a model has understood the question.
    """
    found: list[tuple[Tap, ...]] = []
    for end, depth in enumerate(depths, start=1):
        last, so_far = Tap(depth, "last"), tuple(tap for early in depths[:end] for tap in _over_the_ticket(early))
        found += [(Tap(depth, "mean"), last), so_far, (*so_far, last)]
    return found


def _over_the_ticket(depth: int) -> tuple[Tap, Tap]:
    return Tap(depth, "mean"), Tap(depth, "max")


def _folds(labels: Ints, draw: int) -> Ints:
    """A fold for each example, every label spread evenly; no more folds than there are examples of any label."""
    from sklearn.model_selection import StratifiedKFold

    splits = StratifiedKFold(min(_FOLDS, int(np.bincount(labels).min())), shuffle=True, random_state=draw)
    fold = np.zeros(len(labels), dtype=np.int64)
    for number, (_, held_out) in enumerate(splits.split(labels, labels)):
        fold[held_out] = number
    return fold


def _try_out(
    form: Form,
    features: Features,
    labels: Ints,
    draws: Sequence[Ints],
    taps: tuple[Tap, ...],
    strength: float,
) -> Candidate:
    """Cross-validate a head on these taps."""
    inputs = _rotated(_standardised(_joined(features, taps))[0])
    log_probs: Floats = np.zeros((len(draws), len(labels), int(labels.max()) + 1))
    for fold, found in zip(draws, log_probs, strict=True):
        for number in range(int(fold.max()) + 1):
            held_out = fold == number
            model = _regress(inputs[~held_out], labels[~held_out], strength)
            found[held_out] = model.predict_log_proba(inputs[held_out])
    right = (log_probs.argmax(axis=2) == labels).mean(axis=0)
    loss = -log_probs[:, np.arange(len(labels)), labels].mean(axis=0)
    return Candidate(form, taps, strength, log_probs, right, loss)


def _choose(candidates: Sequence[Candidate], prefer: Prefer, judged: NDArray[np.bool_]) -> Candidate:
    """The earliest end of the pass that gives up no more accuracy than wished, by the examples in `judged`.

    First the prompt form in which the best is possible, then within it the earliest depth within so many standard
    errors of the best; of equally deep ones the most accurate, and of these the likeliest.
    """

    def merit(one: Candidate) -> tuple[float, float]:
        return float(one.right[judged].mean()), -float(one.loss[judged].mean())

    best = max(candidates, key=merit)
    least = merit(best)[0] - _GIVEN_UP[prefer] * standard_error(merit(best)[0], int(judged.sum()))
    enough = [one for one in candidates if one.form == best.form and merit(one)[0] >= least]
    return best if prefer == "accuracy" else max(enough, key=lambda one: (-one.depth, *merit(one)))


def _unseen(candidates: Sequence[Candidate], tuned: Candidate, prefer: Prefer, fold: Ints) -> Floats:
    """Log-probabilities for each example by a head whose taps were chosen by the results of the other folds.

    `fold` are the folds of the first draw.
    """
    log_probs: Floats = np.zeros_like(tuned.log_probs[0])
    for number in range(int(fold.max()) + 1):
        chosen = _choose(candidates, prefer, fold != number)
        same = (chosen.form, chosen.taps) == (tuned.form, tuned.taps)
        log_probs[fold == number] = (tuned if same else chosen).log_probs[0][fold == number]
    return log_probs


def _put(log_probs: Floats, places: Ints, others: Floats) -> Floats:
    changed = log_probs.copy()
    changed[places] = others
    return changed


def standard_error(share: float, count: int) -> float:
    """Of a share, by Agresti and Coull: two right and two wrong are added, or a perfect score would have none."""
    share = (share * count + 2) / (count + 4)
    return float(np.sqrt(share * (1 - share) / (count + 4)))


def _fold_in(inputs: Floats, labels: Ints, strength: float, temperature: float) -> tuple[Floats, Floats]:
    """The head fitted to all examples, as one linear layer on what the taps read."""
    standardised, mean, scale = _standardised(inputs)
    model = _regress(standardised, labels, strength)
    weight, bias = np.asarray(model.coef_), np.asarray(model.intercept_)
    if len(weight) == 1:  # of two labels, only the second one's odds are modelled
        weight, bias = np.concatenate([np.zeros_like(weight), weight]), np.array([0.0, bias[0]])
    weight = weight / scale / temperature
    return weight, bias / temperature - weight @ mean


def _temperature(log_probs: Floats, labels: Ints) -> float:
    """What the scores must be divided by for the true labels to be likeliest."""

    def loss(temperature: float) -> float:
        return -float(_log_softmax(log_probs / temperature)[:, np.arange(len(labels)), labels].mean())

    return float(min(_TEMPERATURES, key=loss))


def _regress(inputs: Floats, labels: Ints, strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, max_iter=2000).fit(inputs, labels)


def _joined(features: Features, taps: Sequence[Tap]) -> Floats:
    joined: Floats = np.concatenate([features[tap] for tap in taps], axis=1)
    return joined


def _standardised(inputs: Floats) -> tuple[Floats, Floats, Floats]:
    """Each column with mean 0 and deviation 1, and what they were. Labels have no part in it, so folds may share it."""
    mean, scale = inputs.mean(axis=0), inputs.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    return (inputs - mean) / scale, mean, scale


def _rotated(inputs: Floats) -> Floats:
    """The same points in as few columns as they need: for the penalty of a regression only distances count."""
    if len(inputs) >= inputs.shape[1]:
        return inputs
    variances, directions = np.linalg.eigh(inputs @ inputs.T)
    rotated: Floats = directions * np.sqrt(variances.clip(min=0))
    return rotated


def _first_of_each(labels: Ints, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """One example of every label: without it the label would be unknown."""
    first = np.zeros(len(labels), dtype=bool)
    places = np.flatnonzero(among)
    first[places[np.unique(labels[places], return_index=True)[1]]] = True
    return first


def _log_softmax(scores: Floats) -> Floats:
    shifted = scores - scores.max(axis=-1, keepdims=True)
    normed: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normed
