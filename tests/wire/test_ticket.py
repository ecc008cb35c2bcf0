"""Tickets: both directions, the golden payloads, and that nothing but a TicketError ever comes of a bad one."""

import json
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import wire.ticket
from wire.ticket import (
    MAX_ID_BYTES,
    MAX_TICKET_BYTES,
    PUSHED_AT_FIELD,
    Ticket,
    TicketError,
    content_id,
    decode_ticket,
    encode_ticket,
)

REASONS = {"too_large", "not_utf8", "not_json", "too_deep", "not_object", "missing_field", "wrong_type", "bad_id"}
KNOWN_FIELDS = {"id", "subject", "body", PUSHED_AT_FIELD}
DEEP = 100_000
HUGE = 10**8  # a cap that nothing here reaches

GOLDEN_FILE = Path(__file__).parent / "golden" / "tickets.jsonl"
GOLDEN: list[dict[str, Any]] = [json.loads(line) for line in GOLDEN_FILE.read_text("utf-8").split("\n") if line]
NASTY = Path(__file__).parents[3] / "shared" / "data" / "nasty.jsonl"

# Tickets to plant in bad payloads: no four letters of it may come out again. The digits are for numbers.
MARKER, MARKER_PIECE = "Qzxj" * 4, "Qzxj"
MARKER_NUMBER, MARKER_NUMBER_PIECE = b"90719" * 8, "90719"

texts = st.text(st.characters(codec="utf-8"))
ids = texts.filter(lambda text: 0 < len(text.encode()) <= MAX_ID_BYTES)
numbers = (
    st.integers().map(str)
    | st.integers(min_value=-(10**600), max_value=10**600).map(str)
    | st.floats(allow_nan=False, allow_infinity=False).map(repr)
    | st.sampled_from(["1e999999", "-1E+999999", "1e-999999", "-0", "-0.0", "0.1000", "9" * 5000])
)


