import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.lines import MAX_LINE_BYTES, MAX_ROW_BYTES
from producer.prepare import prepare
from producer.sources import ROOM_FOR_STAMPS, Kind, Parsed, Reject, SourceLine, guess_kind, parse_ticket, read_source
from wire.ticket import MAX_TICKET_BYTES, Ticket, TicketError

SECRET = "do-not-quote-me"


def read(data: bytes | str, kind: Kind = "jsonl") -> list[SourceLine]:
    """All that a file with this content gives."""
    return list(read_source(io.BytesIO(data.encode() if isinstance(data, str) else data), kind))


def tickets(lines: list[SourceLine]) -> list[Ticket]:
    """The good ones."""
    return [line.ticket for line in lines if isinstance(line, Parsed)]


def reasons(lines: list[SourceLine]) -> list[tuple[int, str]]:
    """The bad ones: line and reason."""
    return [(line.line, line.reason) for line in lines if isinstance(line, Reject)]


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
cell = text.filter(lambda value: "\0" not in value)
row = st.fixed_dictionaries({"id": cell, "subject": st.just("") | cell, "body": cell, "plan": st.just("") | cell})


@given(st.lists(st.fixed_dictionaries({"id": text, "body": text, "subject": text, "more": text}), max_size=8))
def test_jsonl_round_trip(objects: list[dict[str, str]]) -> None:
    """Whatever text a JSONL file holds arrives unchanged and in order, further fields included."""
    found = tickets(read("".join(json.dumps(one) + "\n" for one in objects)))
    again = [(t.id, t.body, t.subject, json.loads(bytes(t.extra["more"]))) for t in found]
    assert again == [(one["id"], one["body"], one["subject"], one["more"]) for one in objects]


