"""Labelled tickets -> a fitted task: one pass of the model over them, a head chosen and fitted, a folder written."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tomli_w
import torch
from msgspec.structs import replace

from worker.engine.classifier import Classifier
from worker.engine.features import features
from worker.engine.head import Facts, Fitted, PriorHead
from worker.engine.prompt import Prompter
from worker.engine.tap import Tap
from worker.engine.task import HEAD_FILE, TASK_FILE, Form, Task
from worker.errors import ConfigError
from worker.fitting import Fit, Floats, Prefer, fit_head, fit_prior, learning_curve
from worker.ports import score_all

# A prefix that lists the labels is tried while it is no longer than this: every ticket looks back at all of it.
_LONGEST_PREFIX = 256
# What a task file leaves out.
_NOTHING: tuple[object, ...] = (None, {}, [])


@dataclass(frozen=True)
class FittedTask:
    """A task with the head that was fitted for it. `task.head` is the file's name beside the task's."""

    task: Task
    fitted: Fitted

    def save(self, folder: Path) -> None:
        """Write the task and its head. Raises ConfigError if that cannot be done."""
        fields = {name: value for name, value in msgspec.to_builtins(self.task).items() if value not in _NOTHING}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.fitted.save(folder / HEAD_FILE)
            (folder / TASK_FILE).write_text(tomli_w.dumps(fields), "utf-8")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None


@dataclass(frozen=True)
class Outcome:
    """A fitted task, how it was chosen, and the accuracy by number of examples learnt from."""

    fitted: FittedTask
    fit: Fit
    curve: list[tuple[int, float]]


def fit_task(
    classifier: Classifier, texts: Sequence[str], labels: Sequence[str], prefer: Prefer, tell: Callable[[str], None]
) -> Outcome:
    """Fit a head for the classifier's task to labelled texts. Every label must be the task's and occur twice at least.

    Raises ConfigError for a task of several questions, and for a model whose layers cannot be tapped.
    """
    task = classifier.task
    if task.questions:
        raise ConfigError(f"task {task.name!r} asks {len(task.asked)} questions; a head answers one: fit each apart")
    task = _narrowed(task, set(labels))
    order = list(task.labels)
    numbers = np.array([order.index(label) for label in labels])
    materials: dict[Form, dict[Tap, Floats]] = {}
    for form in _forms(classifier, task):
        tell(f"running the model over {len(texts)} examples")
        found = features(classifier, replace(task, form=form), texts)
        materials[form] = {tap: states.double().numpy() for tap, states in found.items()}
    tell("choosing what to read")
    fit = fit_head(materials, numbers, prefer)
    curve = learning_curve(materials[fit.chosen.form], numbers, fit.chosen)
    fitted_task = replace(task, form=fit.chosen.form, head=HEAD_FILE)
    loaded = classifier.loaded
    prompter = Prompter(fitted_task, loaded.tokenizer, loaded.window, fit.chosen.taps)
    tensors = {"weight": _tensor(fit.weight), "bias": _tensor(fit.bias)}
    return Outcome(_joined(classifier, fitted_task, prompter, fit.chosen.taps, tensors), fit, curve)


def fit_unlabelled(classifier: Classifier, texts: Sequence[str]) -> FittedTask:
    """Fit a prior for the classifier's task to texts without labels: what its model says of any ticket at all."""
    scores = np.array(score_all(classifier, classifier.tokenise(texts)))
    task = replace(classifier.task, head=HEAD_FILE)
    return _joined(classifier, task, classifier.prompter, (), {"prior": _tensor(fit_prior(scores))})


def _narrowed(task: Task, known: Set[str]) -> Task:
    """The task with those of its labels that are in `known`: a head cannot give one that it saw no example of."""
    labels = {label: text for label, text in task.labels.items() if label in known}
    return replace(task, labels=labels, examples=tuple(one for one in task.examples if one.label in known))


def use_prior(classifier: Classifier, fitted: FittedTask) -> None:
    """Let a loaded classifier take a prior off its scores from now on."""
    classifier.head = PriorHead(fitted.fitted, classifier.head, classifier.task.sizes, classifier.choices.device)


def _forms(classifier: Classifier, task: Task) -> list[Form]:
    """The prompts a head may read: the task's own, if it is short, and the one that names no labels."""
    loaded = classifier.loaded
    own = Prompter(task, loaded.tokenizer, loaded.window)
    return [task.form, "bare"] if len(own.prefix_ids) <= _LONGEST_PREFIX else ["bare"]


def _joined(
    classifier: Classifier, task: Task, prompter: Prompter, taps: Any, tensors: Mapping[str, torch.Tensor]
) -> FittedTask:
    facts = Facts(
        labels=task.all_labels,
        taps=taps,
        model=classifier.loaded.name,
        model_hash=classifier.loaded.fingerprint,
        prompt_hash=prompter.fingerprint,
        dtype=classifier.choices.dtype,
    )
    return FittedTask(task, Fitted(facts, dict(tensors)))


def _tensor(values: Floats) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).float()
