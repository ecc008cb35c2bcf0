import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis
from redis.connection import AbstractConnection

from producer import Producer, PushReceipt, QueueFullError, RedisUnavailableError, RefusedTicketError
from wire.ticket import MAX_TICKET_BYTES, Ticket, TicketError, decode_ticket
from worker.embedded import embedded_server

SECRET = "do-not-quote-me"


def waiting(client: redis.Redis, queue: str = "tickets") -> list[Ticket]:
    """What waits in the queue, oldest first."""
    return [decode_ticket(cast(bytes, payload)) for payload in client.lrange(queue, 0, -1)]


def some(count: int) -> Iterator[dict[str, str]]:
    """As many tickets, one at a time."""
    return ({"id": f"t-{number}", "body": SECRET} for number in range(count))


@pytest.fixture
def lost_replies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Append n: the reply of the n-th EVAL from now on is lost, after the server has done its work."""
    losses: list[int] = []
    connection: Any = AbstractConnection  # redis-py leaves it half typed
    send, receive = connection.send_packed_command, connection.read_response
    state = {"evals": 0, "lose": 0}

    def counting_send(self: Any, command: Any, *args: Any, **options: Any) -> Any:
        if b"EVAL" in b"".join(bytes(part) for part in command):
            state["evals"] += 1
            state["lose"] = state["evals"] in losses
        return send(self, command, *args, **options)

    def losing_receive(self: Any, *args: Any, **options: Any) -> Any:
        reply = receive(self, *args, **options)
        if state["lose"]:
            state["lose"] = 0
            self.disconnect()
            raise redis.ConnectionError("the reply is lost")
        return reply

    monkeypatch.setattr(AbstractConnection, "send_packed_command", counting_send)
    monkeypatch.setattr(AbstractConnection, "read_response", losing_receive)
    return losses


def test_tickets_arrive_in_order_and_whole(redis_url: str, redis_client: redis.Redis) -> None:
    """Every ticket arrives once, in order, across chunks, whatever it was given as; the receipt counts them."""
    given: list[Any] = [
        {"id": 7, "body": "a", "plan": {"x": [1]}},
        Ticket(id="t", body="b", subject="s"),
        {"body": "c"},
    ]
    with Producer(redis_url, chunk_size=2) as producer:
        receipt = producer.push_many(given)
    found = waiting(redis_client)
    assert receipt == PushReceipt(pushed=3, ids_made=1, depth=3)
    assert [(t.id, t.body, t.subject) for t in found[:2]] == [("7", "a", None), ("t", "b", "s")]
    assert json.loads(bytes(found[0].extra["plan"])) == {"x": [1]}
    assert found[2].id.startswith("made-")
    assert found[2].has_own_id


def test_push_returns_the_ids(redis_url: str, redis_client: redis.Redis) -> None:
    """`push` tells the ids under which the labels will be found, the made ones too, and made ids differ."""
    ids = Producer(redis_url).push({"id": "mine", "body": "x"}, {"body": "y"}, {"body": "y"})
    assert ids == [ticket.id for ticket in waiting(redis_client)]
    assert len(set(ids)) == 3


def test_the_push_time_is_last(redis_url: str, redis_client: redis.Redis) -> None:
    """The push time is the payload's last field, in milliseconds, and replaces one that was there."""
    before = time.time_ns() // 1_000_000
    Producer(redis_url).push({"pushed_at_ms": 5, "body": "x", "z": 1})
    (payload,) = redis_client.lrange("tickets", 0, -1)
    assert list(json.loads(payload))[-1] == "pushed_at_ms"
    assert before <= json.loads(payload)["pushed_at_ms"] <= time.time_ns() // 1_000_000


def test_more_than_lua_can_unpack(redis_url: str, redis_client: redis.Redis) -> None:
    """A chunk larger than Lua's unpack can take goes in whole and in order."""
    assert Producer(redis_url, chunk_size=30_000).push_many(some(20_001)).pushed == 20_001
    assert [ticket.id for ticket in waiting(redis_client)] == [f"t-{number}" for number in range(20_001)]


