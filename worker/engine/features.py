"""What a model makes of tickets after each of its layers: the material a head is fitted to, all from one pass."""

from collections.abc import Sequence

import torch

from worker.engine.classifier import Classifier
from worker.engine.opening import KINDS
from worker.engine.plan import Limits, plan
from worker.engine.prompt import Prompter
from worker.engine.reading import layers_of
from worker.engine.tap import POOLINGS, Tap
from worker.engine.task import Task

# Depths looked at, evenly over the model and the first layer among them: neighbours hardly differ.
_DEPTHS = 12
# States of all layers are kept while a batch runs, so batches are smaller than a worker's.
_LIMITS = Limits(rows=64, tokens=512, padded=False)


def depths_of(classifier: Classifier) -> list[int]:
    """The depths that may be tapped, the shallowest first. Raises ConfigError for a model without plain layers."""
    layers = len(layers_of(classifier.loaded.model))
    return sorted({1, *(max(1, round(layers * step / _DEPTHS)) for step in range(1, _DEPTHS + 1))})


def features(classifier: Classifier, task: Task, texts: Sequence[str]) -> dict[Tap, torch.Tensor]:
    """Each text's states after every depth, pooled in every way: of each tap `[texts, width]`, float32.

    The classifier must not have a fitted head itself. Its strategy runs them, in the prompts of `task`.
    """
    loaded, kind = classifier.loaded, KINDS[classifier.strategy.name]
    taps = [Tap(depth, pooling) for depth in depths_of(classifier) for pooling in POOLINGS]
    prompter = Prompter(task, loaded.tokenizer, loaded.window, taps)
    prompts = [prompt.ids for prompt in prompter.prompts(texts)]
    rows: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        strategy = kind(loaded.model, prompter.prefix_ids, prompter.reading)
        for batch in plan(prompts, _LIMITS):
            states, _ = strategy.hidden([prompts[row[0]] for row in batch.rows])
            rows |= {index: states[number] for number, row in enumerate(batch.rows) for index in row}
    together = torch.stack([rows[index] for index in range(len(texts))])
    return {tap: together[:, number].clone() for number, tap in enumerate(taps)}
