"""Stream entries: both directions, the golden fields, and what a reader makes of fields it does not expect."""

import json
import traceback
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.records import Answer, BatchReport, DeadLetter, Label, Totals, from_fields, to_fields

KINDS: list[type[msgspec.Struct]] = [Label, DeadLetter, BatchReport, Totals]
GOLDEN: dict[str, list[list[str]]] = json.loads((Path(__file__).parent / "golden" / "records.json").read_text("utf-8"))
MARKER = "QzxjQzxj"

SAMPLES: list[msgspec.Struct] = [
    Label(
        id="T-1",
        label="billing",
        confidence=0.96875,
        margin=3.5,
        scores={"billing": -0.03125, "technical": -3.53125, "account": -4.5},
        answers={
            "urgency": Answer(label="high", confidence=0.75, margin=1.0, scores={"high": -0.25, "low": -1.25}),
            "language": Answer(label=None, confidence=0.5, margin=0.0, scores={"en": -0.75, "de": -0.75}),
        },
        model="smollm2-135m",
        task="support",
        batch="w1-7",
        worker="w1",
        attempt=2,
        truncated_tokens=12,
        pushed_at_ms=1767225600000,
        labelled_at_ms=1767225601500,
    ),
    DeadLetter(
        payload=b'{"body":"caf\xe9\x00\xff',
        reason="not_utf8",
        detail="invalid UTF-8 at byte 12",
        attempts=3,
        at_ms=1767225601500,
        worker="w1",
    ),
    BatchReport(
        batch="w1-7",
        worker="w1",
        seq=7,
        at_ms=1767225601500,
        size=4,
        dead=1,
        labels={"billing": 2, "account": 1},
        abstained=1,
        tokens_prompt=400,
        tokens_computed=130,
        tokens_padding=0,
        tokens_saved_prefix=240,
        tokens_saved_duplicates=30,
        tokens_saved_packing=55,
        padding_ratio=0.0,
        wait_ms=1500.25,
        tokenise_ms=0.5,
        score_ms=80.125,
        publish_ms=1.0,
        closed="drained",
        latency_buckets=[0, 1, 2, 0],
        lease_margin_ms=29000.0,
        reclaimed=0,
        fenced=1,
        retried=2,
        model="smollm2-135m",
        task="support",
        strategy="packed",
        certificate="exact",
        published=2,
        duplicates=1,
        depth=0,
        oldest_age_ms=None,
        total_published=20,
        total_duplicates=1,
        total_dead=1,
        total_batches=7,
    ),
    Totals(
        published=20, duplicates=1, dead=1, batches=7, reclaimed=2, fenced=3, retried=4, abstained=5,
        tokens_prompt=4000, tokens_computed=2**64
    ),
]  # fmt: skip

texts = st.text(st.characters(codec="utf-8"))
floats = st.floats(allow_nan=False, allow_infinity=False)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: texts,
    bytes: st.binary(),
    int: st.integers(),
    float: floats,
    dict[str, float]: st.dictionaries(texts, floats),
    dict[str, int]: st.dictionaries(texts, st.integers()),
    list[int]: st.lists(st.integers()),
    str | None: st.none() | texts,
    int | None: st.none() | st.integers(),
    float | None: st.none() | floats,
}
VALUES[dict[str, Answer] | None] = st.none() | st.dictionaries(
    texts, st.builds(Answer, **{field.name: VALUES[field.type] for field in msgspec.structs.fields(Answer)})
)