@given(st.lists(row, max_size=8), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_csv_round_trip(rows: list[dict[str, str]], newline: str, with_bom: bool) -> None:
    """Whatever text a CSV file holds arrives unchanged, newlines and quotes too; further columns are kept."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, ["id", "subject", "body", "plan"], lineterminator=newline, quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    found = read(out.getvalue().encode("utf-8-sig" if with_bom else "utf-8"), "csv")
    assert [
        {"id": t.id, "subject": t.subject or "", "body": t.body, "plan": json.loads(bytes(t.extra["plan"]))}
        for t in tickets(found)
    ] == rows
    assert len(found) == len(rows)


@given(st.binary(max_size=300), st.sampled_from(["jsonl", "csv"]))
def test_any_bytes_are_tickets_or_rejects(data: bytes, kind: Kind) -> None:
    """No input raises, and its lines are numbered in rising order."""
    for prefix in (b"", b"id,body\n", b'{"body":"x"}\n'):
        lines = read(prefix + data, kind)
        assert [line.line for line in lines] == sorted(line.line for line in lines)


def test_bad_json_lines_are_rejected_by_number() -> None:
    """Each bad line is a reject with its own line number and reason; the good ones around it are read."""
    data = b'\n{"body":"a"}\nnonsense\n[1]\n{"id":"x"}\n{"body":1}\n\xff\n{"body":"\0"}\n{"body":"z"}'
    lines = read(data)
    assert [ticket.body for ticket in tickets(lines)] == ["a", "z"]
    assert reasons(lines) == [
        (3, "not_json"),
        (4, "not_object"),
        (5, "missing_field"),
        (6, "wrong_type"),
        (7, "not_utf8"),
        (8, "not_json"),
    ]


def test_bad_csv_rows_are_rejected_by_physical_line() -> None:
    """A reject tells the physical line its row begins at, and spoils no neighbour, even inside a quoted text."""
    data = (
        b'id,body\n1,"two\nlines"\n2,bad \xff byte\n3,"bad \xff\nbyte"\n4,n\0l\n5\n6,x,y\n\n7,\n'
        b'8,"half"closed\n9,good\n10,"open\n'
    )
    lines = read(data, "csv")
    assert [ticket.id for ticket in tickets(lines)] == ["1", "9"]
    assert reasons(lines) == [
        (4, "not_utf8"),
        (5, "not_utf8"),
        (7, "has_nul"),
        (8, "wrong_columns"),
        (9, "wrong_columns"),
        (11, "missing_field"),
        (12, "not_csv"),
        (14, "not_csv"),
    ]


@pytest.mark.parametrize("written", ["42", "-7", "12345678901234567890123", "1.50"])
def test_numeric_ids_become_strings(written: str) -> None:
    """An id that is a number becomes its text as written, not a rounded float."""
    assert tickets(read(f'{{"id": {written}, "body": "x", "n": 1}}'))[0].id == written


def test_other_ids_do_not_become_strings() -> None:
    """An id that is neither text nor a number is refused, not guessed at."""
    assert reasons(read('{"id":true,"body":"x"}\n{"id":[1],"body":"x"}')) == [(1, "wrong_type"), (2, "wrong_type")]
    with pytest.raises(TicketError, match="bad_id"):
        parse_ticket(b'{"id":"","body":"x"}')


def test_no_id_is_no_id() -> None:
    """A missing, null or empty-cell id leaves the ticket without one, for the push to make."""
    found = tickets(read('{"body":"x"}\n{"id":null,"body":"x"}')) + tickets(read("id,body\n,x\n", "csv"))
    assert [ticket.has_own_id for ticket in found] == [False] * 3


@pytest.mark.parametrize("header", ["id,text", "id;subject;body", "Body"])
def test_a_header_without_body_names_the_columns(header: str) -> None:
    """A CSV without a column 'body' is one reject that names the columns it has."""
    (only,) = read(f"{header}\n1,2\n", "csv")
    assert isinstance(only, Reject)
    assert only.reason == "wrong_columns"
    assert "expected a column 'body', found " + header.replace(",", ", ") == only.detail


def test_a_missing_header_quotes_no_ticket() -> None:
    """Where the header was forgotten, the message does not quote the ticket that stands in its place."""
    (only,) = read(f"1,{SECRET} I want my money back\n", "csv")
    assert isinstance(only, Reject)
    assert SECRET not in only.detail


def test_a_column_twice_is_refused() -> None:
    """Two columns of one name are refused, for one would silently win; unnamed ones may repeat and are not kept."""
    assert reasons(read("body,plan,plan\na,b,c\n", "csv")) == [(1, "wrong_columns")]
    (ticket,) = tickets(read("body,,\na,b,c\n", "csv"))
    assert ticket.extra == {}


def test_an_exported_push_time_is_no_obstacle() -> None:
    """A CSV made from the queue may carry the push time; the next push sets its own."""
    (ticket,) = tickets(read("body,pushed_at_ms\na,123\n", "csv"))
    assert ticket.pushed_at_ms is None


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_an_endless_line_is_a_reject(kind: Kind) -> None:
    """A line past every limit is one reject; what follows is read."""
    endless = "y" * (2 * MAX_LINE_BYTES + 1)
    good = '{"body":"good"}' if kind == "jsonl" else "good"
    lines = read(("body\n" if kind == "csv" else "\n") + f"{endless}\n{good}\n", kind)
    assert reasons(lines) == [(2, "too_large")]
    assert [ticket.body for ticket in tickets(lines)] == ["good"]


@pytest.mark.parametrize("length", [MAX_ROW_BYTES + 1, 140_000, MAX_LINE_BYTES + 10])
def test_no_line_of_a_huge_quoted_text_becomes_a_ticket(length: int) -> None:
    """The lines of a quoted text past the limit are one reject, not tickets of their own."""
    long_line = "y" * length
    body = f'first\n{long_line}\n""quoted""\nnot a ticket\n' * 3
    lines = read(f'body\n"{body}"\ngood\n', "csv")
    assert reasons(lines) == [(2, "too_large")]
    assert [ticket.body for ticket in tickets(lines)] == ["good"]


def test_a_quote_that_never_closes_ends_the_file() -> None:
    """A row that swallows the file is one reject that says so, in memory that does not grow with the file."""
    lines = read("body\ngood\n" + '"never closed\n' + "more\n" * 100_000, "csv")
    assert reasons(lines) == [(3, "not_csv")]
    assert len(tickets(lines)) == 1


class _Patience(io.RawIOBase):
    """Good tickets, and a failure for whoever wants them all before giving the first."""

    lines_given = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        self.lines_given += 1
        assert self.lines_given < 10
        return b'{"body":"x"}\n'


def test_reading_is_lazy() -> None:
    """Tickets come out while the stream goes on: nothing waits for its end."""
    lines = read_source(_Patience(), "jsonl")  # type: ignore[arg-type]  # only readline is used
    assert isinstance(next(lines), Parsed)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_what_is_read_can_be_pushed(spare: int) -> None:
    """A ticket that the sources let through still fits the queue once it has an id and a push time."""
    size = MAX_TICKET_BYTES - ROOM_FOR_STAMPS - len('{"body":""}') + spare
    lines = read(json.dumps({"body": "y" * size}))
    assert reasons(lines) == ([(1, "too_large")] if spare > 0 else [])
    assert len(list(prepare(tickets(lines)))) == len(tickets(lines))


def test_escapes_do_not_count_against_a_ticket() -> None:
    """What counts is the size in the queue: a ticket written in JSON escapes may be longer in the file."""
    body = "é" * 20_000
    assert tickets(read(json.dumps({"body": body})))[0].body == body


@given(st.sampled_from(["{}", '{"body": %s}', '{"id": %s, "body": "x"}', "%s", '"%s', "[%s"]))
def test_no_reject_quotes_its_line(shape: str) -> None:
    """Neither the reason nor the detail of a reject holds any of the line's text."""
    data = shape.replace("%s", f'{{"{SECRET}": "{SECRET}"')
    for line in [*read(data), *read(f"body,id\n{SECRET},{SECRET},{SECRET}\n", "csv")]:
        assert isinstance(line, Reject)
        assert SECRET not in line.reason + line.detail


def test_the_kind_comes_from_the_name() -> None:
    """`.csv` in any case is CSV; everything else, standard input too, is JSONL."""
    assert [guess_kind(name) for name in ("a.csv", "A.CSV", "a.jsonl", "-", "csv")] == ["csv", "csv", *["jsonl"] * 3]
