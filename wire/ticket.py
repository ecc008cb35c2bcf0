"""A support ticket as it crosses the queue: one JSON object, both directions in one place."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

MAX_TICKET_BYTES = 64 * 1024
MAX_ID_BYTES = 512

# Set by our producer as the last field, so that a script can read a waiting ticket's age from its last bytes.
PUSHED_AT_FIELD = "pushed_at_ms"

_T = TypeVar("_T")

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPED_PAIR_OR_BACKSLASH = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\\\")

# Beyond it arithmetic in floats overflows, and the exception would be the whole batch's.
_MAX_MS = 2**63 - 1


class TicketError(Exception):
    """A payload that is no ticket.

    `reason` is one word of a fixed set for filters: too_large, not_utf8, not_json, too_deep, not_object,
    missing_field, wrong_type, bad_id. `detail` is a sentence and never quotes the payload.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One support ticket. `extra` holds every further field as the JSON that came, undecoded."""

    id: str
    body: str
    subject: str | None = None
    pushed_at_ms: int | None = None
    has_own_id: bool = True  # False: `id` is a hash of the payload, and no duplicate check is made
    extra: Mapping[str, msgspec.Raw] = {}

    @property
    def text(self) -> str:
        """What the model reads: the subject, where there is one, above the body."""
        return f"{self.subject}\n{self.body}" if self.subject else self.body


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_ticket(payload: bytes, max_bytes: int = MAX_TICKET_BYTES) -> Ticket:
    """Read a payload from the queue. Raises TicketError, and nothing else, for whatever is not a ticket.

    Of a repeated key the last value counts, as in nearly every JSON reader.
    """
    fields = _decode_object(payload, max_bytes)
    body = _take(fields, "body", str)
    if body is None:
        raise TicketError("missing_field", "expected a string field 'body', found none")
    own_id = _take(fields, "id", str)
    if own_id is not None:
        _check_id(own_id)
    return Ticket(
        id=content_id(payload) if own_id is None else own_id,
        body=body,
        subject=_take(fields, "subject", str),
        pushed_at_ms=_take_time(fields, PUSHED_AT_FIELD),
        has_own_id=own_id is not None,
        extra=fields,
    )


def encode_ticket(ticket: Ticket) -> bytes:
    """The payload `decode_ticket` reads back. A content hash is left out: it is made again from the payload.

    Raises TicketError for a ticket with a lone surrogate in its text, which has no UTF-8.
    """
    fields: dict[str, Any] = {"id": ticket.id} if ticket.has_own_id else {}
    if ticket.subject is not None:
        fields["subject"] = ticket.subject
    fields["body"] = ticket.body
    fields.update(ticket.extra)
    if ticket.pushed_at_ms is not None:
        fields[PUSHED_AT_FIELD] = ticket.pushed_at_ms
    try:
        return msgspec.json.encode(fields)
    except UnicodeEncodeError:
        raise TicketError("not_utf8", "a lone surrogate has no UTF-8") from None


def content_id(payload: bytes) -> str:
    """The id of a payload that brings none: the first 128 bits of its SHA-256."""
    return "sha256:" + hashlib.sha256(payload).hexdigest()[:32]


def _decode_object(payload: bytes, max_bytes: int) -> dict[str, msgspec.Raw]:
    if len(payload) > max_bytes:
        raise TicketError("too_large", f"expected at most {max_bytes} bytes, got {len(payload)}")
    try:
        # msgspec skips undecoded fields without looking at their encoding, so it is checked here, once.
        payload.decode("utf-8")
        return _FIELDS.decode(payload)
    except UnicodeDecodeError as error:
        raise TicketError("not_utf8", f"invalid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise TicketError("too_deep", "JSON is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise TicketError("not_object", f"expected a JSON object: {error}") from None
    except msgspec.DecodeError as error:
        raise TicketError("not_json", _why_not_json(payload, error)) from None


def _take(fields: dict[str, msgspec.Raw], name: str, kind: type[_T]) -> _T | None:
    """Remove and decode one known field; null counts as absent, as most producers mean it."""
    raw = fields.pop(name, None)
    if raw is None or bytes(raw) == b"null":
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise TicketError("wrong_type", f"field '{name}': {error}") from None
    except msgspec.DecodeError as error:
        raise TicketError("not_json", f"field '{name}': {_why_not_json(bytes(raw), error)}") from None


def _take_time(fields: dict[str, msgspec.Raw], name: str) -> int | None:
    value = _take(fields, name, int)
    if value is not None and abs(value) > _MAX_MS:
        raise TicketError("wrong_type", f"field '{name}': expected a 64-bit integer")
    return value


def _check_id(ticket_id: str) -> None:
    size = len(ticket_id.encode())
    if not 0 < size <= MAX_ID_BYTES:
        raise TicketError("bad_id", f"expected an id of 1-{MAX_ID_BYTES} bytes, got {size}")


def _why_not_json(payload: bytes, error: msgspec.DecodeError) -> str:
    if _ESCAPED_SURROGATE.search(_ESCAPED_PAIR_OR_BACKSLASH.sub(b" ", payload)):
        return "an escaped surrogate without its other half"  # msgspec says "truncated", which misleads
    return str(error)
