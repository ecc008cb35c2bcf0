"""What the drain loop passes to and gets from its two neighbours, the queue and the classifier.

Neither neighbour is imported: the loop can be run against any pair that keeps these two Protocols.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from wire import BatchReport, DeadLetter, Label
from worker.engine.plan import Batch
from worker.engine.prompt import Prompt


@dataclass(frozen=True)
class Claimed:
    """One payload of a claim, exactly as it was pushed."""

    index: int
    payload: bytes
    crashes: int = 0  # workers that ended without a word while they had it
    errors: int = 0  # passes of the model that failed over it

    @property
    def attempt(self) -> int:
        """The how manieth time this is that it is tried, from 1."""
        return 1 + self.crashes + self.errors


@dataclass(frozen=True)
class Claim:
    """Tickets leased to this worker, oldest first."""

    id: str
    tickets: tuple[Claimed, ...]


@dataclass(frozen=True)
class Outcome:
    """One batch, ready to be committed. The numbers are the tickets' indexes in the claim."""

    labels: Sequence[tuple[int, str | None, Label]]  # with the id to check for duplicates, None for no check
    dead: Sequence[tuple[int, DeadLetter]]  # their payload is left empty: the claim has it
    report: BatchReport
    retry: Sequence[int] = ()  # to go to the end of the queue, with one more error to their count


class Answer(Enum):
    """What became of a commit."""

    OK = "OK"
    ALREADY = "ALREADY"  # it was done before; the reply was lost
    FENCED = "FENCED"  # the claim was taken over, nothing was published


@dataclass(frozen=True)
class Receipt:
    """The answer to a commit. The counts are known for OK alone."""

    answer: Answer
    published: int = 0
    duplicates: int = 0
    depth: int = 0


class Queue(Protocol):
    """Where tickets come from and labels go to. Used from two threads: one claims, one commits."""

    def claim(self, most: int | None = None) -> Claim | None:
        """The next tickets; None if there were none for about a second. `most` can only lower the configured number."""

    def commit(self, claim: Claim, outcome: Outcome) -> Receipt:
        """Publish one batch of the claim, whole or not at all."""

    def release(self, claim: Claim) -> int:
        """Hand back what the claim still owes, in order, and say how many that were."""

    def lease_margin_ms(self, claim: Claim) -> float:
        """What is left of the claim's lease by this machine's monotonic clock; negative once it ran out."""

    def take_reclaimed(self) -> int:
        """Tickets taken back from dead workers since this was last asked."""


@dataclass(frozen=True)
class Scored:
    """The scores of some prompts, in their order."""

    log_probs: Sequence[Sequence[float]]  # per prompt, one log-probability a label of each question, in their order
    tokens_computed: int  # tokens the model really ran, padding included


class Classifier(Protocol):
    """Text in, label scores out."""

    @property
    def questions(self) -> Mapping[str, Sequence[str]]:
        """Each question with its labels, the main one first; the order of all scores."""

    @property
    def costs(self) -> "Costs":
        """What every ticket costs beside its own prompt."""

    @property
    def identity(self) -> "Identity":
        """What made a label, for every result and metric."""

    def tokenise(self, texts: Sequence[str]) -> list[Prompt]:
        """Prompts for the texts, in their order. Used from the claiming thread."""

    def plan(self, prompts: Sequence[Prompt]) -> list[Batch]:
        """Batches that together hold every prompt once."""

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        """One forward pass over the prompts."""

    def shrink(self, prompts: Sequence[Prompt]) -> None:
        """Plan smaller batches from now on: one pass over these prompts did not fit into memory."""


def score_all(classifier: Classifier, prompts: Sequence[Prompt]) -> list[Sequence[float]]:
    """The scores of each prompt, in their order: every planned batch in a pass of its own."""
    found: dict[int, Sequence[float]] = {}
    for batch in classifier.plan(prompts):
        scores = classifier.score([prompts[row[0]] for row in batch.rows]).log_probs
        found |= {index: one for row, one in zip(batch.rows, scores, strict=True) for index in row}
    return [found[index] for index in range(len(prompts))]


@dataclass(frozen=True)
class Costs:
    """What every ticket costs beside its own prompt, in tokens."""

    prefix_tokens: int  # the instruction, in front of every prompt
    reuses_prefix: bool  # whether it is run once for all of them
    branch_tokens: int = 0  # of long labels, run after every prompt


@dataclass(frozen=True)
class Identity:
    """What made a label."""

    model: str
    task: str
    strategy: str
    certificate: str
