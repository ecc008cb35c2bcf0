"""Heads from features alone: no model. What is chosen, how surely, and that nothing is told that was seen before."""

from collections.abc import Mapping

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from worker import fitting
from worker.engine.tap import POOLINGS, Tap
from worker.engine.task import Form
from worker.fitting import (
    Candidate,
    Features,
    Fit,
    Floats,
    Ints,
    Prefer,
    fit_head,
    fit_prior,
    learning_curve,
    standard_error,
)

WIDTH = 8


def labels_of(*counts: int) -> Ints:
    """So many examples of each label, in some order."""
    return np.random.default_rng(7).permutation(np.repeat(np.arange(len(counts)), counts))


def features(labels: Ints, signal: Mapping[int, float], seed: int = 0) -> dict[Tap, Floats]:
    """Noise for every depth, and in the mean over the ticket, where the noise is the same, a signal of this size."""
    random = np.random.default_rng(seed)
    shown, common = random.normal(size=(int(labels.max()) + 1, WIDTH))[labels], random.normal(size=(len(labels), WIDTH))
    found: dict[Tap, Floats] = {}
    for depth, size in signal.items():
        for pooling in POOLINGS:
            noise = common + size * shown if pooling == "mean" and size else random.normal(size=common.shape)
            found[Tap(depth, pooling)] = 100 + 5 * noise
    return found


def fitted(labels: Ints, signal: Mapping[int, float], prefer: Prefer = "balanced", seed: int = 0) -> Fit:
    """A head for one prompt form."""
    return fit_head({"plain": features(labels, signal, seed)}, labels, prefer)


def accuracy(fit: Fit, labels: Ints) -> float:
    """What is told of a head."""
    return float((fit.log_probs.argmax(axis=1) == labels).mean())


def probabilities(fit: Fit, inputs: Floats) -> Floats:
    """What the head makes of its inputs."""
    scores = inputs @ fit.weight.T + fit.bias
    exps: Floats = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares: Floats = exps / exps.sum(axis=1, keepdims=True)
    return shares


def test_the_same_examples_give_the_same_bits() -> None:
    """Nothing is drawn at random anew: taps, weights, temperature and the figures are the same every time."""
    labels = labels_of(20, 20, 20)
    one, other = (fitted(labels, {1: 0.5, 2: 1.0}) for _ in range(2))
    assert one.chosen.taps == other.chosen.taps
    assert one.weight.tobytes() == other.weight.tobytes()
    assert (one.bias.tobytes(), one.temperature) == (other.bias.tobytes(), other.temperature)
    assert one.log_probs.tobytes() == other.log_probs.tobytes()


def test_noise_is_told_as_chance() -> None:
    """Random labels on noise, many taps to choose from: what is told is a third, though the chosen look better."""
    labels = labels_of(40, 40, 40)
    told, naive = [], []
    for seed in range(8):
        fit = fitted(labels, dict.fromkeys(range(1, 4), 0.0), seed=seed)
        told.append(accuracy(fit, labels))
        naive.append(float(fit.chosen.right.mean()))
    assert np.mean(told) < np.mean(naive) - 0.02, "the chosen taps' own figure is too good, or there is no trap here"
    assert np.mean(told) == pytest.approx(1 / 3, abs=0.04)


