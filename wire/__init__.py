"""Everything that crosses Redis: the keys, the tickets, the stream entries. Knows neither Redis nor a model."""

from wire.keys import Keys
from wire.records import Answer, BatchReport, DeadLetter, Label, Totals
from wire.ticket import MAX_TICKET_BYTES, Ticket, TicketError, decode_ticket, encode_ticket

__all__ = [
    "MAX_TICKET_BYTES",
    "Answer",
    "BatchReport",
    "DeadLetter",
    "Keys",
    "Label",
    "Ticket",
    "TicketError",
    "Totals",
    "decode_ticket",
    "encode_ticket",
]
