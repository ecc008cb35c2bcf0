"""The classifier: texts in, labels out, without Redis. The worker uses the same object through `worker.ports`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from worker.engine.certify import Certificate, best, certify, random_probes
from worker.engine.fuse import fuse
from worker.engine.machine import describe, faster_dtype, usable_cores
from worker.engine.model import DEFAULT_MODEL, LoadedModel, load_model
from worker.engine.packed import Packed
from worker.engine.padded import Padded, Single
from worker.engine.plan import Batch, Limits, plan
from worker.engine.prompt import Prompt, Prompter
from worker.engine.scorer import LabelHead, Strategy
from worker.engine.stock import Stock, UnfitError, failures_explained
from worker.engine.task import DEFAULT_TASK, Task, check_task, load_task
from worker.engine.tuning import tokens_a_batch
from worker.errors import ConfigError, LengthwiseError
from worker.ports import Costs, Identity, Scored

# In the order in which they are tried: the next one is for models or machines where the one before changes a label.
STRATEGIES = ("packed", "padded", "single")
_KINDS: dict[str, type[Packed] | type[Padded] | type[Single]] = dict(
    zip(STRATEGIES, (Packed, Padded, Single), strict=True)
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MOST_ROWS = 512
_PADDED_ROWS, _PADDED_TOKENS = 32, 4096


@dataclass(frozen=True)
class Classification:
    """One text's label. `scores` are log-probabilities in nats, one a label, and add up to a probability of one."""

    label: str
    confidence: float
    margin: float
    scores: dict[str, float]
    truncated_tokens: int


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

    Made by `Classifier.load`. `labels` is the order of all scores, `choices` how it runs, `certificate` what was shown
    of batched against unbatched when it was loaded.
    """

    def __init__(
        self, task: Task, loaded: LoadedModel, strategy: Strategy, prompter: Prompter, limits: Limits, choices: Choices
    ) -> None:
        self.task, self.labels = task, tuple(task.labels)
        self.certificate: Certificate | None = None
        self.limits, self.choices = limits, replace(choices, tokens=limits.tokens)
        self._model_name, self.strategy, self.prompter = loaded.name, strategy, prompter
        with torch.inference_mode():
            self.head = LabelHead(loaded.model, prompter.tree)

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
        batch), `dtype` (float32 or bfloat16), `threads` (all usable cores), `tokens` of a batch. The first use of a
        catalogue model fetches it. Raises ConfigError with a sentence on how to mend it.
        """
        task = load_task(task) if isinstance(task, str) else task
        check_task(task, repr(task.name))
        threads = threads or usable_cores()
        torch.set_num_threads(threads)
        reasons: dict[str, str] = {}
        if dtype is None:
            chosen, reasons["dtype"] = faster_dtype(device)
            dtype = str(chosen).removeprefix("torch.")
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
        return Identity(self._model_name, self.task.name, self.strategy.name, certificate)

    def classify(self, texts: Sequence[str]) -> list[Classification]:
        """Label each text, in the order given. Equal texts get equal scores, and neighbours make no difference.

        Raises LengthwiseError if a score is not a number.
        """
        prompts = self.tokenise(texts)
        results: dict[int, Classification] = {}
        for batch in self.plan(prompts):
            scored = self.score([prompts[row[0]] for row in batch.rows])
            for row, log_probs in zip(batch.rows, scored.log_probs, strict=True):
                for index in row:
                    results[index] = self._classification(log_probs, prompts[index].truncated)
        return [results[index] for index in range(len(texts))]

    def tokenise(self, texts: Sequence[str]) -> list[Prompt]:
        """Prompts for the texts, in their order."""
        return self.prompter.prompts(texts)

    def plan(self, prompts: Sequence[Prompt]) -> list[Batch]:
        """Length-sorted batches that together hold every prompt once."""
        return plan([prompt.ids for prompt in prompts], self.limits)

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        """One forward pass: log-probabilities in the order of `labels`, one row a prompt."""
        with torch.inference_mode():
            states, tokens = self.strategy.hidden([prompt.ids for prompt in prompts])
            return Scored(self.head.log_probs(states).tolist(), tokens)

    def certify(self) -> Certificate:
        """Show once more whether batched equals unbatched here."""
        probes = random_probes(self.prompter.wrap, self.prompter.ordinary_ids, self.prompter.room)
        return certify(lambda batch: self.score(batch).log_probs, probes)

    def tune(self) -> None:
        """Choose the token budget of a batch for this machine."""
        if not self.strategy.takes_any_mix:
            return
        key = (
            f"{describe(self.choices.device)}, {self._model_name}, {self.choices.dtype}, {self.choices.threads} threads"
        )
        tokens, reason = tokens_a_batch(self.score, self.prompter.wrap, self.prompter.ordinary_ids, key)
        self.limits = replace(self.limits, tokens=tokens)
        self.choices = replace(self.choices, tokens=tokens, reasons={**self.choices.reasons, "tokens": reason})

    def _classification(self, log_probs: Sequence[float], truncated: int) -> Classification:
        if not all(map(math.isfinite, log_probs)):
            raise LengthwiseError(f"{self._model_name}: a text's score is not a number, so it has no label")
        ranked = sorted(log_probs, reverse=True)
        winner = best(log_probs)
        return Classification(
            label=self.labels[winner],
            confidence=math.exp(log_probs[winner]),
            margin=ranked[0] - ranked[1],
            scores=dict(zip(self.labels, log_probs, strict=True)),
            truncated_tokens=truncated,
        )


def _build(kind: type[Classifier], task: Task, model: str, choices: Choices) -> Classifier:
    """A certified classifier as chosen. Raises UnfitError if the strategy is not for this model."""
    loaded, prompter, fused = _load(task, model, choices)
    with failures_explained(), torch.inference_mode():
        strategy = _KINDS[choices.strategy](loaded.model, prompter.prefix_ids, prompter.tree)
    padded = not strategy.takes_any_mix
    rows, tokens = (_PADDED_ROWS, _PADDED_TOKENS) if padded else (_MOST_ROWS, 1024)
    limits = Limits(rows, choices.tokens or tokens, padded)
    classifier = kind(task, loaded, strategy, prompter, limits, replace(choices, fused=fused))
    with failures_explained():
        classifier.certificate = classifier.certify()
    return classifier


def _load(task: Task, model: str, choices: Choices) -> tuple[LoadedModel, Prompter, bool]:
    """The model, with our own layers where they apply: packed, bfloat16, on a processor.

    Raises UnfitError if the strategy does not give what the model itself gives.
    """
    dtype, strategy = DTYPES[choices.dtype], _KINDS[choices.strategy]
    # Compared in float32 where memory allows: in bfloat16 a forgotten window may look like one more rounding.
    loaded = load_model(model, torch.float32 if choices.device == "cpu" else dtype, device=choices.device)
    prompter = Prompter(task, loaded.tokenizer, loaded.window)
    stock = Stock(loaded.model, prompter)
    if strategy is not Single:
        stock.check(strategy, loaded.model, loaded.dtype)
    if strategy is Packed and dtype is torch.bfloat16 and choices.device == "cpu" and _fused(loaded.model, stock):
        return loaded, prompter, True
    # Not `.to(dtype)`, which would round the rotary frequencies too.
    return (loaded if loaded.dtype is dtype else load_model(model, dtype, device=choices.device)), prompter, False


def _fused(model: Any, stock: Stock) -> bool:
    with torch.inference_mode():
        if not fuse(model):
            return False
    try:
        stock.check(Packed, model, torch.bfloat16)
    except UnfitError:
        return False
    return True


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    return dtype
