"""The demo's own fitted task: what the shipped examples make of the model's labels, before and after."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from producer.samples import load_examples
from worker.commands.texts import evenly, sample_text
from worker.engine.task import DEFAULT_TASK, load_task

# Tickets whose labels are looked at before anything is fitted.
_BEFORE_SAMPLE = 120


def fit_on_examples(
    folder: Path, model: str, samples: Sequence[Mapping[str, str]], tell: Callable[[str], None]
) -> float:
    """Fit the built-in task to the shipped examples, into `folder`.

    Gives the accuracy of the model without that, on some of the samples.
    """
    from worker.engine import Classifier
    from worker.engine.fitter import fit_task

    tell("loading the model")
    classifier = Classifier.load(load_task(DEFAULT_TASK), model)
    tell("labelling some tickets with the model's own scores")
    truth = {sample_text(sample): sample["label"] for sample in samples}
    texts = evenly(list(truth), _BEFORE_SAMPLE)
    right = sum(one.label == truth[text] for text, one in zip(texts, classifier.classify(texts), strict=True))
    examples = load_examples()
    outcome = fit_task(
        classifier,
        [sample_text(example) for example in examples],
        [example["label"] for example in examples],
        "balanced",
        tell,
    )
    outcome.fitted.save(folder)
    return right / len(texts)
