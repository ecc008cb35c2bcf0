"""A ticket on its way to the queue: given an id and the time, and checked as a worker will check it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from uuid import uuid4

import msgspec

from producer.errors import RefusedTicketError
from producer.sources import parse_ticket
from wire.ticket import Ticket, TicketError, decode_ticket, encode_ticket

TicketLike: TypeAlias = Ticket | Mapping[str, Any]


class Prepared(NamedTuple):
    """A payload that a worker will take, its id, and whether the id was made here."""

    id: str
    payload: bytes
    id_made: bool


def prepare(tickets: Iterable[TicketLike]) -> Iterator[Prepared]:
    """Each ticket as its payload. Raises RefusedTicketError with the index of the first that is none."""
    for index, ticket in enumerate(tickets):
        try:
            yield _prepared(ticket)
        except TicketError as error:
            raise RefusedTicketError(error, index) from None


def _prepared(ticket: TicketLike) -> Prepared:
    ticket = ticket if isinstance(ticket, Ticket) else _from_mapping(ticket)
    made = not ticket.has_own_id
    stamped = msgspec.structs.replace(
        ticket,
        id=f"made-{uuid4().hex}" if made else ticket.id,
        has_own_id=True,
        pushed_at_ms=time.time_ns() // 1_000_000,
    )
    payload = _encoded(encode_ticket, stamped)
    decode_ticket(payload)  # what a worker would bury, the producer refuses
    return Prepared(stamped.id, payload, made)


def _from_mapping(ticket: object) -> Ticket:
    if not isinstance(ticket, Mapping):
        raise TicketError("not_object", f"expected a Ticket or a mapping with a 'body', got {type(ticket).__name__}")
    return parse_ticket(_encoded(msgspec.json.encode, ticket))


def _encoded(encode: Callable[[Any], bytes], value: object) -> bytes:
    try:
        return encode(value)
    except UnicodeEncodeError:
        raise TicketError("not_utf8", "a text holds half of a surrogate pair") from None
    except RecursionError:
        raise TicketError("too_deep", "the ticket is nested too deeply") from None
    except TypeError as error:
        raise TicketError("wrong_type", f"no JSON for it: {error}") from None
