"""Files and streams to tickets, one line at a time and in flat memory. Knows neither Redis nor the command line.

A line that is no ticket is a `Reject` with its reason, never an exception; no reject quotes the line.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal, TypeAlias

import msgspec

from producer.lines import MAX_LINE_BYTES, Reject, Row, csv_rows, physical_lines
from wire.ticket import MAX_TICKET_BYTES, PUSHED_AT_FIELD, Ticket, TicketError, decode_ticket, encode_ticket

__all__ = ["Kind", "Parsed", "Reject", "SourceLine", "guess_kind", "parse_ticket", "read_source"]

Kind: TypeAlias = Literal["jsonl", "csv"]

# A push may add an id of its own making and the time; the ticket must fit with both.
ROOM_FOR_STAMPS = 96

_PLAIN_NAME = re.compile(r"\w[\w;|.-]{0,39}")
_NUMBER = re.compile(rb"-?[0-9]")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A ticket, and the physical line it begins at, from 1."""

    line: int
    ticket: Ticket


SourceLine: TypeAlias = Parsed | Reject


def guess_kind(name: str) -> Kind:
    """What a file's name says it holds; `-`, standard input, is taken for JSONL."""
    return "csv" if name.lower().endswith(".csv") else "jsonl"


def read_source(stream: BinaryIO, kind: Kind) -> Iterator[SourceLine]:
    """The tickets and rejects of a stream, in its order.

    JSONL is one object a line; blank lines are skipped. CSV is RFC 4180 with a header: `body`, optionally `id` and
    `subject`; every further named column is kept with the ticket. Numeric ids become strings, digit by digit as
    written. A ticket without an id keeps none: the push makes one.
    """
    return _read_csv(stream) if kind == "csv" else _read_jsonl(stream)


def parse_ticket(payload: bytes, max_bytes: int = MAX_TICKET_BYTES) -> Ticket:
    """As wire.decode_ticket, but an id that is a JSON number becomes its text. Raises TicketError."""
    try:
        return decode_ticket(payload, max_bytes)
    except TicketError as error:
        if error.reason != "wrong_type":
            raise
        return decode_ticket(_with_text_id(payload), max_bytes + 2)


def _with_text_id(payload: bytes) -> bytes:
    fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    raw = bytes(fields.get("id", b""))
    if _NUMBER.match(raw):
        fields["id"] = msgspec.Raw(b'"' + raw + b'"')  # not through a float, which would round long ids
    return msgspec.json.encode(fields)


def _read_jsonl(stream: BinaryIO) -> Iterator[SourceLine]:
    for number, (line, whole) in enumerate(physical_lines(stream), 1):
        if not whole:
            yield Reject(number, "too_large", f"the line is longer than {MAX_LINE_BYTES:,} bytes")
        elif line.strip():
            yield _parsed(number, line)


def _parsed(number: int, payload: bytes) -> SourceLine:
    try:
        ticket = parse_ticket(payload, MAX_LINE_BYTES)
        _check_room(ticket)
    except TicketError as error:
        return Reject(number, error.reason, error.detail)
    return Parsed(number, ticket)


def _check_room(ticket: Ticket) -> None:
    size, limit = len(encode_ticket(ticket)), MAX_TICKET_BYTES - ROOM_FOR_STAMPS
    if size > limit:
        raise TicketError("too_large", f"expected at most {limit} bytes, got {size}")


def _read_csv(stream: BinaryIO) -> Iterator[SourceLine]:
    rows = csv_rows(stream)
    for header in rows:
        columns = _columns(header)
        if isinstance(columns, Reject):
            yield columns
            return
        yield from (row if isinstance(row, Reject) else _parsed_row(row, columns) for row in rows)


def _columns(header: Row | Reject) -> list[str] | Reject:
    if isinstance(header, Reject):
        return Reject(header.line, header.reason, f"the header is unreadable, so no row was read: {header.detail}")
    names = [name.strip() for name in header.cells]
    if "body" not in names:
        return Reject(header.line, "wrong_columns", f"expected a column 'body', found {_listed(names)}")
    if len(set(names) - {""}) < len(names) - names.count(""):
        return Reject(header.line, "wrong_columns", f"expected each column once, found {_listed(names)}")
    return names


def _listed(names: list[str]) -> str:
    """Column names for a message. Without a header these are a ticket's words: only what looks like a name is shown."""
    return ", ".join(name if _PLAIN_NAME.fullmatch(name) else "(no plain name)" for name in names[:20])


def _parsed_row(row: Row, columns: list[str]) -> SourceLine:
    if len(row.cells) != len(columns):
        return Reject(row.line, "wrong_columns", f"expected {len(columns)} cells, found {len(row.cells)}")
    fields = {name: cell for name, cell in zip(columns, row.cells, strict=True) if name and name != PUSHED_AT_FIELD}
    for name in ("id", "subject", "body"):
        if not fields.get(name):
            fields.pop(name, None)  # CSV cannot tell empty from absent
    return _parsed(row.line, msgspec.json.encode(fields))
