"""Labelled tickets from a file: what `fit` learns from and `evaluate` tests on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from producer.sources import Parsed, SourceLine, guess_kind, read_source
from worker.errors import UsageError

_SHOWN = 10


@dataclass(frozen=True)
class Labelled:
    """Tickets in the file's order: ids, texts as the model reads them, labels."""

    ids: Sequence[str]
    texts: Sequence[str]
    labels: Sequence[str]


def read_labelled(file: Path, split: str | None = None) -> Labelled:
    """Read JSONL or CSV with `body` and `label`, equal texts once. `split`: only rows whose field `split` says so.

    Raises UsageError, with the line, for a line that is no ticket, has no label, or has the same text as another with
    another label.
    """
    lines: dict[str, int] = {}
    found: dict[str, tuple[str, str]] = {}
    conflicts: list[str] = []
    with file.open("rb") as stream:
        for line in read_source(stream, guess_kind(file.name)):
            ticket = _ticket(line, file)
            if split is not None and _field(ticket, "split") != split:
                continue
            label, text = _label(ticket, file), ticket.ticket.text.strip()
            if text in found and found[text][1] != label:
                conflicts.append(f"lines {lines[text]} and {ticket.line} ({found[text][1]!r} and {label!r})")
            found.setdefault(text, (ticket.ticket.id, label))
            lines.setdefault(text, ticket.line)
    if conflicts:
        raise UsageError(
            f"{file}: the same text with different labels, {len(conflicts)} times: {'; '.join(conflicts[:_SHOWN])}"
        )
    if not found:
        where = f" with split {split!r}" if split is not None else ""
        expected = f"labelled tickets{where}, one JSON object with body and label a line"
        raise UsageError(f"{file}: expected {expected}; found none")
    return Labelled([one for one, _ in found.values()], list(found), [label for _, label in found.values()])


def check_counts(labels: Sequence[str], file: Path) -> None:
    """Raise UsageError unless there are two labels at least, and two examples of each."""
    counts = Counter(labels)
    if len(counts) < 2:
        raise UsageError(f"{file}: expected examples of at least two labels, found only {next(iter(counts))!r}")
    if few := sorted(label for label, count in counts.items() if count < 2):
        raise UsageError(f"{file}: expected at least two examples of each label; there is one of {_listed(few)}")


def check_known(labels: Sequence[str], known: Sequence[str], file: Path) -> None:
    """Raise UsageError if there is a label that the task does not have."""
    if unknown := sorted(set(labels) - set(known)):
        raise UsageError(f"{file}: the task has no label {_listed(unknown)}; it has {_listed(list(known))}")


def _ticket(line: SourceLine, file: Path) -> Parsed:
    if not isinstance(line, Parsed):
        raise UsageError(f"{file}, line {line.line}: {line.detail} ({line.reason})")
    return line


def _label(line: Parsed, file: Path) -> str:
    label = (_field(line, "label") or "").strip()
    if not label:
        found = "something else" if "label" in line.ticket.extra else "none"
        raise UsageError(f"{file}, line {line.line}: expected a field 'label' with a text, found {found}")
    return label


def _field(line: Parsed, name: str) -> str | None:
    """A further field of a ticket if it is a text."""
    raw = line.ticket.extra.get(name)
    try:
        return None if raw is None else msgspec.json.decode(raw, type=str)
    except msgspec.ValidationError:
        return None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
