"""A claim made ready to be scored: decoded, tokenised, planned. What is no ticket becomes a dead letter (pure)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from wire import DeadLetter, Ticket, TicketError, decode_ticket
from worker.engine.plan import Batch
from worker.engine.prompt import Prompt
from worker.ports import Claim, Claimed, Classifier


@dataclass(frozen=True)
class Load:
    """One claim, ready to be scored. `batches` index into `tickets` and `prompts`, and there is always one at least."""

    claim: Claim
    tickets: Sequence[tuple[Claimed, Ticket]]
    prompts: Sequence[Prompt]
    batches: Sequence[Batch]
    rejects: Sequence[tuple[int, DeadLetter]]
    claimed_at_ms: int
    tokenise_ms: float


def take_in(claim: Claim, classifier: Classifier, worker: str, max_ticket_bytes: int) -> Load:
    """Decode, tokenise and plan a claim. A payload that is no ticket is set aside with its reason."""
    claimed_at_ms = int(time.time() * 1000)
    tickets: list[tuple[Claimed, Ticket]] = []
    rejects: list[tuple[int, DeadLetter]] = []
    for claimed in claim.tickets:
        try:
            tickets.append((claimed, decode_ticket(claimed.payload, max_ticket_bytes)))
        except TicketError as error:
            rejects.append((claimed.index, bury(claimed, error.reason, error.detail, worker)))
    started_s = time.monotonic()
    tickets, prompts, failed = _tokenise(tickets, classifier, worker)
    rejects += failed
    tokenise_ms = (time.monotonic() - started_s) * 1000
    batches = classifier.plan(prompts) or [Batch((), "drained")]
    return Load(claim, tickets, prompts, batches, rejects, claimed_at_ms, tokenise_ms)


def _tokenise(
    tickets: list[tuple[Claimed, Ticket]], classifier: Classifier, worker: str
) -> tuple[list[tuple[Claimed, Ticket]], list[Prompt], list[tuple[int, DeadLetter]]]:
    """Prompts for the tickets. If a text makes the tokenizer fail, that ticket alone is set aside."""
    try:
        return tickets, classifier.tokenise([ticket.text for _, ticket in tickets]), []
    except Exception as error:  # noqa: BLE001 - whatever a tokenizer raises is that ticket's fate, not the worker's
        if len(tickets) == 1:
            claimed, _ = tickets[0]
            # The type alone: a message might quote the ticket.
            detail = f"tokenising failed with {type(error).__name__}"
            return [], [], [(claimed.index, bury(claimed, "engine_error", detail, worker))]
    first, second = (
        _tokenise(part, classifier, worker) for part in (tickets[: len(tickets) // 2], tickets[len(tickets) // 2 :])
    )
    return first[0] + second[0], first[1] + second[1], first[2] + second[2]


def bury(claimed: Claimed, reason: str, detail: str, worker: str) -> DeadLetter:
    """A dead letter for one payload of a claim. The payload stays out of it: the commit has it at hand."""
    return DeadLetter(
        payload=b"",
        reason=reason,
        detail=detail,
        attempts=claimed.attempt,
        at_ms=int(time.time() * 1000),
        worker=worker,
    )
