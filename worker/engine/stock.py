"""Does a strategy give what transformers itself gives for this model? Held against it once, before it is relied on.

`certify` compares a strategy with itself and cannot see this: one that forgets a sliding window forgets it alone and in
a batch alike. No model is known by name. A strategy passes if its hidden states are those of the stock model.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, Protocol

import torch

from worker.engine.padded import Single
from worker.engine.prompt import Prompter
from worker.engine.scorer import Strategy
from worker.engine.tap import Reading
from worker.engine.tree import ROOT, LabelTree
from worker.errors import ConfigError

# Largest difference of a hidden state from the stock model's, relative to it: float32's noise over many layers, and
# the roundings of bfloat16. A token too many or too few in attention shows clearly in the former.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# Lengths of the two probes. The longer one is made longer still if the model's configuration speaks of a reach that
# tickets may pass, by enough tokens for what is out of reach to matter.
_SHORT, _LONG, _BEYOND_REACH = 3, 48, 64
_REACH = re.compile("window|chunk|local|block|sliding")
# What a model's own code raises when it is called in a way it does not know.
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


class UnfitError(Exception):
    """This model cannot be run by this strategy; the message says why."""


class MakesStrategy(Protocol):
    """A strategy's class."""

    def __call__(self, model: Any, prefix_ids: Sequence[int], reading: Reading) -> Strategy:
        """A strategy for this model."""


class Stock:
    """What the stock model makes of two probes, each run alone. Made before anything about the model is changed.

    Raises UnfitError if it cannot be run at all, ConfigError if its weights are broken.
    """

    def __init__(self, model: Any, prompter: Prompter) -> None:
        self._prefix_ids = prompter.prefix_ids
        random = Random(2)  # noqa: S311 - probes, not secrets
        ids = random.choices(prompter.ordinary_ids, k=_probe_length(model.config, prompter))
        self._probes = [prompter.wrap(ids).ids, prompter.wrap(ids[:_SHORT]).ids]
        # The second of two siblings is read: it must see the ticket and itself, and not the first.
        siblings = (ids[0], ids[1])
        self._reading = Reading(LabelTree(siblings, (ROOT, ROOT), reads=(1,), choices=(siblings,), paths=()))
        self._states = self._run(Single, model)
        if not self._states.isfinite().all():
            raise ConfigError("this model's weights are broken: what it computes is not a number")

    def check(self, kind: MakesStrategy, model: Any, dtype: torch.dtype) -> None:
        """Raise UnfitError unless the strategy gives the same, up to what `dtype` rounds."""
        difference = self._states - self._run(kind, model)
        largest = float((difference.norm(dim=-1) / self._states.norm(dim=-1)).max())
        if not largest <= TOLERANCE[dtype]:
            raise UnfitError(
                f"gives other states than the model itself, off by {largest:.2g} with {len(self._probes[0])} tokens"
            )

    def _run(self, kind: MakesStrategy, model: Any) -> torch.Tensor:
        with failures_explained(), torch.inference_mode():
            return kind(model, self._prefix_ids, self._reading).hidden(self._probes)[0].float()


@contextmanager
def failures_explained() -> Iterator[None]:
    """Turn what a model's code raises into UnfitError with its first line."""
    try:
        yield
    except _FAILURES as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnfitError(f"cannot run this model: {lines[0]}") from error


def _probe_length(config: Any, prompter: Prompter) -> int:
    """Long enough to pass every reach that a ticket can pass."""
    longest = len(prompter.prefix_ids) + prompter.room
    reach = max((number for number in _reaches(config.to_dict()) if number < longest), default=0)
    return min(prompter.room, max(_LONG, reach + _BEYOND_REACH - len(prompter.prefix_ids)))


def _reaches(settings: Any, name: str = "") -> Iterator[int]:
    """Numbers in a model's configuration whose name speaks of how far a token sees."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from _reaches(value, str(key))
    elif isinstance(settings, int) and not isinstance(settings, bool) and _REACH.search(name):
        yield settings
