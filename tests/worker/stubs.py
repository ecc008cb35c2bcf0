"""What the tests of the loop share: an in-memory queue and a stub classifier, through the two Protocols."""

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from wire import DeadLetter, Label
from worker.drain import Drain, Drained
from worker.engine.plan import Batch, Limits, plan
from worker.engine.prompt import Prompt
from worker.ports import Answer, Claim, Claimed, Costs, Identity, Outcome, Receipt, Scored
from worker.stop import Stop

SURE, UNSURE = math.log(0.8), math.log(0.1)
# What the stub makes of a text that begins so; anything else is "other".
SCORES = {
    "red": (SURE, UNSURE, UNSURE),
    "blue": (UNSURE, SURE, UNSURE),
    "tie": (UNSURE, math.log(0.45), math.log(0.45)),
    "zero": (-math.inf, 0.0, -math.inf),
    "nan": (SURE, math.nan, UNSURE),
    "inf": (SURE, math.inf, UNSURE),
    "none": (-math.inf, -math.inf, -math.inf),
}
OTHER = (UNSURE, UNSURE, SURE)
LABEL_OF = {"red": "red", "blue": "blue", "tie": "blue", "zero": "blue", "other": "other"}
IDENTITY = Identity("stub", "colours", "padded", "exact")


@dataclass
class StubClassifier:
    """One token a byte. `during` is called inside every pass with the number of passes; a text with "boom" raises."""

    rows: int = 2
    rows_in_memory: int = 1000  # more in one pass raise `no_memory`
    no_memory: Exception = field(default_factory=MemoryError)
    during: Callable[[int], None] = lambda number: None
    passes: list[list[str]] = field(default_factory=list)
    questions: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"category": ("red", "blue", "other")})
    costs: Costs = Costs(prefix_tokens=16, reuses_prefix=True)  # noqa: RUF009 - frozen
    identity: Identity = IDENTITY
    limits: Limits = Limits(rows=1, tokens=10_000, padded=True)  # noqa: RUF009 - frozen; `rows` of the stub go first

    def tokenise(self, texts: Sequence[str]) -> list[Prompt]:
        """One token a byte; a text with "spell" cannot be tokenised."""
        if any("spell" in text for text in texts):
            raise RuntimeError(f"cannot tokenise {texts}")
        return [Prompt(tuple(text.encode())) for text in texts]

    def plan(self, prompts: Sequence[Prompt]) -> list[Batch]:
        """The real plan."""
        return plan([prompt.ids for prompt in prompts], replace(self.limits, rows=self.rows))

    def shrink(self, prompts: Sequence[Prompt]) -> None:
        """As the real one."""
        self.limits = self.limits.under([len(prompt.ids) for prompt in prompts])

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        """Padded to the longest."""
        texts = [bytes(prompt.ids).decode() for prompt in prompts]
        self.passes.append(texts)
        self.during(len(self.passes))
        if len(texts) > self.rows_in_memory:
            raise self.no_memory
        if any("boom" in text for text in texts):
            raise RuntimeError(f"cannot score {texts}")
        scores = [next((SCORES[word] for word in SCORES if text.startswith(word)), OTHER) for text in texts]
        return Scored(scores, max(map(len, texts)) * len(texts))


@dataclass
class MemoryQueue:
    """A queue that checks what it is told: a commit or release of what is not owed is an AssertionError."""

    waiting: deque[bytes]
    drain_size: int = 4
    answers: dict[str, Answer] = field(default_factory=dict)  # by batch name, where it is not OK
    crashes: int = 0
    errors: Counter[bytes] = field(default_factory=Counter)
    when_empty: Callable[[], None] = lambda: None
    during_commit: Callable[[], None] = lambda: None
    calls: list[str] = field(default_factory=list)
    owed: dict[str, dict[int, bytes]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    buried: list[tuple[bytes, DeadLetter]] = field(default_factory=list)
    most_held: int = 0
    claim_sizes: list[int] = field(default_factory=list)
    margins_ms: list[float] = field(default_factory=list)  # told one after the other, then always enough
    reclaimed: int = 0

    def claim(self, most: int | None = None) -> Claim | None:
        """Up to `most` or `drain_size` from the head."""
        if not self.waiting:
            self.when_empty()
            return None
        name = str(1 + sum(call.startswith("claim") for call in self.calls))
        number = min(self.drain_size, most or self.drain_size, len(self.waiting))
        taken = {index: self.waiting.popleft() for index in range(1, 1 + number)}
        self.claim_sizes.append(number)
        self.owed[name] = taken
        self.calls.append(f"claim {name}")
        self.most_held = max(self.most_held, len(self.owed))
        return Claim(name, tuple(Claimed(index, p, self.crashes, self.errors[p]) for index, p in taken.items()))

    def commit(self, claim: Claim, outcome: Outcome) -> Receipt:
        """Publish, unless `answers` has something else in store."""
        self.during_commit()
        self.calls.append(f"commit {outcome.report.batch}")
        answer = self.answers.get(outcome.report.batch, Answer.OK)
        if answer is Answer.FENCED:
            del self.owed[claim.id]
            return Receipt(answer)
        self.outcomes.append(outcome)
        owed = self.owed[claim.id]
        for index, _, label in outcome.labels:
            del owed[index]
            self.labels.append(label)
        self.buried += [(owed.pop(index), letter) for index, letter in outcome.dead]
        for index in outcome.retry:
            self.errors[owed[index]] += 1
            self.waiting.append(owed.pop(index))
        if not owed:
            del self.owed[claim.id]
        return Receipt(answer, published=len(outcome.labels) if answer is Answer.OK else 0)

    def release(self, claim: Claim) -> int:
        """Back to the head, in order."""
        left = self.owed.pop(claim.id, {})
        if left:
            self.calls.append(f"release {claim.id}")
        self.waiting.extendleft(reversed(left.values()))
        return len(left)

    def lease_margin_ms(self, claim: Claim) -> float:
        """As set, then always enough."""
        return self.margins_ms.pop(0) if self.margins_ms else 30_000.0

    def take_reclaimed(self) -> int:
        """What was set, once."""
        taken, self.reclaimed = self.reclaimed, 0
        return taken


def tickets(*texts: str) -> deque[bytes]:
    """Payloads with these bodies, and the body as id."""
    return deque(json.dumps({"id": text, "body": text}).encode() for text in texts)


def drain(
    queue: MemoryQueue, classifier: StubClassifier | None = None, stop: Stop | None = None, error_limit: int = 1
) -> Drained:
    """Run a burst to its end."""
    worker = Drain(queue, classifier or StubClassifier(), "w", stop or Stop(), burst=True, error_limit=error_limit)
    return worker.run()