def test_examples_that_chose_the_taps_are_told_by_other_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many examples some choose the taps: these are not told by the chosen head alone."""
    monkeypatch.setattr(fitting, "_ENOUGH", 60)
    labels = labels_of(45, 45)
    fit, some = fitted(labels, dict.fromkeys(range(1, 7), 0.0)), fitting._some(labels)
    own = fitting._log_softmax(fit.chosen.log_probs[0] / fit.temperature)
    same = np.array([np.allclose(*pair) for pair in zip(fit.log_probs, own, strict=True)])
    beyond = np.setdiff1d(np.arange(len(labels)), some)
    assert (len(some), len(beyond)) == (60, 30)
    assert same[beyond].all()
    assert not same[some].all()


def test_a_fold_has_no_part_in_the_choice_by_which_it_is_told() -> None:
    """Of many guessing candidates the best is far above chance on what it was chosen by, and at chance on the rest."""
    labels, random = labels_of(60, 60, 60), np.random.default_rng(3)
    candidates = []
    for depth in range(1, 301):
        log_probs = np.log(random.dirichlet(np.ones(3), size=(1, len(labels))))
        right = (log_probs[0].argmax(axis=1) == labels).astype(float)
        candidates.append(Candidate("plain", (Tap(depth, "mean"),), 0.1, log_probs, right, -log_probs[0].max(axis=1)))
    best = fitting._choose(candidates, "accuracy", np.ones(len(labels), dtype=bool))
    unseen = fitting._unseen(candidates, best, "accuracy", fitting._folds(labels, 0))
    assert best.right.mean() > 0.41
    assert (unseen.argmax(axis=1) == labels).mean() == pytest.approx(1 / 3, abs=0.06)


def test_an_early_end_is_chosen_where_depths_are_equally_good() -> None:
    """`balanced` ends the pass as early as the accuracy allows, `speed` earlier, `accuracy` where it is best."""
    labels = labels_of(30, 30, 30)
    assert fitted(labels, {1: 1.0, 3: 1.0, 6: 1.0}).chosen.depth == 1
    rising = {1: 0.25, 2: 0.6, 6: 0.7}
    depths = [fitted(labels, rising, prefer).chosen.depth for prefer in ("speed", "balanced", "accuracy")]
    assert depths == sorted(depths)


def test_a_deep_end_is_chosen_where_it_is_clearly_better() -> None:
    """Nothing is saved at the price of the labels: a signal that comes late is waited for."""
    labels = labels_of(30, 30, 30)
    for prefer in ("accuracy", "balanced", "speed"):
        fit = fitted(labels, {1: 0.0, 3: 0.1, 6: 1.0}, prefer)
        assert fit.chosen.depth == 6
        assert accuracy(fit, labels) > 0.8


def test_the_prompt_form_with_the_better_head_is_chosen() -> None:
    """A form is no depth: of two prompts the one whose head is best is read, though the other would end earlier."""
    labels = labels_of(30, 30, 30)
    materials: dict[Form, Features] = {
        "plain": features(labels, {1: 0.3, 4: 0.4}),
        "bare": features(labels, {1: 0.1, 4: 1.2}),
    }
    assert fit_head(materials, labels, "balanced").chosen.form == "bare"
    assert fit_head({"plain": materials["bare"], "bare": materials["plain"]}, labels, "balanced").chosen.form == "plain"


def test_an_early_end_in_the_other_form_is_not_looked_at() -> None:
    """Depth is given up for within the best form alone: another form that ends earlier and is nearly as good loses."""

    def candidate(form: Form, depth: int, right: int) -> Candidate:
        shares = (np.arange(90) < right).astype(float)
        return Candidate(form, (Tap(depth, "mean"),), 0.1, np.zeros((1, 90, 2)), shares, 1 - shares)

    candidates = [
        candidate("plain", 6, 85),
        candidate("plain", 4, 84),
        candidate("bare", 1, 84),
        candidate("bare", 2, 83),
    ]
    chosen = fitting._choose(candidates, "balanced", np.ones(90, dtype=bool))
    assert (chosen.form, chosen.depth) == ("plain", 4)


@pytest.mark.parametrize("counts", [(30, 30), (40, 2), (2, 2), (3, 30, 2), (1, 2, 2, 2)[1:]])
def test_few_labels_and_few_examples_are_enough(counts: tuple[int, ...]) -> None:
    """Two labels, and two examples of a label, make a head: a weight for every label, probabilities of all examples."""
    labels = labels_of(*counts)
    signal = features(labels, {1: 2.0, 2: 2.0})
    fit = fit_head({"plain": signal}, labels, "balanced")
    inputs = fitting._joined(signal, fit.chosen.taps)
    assert fit.weight.shape == (len(counts), inputs.shape[1])
    assert fit.log_probs.shape == (len(labels), len(counts))
    np.testing.assert_allclose(np.exp(fit.log_probs).sum(axis=1), 1.0)
    assert (probabilities(fit, inputs).argmax(axis=1) == labels).mean() > 0.9
    assert len(learning_curve(signal, labels, fit.chosen)) == 4


@pytest.mark.parametrize("counts", [(30, 30), (25, 30, 35)])
def test_the_layer_is_sklearns_own_pipeline(counts: tuple[int, ...]) -> None:
    """One linear layer on raw states gives what scaler and regression give, for two labels and for more."""
    labels = labels_of(*counts)
    inputs = fitting._joined(features(labels, {1: 0.7}), (Tap(1, "mean"), Tap(1, "last")))
    inputs[:, 3] = 4.0  # a column that says nothing must not divide by zero
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=0.3, max_iter=2000)).fit(inputs, labels)
    weight, bias = fitting._fold_in(inputs, labels, 0.3, 1.0)
    scores = inputs @ weight.T + bias
    np.testing.assert_allclose(np.exp(fitting._log_softmax(scores)), pipeline.predict_proba(inputs), atol=1e-6)
    halved = fitting._fold_in(inputs, labels, 0.3, 2.0)
    np.testing.assert_allclose(inputs @ halved[0].T + halved[1], scores / 2, atol=1e-9)


def test_fewer_columns_make_the_same_head() -> None:
    """Features are rotated into as many columns as there are examples: no prediction changes by that."""
    labels = labels_of(10, 10)
    wide = np.random.default_rng(1).normal(size=(20, 50)) + labels[:, None]
    narrow = fitting._rotated(wide)
    assert narrow.shape == (20, 20)
    np.testing.assert_allclose(narrow @ narrow.T, wide @ wide.T, atol=1e-8)
    one, other = (
        fitting._regress(inputs[:14], labels[:14], 0.1).predict_proba(inputs[14:]) for inputs in (wide, narrow)
    )
    np.testing.assert_allclose(one, other, atol=1e-3)


def test_the_temperature_undoes_what_is_too_sure() -> None:
    """Scores three times too large need a temperature of three, and those that are right one of one."""
    random = np.random.default_rng(2)
    true = np.log(random.dirichlet(np.ones(3), size=4000))
    labels = np.array([random.choice(3, p=np.exp(row)) for row in true])
    assert fitting._temperature(true[None], labels) == pytest.approx(1.0, rel=0.1)
    assert fitting._temperature(3 * true[None], labels) == pytest.approx(3.0, rel=0.1)
    assert fitting._temperature(true[None] / 3, labels) == pytest.approx(1 / 3, rel=0.1)


def test_confidences_are_about_right() -> None:
    """What is told of unseen examples is calibrated: mean confidence is near the accuracy."""
    labels = labels_of(60, 60, 60)
    fit = fitted(labels, {1: 0.5, 2: 0.6})
    assert np.exp(fit.log_probs.max(axis=1)).mean() == pytest.approx(accuracy(fit, labels), abs=0.06)


def test_the_learning_curve_ends_with_all_there_is() -> None:
    """Its points are growing numbers of examples; the last learnt from all but the fold that it was tested on."""
    labels = labels_of(30, 20, 10)
    signal = features(labels, {1: 1.0})
    chosen = fit_head({"plain": signal}, labels, "balanced").chosen
    counts, accuracies = zip(*learning_curve(signal, labels, chosen), strict=True)
    assert counts[-1] == 60 * 4 // 5
    assert list(counts) == sorted(set(counts))
    assert counts[0] == pytest.approx(12, abs=2)
    assert accuracies[-1] > max(0.6, accuracies[0])


def test_of_many_examples_some_are_chosen_evenly() -> None:
    """Of more than enough, each label keeps its share, and two at least."""
    labels = labels_of(3000, 1500, 2)
    some = fitting._some(labels)
    assert np.bincount(labels[some]).tolist() == [400, 200, 2]
    assert len(fitting._some(labels_of(200, 300))) == 500


def test_a_prior_is_the_mean_of_probabilities() -> None:
    """By hand: of (0.5, 0.5) and (0.9, 0.1) the mean is (0.7, 0.3); so too where one is too small for a float."""
    assert np.exp(fit_prior(np.log([[0.5, 0.5], [0.9, 0.1]]))) == pytest.approx([0.7, 0.3])
    tiny = fit_prior(np.array([[0.0, -2000.0], [0.0, -2000.0]]))
    assert tiny == pytest.approx([0.0, -2000.0])


def test_a_perfect_share_still_has_an_error() -> None:
    """Ninety of ninety right is not certainty, or nothing would ever be given up for speed."""
    assert 0.005 < standard_error(1.0, 90) < 0.05
    assert standard_error(0.5, 100) == pytest.approx(0.05, abs=0.002)
