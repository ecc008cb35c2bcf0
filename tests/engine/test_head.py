"""Fitted heads in their files: what they bring, and where they are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from producer import samples
from worker.commands.labelled import read_labelled
from worker.commands.texts import sample_text
from worker.engine import Classifier, fitter
from worker.engine.features import features
from worker.engine.fitter import fit_task, fit_unlabelled, use_prior
from worker.engine.head import load_fitted
from worker.engine.reading import layers_of
from worker.engine.tap import Tap
from worker.engine.task import Example, Task, load_task
from worker.errors import ConfigError
from worker.quality import assess

Tiny = Callable[..., str]
SHARED = Path(__file__).parents[3] / "shared" / "data" / "eval_bta_600.jsonl"


def load(folder: str, **options: object) -> Classifier:
    """A fitted task with SmolLM2 on one thread."""
    return Classifier.load(folder, **{"threads": 1, "tokens": 512, **options})  # type: ignore[arg-type]  # by name


def test_the_examples_teach_the_sample(taught: Classifier, loaded: Classifier) -> None:
    """The shipped examples bring more sample tickets right than the model's own scores, and the pass is shorter."""
    rows = samples.load(60)
    texts, truth = [sample_text(row) for row in rows], [row["label"] for row in rows]
    before, after = (
        sum(one.label == true for one, true in zip(each.classify(texts), truth, strict=True))
        for each in (loaded, taught)
    )
    assert after > before
    assert after >= 54
    assert len(layers_of(taught.loaded.model)) == max(tap.depth for tap in taught.prompter.reading.taps)


def test_a_folder_may_be_moved(fitted: str, taught: Classifier, tmp_path: Path, tickets: list[str]) -> None:
    """The head is found beside its task, wherever both are."""
    there = shutil.copytree(fitted, tmp_path / "elsewhere")
    assert load(str(there)).classify(tickets[:2]) == taught.classify(tickets[:2])


def edited(fitted: str, folder: Path, old: str, new: str) -> str:
    """A copy whose task file says something else."""
    there = shutil.copytree(fitted, folder / "edited")
    file = there / "task.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    return str(there)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("billing = ", "payments = ", "not fitted on these labels: expected billing, technical, account, got payments"),
        ("Sort each support ticket", "Sort every ticket", "not fitted on this prompt"),
    ],
)
def test_a_head_is_refused_with_another_task(fitted: str, tmp_path: Path, old: str, new: str, says: str) -> None:
    """A label renamed or an instruction changed: the weights would mean something else."""
    with pytest.raises(ConfigError, match=says):
        load(edited(fitted, tmp_path, old, new))


def test_a_head_is_refused_in_another_dtype(fitted: str, taught: Classifier) -> None:
    """Unless told otherwise the head's own dtype is used, whatever is faster here."""
    assert taught.choices.reasons["dtype"] == "the task's head was fitted in it"
    with pytest.raises(ConfigError, match="not fitted on this dtype: expected bfloat16, got float32"):
        load(fitted, dtype="float32")


def test_a_head_is_refused_with_other_weights(fitted: str, tmp_path: Path, loaded: Classifier) -> None:
    """Of the same model one weight's tensor is another: its name and shape tell nothing, its values do."""
    place = loaded.loaded.model.config._name_or_path
    there = shutil.copytree(place, tmp_path / "model")
    file = there / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    weights["model.layers.3.mlp.up_proj.weight"] *= 1.5
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="not fitted on this model: expected smollm2-135m"):
        load(fitted, model=str(there))


def test_a_file_that_is_no_head_is_refused(fitted: str, tmp_path: Path) -> None:
    """Whatever lies there instead, the message names the file and says how to make one."""
    there = shutil.copytree(fitted, tmp_path / "broken")
    file = there / "head.safetensors"
    tensors = load_fitted(str(file)).tensors
    for break_it in (
        lambda: file.write_bytes(b"no tensors"),
        lambda: save_file(tensors, file),
        lambda: save_file(tensors, file, {"lengthwise": "{}"}),
        file.unlink,
    ):
        break_it()
        with pytest.raises(ConfigError, match=r"head .*head\.safetensors: expected a file that `lengthwise fit` made"):
            load_fitted(str(file))


def test_a_prior_is_frozen_and_keeps_probabilities(loaded: Classifier, tickets: list[str], tmp_path: Path) -> None:
    """Labels the model always leans to lose their lead; sums stay one; neighbours make no difference to any bit."""
    fit_unlabelled(loaded, tickets[:12]).save(tmp_path / "prior")
    classifier = load(str(tmp_path / "prior"))
    together = classifier.classify(tickets[:12])
    assert [one.scores for one in together] == [classifier.classify([text])[0].scores for text in tickets[:12]]
    probabilities = torch.tensor([list(one.scores.values()) for one in together]).exp()
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(12))
    before = torch.tensor([list(one.scores.values()) for one in loaded.classify(tickets[:12])]).exp().mean(dim=0)
    assert probabilities.mean(dim=0).max() < before.max()


def test_a_prior_can_be_used_at_once(tiny: Tiny, tickets: list[str], tmp_path: Path) -> None:
    """What is scored before it is saved is what comes after loading."""
    options = {"model": tiny("llama"), "dtype": "float32", "strategy": "single"}
    classifier = load("support", **options)
    fitted = fit_unlabelled(classifier, tickets)
    use_prior(classifier, fitted)
    fitted.save(tmp_path)
    assert load(str(tmp_path), **options).classify(tickets[:3]) == classifier.classify(tickets[:3])