def records(kind: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    """Any record of a kind. A field of a type not seen before is a KeyError here, to be thought about."""
    return st.builds(kind, **{field.name: VALUES[field.type] for field in msgspec.structs.fields(kind)})


def stored(flat: list[str | bytes]) -> dict[bytes, bytes]:
    """What redis-py returns, undecoded, for the fields it was given."""
    sent = [value.encode("utf-8") if isinstance(value, str) else value for value in flat]
    return dict(zip(sent[::2], sent[1::2], strict=True))


def read(kind: type[msgspec.Struct], fields: dict[bytes, bytes]) -> msgspec.Struct | msgspec.ValidationError:
    """What comes of an entry; any other exception fails the test."""
    try:
        return from_fields(kind, fields)
    except msgspec.ValidationError as error:
        return error


def accepts_none(kind: Any) -> bool:
    """Is `kind` one of the optional types?"""
    return isinstance(kind, types.UnionType) and type(None) in typing.get_args(kind)


@settings(deadline=None)
@given(st.one_of([records(kind) for kind in KINDS]))
def test_a_record_comes_back_as_it_went(record: msgspec.Struct) -> None:
    """Through to_fields, Redis and from_fields any record is equal to itself, to the last bit of a float."""
    flat = to_fields(record)
    assert from_fields(type(record), stored(flat)) == record
    assert all(isinstance(item, str | bytes) for item in flat)
    assert len(stored(flat)) * 2 == len(flat)


@settings(deadline=None)
@given(st.binary())
def test_a_dead_letter_keeps_the_payload_byte_for_byte(payload: bytes) -> None:
    """What was buried can be dug up and replayed: no byte is escaped, decoded or lost."""
    letter = DeadLetter(payload=payload, reason="not_utf8", detail="", attempts=1, at_ms=0, worker="w")
    fields = stored(to_fields(letter))
    assert fields[b"payload"] == payload
    assert from_fields(DeadLetter, fields).payload == payload


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
def test_golden_fields(record: msgspec.Struct) -> None:
    """Names, order and spelling of every field stay: streams outlive releases, dashboards read them raw."""
    flat = [field.encode("latin-1") for pair in GOLDEN[type(record).__name__] for field in pair]
    sent = [field.encode("utf-8") if isinstance(field, str) else field for field in to_fields(record)]
    assert sent == flat
    assert from_fields(type(record), dict(zip(flat[::2], flat[1::2], strict=True))) == record


def test_every_field_has_a_golden_value() -> None:
    """No field escapes the golden file, but for the one that shows how None is left out."""
    assert [type(record) for record in SAMPLES] == KINDS
    for kind in KINDS:
        names = {name for name, _ in GOLDEN[kind.__name__]}
        assert set(kind.__struct_fields__) - names == ({"oldest_age_ms"} if kind is BatchReport else set())


@settings(deadline=None)
@given(st.sampled_from(SAMPLES), st.dictionaries(st.binary(), st.binary()))
def test_unknown_fields_are_ignored(record: msgspec.Struct, more: dict[bytes, bytes]) -> None:
    """An older reader survives a newer writer, whatever bytes the new fields' names and values are."""
    assert from_fields(type(record), more | stored(to_fields(record))) == record


@pytest.mark.parametrize(
    ("record", "name"),
    [
        pytest.param(record, field.name, id=f"{type(record).__name__}-{field.name}")
        for record in SAMPLES
        for field in msgspec.structs.fields(type(record))
    ],
)
def test_a_missing_field_is_named_or_takes_its_default(record: msgspec.Struct, name: str) -> None:
    """Without a required field an entry is refused by that name; without an optional one it has the default."""
    [field] = [field for field in msgspec.structs.fields(type(record)) if field.name == name]
    fields = stored(to_fields(record, skip=[name]))
    assert name.encode() not in fields
    if field.required:
        with pytest.raises(msgspec.ValidationError, match=f"`{name}`"):
            from_fields(type(record), fields)
    else:
        assert getattr(from_fields(type(record), fields), name) == field.default


def test_what_an_absent_field_means() -> None:
    """A reader takes an absent field for nothing or zero, and an absent attempt for the first."""
    for kind in KINDS:
        defaults = {field.name: field.default for field in msgspec.structs.fields(kind) if not field.required}
        assert all(value in ((1,) if name == "attempt" else (0, None)) for name, value in defaults.items())


def test_none_is_not_sent() -> None:
    """A field that is None does not cross at all, so that a reader never meets the word null."""
    for record in SAMPLES:
        bare = type(record)(
            **{
                field.name: None if accepts_none(field.type) else getattr(record, field.name)
                for field in msgspec.structs.fields(type(record))
            }
        )
        assert not any(accepts_none(f.type) and f.name in to_fields(bare) for f in msgspec.structs.fields(type(bare)))
        assert b"null" not in stored(to_fields(bare)).values()


def test_an_abstained_label_is_an_entry_without_label() -> None:
    """Who reads only `label` finds none, `abstained` counts it, and the probability and the scores are still there."""
    values = {name: getattr(SAMPLES[0], name) for name in Label.__struct_fields__}
    label = Label(**values | {"label": None, "abstained": 1, "confidence": 0.5, "answers": None})
    flat = [[str(name), str(value)] for name, value in zip(*2 * [iter(to_fields(label))], strict=True)]
    assert flat == GOLDEN["Label, abstained"]
    assert from_fields(Label, stored(to_fields(label))) == label


def test_skipped_fields_are_not_sent() -> None:
    """The commit script fills in some fields itself; the worker leaves out exactly those."""
    skip = ("published", "depth")
    assert stored(to_fields(SAMPLES[2])).keys() - stored(to_fields(SAMPLES[2], skip)).keys() == {b"published", b"depth"}


MALFORMED: list[tuple[type[msgspec.Struct], str, bytes]] = [
    (Totals, "published", b""),
    (Totals, "published", b"many"),
    (Totals, "published", b"1.5"),
    (Totals, "published", b"1.0"),
    (Totals, "published", b"1e3"),
    (Totals, "published", b"1e999999"),
    (Totals, "published", b"9" * 5000),
    (Totals, "published", b"true"),
    (Totals, "published", b"null"),
    (Totals, "published", b'"1"'),
    (Totals, "published", b"1 2"),
    (Totals, "published", b"\xff"),
    (Label, "worker", b"\xff"),
    (Label, "worker", b"\xed\xa0\x80"),
    (Label, "confidence", b"NaN"),
    (Label, "confidence", b"9" * 400),
    (Label, "scores", b'{"a":null}'),
    (Label, "scores", b'{"\xff":1}'),
    (Label, "scores", b'{"\\ud800":1}'),
    (Label, "scores", b'{"a":1'),
    (Label, "scores", b"[1]"),
    (Label, "pushed_at_ms", b"0.5"),
    (Label, "label", b"\xff"),
    (Label, "answers", b'{"urgency":"high"}'),
    (Label, "answers", b'{"urgency":{"label":"high"}}'),
    (BatchReport, "latency_buckets", b"[1.5]"),
    (BatchReport, "latency_buckets", b"[" * 100_000),
    (BatchReport, "labels", b'{"a":' * 100_000),
    (DeadLetter, "detail", b"\xc0\x80"),
]


@pytest.mark.parametrize(
    ("kind", "name", "raw"), MALFORMED, ids=[f"{kind.__name__}-{name}-{raw[:9]!r}" for kind, name, raw in MALFORMED]
)
def test_a_malformed_field_is_a_validation_error_that_names_it(
    kind: type[msgspec.Struct], name: str, raw: bytes
) -> None:
    """Broken JSON, broken UTF-8 and a float for an integer are all one kind of error, which says where it is."""
    [sample] = [record for record in SAMPLES if type(record) is kind]
    with pytest.raises(msgspec.ValidationError, match=f"^field '{name}': "):
        from_fields(kind, stored(to_fields(sample)) | {name.encode(): raw})


@settings(deadline=None)
@given(st.data())
def test_any_fields_are_a_record_or_a_validation_error(data: st.DataObject) -> None:
    """Whatever is in a stream, reading it ends in a record or in msgspec.ValidationError, nothing else."""
    sample = data.draw(st.sampled_from(SAMPLES))
    names = st.sampled_from([name.encode() for name in sample.__struct_fields__])
    values = st.binary() | texts.map(str.encode) | st.sampled_from([b"null", b"{}", b"[]", b"[" * 5000, b"1.5", b'""'])
    fields = stored(to_fields(sample)) | data.draw(st.dictionaries(names, values, min_size=1))
    assert isinstance(read(type(sample), fields), type(sample) | msgspec.ValidationError)


def test_a_message_never_quotes_the_entry() -> None:
    """A dashboard that logs a malformed entry logs none of its text, which may be a ticket's."""
    bad = [MARKER.encode(), b'"%s"' % MARKER.encode(), b"%s\xff" % MARKER.encode(), b'{"%s":"x"}' % MARKER.encode()]
    entries = [
        (type(sample), stored(to_fields(sample)) | {name.encode(): raw})
        for sample in SAMPLES
        for name in sample.__struct_fields__
        for raw in bad
    ]
    errors = [outcome for entry in entries if isinstance(outcome := read(*entry), msgspec.ValidationError)]
    assert len(errors) > 100
    for error in errors:
        assert MARKER not in "".join([repr(error), *traceback.format_exception(error)])
