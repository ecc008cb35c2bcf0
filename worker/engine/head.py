"""Heads fitted to examples: saved beside a task as safetensors, refused where they do not belong.

A linear head turns what its taps read into label scores. A prior head keeps the label rows of the output layer and
takes off what they say of any ticket at all.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from worker.engine.scorer import FewRows, Head
from worker.engine.tap import Tap
from worker.errors import ConfigError

_FACTS = "lengthwise"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a head was fitted on. It is refused where any of this differs."""

    labels: tuple[str, ...]
    taps: tuple[Tap, ...]  # none for a prior
    model: str
    model_hash: str
    prompt_hash: str
    dtype: str


class Fitted(msgspec.Struct, frozen=True):
    """A head as it lies in its file: `weight` `[labels, taps x width]` and `bias` `[labels]`, or `prior` `[labels]`."""

    facts: Facts
    tensors: dict[str, torch.Tensor]

    def save(self, file: Path) -> None:
        """Write it as safetensors, float32. Raises OSError."""
        # In one step: somebody may be reading what was there. Not `save_file`: nobody else could read that file.
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_bytes(save(self.tensors, {_FACTS: msgspec.json.encode(self.facts).decode()}))
        temporary.replace(file)

    def check(self, labels: Sequence[str], model_hash: str, prompt_hash: str, dtype: str) -> None:
        """Raise ConfigError unless it belongs here."""
        facts = self.facts
        if facts.labels != tuple(labels):
            raise _refused("these labels", ", ".join(facts.labels), ", ".join(labels))
        if facts.model_hash != model_hash:
            raise _refused("this model", f"{facts.model} ({facts.model_hash[:12]})", f"weights {model_hash[:12]}")
        if facts.prompt_hash != prompt_hash:
            raise _refused("this prompt", facts.prompt_hash[:12], prompt_hash[:12])
        if facts.dtype != dtype:
            raise _refused("this dtype", facts.dtype, dtype)


def load_fitted(file: str) -> Fitted:
    """Read a head. Raises ConfigError for a file that is none."""
    try:
        with safe_open(file, framework="pt") as opened:
            facts = msgspec.json.decode((opened.metadata() or {})[_FACTS], type=Facts)
            # Copied: what safetensors gives lies in the file, and is gone with it.
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError, KeyError, msgspec.DecodeError) as error:
        raise ConfigError(f"head {file}: expected a file that `lengthwise fit` made ({type(error).__name__})") from None
    return Fitted(facts, tensors)


class LinearHead:
    """Softmax regression on what the taps read."""

    def __init__(self, fitted: Fitted, device: Any) -> None:
        self._rows = FewRows(fitted.tensors["weight"].to(device), fitted.tensors["bias"].to(device))

    def log_probs(self, states: torch.Tensor) -> torch.Tensor:
        """See `Head`; `states` are `[prompts, taps, width]`."""
        return self._rows(states.flatten(1)).log_softmax(dim=-1)


class PriorHead:
    """The model's own label scores without the part that every ticket gets."""

    def __init__(self, fitted: Fitted, inner: Head, sizes: Sequence[int], device: Any) -> None:
        self._prior, self._inner, self._sizes = fitted.tensors["prior"].to(device), inner, list(sizes)

    def log_probs(self, states: torch.Tensor) -> torch.Tensor:
        """See `Head`; `sizes` are the numbers of each question's labels."""
        scores = self._inner.log_probs(states) - self._prior
        questions = torch.split(scores, self._sizes, dim=1)
        return torch.cat([question.log_softmax(dim=-1) for question in questions], dim=1)


def _refused(what: str, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"the task's head was not fitted on {what}: expected {expected}, got {got}. Fit it anew with `lengthwise fit`"
    )
