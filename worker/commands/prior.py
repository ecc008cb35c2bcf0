"""The prior of `lengthwise fit --unlabelled`: a model's own label scores, without what it says of any ticket at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from rich.console import Console

from worker.commands.labelled import Labelled
from worker.engine.task import Form, Task
from worker.errors import ConfigError

if TYPE_CHECKING:
    from worker.engine.fitter import FittedTask


def fit_prior(
    console: Console,
    task: Task,
    model: str,
    texts: Sequence[str],
    known: Labelled | None,
    folder: Path,
    options: Mapping[str, Any],
) -> None:
    """Fit a prior to texts and write the task into `folder`; with known labels, in the prompt form that labels best."""
    forms: tuple[Form, ...] = (task.form,) if known is None else ("plain", "chat")
    best: tuple[float, FittedTask] | None = None
    for form in forms:
        try:
            with console.status(f"running the model, form {form}"):
                fitted, before, accuracy = _try_form(replace(task, form=form, head=None), model, texts, known, options)
        except ConfigError as error:
            if len(forms) == 1:
                raise
            console.print(f"form {form}: {error}", markup=False)
            continue
        if known is not None:
            console.print(f"form {form}: {before:.1%} of {len(known.ids)} right, with the prior {accuracy:.1%}")
        if best is None or accuracy > best[0]:
            best = accuracy, fitted
    if best is None:
        raise ConfigError(f"task {task.name!r}: no prompt form can be used with model {model!r}")
    best[1].save(folder)
    console.print(
        f"prior of {len(texts)} tickets, form {best[1].task.form}, written to {folder}. "
        f"Use it: lengthwise work --task {folder} --model {model}",
        markup=False,
        soft_wrap=True,
    )


def _try_form(
    task: Task, model: str, texts: Sequence[str], known: Labelled | None, options: Mapping[str, Any]
) -> "tuple[FittedTask, float, float]":
    """The task with its prior, and the accuracy on the known labels without and with it (0 if none are known)."""
    from worker.engine import Classifier
    from worker.engine.fitter import fit_unlabelled, use_prior

    classifier = Classifier.load(task, model, **options)
    fitted = fit_unlabelled(classifier, texts)
    accuracies = []
    for _ in ("without", "with"):
        found = classifier.classify(known.texts) if known else []
        right = sum(one.label == true for one, true in zip(found, known.labels if known else [], strict=True))
        accuracies.append(right / len(found) if found else 0.0)
        use_prior(classifier, fitted)
    return fitted, accuracies[0], accuracies[1]
