"""The classifier: texts in, labels out, without Redis. The worker uses the same object through `worker.ports`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from worker.engine.model import DEFAULT_MODEL, LoadedModel, load_model
from worker.engine.padded import Padded, Single
from worker.engine.plan import Batch, Limits, plan
from worker.engine.prompt import Prompt, Prompter
from worker.engine.scorer import LabelHead, Strategy
from worker.engine.task import DEFAULT_TASK, Task, load_task
from worker.ports import Identity, Scored

STRATEGIES: dict[str, Callable[..., Strategy]] = {"padded": Padded, "single": Single}


@dataclass(frozen=True)
class Classification:
    """One text's label. `scores` are log-probabilities in nats, one a label, and add up to a probability of one."""

    label: str
    confidence: float
    margin: float
    scores: dict[str, float]
    truncated_tokens: int


class Classifier:
    """Labels texts with a language model: one forward pass a text, never a word generated."""

    def __init__(self, task: Task, loaded: LoadedModel, strategy: str = "padded", limits: Limits | None = None) -> None:
        self.task = task
        self._loaded = loaded
        self._limits = limits or Limits(rows=32, tokens=4096, padded=True)
        self._prompter = Prompter(task, loaded.tokenizer, loaded.window)
        with torch.inference_mode():
            self._strategy = STRATEGIES[strategy](loaded.model, self._prompter.prefix_ids, self._prompter.tree)
            self._head = LabelHead(loaded.model, self._prompter.tree)
        self.labels = tuple(task.labels)
        self.prefix_tokens = len(self._prompter.prefix_ids)
        self.identity = Identity(loaded.name, task.name, self._strategy.name, "unverified")

    @classmethod
    def load(
        cls,
        task: Task | str = DEFAULT_TASK,
        model: str = DEFAULT_MODEL,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        strategy: str = "padded",
        threads: int | None = None,
    ) -> "Classifier":
        """A classifier for a task (its name, TOML file or `Task`) and a model (its name, folder or Hugging Face id).

        The first use of a catalogue model fetches it. Raises ConfigError with a sentence on how to mend it.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        task = load_task(task) if isinstance(task, str) else task
        return cls(task, load_model(model, dtype, device=device), strategy)

    def classify(self, texts: Sequence[str]) -> list[Classification]:
        """Label each text, in the order given. Equal texts get equal scores, and neighbours make no difference."""
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
        return self._prompter.prompts(texts)

    def plan(self, prompts: Sequence[Prompt]) -> list[Batch]:
        """Length-sorted batches that together hold every prompt once."""
        return plan([prompt.ids for prompt in prompts], self._limits)

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        """One forward pass: log-probabilities in the order of `labels`, one row a prompt."""
        with torch.inference_mode():
            states, tokens = self._strategy.hidden([prompt.ids for prompt in prompts])
            return Scored(self._head.log_probs(states).tolist(), tokens)

    def with_strategy(self, strategy: str) -> "Classifier":
        """The same task and model, another way to run it. The weights are shared."""
        return Classifier(self.task, self._loaded, strategy, self._limits)

    def _classification(self, log_probs: Sequence[float], truncated: int) -> Classification:
        ranked = sorted(log_probs, reverse=True)
        best = max(range(len(log_probs)), key=log_probs.__getitem__)
        return Classification(
            label=self.labels[best],
            confidence=math.exp(log_probs[best]),
            margin=ranked[0] - ranked[1],
            scores=dict(zip(self.labels, log_probs, strict=True)),
            truncated_tokens=truncated,
        )
