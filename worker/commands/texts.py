"""Texts to measure with: a file of the user's own tickets, or the sample."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from producer import samples
from producer.sources import Parsed, guess_kind, read_source
from wire import Ticket
from worker.errors import UsageError


def read_texts(file: Path | None, limit: int | None) -> list[str]:
    """The tickets' texts in their order, at most `limit`, spread evenly over the lengths. Raises UsageError."""
    if file is None:
        texts = [sample_text(row) for row in samples.load()]
    else:
        with file.open("rb") as stream:
            lines = list(read_source(stream, guess_kind(file.name)))
        texts = [line.ticket.text for line in lines if isinstance(line, Parsed)]
        if not texts:
            raise UsageError(f"{file}: expected tickets, one JSON object with a body a line or CSV; found none")
    return evenly(texts, limit)


def sample_text(row: Mapping[str, str]) -> str:
    """What the model reads of a sample ticket."""
    return Ticket(id=row["id"], subject=row.get("subject"), body=row["body"]).text


def evenly(texts: Sequence[str], limit: int | None) -> list[str]:
    """At most `limit` of the texts, evenly over their lengths, in the order given."""
    if limit is None or limit >= len(texts):
        return list(texts)
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    chosen = sorted(by_length[position * len(texts) // limit] for position in range(limit))
    return [texts[index] for index in chosen]
