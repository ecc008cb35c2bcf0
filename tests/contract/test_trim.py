"""Streams bounded by age, and readers that are told of what they missed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import worker
from wire import Label
from wire.records import to_fields
from worker.queue.connection import connect
from worker.queue.streams import StreamReader
from worker.queue.verbs import StreamLengths

if TYPE_CHECKING:
    from tests.contract.conftest import Desk

HOUR_MS = 3600 * 1000
_NUMBERS = itertools.count(1)  # two fills may fall into one millisecond
NODE_ENTRIES = 100  # what a server trims by approximation: whole nodes of so many


def fill(desk: Desk, stream: str, count: int, age_ms: int = 0) -> None:
    """Append labels that are so old by their ids."""
    (_, label) = desk.outcome("b", {1: None, 2: "t"}).labels[1][1:]
    flat = to_fields(label)
    fields: Any = dict(zip(flat[::2], flat[1::2], strict=True))
    at_ms = desk.now_ms() - age_ms
    with desk.redis.pipeline() as pipeline:
        for _ in range(count):
            pipeline.xadd(stream, fields, id=f"{at_ms}-{next(_NUMBERS)}")
        pipeline.execute()


def ages_ms(desk: Desk, stream: str) -> list[int]:
    """How old the entries of a stream are."""
    now_ms = desk.now_ms()
    return [now_ms - int(entry_id.decode().partition("-")[0]) for entry_id, _ in desk.redis.xrange(stream)]


@pytest.mark.parametrize("name", ["results", "metrics"])
def test_old_entries_go_with_the_next_commit(desk: Desk, name: str) -> None:
    """Entries older than the age are trimmed, about: whole nodes of them. Younger ones and other streams stay."""
    stream, other = (getattr(desk.keys, one) for one in (name, "metrics" if name == "results" else "results"))
    for one in (stream, other):
        fill(desk, one, 2 * NODE_ENTRIES, 2 * HOUR_MS)
        fill(desk, one, 10, HOUR_MS // 2)
    desk.push(b"one")
    desk.claim()
    age = {f"{name}_age_ms": HOUR_MS}
    desk.commit(desk.outcome("c", {1: "t-1"}), lengths=StreamLengths(**age))
    left = ages_ms(desk, stream)
    assert sum(age_ms > HOUR_MS for age_ms in left) < NODE_ENTRIES
    assert sum(age_ms < HOUR_MS for age_ms in left) == 11
    assert len(ages_ms(desk, other)) == 2 * NODE_ENTRIES + 11


def test_length_and_age_hold_together(desk: Desk) -> None:
    """A stream with both bounds keeps to the narrower one; with neither it keeps all."""
    fill(desk, desk.keys.results, 5 * NODE_ENTRIES, HOUR_MS)
    desk.push(b"one", b"two", b"three")
    desk.claim()
    desk.commit(desk.outcome("a", {1: None}), lengths=StreamLengths(results=0))
    assert desk.redis.xlen(desk.keys.results) == 5 * NODE_ENTRIES + 1
    desk.commit(desk.outcome("b", {2: None}), lengths=StreamLengths(results=200, results_age_ms=2 * HOUR_MS))
    assert desk.redis.xlen(desk.keys.results) < 200 + NODE_ENTRIES
    desk.commit(desk.outcome("c", {3: None}), lengths=StreamLengths(results=200, results_age_ms=1))
    assert desk.redis.xlen(desk.keys.results) < NODE_ENTRIES


@pytest.fixture
def counting(desk: Desk) -> None:
    """A server that counts what was ever added to a stream."""
    if int(desk.redis.info("server")["redis_version"].partition(".")[0]) < 7:
        pytest.skip("this server is older than Redis 7, and does not count a stream's entries")


class Following:
    """A reader of the results, and what it was told of gaps."""

    def __init__(self, desk: Desk, last: int | None = 0, client: Any = None) -> None:
        self.told: list[int | None] = []
        self.reader = StreamReader(client or desk.redis, desk.keys.results, Label, last, self.told.append)

    def read(self) -> int:
        """Read what is there, and count it."""
        return sum(1 for _ in self.reader.available())


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("last", [0, 3, 50, None])
def test_a_reader_is_told_how_many_it_missed(desk: Desk, last: int | None) -> None:
    """Entries trimmed before the reader came to them are counted exactly, each once; those it has read are not."""
    fill(desk, desk.keys.results, 10)
    desk.redis.xtrim(desk.keys.results, maxlen=8, approximate=False)  # before it began: not missed
    following = Following(desk, last)
    assert following.read() == (8 if last is None else min(8, last))
    fill(desk, desk.keys.results, 20)
    desk.redis.xtrim(desk.keys.results, maxlen=5, approximate=False)
    assert following.read() == 5
    assert following.told == [15]
    fill(desk, desk.keys.results, 7)
    desk.redis.xtrim(desk.keys.results, maxlen=0, approximate=False)
    assert following.read() == 0
    fill(desk, desk.keys.results, 4)
    desk.redis.xtrim(desk.keys.results, maxlen=2, approximate=False)
    assert following.read() == 2
    assert following.told == [15, 7, 2]


@pytest.mark.usefixtures("counting")
def test_a_reader_that_keeps_up_is_told_nothing(desk: Desk) -> None:
    """Trimming what was read already, to the last entry and beyond, is no gap; nor is a stream that comes to be."""
    following = Following(desk)
    assert following.read() == 0
    for _ in range(3):
        fill(desk, desk.keys.results, 2300)  # more than a page
        assert following.read() == 2300
        desk.redis.xtrim(desk.keys.results, maxlen=0, approximate=False)
        assert following.read() == 0
    assert following.told == []


@pytest.mark.usefixtures("counting")
def test_gaps_between_pages_are_counted(desk: Desk) -> None:
    """What is trimmed between two pages of one reading is missed too, and counted, each time by itself."""
    fill(desk, desk.keys.results, 4000)
    following = Following(desk, last=None)
    labels: Iterator[Any] = following.reader.available()
    next(labels)
    desk.redis.xtrim(desk.keys.results, maxlen=2500, approximate=False)
    assert sum(1 for _ in itertools.islice(labels, 1000)) == 1000
    desk.redis.xtrim(desk.keys.results, maxlen=1000, approximate=False)
    assert sum(1 for _ in labels) == 999 + 1000
    assert following.told == [500, 500]


@pytest.mark.usefixtures("counting")
def test_what_was_deleted_is_not_missed(desk: Desk) -> None:
    """Entries that somebody deletes one by one, among others that stay, are no gap and do not spoil a later count."""
    following = Following(desk)
    fill(desk, desk.keys.results, 5)
    assert following.read() == 5
    fill(desk, desk.keys.results, 10)
    for entry_id, _ in desk.redis.xrevrange(desk.keys.results, count=4)[2:]:
        desk.redis.xdel(desk.keys.results, entry_id)
    assert following.read() == 8
    fill(desk, desk.keys.results, 4)
    desk.redis.xtrim(desk.keys.results, maxlen=2, approximate=False)
    assert following.read() == 2
    assert following.told == [2]


@pytest.mark.usefixtures("counting")
def test_where_the_number_is_not_known_a_gap_is_still_told(desk: Desk) -> None:
    """Among entries deleted one by one, for a stream begun anew, and on a server that does not count, it is None."""
    following = Following(desk)
    fill(desk, desk.keys.results, 10)
    for entry_id, _ in desk.redis.xrange(desk.keys.results, count=4):
        desk.redis.xdel(desk.keys.results, entry_id)
    assert following.read() == 6
    assert following.told == [None]
    desk.redis.delete(desk.keys.results)
    fill(desk, desk.keys.results, 3)
    assert following.read() == 3
    assert following.told == [None, None]


def test_a_server_before_redis_7(desk: Desk) -> None:
    """Without the server's counters a gap is told without a number, and a reader that keeps up is told nothing."""
    with connect(desk.url) as client:
        whole = client.response_callbacks["XINFO STREAM"]

        def as_before(reply: Any, **options: Any) -> Any:
            new = ("entries-added", "max-deleted-entry-id")
            return {name: value for name, value in whole(reply, **options).items() if name not in new}

        client.set_response_callback("XINFO STREAM", as_before)
        following = Following(desk, None, client)
        fill(desk, desk.keys.results, 10)
        assert following.read() == 10
        fill(desk, desk.keys.results, 10)
        desk.redis.xtrim(desk.keys.results, maxlen=10, approximate=False)
        assert following.read() == 10
        desk.redis.xtrim(desk.keys.results, maxlen=5, approximate=False)
        fill(desk, desk.keys.results, 5)
        assert following.read() == 5
        assert following.told == [None]  # the first time: what was last read is gone, and so may be what came next
        fill(desk, desk.keys.results, 10)
        desk.redis.xtrim(desk.keys.results, maxlen=5, approximate=False)
        assert following.read() == 5
        assert following.told == [None, None]


@pytest.mark.usefixtures("counting")
def test_results_tells_on_stderr(desk: Desk, tmp_path: Path) -> None:
    """`results --follow` that was too slow says how many labels it never saw, and goes on; stdout has labels alone."""
    out, err = tmp_path / "out", tmp_path / "err"
    words = [sys.executable, "-m", "worker.cli", "results", "--follow", "--last", "0", "--json"]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            words,
            cwd=Path(worker.__file__).parents[1],
            env={**os.environ, "REDIS_URL": desk.url},
            stdout=stdout,
            stderr=stderr,
        )
    try:
        assert desk.eventually(lambda: bool(desk.redis.info("clients")["blocked_clients"]), within_s=20)
        fill(desk, desk.keys.results, 3)
        assert desk.eventually(lambda: len(out.read_bytes().splitlines()) == 3, within_s=5)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        fill(desk, desk.keys.results, 20)
        desk.redis.xtrim(desk.keys.results, maxlen=8, approximate=False)
        process.send_signal(signal.SIGCONT)
        assert desk.eventually(lambda: len(out.read_bytes().splitlines()) == 11, within_s=5)
        assert "12 labels were trimmed away" in err.read_text()
    finally:
        process.kill()
        process.wait()
