"""A classifier without a model: the label is a hash of the text, a batch costs a few milliseconds, poison kills."""

import hashlib
import os
import signal
import time
from collections.abc import Sequence
from math import log
from typing import ClassVar

from worker.engine.plan import Batch, Limits, plan
from worker.engine.prompt import Prompt
from worker.ports import Costs, Identity, Scored

LABELS = ("billing", "technical", "account")
POISON = "POISON"  # a text with it ends the process that scores it, as a crash in native code would

_SURE, _UNSURE = log(0.8), log(0.1)
_DIGEST_TOKENS = 16
_POISONED = -1


def label_of(text: str) -> str:
    """The label that the stub gives this text, always."""
    return LABELS[hashlib.sha256(text.encode()).digest()[0] % len(LABELS)]


class StubClassifier:
    """`worker.ports.Classifier` without torch. One token for 16 bytes of text, at most 64 beyond the hash."""

    questions: ClassVar = {"category": LABELS}
    costs = Costs(prefix_tokens=64, reuses_prefix=True)
    identity = Identity("stub", "soak", "packed", "exact")

    def __init__(self, rows: int, batch_s: float) -> None:
        self._limits, self._batch_s = Limits(rows=rows, tokens=1_000_000, padded=False), batch_s

    def tokenise(self, texts: Sequence[str]) -> list[Prompt]:
        """The hash of each text, and filler by its length, so that batches are sorted as real ones are."""
        return [Prompt(_tokens(text)) for text in texts]

    def plan(self, prompts: Sequence[Prompt]) -> list[Batch]:
        """The real plan."""
        return plan([prompt.ids for prompt in prompts], self._limits)

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        """The label that the hash says. With poison among them, the process ends here."""
        time.sleep(self._batch_s)
        if any(prompt.ids[-1] == _POISONED for prompt in prompts):
            os.kill(os.getpid(), signal.SIGKILL)
        return Scored([_scores(prompt.ids[0]) for prompt in prompts], sum(len(prompt.ids) for prompt in prompts))

    def shrink(self, prompts: Sequence[Prompt]) -> None:
        """Never asked: no pass fails for want of memory."""


def _tokens(text: str) -> tuple[int, ...]:
    raw = text.encode()
    filler = (0,) * min(64, len(raw) // 16)
    return (*hashlib.sha256(raw).digest()[:_DIGEST_TOKENS], *filler, *([_POISONED] if POISON in text else []))


def _scores(first: int) -> list[float]:
    return [_SURE if first % len(LABELS) == index else _UNSURE for index in range(len(LABELS))]
