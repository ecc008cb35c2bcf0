"""URLs of several servers, and who is asked for the right one."""

from typing import Any

import pytest

from wire.place import Address, Finder, Place, parse_place


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://h:1/0", None),
        ("rediss://h", None),
        ("unix:///s", None),
        (
            "redis+sentinel://a:1,b/main/3",
            Place((("a", 1), ("b", 26379)), "main", "redis://localhost/3", "redis://localhost"),
        ),
        (
            "rediss+sentinel://me:p%40w@[::1]:1/main?sentinel_password=s/t&ssl_cert_reqs=none",
            Place(
                (("::1", 1),),
                "main",
                "rediss://me:p%40w@localhost/0?ssl_cert_reqs=none",
                "rediss://:s%2Ft@localhost?ssl_cert_reqs=none",
            ),
        ),
        (
            "redis+cluster://me:pw@a,b:2",
            Place((("a", 6379), ("b", 2)), None, "redis://me:pw@localhost/0", "redis://me:pw@localhost/0"),
        ),
    ],
)
def test_what_a_url_names(url: str, place: Place | None) -> None:
    """Hosts in order with their usual ports, the sentinels' login apart from the servers', one server's URL is None."""
    assert parse_place(url) == place


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://:secret@a:1",
        "redis+sentinel://:secret@a:1/main/x",
        "redis+sentinel://:secret@a:1/main/0/x",
        "redis+sentinel://:secret@a:no/main",
        "redis+sentinel://:secret@/main",
        "redis+sentinel://:secret@a,,b/main",
        "redis+cluster://:secret@a:1/2",
        "redis+cluster://:secret@a/main",
        "redis+cluster://:secret@a:99999",
    ],
)
def test_what_no_url_is(url: str) -> None:
    """A URL without a service, with a database a cluster has not, or with a bad host is refused, never quoted."""
    with pytest.raises(ValueError) as caught:
        parse_place(url)
    assert "secret" not in str(caught.value)


class Servers:
    """What each server answers; it can be changed, and what was asked is kept."""

    def __init__(self, answers: dict[Address, Any]) -> None:
        self.answers, self.asked = answers, list[Address]()

    def ask(self, address: Address, words: tuple[str, ...]) -> Any:
        """Answer; None for a server that is not there."""
        self.asked.append(address)
        return self.answers.get(address)


def finder(url: str) -> Finder:
    """One for the place of a URL."""
    place = parse_place(url)
    assert place is not None
    return Finder(place)


def test_sentinels_are_asked_in_turn() -> None:
    """The first sentinel that knows the master tells it; one that is gone or has never heard of it is passed over."""
    servers = Servers({("b", 26379): [b"10.0.0.1", b"6379"]})
    found = finder("redis+sentinel://a,b,c/main")
    assert found.find(servers.ask) == ("10.0.0.1", 6379)
    servers.answers = {("c", 26379): [b"10.0.0.2", b"6380"]}
    assert found.find(servers.ask) == ("10.0.0.2", 6380)
    assert [host for host, _ in servers.asked] == ["a", "b", "c"]
    servers.answers = {}
    assert found.find(servers.ask) is None


def test_a_cluster_is_learned() -> None:
    """Nodes that another named are asked too, so a cluster is found again when all nodes of the URL are gone."""
    ranges = [[0, 99, [b"n1", 1, b"id"], [b"n3", 3, b"id"]], [100, 16383, [b"", 2, b"id"]]]
    servers = Servers({("seed", 6379): ranges})
    found = finder("redis+cluster://seed")
    assert found.find(servers.ask) == ("n1", 1)
    found.slot = 100
    servers.answers = {("seed", 2): ranges}
    assert found.find(servers.ask) == ("seed", 2)  # no name: the one who answers
    assert {host for host, _ in servers.asked} == {"seed", "n1", "n3"}
    servers.answers = {("n3", 3): [[0, 16383, [b"n3", 3, b"id"]]]}
    assert found.find(servers.ask) == ("n3", 3)
