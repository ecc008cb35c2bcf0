"""Payloads that somebody, by malice or by accident, could push; and what has to become of each."""

from typing import NamedTuple

PUBLISHED = "published"


class Hostile(NamedTuple):
    """A payload, its fate (`published` or a dead letter's reason), and the id it is published under."""

    name: str
    payload: bytes
    fate: str
    id: str = ""


def hostile_payloads(mark: str) -> list[Hostile]:
    """One of each kind. `mark` goes into ids, so that several sets can share a queue."""

    def with_id(name: str, ticket_id: str, as_json: str) -> Hostile:
        return Hostile(name, f'{{"id": "{as_json}", "body": "x"}}'.encode(), PUBLISHED, ticket_id)

    m = mark.encode()
    return [
        Hostile("10 MB body", b'{"id": "big%s", "body": "%s"}' % (m, b"x" * 10_000_000), "too_large"),
        Hostile("a million zeros", b"0" * 1_000_000, "too_large"),
        Hostile("zeros under the cap", b"0" * 60_000, "not_json"),
        Hostile("zero bytes", b"\0" * 60_000, "not_json"),
        Hostile("a body of zeros", b'{"id": "z%s", "body": "%s"}' % (m, b"0" * 60_000), PUBLISHED, f"z{mark}"),
        Hostile("deep arrays", b'{"body": "x", "more": %s%s}' % (b"[" * 30_000, b"]" * 30_000), "too_deep"),
        Hostile("deep objects", b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "too_deep"),
        Hostile("unclosed", b"[" * 60_000, "not_object"),
        Hostile("many keys", b"{%s}" % b",".join(b'"k%d":0' % n for n in range(5000)), "missing_field"),
        Hostile("duplicate ids", b'{"id": "a", "body": "x", "id": "d%s"}' % m, PUBLISHED, f"d{mark}"),
        Hostile("duplicate bodies", b'{"id": "e%s", "body": 1, "body": "x"}' % m, PUBLISHED, f"e{mark}"),
        Hostile("invalid UTF-8", b'{"id": "u", "body": "\xff\xfe"}', "not_utf8"),
        Hostile("an encoded surrogate", b'{"body": "\xed\xa0\x80"}', "not_utf8"),
        Hostile("half an escaped surrogate", rb'{"body": "\ud800"}', "not_json"),
        Hostile("raw control characters", b'{"body": "\x00\x1b[2J\x07"}', "not_json"),
        with_id("escaped control characters", f"\x00\x1b[2J{mark}", rf"\u0000\u001b[2J{mark}"),
        Hostile("a number for an id", b'{"id": 17, "body": "x"}', "wrong_type"),
        Hostile("a list for an id", b'{"id": ["a"], "body": "x"}', "wrong_type"),
        Hostile("an id of 10 kB", b'{"id": "%s", "body": "x"}' % (b"i" * 10_000), "bad_id"),
        Hostile("an empty id", b'{"id": "", "body": "x"}', "bad_id"),
        with_id("braces in an id", f"{{tickets}}:results{mark}", f"{{tickets}}:results{mark}"),
        with_id("newlines in an id", f"a\r\nb{mark}", rf"a\r\nb{mark}"),
        with_id("quotes in an id", f'"]}}{mark}', rf"\"]}}{mark}"),
        Hostile("a body that is null", b'{"id": "n", "body": null}', "missing_field"),
        Hostile("an empty body", b'{"id": "y%s", "body": ""}' % m, PUBLISHED, f"y{mark}"),
        Hostile("a time beyond 64 bits", b'{"body": "x", "pushed_at_ms": 1%s}' % (b"0" * 300), "wrong_type"),
        Hostile("a time before all time", b'{"id":"t%s","body":"x","pushed_at_ms":-1}' % m, PUBLISHED, f"t{mark}"),
        Hostile("nothing", b"", "not_json"),
        Hostile("a byte order mark", b'\xef\xbb\xbf{"body": "x"}', "not_json"),
        Hostile("MessagePack", b"\x81\xa4body\xa1x", "not_utf8"),
    ]