def test_exactly_the_cap_fits(redis_url: str, redis_client: redis.Redis) -> None:
    """The cap is a number of tickets that may wait, not one less."""
    producer = Producer(redis_url, max_depth=5, chunk_size=2)
    assert producer.push_many(list(some(5))).depth == 5
    with pytest.raises(QueueFullError):
        producer.push({"body": "x"})


def test_a_collection_that_cannot_fit_is_refused_whole(redis_url: str, redis_client: redis.Redis) -> None:
    """A collection over the cap is refused before its first chunk, with the numbers that say why."""
    producer = Producer(redis_url, max_depth=10, chunk_size=2)
    producer.push(*some(4))
    with pytest.raises(QueueFullError, match=r"holds 4 of at most 10 tickets: 7 were refused, 0 were") as caught:
        producer.push_many(list(some(7)))
    error = caught.value
    assert (error.depth, error.cap, error.pushed, error.refused, error.exit_code) == (4, 10, 0, 7, 75)
    assert len(waiting(redis_client)) == 4


def test_an_iterator_of_known_length_is_refused_whole(redis_url: str, redis_client: redis.Redis) -> None:
    """`expected` does for an iterator what its length does for a collection."""
    with pytest.raises(QueueFullError, match="0 were pushed before"):
        Producer(redis_url, max_depth=6, chunk_size=2).push_many(some(7), expected=7)
    assert redis_client.llen("tickets") == 0


def test_an_iterator_stops_at_the_chunk_that_does_not_fit(redis_url: str, redis_client: redis.Redis) -> None:
    """A stream's chunk goes in whole or not at all, and the error tells how many went in before."""
    with pytest.raises(QueueFullError, match="at least 3 were refused, 3 were pushed") as caught:
        Producer(redis_url, max_depth=5, chunk_size=3).push_many(some(100))
    assert (caught.value.pushed, caught.value.depth) == (3, 3)
    assert redis_client.llen("tickets") == 3


