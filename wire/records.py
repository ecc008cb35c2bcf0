"""Stream entries, both directions in one place.

A record crosses as flat fields: text as text, bytes as bytes, everything else as JSON, and None not at all.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

_R = TypeVar("_R", bound=msgspec.Struct)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question about a ticket."""

    label: str | None  # None: the best one was less probable than what was asked for
    confidence: float  # probability of the best label among the question's, 0-1
    margin: float  # log-odds of the best label over the runner-up, nats; 0 is a tie
    scores: dict[str, float]  # log-probability of every label, nats


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the results stream: what one ticket was labelled, how surely, and by whom.

    `label` to `scores` are the answer to the task's main question. An entry without `label` has `abstained`.
    """

    id: str
    label: str | None = None
    confidence: float
    margin: float
    scores: dict[str, float]
    abstained: int = 0  # 1: the best label was less probable than the worker's --min-confidence
    answers: dict[str, Answer] | None = None  # to the task's further questions, by name
    model: str
    task: str
    batch: str
    worker: str
    attempt: int = 1  # 1 + the crashes this payload was in + the errors that were raised over it
    truncated_tokens: int = 0  # tokens cut from the middle of the ticket to fit the model
    pushed_at_ms: int | None = None  # the producer's clock; absent where the producer set none
    labelled_at_ms: int  # the worker's clock


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the dead stream: a payload that got no label, byte for byte, and why."""

    payload: bytes
    reason: str
    detail: str
    attempts: int
    at_ms: int
    worker: str


class BatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the metrics stream: one batch, written by the same commit as its labels.

    `tokens_computed == tokens_prompt - tokens_saved_prefix - tokens_saved_duplicates + tokens_padding` always.
    The fields from `published` on are filled in by the commit itself, which alone knows them.
    """

    batch: str
    worker: str
    seq: int  # the worker's own batch count from 1: a gap tells a reader what was trimmed
    at_ms: int
    size: int  # tickets in the batch, dead and retried ones included
    dead: int
    labels: dict[str, int]
    abstained: int = 0  # tickets of which no label was probable enough
    tokens_prompt: int  # what one pass a ticket would compute: instruction + ticket + answer cue, for each
    tokens_computed: int
    tokens_padding: int
    tokens_saved_prefix: int
    tokens_saved_duplicates: int
    tokens_saved_packing: int  # padding that length-sorted padded batches would have added
    padding_ratio: float  # tokens_padding / tokens_computed
    wait_ms: float | None = None  # longest wait from push to claim; absent where no ticket tells
    tokenise_ms: float  # this batch's share of its claim's tokenising
    score_ms: float
    publish_ms: float  # of the worker's commit before this one: its own end is not known while it is written
    closed: str  # full | budget | drained: what ended the batch
    latency_buckets: list[int]  # tickets by push-to-label time, `report.BUCKET_LIMITS_MS`
    lease_margin_ms: float  # what was left of the lease when the batch was done
    reclaimed: int  # tickets this worker took back from dead ones since its last batch
    fenced: int = 0  # batches of this worker not published since its last report: their claim was taken over
    retried: int = 0  # tickets put back, to be tried again after an error
    model: str
    task: str
    strategy: str
    certificate: str
    published: int = 0
    duplicates: int = 0  # labels withheld because the id was published inside the window
    depth: int = 0  # tickets waiting after the batch
    oldest_age_ms: int | None = None  # of the ticket at the head; absent where it tells no push time
    total_published: int = 0  # these four: the whole queue's sums since it began, so a reader recovers from gaps
    total_duplicates: int = 0
    total_dead: int = 0
    total_batches: int = 0


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The totals hash: sums over all workers since the queue began."""

    published: int = 0
    duplicates: int = 0
    dead: int = 0
    batches: int = 0
    reclaimed: int = 0
    fenced: int = 0  # batches
    retried: int = 0
    abstained: int = 0
    tokens_prompt: int = 0
    tokens_computed: int = 0


def to_fields(record: msgspec.Struct, skip: Iterable[str] = ()) -> list[str | bytes]:
    """A record as the flat `[name, value, name, value, ...]` that XADD takes, without the fields in `skip`."""
    flat: list[str | bytes] = []
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if value is not None and name not in skip:
            flat += [name, value if isinstance(value, str | bytes) else msgspec.json.encode(value).decode()]
    return flat


def from_fields(kind: type[_R], fields: Mapping[bytes, bytes]) -> _R:
    """The record of one stream entry or hash, as redis-py returns it undecoded.

    Unknown fields are ignored, so that an older reader survives a newer writer. Raises msgspec.ValidationError
    for a missing or malformed field.
    """
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        raw = fields.get(field.name.encode())
        if raw is not None:
            values[field.name] = _decode_value(field.name, raw, field.type)
    return msgspec.convert(values, kind)


def _decode_value(name: str, raw: bytes, kind: Any) -> Any:
    if kind is bytes:
        return raw
    try:
        return raw.decode("utf-8") if kind in (str, str | None) else msgspec.json.decode(raw, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.ValidationError(f"field '{name}': invalid UTF-8 at byte {error.start}") from None
    except msgspec.DecodeError as error:  # not JSON at all, or of another type
        raise msgspec.ValidationError(f"field '{name}': {error}") from None