@pytest.mark.parametrize("strategy", ["packed", "padded", "single"])
def test_a_head_can_be_fitted_by_every_strategy(strategy: str, tiny: Tiny, tmp_path: Path) -> None:
    """Of three labels given two are in the examples: the head has those two."""
    options = {"model": tiny("llama"), "dtype": "float32", "strategy": strategy}
    classifier = load("support", **options)
    rows = [row for row in samples.load(40) if row["label"] != "technical"]
    outcome = fit_task(
        classifier, [row["body"] for row in rows], [row["label"] for row in rows], "speed", lambda _: None
    )
    outcome.fitted.save(tmp_path)
    again = load(str(tmp_path), **options)
    assert again.labels == ("billing", "account")
    assert len(again.classify([rows[0]["body"], ""])) == 2


def test_a_label_without_examples_is_left_out_of_the_prompt_too(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head reads the very prompt that it was fitted to: no line names a label that it cannot give, nor an example."""
    asked: list[Task] = []

    def recorded(classifier: Classifier, task: Task, texts: list[str]) -> dict[Tap, torch.Tensor]:
        asked.append(task)
        return features(classifier, task, texts)

    monkeypatch.setattr(fitter, "features", recorded)
    monkeypatch.setattr(fitter, "_forms", lambda *_: ["plain"])
    examples = (Example("It does not start", "technical"), Example("Refund me", "billing"))
    given = replace(load_task("support"), examples=examples)
    classifier = Classifier.load(given, tiny("llama"), dtype="float32", threads=1, tokens=512)
    rows = [row for row in samples.load(40) if row["label"] != "technical"]
    texts = [row["body"] for row in rows]
    outcome = fit_task(classifier, texts, [row["label"] for row in rows], "speed", lambda _: None)
    outcome.fitted.save(tmp_path)
    task = load_task(str(tmp_path))
    assert (list(task.labels), task.examples) == (["billing", "account"], examples[1:])
    assert asked == [replace(task, head=None)]
    found = features(classifier, asked[0], texts)
    inputs = torch.cat([found[tap] for tap in outcome.fit.chosen.taps], dim=1).double().numpy()
    expected = torch.from_numpy(inputs @ outcome.fit.weight.T + outcome.fit.bias).log_softmax(dim=1)
    again = load(str(tmp_path), model=tiny("llama"), dtype="float32").classify(texts)
    scores = torch.tensor([list(one.scores.values()) for one in again])
    torch.testing.assert_close(scores.double(), expected, atol=5e-3, rtol=0)


def test_the_same_examples_make_the_same_file(tiny: Tiny, tmp_path: Path) -> None:
    """From model to file nothing is drawn anew: two fits give equal bytes, and the next replaces the one before."""
    rows, classifier = samples.load(20), load("support", model=tiny("llama"), dtype="float32")
    examples = [row["body"] for row in rows], [row["label"] for row in rows]
    for name in ("a", "b"):
        fitted = fit_task(classifier, *examples, "speed", lambda _: None).fitted
        fitted.save(tmp_path / name)
    fitted.save(tmp_path / "b")
    for file in ("head.safetensors", "task.toml"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert len(list((tmp_path / "b").iterdir())) == 2


def test_a_folder_is_for_everybody_who_may_read_it(tiny: Tiny, tickets: list[str], tmp_path: Path) -> None:
    """A worker under another account can read a head as it can read the task; a task's odd texts come back."""
    odd = 'She said: "1 < 2"\r\n\té \\ # \x07'
    task = Task(name="t", instruction="", labels={"a": odd, "b": ""}, examples=(Example(odd, "a"),))
    classifier = Classifier.load(task, tiny("llama"), dtype="float32", threads=1, tokens=512)
    fit_unlabelled(classifier, tickets[:3]).save(tmp_path / "t")
    modes = {(tmp_path / "t" / file).stat().st_mode for file in ("task.toml", "head.safetensors")}
    assert len(modes) == 1
    assert replace(load_task(str(tmp_path / "t")), head=None) == task


def test_a_folder_that_cannot_be_written_is_named(tiny: Tiny, tickets: list[str], tmp_path: Path) -> None:
    """Where the head's place is taken, or the folder's, the message says which folder and why."""
    fitted = fit_unlabelled(load("support", model=tiny("llama"), dtype="float32"), tickets[:3])
    (tmp_path / "taken" / "head.safetensors" / "x").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name in ("taken", "file"):
        with pytest.raises(ConfigError, match=f"{name}: cannot be written"):
            fitted.save(tmp_path / name)


def test_a_head_answers_one_question(loaded: Classifier) -> None:
    """A task of several questions is refused, with what to do."""
    task = Task(name="t", instruction="i", labels={"a": "", "b": ""}, questions={"urgent": {"yes": "", "no": ""}})
    classifier = Classifier.__new__(Classifier)
    classifier.task = task
    with pytest.raises(ConfigError, match="asks 2 questions; a head answers one: fit each apart"):
        fit_task(classifier, ["x"], ["a"], "speed", lambda _: None)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared tickets are not beside this checkout")
def test_real_tickets_are_labelled_right(loaded: Classifier, tmp_path: Path) -> None:
    """Ninety real tickets teach SmolLM2 what it needs for 510 others (measured: 94.1 %, calibration error 1.8 %)."""
    learnt, tested = read_labelled(SHARED, "dev"), read_labelled(SHARED, "test")
    fit_task(loaded, learnt.texts, learnt.labels, "balanced", lambda _: None).fitted.save(tmp_path)
    classifier = load(str(tmp_path))
    scores = [list(one.scores.values()) for one in classifier.classify(tested.texts)]
    quality = assess(tested.ids, tested.labels, list(classifier.labels), scores)
    assert quality.accuracy >= 0.92
    assert quality.ece <= 0.05
    assert json.loads(SHARED.read_text().splitlines()[0])["label"] in classifier.labels