def test_another_producer_cannot_slip_in_between(redis_url: str, redis_client: redis.Redis) -> None:
    """The room is checked in the same step as the push: one that fills the queue meanwhile never leads past the cap."""

    def with_a_rival() -> Iterator[dict[str, str]]:
        yield from some(2)
        redis_client.rpush("tickets", *["{}"] * 7)
        yield from some(4)

    with pytest.raises(QueueFullError) as caught:
        Producer(redis_url, max_depth=10, chunk_size=2).push_many(with_a_rival(), expected=6)
    assert (caught.value.pushed, caught.value.refused, caught.value.depth) == (2, 4, 9)
    assert redis_client.llen("tickets") == 9


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"body": "y" * MAX_TICKET_BYTES}, "too_large"),
        (Ticket(id="x", body="y" * MAX_TICKET_BYTES), "too_large"),
        (Ticket(id="", body="y"), "bad_id"),
        ({"id": "x"}, "missing_field"),
        ({"body": 5}, "wrong_type"),
        ({"body": "\ud800"}, "not_utf8"),
        ({"body": "x", "more": object()}, "wrong_type"),
        ("text", "not_object"),
    ],
)
def test_a_bad_ticket_is_refused_before_any_is_pushed(
    bad: Any, reason: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """What a worker would bury, the producer refuses: nothing of a collection goes in, and the error names which."""
    producer = Producer(redis_url, chunk_size=1)
    for push in (lambda: producer.push_many([*some(3), bad]), lambda: producer.push(*some(3), bad)):
        with pytest.raises(TicketError) as caught:
            push()
        assert isinstance(caught.value, RefusedTicketError)
        assert (caught.value.reason, caught.value.index, caught.value.pushed) == (reason, 3, 0)
        assert "yyy" not in str(caught.value)
    assert redis_client.llen("tickets") == 0


def test_a_bad_ticket_in_a_stream_tells_what_went_before(redis_url: str, redis_client: redis.Redis) -> None:
    """Of a stream, the whole chunks before the bad ticket stay, and the error says how many tickets that is."""
    with pytest.raises(RefusedTicketError) as caught:
        Producer(redis_url, chunk_size=2).push_many(one for one in [*some(3), {"id": "no body"}])
    assert (caught.value.index, caught.value.pushed) == (3, 2)
    assert redis_client.llen("tickets") == 2


def test_a_lost_reply_never_pushes_twice(redis_url: str, redis_client: redis.Redis, lost_replies: list[int]) -> None:
    """When the reply is lost after the push, nothing is repeated, and the error says what is uncertain."""
    lost_replies.append(2)
    with pytest.raises(RedisUnavailableError, match="2 tickets were pushed for certain; of 2 more") as caught:
        Producer(redis_url, chunk_size=2).push_many(some(6))
    assert (caught.value.pushed, caught.value.uncertain) == (2, 2)
    assert [ticket.id for ticket in waiting(redis_client)] == ["t-0", "t-1", "t-2", "t-3"]
    assert SECRET not in str(caught.value)


def test_a_refusal_is_certain(redis_url: str, redis_client: redis.Redis) -> None:
    """When Redis answers with an error, nothing of the chunk is pushed and nothing uncertain."""
    redis_client.set("text", "no list")
    with pytest.raises(RedisUnavailableError, match="WRONGTYPE") as caught:
        Producer(redis_url, "text").push({"body": SECRET})
    assert (caught.value.pushed, caught.value.uncertain) == (0, 0)

    def broken_later() -> Iterator[dict[str, str]]:
        yield from some(2)
        redis_client.set("tickets", "no list")
        yield from some(2)

    with pytest.raises(RedisUnavailableError, match="WRONGTYPE") as caught:
        Producer(redis_url, chunk_size=2).push_many(broken_later())
    assert (caught.value.pushed, caught.value.uncertain) == (2, 0)
    assert SECRET not in str(caught.value)


def test_a_full_redis_refuses_whole_chunks() -> None:
    """When Redis runs out of memory, what the error counts is what is in the queue, chunk by chunk."""
    with embedded_server(settings={"maxmemory": "3mb", "maxmemory-policy": "noeviction"}) as server:
        with pytest.raises(RedisUnavailableError, match="maxmemory") as caught:
            Producer(server.url, chunk_size=100).push_many({"body": SECRET * 50} for _ in range(100_000))
        with redis.Redis.from_url(server.url) as client:
            assert caught.value.pushed == client.llen("tickets") > 0
        assert (caught.value.pushed % 100, caught.value.uncertain) == (0, 0)


def test_no_server_says_where_and_what_to_do() -> None:
    """Without a server the message names the URL, hides the password, tells the way out; nothing is uncertain."""
    with pytest.raises(RedisUnavailableError) as caught:
        Producer("redis://me:hun@ter2@127.0.0.1:1/0").push({"body": SECRET})
    message = str(caught.value)
    assert (caught.value.exit_code, caught.value.pushed, caught.value.uncertain) == (69, 0, 0)
    assert "redis://me:***@127.0.0.1:1/0" in message
    assert "lengthwise server" in message
    assert "REDIS_URL" in message
    assert "ter2" not in message


def test_impossible_settings_are_refused_at_once() -> None:
    """A queue name, URL or number that cannot be is a ValueError before anything is pushed, without the password."""
    impossible: list[dict[str, Any]] = [{"queue": "a b"}, {"max_depth": 0}, {"chunk_size": 0}]
    for settings in impossible:
        with pytest.raises(ValueError):
            Producer("redis://h", **settings)
    with pytest.raises(ValueError, match="is no Redis URL") as caught:
        Producer("redis://:hunter2/x@h:6379")
    assert "hunter2" not in str(caught.value)


def test_the_url_comes_from_the_environment(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a url, REDIS_URL counts."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    assert Producer().push_many([{"body": "x"}]) == PushReceipt(1, 1, 1)


def test_running_sums_reach_on_chunk(redis_url: str, redis_client: redis.Redis) -> None:
    """`on_chunk` hears the sums after each chunk; an empty push does nothing and says so."""
    heard: list[int] = []
    producer = Producer(redis_url, chunk_size=2)
    producer.push_many(some(5), on_chunk=lambda receipt: heard.append(receipt.pushed))
    assert heard == [2, 4, 5]
    assert producer.push_many([]) == PushReceipt()


@pytest.mark.parametrize("module", ["producer", "producer.cli"])
def test_a_producer_needs_no_model(module: str) -> None:
    """Importing the producer or its command loads neither torch nor the worker."""
    code = f"import sys, {module}; print({{name.split('.')[0] for name in sys.modules}} & {{'torch', 'worker'}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
