"""A model made ready for one task: loaded, cut to what is read of it, and run by a strategy that was checked."""

from dataclasses import dataclass
from typing import Any

import torch

from worker.engine.fuse import fuse
from worker.engine.head import Fitted, LinearHead, PriorHead, load_fitted
from worker.engine.model import LoadedModel, load_model
from worker.engine.packed import Packed
from worker.engine.padded import Padded, Single
from worker.engine.prompt import Prompter
from worker.engine.reading import cut
from worker.engine.scorer import Head, LabelHead, Strategy
from worker.engine.stock import Stock, UnfitError, failures_explained
from worker.engine.task import Task

# In the order in which they are tried: the next one is for models or machines where the one before changes a label.
STRATEGIES = ("packed", "padded", "single")
KINDS: dict[str, type[Packed] | type[Padded] | type[Single]] = dict(
    zip(STRATEGIES, (Packed, Padded, Single), strict=True)
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Opened:
    """A model with everything between a text and its scores. `fused`: whether its layers were replaced by ours."""

    loaded: LoadedModel
    prompter: Prompter
    strategy: Strategy
    head: Head
    fused: bool


def fitted_of(task: Task) -> Fitted | None:
    """The head fitted to a task's examples, if it has one. Raises ConfigError for a file that is none."""
    return load_fitted(task.head) if task.head else None


def open_model(task: Task, model: str, strategy: str, dtype: str, device: str) -> Opened:
    """Load a model for a task. Packed in bfloat16 on a processor, its layers are our own where these agree with it.

    Raises UnfitError if the strategy does not give what the model itself gives, ConfigError if the task's head was
    fitted on something else.
    """
    fitted = fitted_of(task)
    # Compared in float32 where memory allows: in bfloat16 a forgotten window may look like one more rounding.
    loaded, prompter = load_cut(task, fitted, model, "float32" if device == "cpu" else dtype, device)
    if fitted:
        fitted.check(task.all_labels, loaded.fingerprint, prompter.fingerprint, dtype)
    fused = _check(loaded, prompter, strategy, dtype, device)
    if loaded.dtype is not DTYPES[dtype] and not fused:
        # Not `.to(dtype)`, which would round the rotary frequencies too.
        loaded, prompter = load_cut(task, fitted, model, dtype, device)
    with failures_explained(), torch.inference_mode():
        running = KINDS[strategy](loaded.model, prompter.prefix_ids, prompter.reading)
        return Opened(loaded, prompter, running, head_for(task, fitted, loaded.model, prompter, device), fused)


def load_cut(
    task: Task, fitted: Fitted | None, model: str, dtype: str, device: str = "cpu"
) -> tuple[LoadedModel, Prompter]:
    """A model as transformers runs it, without the layers that the task's head does not need, and its prompts."""
    taps = fitted.facts.taps if fitted else ()
    loaded = load_model(model, DTYPES[dtype], device=device)
    if taps:
        cut(loaded.model, taps)
    return loaded, Prompter(task, loaded.tokenizer, loaded.window, taps)


def head_for(task: Task, fitted: Fitted | None, model: Any, prompter: Prompter, device: str = "cpu") -> Head:
    """What a task reads scores with: the head that was fitted to it, or the label rows of the output layer."""
    if fitted and fitted.facts.taps:
        return LinearHead(fitted, device)
    own = LabelHead(model, prompter.tree)
    return PriorHead(fitted, own, task.sizes, device) if fitted else own


def _check(loaded: LoadedModel, prompter: Prompter, strategy: str, dtype: str, device: str) -> bool:
    """Hold the strategy against the stock model; and put our own layers in its place if they pass too."""
    stock, kind = Stock(loaded.model, prompter), KINDS[strategy]
    if kind is not Single:
        stock.check(kind, loaded.model, loaded.dtype)
    return kind is Packed and dtype == "bfloat16" and device == "cpu" and _fused(loaded.model, stock)


def _fused(model: Any, stock: Stock) -> bool:
    with torch.inference_mode():
        if not fuse(model):
            return False
    try:
        stock.check(Packed, model, torch.bfloat16)
    except UnfitError:
        return False
    return True
