"""Dead letters, and what became of them, for people and for machines (pure).

Whoever may write to the queue chooses every text of an entry. So people get it without control characters, and
machines as ASCII: escaped, exact, and harmless on a terminal too.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from worker.commands.printable import printable
from worker.queue.dead import Buried, Counts, Survey, Tally

HEADER = f"{'id':<20} {'when':<20} {'reason':<14} {'attempts':>8} {'bytes':>9}  detail"


def as_table_line(entry: Buried) -> str:
    """One letter below `HEADER`."""
    when = _when(entry.letter.at_ms) if entry.letter else "-"
    attempts = entry.letter.attempts if entry.letter else "-"
    size = "-" if entry.payload is None else f"{len(entry.payload):,}"
    text = f"{entry.id:<20} {when:<20} {entry.reason:<14} {attempts:>8} {size:>9}  {entry.detail}"
    return printable(text)


def as_json_line(entry: Buried, with_payload: bool) -> str:
    """One letter as an object; what a malformed entry does not tell is null."""
    letter, payload = entry.letter, entry.payload
    fields: dict[str, Any] = {
        "id": entry.id,
        "at_ms": letter and letter.at_ms,
        "reason": entry.reason,
        "attempts": letter and letter.attempts,
        "bytes": None if payload is None else len(payload),
        "detail": entry.detail,
        "worker": letter and letter.worker,
    }
    if with_payload:
        fields["payload"] = None if payload is None else base64.b64encode(payload).decode()
    return json.dumps(fields)


def as_text(entry: Buried) -> Iterator[str]:
    """One letter whole, a field a line, the payload last."""
    shown = {"id": entry.id, "reason": entry.reason, "detail": entry.detail}
    if entry.letter:
        shown |= {
            "when": _when(entry.letter.at_ms),
            "attempts": f"{entry.letter.attempts}",
            "worker": entry.letter.worker,
        }
    else:
        shown |= {
            f"field {_decoded(name)}": _decoded(value) for name, value in entry.fields.items() if name != b"payload"
        }
    if entry.payload is not None:
        shown |= {"bytes": f"{len(entry.payload):,}", "payload": _decoded(entry.payload)}
    for name, text in shown.items():
        yield f"{printable(name):<9} {printable(text)}"


def numbers(survey: Survey, shown: int) -> dict[str, Any]:
    """The whole stream in numbers, for machines."""
    return {
        "dead": survey.by_reason.total(),
        "by_reason": dict(survey.by_reason.most_common()),
        "matching": survey.matching,
        "shown": shown,
    }


def summary(survey: Survey, shown: int, queue: str) -> str:
    """The whole stream in numbers, for people."""
    reasons = ", ".join(f"{count:,} {printable(reason)}" for reason, count in survey.by_reason.most_common())
    dead = f"dead letters in '{queue}': {survey.by_reason.total():,}"
    return f"{dead} ({reasons}); shown: {shown:,} of {survey.matching:,} that match" if reasons else dead


@dataclass
class Report:
    """What a replay or a drop did or, in a dry run, would do. `after` is None where nobody answered any more."""

    action: str
    queue: str
    dry_run: bool
    before: Counts
    tally: Tally = field(default_factory=Tally)
    after: Counts | None = None
    error: str | None = None

    def as_json(self) -> str:
        """One object; of a dry run what is `after` is what would be."""
        after = self._after()
        fields = {
            "action": self.action,
            "queue": self.queue,
            "dry_run": self.dry_run,
            "done": self.tally.done,
            "gone": self.tally.gone,
            "without_payload": self.tally.without_payload,
            "dead_before": self.before.dead,
            "dead_after": after.dead if after else None,
            "waiting_before": self.before.waiting,
            "waiting_after": after.waiting if after else None,
            "error": self.error,
        }
        return json.dumps(fields)

    def as_text(self) -> str:
        """A few lines."""
        replays, after = self.action == "replay", self._after()
        done = "put back" if replays else "deleted"
        tally = f"{'would be ' if self.dry_run else ''}{done}: {self.tally.done:,}; gone before: {self.tally.gone:,}"
        if replays:
            tally += f"; without a payload, left: {self.tally.without_payload:,}"
        lines = [tally, _change("dead letters", self.before.dead, after.dead if after else None)]
        if replays:
            lines.append(_change(f"waiting in '{self.queue}'", self.before.waiting, after.waiting if after else None))
        if self.error:
            lines.append(
                "Not finished. What is counted was done for certain. To repeat it is safe: what is gone stays so."
            )
        return "\n".join(lines)

    def _after(self) -> Counts | None:
        if not self.dry_run:
            return self.after
        added = self.tally.done if self.action == "replay" else 0
        return Counts(self.before.dead - self.tally.done, self.before.waiting + added)


def _change(what: str, before: int, after: int | None) -> str:
    return f"{what}: {before:,} before, {'unknown' if after is None else f'{after:,}'} after"


def _when(at_ms: int) -> str:
    """The time in UTC; the bare number where it is none that a calendar has."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return str(at_ms)


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")
