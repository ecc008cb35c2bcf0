"""The classifier: texts in, labels out, without Redis. The worker uses the same object through `worker.ports`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from wire import Answer
from worker.answers import answers
from worker.engine.certify import Certificate, certify, random_probes
from worker.engine.machine import describe, faster_dtype, usable_cores
from worker.engine.model import DEFAULT_MODEL, locate
from worker.engine.opening import DTYPES, STRATEGIES, Opened, fitted_of, open_model
from worker.engine.plan import Batch, Limits, plan
from worker.engine.prompt import Prompt
from worker.engine.stock import UnfitError, failures_explained
from worker.engine.task import DEFAULT_TASK, MAIN_QUESTION, Task, check_task, load_task
from worker.engine.tuning import threads_for, tokens_a_batch
from worker.errors import ConfigError, LengthwiseError
from worker.ports import Costs, Identity, Scored, score_all

_MOST_ROWS = 512
_PADDED_ROWS, _PADDED_TOKENS = 32, 4096


class Classification(Answer, frozen=True, kw_only=True):
    """One text's answer to the task's main question, and those to its further ones by their names."""

    truncated_tokens: int = 0
    answers: Mapping[str, Answer] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Choices:
    """How a classifier runs on this machine, and why; what the user did not set was measured."""

    strategy: str
    dtype: str
    device: str
    threads: int
    tokens: int  # a batch's budget
    fused: bool  # whether the layers were replaced by ours
    reasons: dict[str, str] = field(default_factory=dict)


class Classifier:
    """Labels texts with a language model: one forward pass a text, never a word generated.

    Made by `Classifier.load`. `labels` are those of the task's main question; the labels of all `questions` side by
    side are the order of all scores. `choices` is how it runs, `certificate` what was shown of batched against
    unbatched when it was loaded.
    """

    def __init__(self, task: Task, opened: Opened, limits: Limits, choices: Choices) -> None:
        self.task, self.labels = task, tuple(task.labels)
        self.questions = {question: tuple(labels) for question, labels in task.asked.items()}
        self.certificate: Certificate | None = None
        self.limits, self.choices = limits, replace(choices, tokens=limits.tokens, fused=opened.fused)
        self.loaded, self.prompter = opened.loaded, opened.prompter
        self.strategy, self.head = opened.strategy, opened.head

    @classmethod
    def load(
        cls,
        task: Task | str = DEFAULT_TASK,
        model: str = DEFAULT_MODEL,
        *,
        strategy: str | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        threads: int | None = None,
        tokens: int | None = None,
    ) -> "Classifier":
        """A classifier for a task (its name, TOML file or `Task`) and a model (its name, folder or Hugging Face id).

        What is not given is chosen by measurement: `strategy` (the first of STRATEGIES that changes no label in a
        batch), `dtype` (float32 or bfloat16), `threads` (the fewest that are nearly as fast as all usable cores),
        `tokens` of a batch. The first use of a catalogue model fetches it. Raises ConfigError with a sentence on how to
        mend it.
        """
        task = load_task(task) if isinstance(task, str) else task
        check_task(task, repr(task.name))
        locate(model)  # first: a model that is not there should be said at once
        reasons: dict[str, str] = {}
        torch.set_num_threads(threads or usable_cores())
        if dtype is None:
            dtype, reasons["dtype"] = _choose_dtype(task, device)
        if threads is None:
            threads, reasons["threads"] = threads_for(DTYPES[_known(dtype)], model, usable_cores())
            torch.set_num_threads(threads)
        choices = Choices(strategy or STRATEGIES[0], _known(dtype), device, threads, tokens or 0, False, reasons)
        for candidate in (strategy,) if strategy else STRATEGIES:
            try:
                classifier = _build(cls, task, model, replace(choices, strategy=candidate))
            except UnfitError as error:
                reasons[candidate] = str(error)
                continue
            if strategy or not classifier.certificate or not classifier.certificate.labels_differ:
                break
            reasons[candidate] = f"changes labels in a batch: {classifier.certificate}"
        else:
            tried = "; ".join(f"{candidate}: {reasons[candidate]}" for candidate in STRATEGIES if candidate in reasons)
            hint = "; leave the strategy out, and another one is tried" if strategy else ""
            raise ConfigError(f"model {model!r} cannot be used here. {tried}{hint}")
        if tokens is None:
            classifier.tune()
        return classifier

    @property
    def costs(self) -> Costs:
        """What every ticket costs beside its own prompt."""
        return Costs(len(self.prompter.prefix_ids), self.strategy.reuses_prefix, len(self.prompter.tree.ids))

    @property
    def identity(self) -> Identity:
        """What makes this classifier's labels."""
        certificate = "none" if self.certificate is None else str(self.certificate)
        return Identity(self.loaded.name, self.task.name, self.strategy.name, certificate)

    def classify(self, texts: Sequence[str], min_confidence: float = 0.0) -> list[Classification]:
        """Label each text, in the order given. Equal texts get equal scores, and neighbours make no difference.

        An answer less probable than `min_confidence` has None for its label, and its scores all the same.

        Raises LengthwiseError if a score is not a number.
        """
        prompts = self.tokenise(texts)
        return [
            self._classification(log_probs, prompt.truncated, min_confidence)
            for prompt, log_probs in zip(prompts, score_all(self, prompts), strict=True)
        ]

    def tokenise(self, texts: Sequence[str]) -> list[Prompt]:
        """Prompts for the texts, in their order."""
        return self.prompter.prompts(texts)

    def plan(self, prompts: Sequence[Prompt]) -> list[Batch]:
        """Length-sorted batches that together hold every prompt once."""
        return plan([prompt.ids for prompt in prompts], self.limits)

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        """One forward pass: log-probabilities of all `questions`' labels side by side, one row a prompt."""
        with torch.inference_mode():
            states, tokens = self.strategy.hidden([prompt.ids for prompt in prompts])
            return Scored(self.head.log_probs(states).tolist(), tokens)

    def shrink(self, prompts: Sequence[Prompt]) -> None:
        """Plan smaller batches from now on: one pass over these prompts did not fit into memory."""
        self.limits = self.limits.under([len(prompt.ids) for prompt in prompts])

    def certify(self) -> Certificate:
        """Show once more whether batched equals unbatched here."""
        probes = random_probes(self.prompter.wrap, self.prompter.ordinary_ids, self.prompter.room)
        return certify(lambda batch: self.score(batch).log_probs, probes, self.task.sizes)

    def tune(self) -> None:
        """Choose the token budget of a batch for this machine."""
        if not self.strategy.takes_any_mix:
            return
        key = (
            f"{describe(self.choices.device)}, {self.loaded.name}, {self.choices.dtype}, {self.choices.threads} threads"
        )
        tokens, reason = tokens_a_batch(self.score, self.prompter.wrap, self.prompter.ordinary_ids, key)
        self.limits = replace(self.limits, tokens=tokens)
        self.choices = replace(self.choices, tokens=tokens, reasons={**self.choices.reasons, "tokens": reason})

    def _classification(self, log_probs: Sequence[float], truncated: int, min_confidence: float) -> Classification:
        if not all(map(math.isfinite, log_probs)):
            raise LengthwiseError(f"{self.loaded.name}: a text's score is not a number, so it has no label")
        found = answers(self.questions, log_probs, min_confidence)
        main = msgspec.structs.asdict(found.pop(MAIN_QUESTION))
        return Classification(**main, truncated_tokens=truncated, answers=found)


def _build(kind: type[Classifier], task: Task, model: str, choices: Choices) -> Classifier:
    """A certified classifier as chosen. Raises UnfitError if the strategy is not for this model."""
    opened = open_model(task, model, choices.strategy, choices.dtype, choices.device)
    padded = not opened.strategy.takes_any_mix
    rows, tokens = (_PADDED_ROWS, _PADDED_TOKENS) if padded else (_MOST_ROWS, 1024)
    classifier = kind(task, opened, Limits(rows, choices.tokens or tokens, padded), choices)
    with failures_explained():
        classifier.certificate = classifier.certify()
    return classifier


def _choose_dtype(task: Task, device: str) -> tuple[str, str]:
    """The dtype to run in, and why."""
    if fitted := fitted_of(task):
        return fitted.facts.dtype, "the task's head was fitted in it"
    chosen, reason = faster_dtype(device)
    return str(chosen).removeprefix("torch."), reason


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    return dtype