def json_lists(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON text of lists and objects, with white space that must survive."""
    members = st.tuples(texts, values).map(lambda pair: f"{json.dumps(pair[0])} :\t{pair[1]}")
    return st.lists(values, max_size=4).map(lambda items: f"[{' ,'.join(items)} ]") | st.lists(members, max_size=4).map(
        lambda items: f"{{\n{','.join(items)}}}"
    )


json_texts = st.recursive(
    st.sampled_from(["null", "true", "false"])
    | numbers
    | texts.map(json.dumps)  # \u escapes
    | texts.map(lambda text: json.dumps(text, ensure_ascii=False)),
    json_lists,
    max_leaves=10,
)
extras = st.dictionaries(
    texts.filter(lambda name: name not in KNOWN_FIELDS), json_texts.map(lambda text: msgspec.Raw(text.encode()))
)
tickets = st.builds(
    Ticket,
    id=ids,
    body=texts,
    subject=st.none() | texts,
    pushed_at_ms=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    extra=extras,
)


def decoded(payload: bytes, max_bytes: int = HUGE) -> Ticket | TicketError:
    """What comes of a payload; any other exception fails the test."""
    try:
        return decode_ticket(payload, max_bytes)
    except TicketError as error:
        return error


def refusal(payload: bytes, max_bytes: int = HUGE) -> TicketError:
    """The TicketError that a payload must give."""
    error = decoded(payload, max_bytes)
    assert isinstance(error, TicketError)
    return error


# Both directions


@settings(deadline=None)
@given(tickets)
def test_a_ticket_comes_back_as_it_went(ticket: Ticket) -> None:
    """encode then decode gives an equal ticket, further fields byte for byte, numbers of any size included."""
    again = decode_ticket(encode_ticket(ticket), HUGE)
    assert again == ticket
    assert {name: bytes(raw) for name, raw in again.extra.items()} == {k: bytes(v) for k, v in ticket.extra.items()}


@settings(deadline=None)
@given(tickets)
def test_a_payload_is_json_to_everyone(ticket: Ticket) -> None:
    """Other programs read our payloads with any JSON reader and see the same text in the same fields."""
    fields = json.loads(encode_ticket(ticket), parse_int=str, parse_float=str)
    assert (fields["id"], fields["body"], fields.get("subject")) == (ticket.id, ticket.body, ticket.subject)
    assert fields.keys() - KNOWN_FIELDS == ticket.extra.keys()


@settings(deadline=None)
@given(tickets, st.integers(0, 2**42))
def test_the_push_time_is_the_last_field(ticket: Ticket, now_ms: int) -> None:
    """A script finds a waiting ticket's age in the payload's last bytes, whatever else the ticket holds."""
    payload = encode_ticket(msgspec.structs.replace(ticket, pushed_at_ms=now_ms))
    assert payload.endswith(b',"pushed_at_ms":%d}' % now_ms)


def test_a_ticket_without_an_id_is_named_by_its_content() -> None:
    """No id or a null id: the payload's hash, the same for the same bytes, and never written into a payload."""
    payload = b'{"body":"x"}'
    ticket = decode_ticket(payload)
    assert (ticket.id, ticket.has_own_id) == (content_id(payload), False)
    assert decode_ticket(b'{"body":"y"}').id != ticket.id
    assert encode_ticket(ticket) == payload
    assert not decode_ticket(b'{"id": null, "body":"x"}').has_own_id


def test_a_lone_surrogate_cannot_be_encoded() -> None:
    """A producer's text that has no UTF-8 is a TicketError as well, and its message does not quote it."""
    for bad in (
        Ticket(id="a", body=f"{MARKER}\ud800"),
        Ticket(id=f"{MARKER}\udcff", body="x"),
        Ticket(id="a", body="x", extra={f"{MARKER}\udfff": msgspec.Raw(b"1")}),
    ):
        with pytest.raises(TicketError) as caught:
            encode_ticket(bad)
        assert caught.value.reason == "not_utf8"
        assert_silent(caught.value)


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden_payloads(case: dict[str, Any]) -> None:
    """Payloads of earlier releases, and of other people's producers, mean for ever what they meant at first."""
    ticket = decode_ticket(case["payload"].encode())
    fields: dict[str, object] = {name: getattr(ticket, name) for name in ticket.__struct_fields__ if name != "extra"}
    assert fields | {"extra": {name: bytes(raw).decode() for name, raw in ticket.extra.items()}} == case["ticket"]
    assert ticket.text == case["text"]
    assert encode_ticket(ticket) == case["encoded"].encode()


# Every kind of bad ticket


def nested(brackets: str, depth: int = DEEP) -> bytes:
    """`depth` arrays or objects in each other."""
    return b"[" * depth + b"]" * depth if brackets == "[]" else b'{"a":' * depth + b"1" + b"}" * depth


BAD = {
    # not JSON
    "empty": (b"", "not_json"),
    "white space": (b" \r\n\t", "not_json"),
    "plain text": (b"My invoice is wrong", "not_json"),
    "truncated in a string": (b'{"body":"x', "not_json"),
    "truncated in a key": (b'{"bo', "not_json"),
    "truncated after a colon": (b'{"body":', "not_json"),
    "truncated after a value": (b'{"body":"x"', "not_json"),
    "truncated in an escape": (b'{"body":"\\u00', "not_json"),
    "trailing rubbish": (b'{"body":"x"} y', "not_json"),
    "two objects": (b'{"body":"x"}{"body":"y"}', "not_json"),
    "trailing NUL": (b'{"body":"x"}\x00', "not_json"),
    "trailing comma": (b'{"body":"x",}', "not_json"),
    "single quotes": (b"{'body':'x'}", "not_json"),
    "byte order mark": (b'\xef\xbb\xbf{"body":"x"}', "not_json"),
    "bare NUL in a string": (b'{"body":"\x00"}', "not_json"),
    "bare NUL in an unknown field": (b'{"body":"x","f":"\x00"}', "not_json"),
    "bare newline in a string": (b'{"body":"a\nb"}', "not_json"),
    "NaN as ticket": (b"NaN", "not_json"),
    "NaN as body": (b'{"body":NaN}', "not_json"),
    "NaN in an unknown field": (b'{"body":"x","f":NaN}', "not_json"),
    "infinity in an unknown field": (b'{"body":"x","f":-Infinity}', "not_json"),
    "leading zero in an unknown field": (b'{"body":"x","f":01}', "not_json"),
    "bad escape in an unknown field": (b'{"body":"x","f":"\\q"}', "not_json"),
    # lone surrogates, as escapes (bare ones are no UTF-8)
    "lone high surrogate in the body": (b'{"body":"\\ud800"}', "not_json"),
    "lone low surrogate in the body": (b'{"body":"\\udc00"}', "not_json"),
    "two high surrogates in the body": (b'{"body":"\\ud800\\ud800"}', "not_json"),
    "lone surrogate in the id": (b'{"id":"\\uDBFF","body":"x"}', "not_json"),
    "lone surrogate in the subject": (b'{"subject":"\\udfff","body":"x"}', "not_json"),
    "lone surrogate in a key": (b'{"\\ud800":1,"body":"x"}', "not_json"),
    "lone surrogate in an unknown field": (b'{"body":"x","f":"\\ud800"}', "not_json"),
    "lone surrogate in a key of an unknown field": (b'{"body":"x","f":{"\\udc00":1}}', "not_json"),
    # not UTF-8
    "invalid UTF-8": (b"\xff", "not_utf8"),
    "UTF-16": ('{"body":"x"}'.encode("utf-16"), "not_utf8"),
    "Latin-1 body": (b'{"body":"caf\xe9"}', "not_utf8"),
    "invalid UTF-8 in the id": (b'{"id":"\xff","body":"x"}', "not_utf8"),
    "invalid UTF-8 in a key": (b'{"\xff":1,"body":"x"}', "not_utf8"),
    "invalid UTF-8 in an unknown field": (b'{"body":"x","f":["\xff"]}', "not_utf8"),
    "invalid UTF-8 after the object": (b'{"body":"x"}\xff', "not_utf8"),
    "overlong UTF-8": (b'{"body":"\xc0\x80"}', "not_utf8"),
    "surrogate as UTF-8": (b'{"body":"\xed\xa0\x80"}', "not_utf8"),
    # JSON, but not an object
    "array": (b'[{"body":"x"}]', "not_object"),
    "number": (b"1", "not_object"),
    "string": (b'"body"', "not_object"),
    "null": (b"null", "not_object"),
    "true": (b"true", "not_object"),
    "nested arrays": (nested("[]"), "not_object"),  # its first byte says so already
    # an object, but no ticket
    "empty object": (b"{}", "missing_field"),
    "no body": (b'{"id":"a","text":"x"}', "missing_field"),
    "body null": (b'{"body":null}', "missing_field"),
    "body null at last": (b'{"body":"x","body":null}', "missing_field"),
    "body number": (b'{"body":1}', "wrong_type"),
    "body object": (b'{"body":{"text":"x"}}', "wrong_type"),
    "body array": (b'{"body":["x"]}', "wrong_type"),
    "body true": (b'{"body":true}', "wrong_type"),
    "id number": (b'{"id":1,"body":"x"}', "wrong_type"),
    "id object": (b'{"id":{},"body":"x"}', "wrong_type"),
    "id empty": (b'{"id":"","body":"x"}', "bad_id"),
    "id too long": (b'{"id":"%s","body":"x"}' % (b"a" * (MAX_ID_BYTES + 1)), "bad_id"),
    "id too long in bytes": (b'{"id":"%s","body":"x"}' % ("\u00e9".encode() * (MAX_ID_BYTES // 2 + 1)), "bad_id"),
    "subject number": (b'{"subject":1,"body":"x"}', "wrong_type"),
    "subject array": (b'{"subject":["x"],"body":"x"}', "wrong_type"),
    "push time string": (b'{"body":"x","pushed_at_ms":"1"}', "wrong_type"),
    "push time true": (b'{"body":"x","pushed_at_ms":true}', "wrong_type"),
    "push time float": (b'{"body":"x","pushed_at_ms":1.5}', "wrong_type"),
    "push time whole float": (b'{"body":"x","pushed_at_ms":1.0}', "wrong_type"),
    "push time out of range as float": (b'{"body":"x","pushed_at_ms":1e999999}', "wrong_type"),
    "push time over 64 bits": (b'{"body":"x","pushed_at_ms":9223372036854775808}', "wrong_type"),
    "push time under 64 bits": (b'{"body":"x","pushed_at_ms":-9223372036854775809}', "wrong_type"),
    "push time no float can hold": (b'{"body":"x","pushed_at_ms":%s}' % (b"9" * 400), "wrong_type"),
    "push time Python would not print": (b'{"body":"x","pushed_at_ms":%s}' % (b"9" * 5000), "wrong_type"),
    # too deep
    "deep arrays as body": (b'{"body":' + nested("[]") + b"}", "too_deep"),
    "deep arrays as id": (b'{"body":"x","id":' + nested("[]") + b"}", "too_deep"),
    "deep arrays in an unknown field": (b'{"body":"x","f":' + nested("[]") + b"}", "too_deep"),
    "deep objects in an unknown field": (b'{"body":"x","f":' + nested("{}") + b"}", "too_deep"),
    "deep arrays, never closed": (b'{"body":"x","f":' + b"[" * DEEP, "too_deep"),
    "deep objects from the root": (nested("{}"), "too_deep"),
}


@pytest.mark.parametrize(("payload", "reason"), BAD.values(), ids=BAD.keys())
def test_a_bad_ticket_gives_its_reason(payload: bytes, reason: str) -> None:
    """Each kind of bad payload is a TicketError with the one reason that people filter by."""
    assert refusal(payload).reason == reason


def test_every_reason_is_of_the_promised_set() -> None:
    """The reasons seen are the documented ones, all of them: a filter on a reason never goes blind."""
    assert {reason for _, reason in BAD.values()} | {"too_large"} == REASONS
    assert all(reason in (TicketError.__doc__ or "") for reason in REASONS)


def test_an_id_at_the_limit_is_taken() -> None:
    """512 bytes of id are allowed, counted in UTF-8."""
    for ticket_id in ("a" * MAX_ID_BYTES, "\u00e9" * (MAX_ID_BYTES // 2)):
        assert decode_ticket(json.dumps({"id": ticket_id, "body": "x"}).encode()).id == ticket_id


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63) + 1, 0])
def test_a_push_time_at_the_limit_is_taken(value: int) -> None:
    """A push time may be any 64-bit integer, and one that is taken can be subtracted from as a float."""
    pushed = decode_ticket(b'{"body":"x","pushed_at_ms":%d}' % value).pushed_at_ms
    assert pushed == value
    float(pushed - 2**63)


@pytest.mark.parametrize("cap", [64, MAX_TICKET_BYTES])
def test_the_size_cap_is_exact(cap: int) -> None:
    """A payload of exactly the cap is a ticket, one byte more is too large; bytes count, not characters."""
    frame = len(b'{"body":""}')
    assert decode_ticket(b'{"body":"%s"}' % (b"x" * (cap - frame)), cap).body == "x" * (cap - frame)
    assert refusal(b'{"body":"%s"}' % (b"x" * (cap - frame + 1)), cap).reason == "too_large"
    assert refusal('{"body":"%s"}'.replace("%s", "\u00e9" * (cap // 2)).encode(), cap).reason == "too_large"


def test_the_default_cap_is_64_kib() -> None:
    """What producers were told: 65,536 bytes, without anybody setting anything."""
    frame = len(b'{"body":""}')
    assert len(decode_ticket(b'{"body":"%s"}' % (b"x" * (65536 - frame))).body) == 65536 - frame
    with pytest.raises(TicketError, match=r"^too_large: expected at most 65536 bytes, got 65537$"):
        decode_ticket(b'{"body":"%s"}' % (b"x" * (65537 - frame)))


class Unread(bytes):
    """A payload that fails the test when somebody reads it."""

    def decode(self, *_: object, **__: object) -> str:
        """Instead of bytes.decode."""
        raise AssertionError("the payload was read")


def test_a_large_payload_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MB costs nothing: it is refused by its length alone, neither decoded nor parsed, a thousand in a moment."""
    monkeypatch.setattr(wire.ticket, "_FIELDS", None)
    payload = Unread(b'{"body":"' + b"\xff" * 1_000_000)
    start = time.perf_counter()
    assert {refusal(payload, MAX_TICKET_BYTES).reason for _ in range(1000)} == {"too_large"}
    assert time.perf_counter() - start < 1.0  # it takes 10 ms; parsing alone would take a second


# What is allowed


def test_an_escaped_nul_is_text() -> None:
    """NUL as an escape is a character like any other, in the body, the id and in further fields."""
    payload = b'{"id":"a\\u0000","body":"x\\u0000y","f":"\\u0000"}'
    ticket = decode_ticket(payload)
    assert (ticket.id, ticket.body, bytes(ticket.extra["f"])) == ("a\0", "x\0y", b'"\\u0000"')
    assert decode_ticket(encode_ticket(ticket)) == ticket


@pytest.mark.parametrize("number", [b"1e999999", b"-1e999999", b"9" * 5000, b"0." + b"1" * 5000, b"-0.0"])
def test_a_huge_number_in_an_unknown_field_is_kept(number: bytes) -> None:
    """A number that no type of ours holds passes through byte for byte, for whoever knows what it is."""
    ticket = decode_ticket(b'{"body":"x","f":%s,"g":[%s]}' % (number, number))
    assert {name: bytes(raw) for name, raw in ticket.extra.items()} == {"f": number, "g": b"[%s]" % number}
    assert encode_ticket(ticket) == b'{"body":"x","f":%s,"g":[%s]}' % (number, number)


def test_the_last_of_a_repeated_key_counts() -> None:
    """Documented: as in Python and JavaScript the last value wins, however the key is spelt."""
    ticket = decode_ticket(b'{"id":"a","body":"x","f":1,"f":2,"b\\u006fdy":"y","id":"b"}')
    assert (ticket.id, ticket.body, bytes(ticket.extra["f"])) == ("b", "y", b"2")


def test_an_escaped_pair_is_one_character() -> None:
    """Emoji arrive as two escapes from every producer that writes ASCII; they are no lone surrogates."""
    assert decode_ticket(b'{"body":"\\ud83d\\ude00"}').body == "\U0001f600"


@pytest.mark.parametrize("text", [rb"\ud83d\ude00", rb"\\ud800", rb"\\\\udc00", rb"\\\ud83d\ude00"])
def test_only_a_lone_surrogate_is_blamed(text: bytes) -> None:
    """`detail` names the true fault: a truncated ticket with an emoji or an escaped backslash is just truncated."""
    assert "truncated" in refusal(b'{"body":"%s' % text).detail
    assert "surrogate" in refusal(rb'{"body":"%s\ud800"}' % text).detail


# Nothing else, ever


def ticket_or_error(payload: bytes) -> None:
    """Fails on anything but a well-formed Ticket or a TicketError with a known reason."""
    outcome = decoded(payload, MAX_TICKET_BYTES)
    if isinstance(outcome, TicketError):
        assert outcome.reason in REASONS
        assert str(outcome) == f"{outcome.reason}: {outcome.detail}"
    else:
        assert 0 < len(outcome.id.encode()) <= MAX_ID_BYTES
        assert decode_ticket(encode_ticket(outcome), HUGE).body == outcome.body


def spliced(payload: bytes, start: int, cut: int, rubbish: bytes) -> bytes:
    """A payload with some bytes in its middle replaced by others."""
    start %= len(payload) + 1
    return payload[:start] + rubbish + payload[start + cut :]


spoiled_tickets = st.builds(
    spliced,
    tickets.map(encode_ticket),
    st.integers(0, 10_000),
    st.integers(0, 10),
    st.binary(max_size=10) | st.sampled_from([b'"', b"\\", b"{", b"]", b"\\ud800", b"1e999999", b"\x00", b"[" * 2000]),
)


@settings(deadline=None)
@given(st.binary() | texts.map(str.encode) | json_texts.map(str.encode) | spoiled_tickets)
@example(b"")
@example(b"[" * DEEP)
@example(b'{"body":' * (MAX_TICKET_BYTES // 8))
def test_any_bytes_are_a_ticket_or_a_ticket_error(payload: bytes) -> None:
    """Whatever anyone pushes, decoding ends in a Ticket that can be encoded again, or in TicketError."""
    ticket_or_error(payload)


@pytest.mark.skipif(not NASTY.exists(), reason="shared/data/nasty.jsonl is not here")
def test_the_nasty_collection() -> None:
    """713 hostile tickets, from zalgo to 1 MB of one letter: each line is a Ticket or a TicketError."""
    for line in NASTY.read_bytes().splitlines():
        ticket_or_error(line)


# The ticket's text never reaches a message


def assert_silent(error: BaseException) -> None:
    """Neither the error nor its traceback, as any logger prints it, holds a piece of the planted text."""
    printed = "".join([str(error), repr(error), repr(vars(error)), *traceback.format_exception(error)])
    assert MARKER_PIECE not in printed
    assert MARKER_NUMBER_PIECE not in printed


def planted(template: bytes) -> bytes:
    """A payload with the marker for every %M and the number for every %N."""
    return template.replace(b"%M", MARKER.encode()).replace(b"%N", MARKER_NUMBER)


MARKED = planted(
    rb'{"id":"%M","%M":{"%M":["%M",%N,"\u00e9%M"]},"subject":"%M '
    + "\u00e9".encode()
    + rb'","body":"%M\n%M \ud83d\ude00","pushed_at_ms":17}'
)


@pytest.mark.parametrize(
    "template",
    [
        b"%M",
        b'"%M"',
        b'["%M"]',
        b"%N",
        b'{"%M":"%M"}',
        b'{"%M"',
        b"{%M:1}",
        b'{"body":%M}',
        b'{"body":%N}',
        b'{"body":["%M"]}',
        b'{"body":{"%M":"%M"}}',
        b'{"body":"x","id":%N}',
        b'{"body":"x","id":{"%M":1}}',
        b'{"body":"x","id":"%s"}' % (b"%M" * 50),
        b'{"body":"x","subject":["%M"]}',
        b'{"body":"x","pushed_at_ms":"%M"}',
        b'{"body":"x","pushed_at_ms":%N}',
        b'{"body":"x","pushed_at_ms":-%N}',
        b'{"body":"x","pushed_at_ms":%N.5}',
        b'{"body":"x","pushed_at_ms":%Ne999999}',
        b'{"body":"x","pushed_at_ms":%s}' % (b"%N" * 150),
        b'{"body":"%M","f":%M}',
        b'{"body":"%M\\q%M"}',
        b'{"body":"%M\\u%M"}',
        b'{"body":"%M\\ud800%M"}',
        b'{"%M\\udc00":1,"body":"%M"}',
        b'{"body":"%M\x00%M"}',
        b'{"body":"%M\xff%M"}',
        b'{"%M\xff":1}',
        b'{"body":"%M"} %M',
        b'{"body":"%M","f":' + b'{"%M":' * 20_000,
        b'\xef\xbb\xbf{"body":"%M"}',
    ],
)
def test_a_message_never_quotes_the_ticket(template: bytes) -> None:
    """Every kind of refusal, with a marker planted wherever text can be, is silent about the text."""
    assert_silent(refusal(planted(template)))


def test_a_message_never_quotes_a_large_ticket() -> None:
    """A refusal for size tells the sizes only."""
    assert_silent(refusal(MARKED, len(MARKED) - 1))


def test_a_message_never_quotes_a_truncated_ticket() -> None:
    """Cut after any byte, a ticket is refused without a word of it."""
    assert decode_ticket(MARKED).subject == f"{MARKER} \u00e9"
    for end in range(len(MARKED)):
        assert_silent(refusal(MARKED[:end]))


@pytest.mark.parametrize("rubbish", [b"\xff", b'"', b"\\", b"{", b"]", b",", b"\x00", b"n", b"\\ud800", b"", b"1"])
def test_a_message_never_quotes_a_spoiled_ticket(rubbish: bytes) -> None:
    """With any one byte replaced by rubbish, a ticket is read, or refused without a word of it."""
    outcomes = [decoded(MARKED[:at] + rubbish + MARKED[at + 1 :]) for at in range(len(MARKED))]
    errors = [outcome for outcome in outcomes if isinstance(outcome, TicketError)]
    assert errors
    for error in errors:
        assert_silent(error)
