"""Where a queue's server is when there are several: URLs for Sentinel and Cluster, and who to ask.

    redis+sentinel://[user:password@]host:26379,host2:26379/service/db
    redis+cluster://[user:password@]host:6379,host2:6379

With `rediss+` in front instead, by TLS. User and password are the servers'; sentinels that want their own get it by
`?sentinel_username=...&sentinel_password=...`. No client library is known here: whoever has one tells how to ask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

Address: TypeAlias = tuple[str, int]
# Sends one command to one server and gives its undecoded answer, or None if it cannot be had from there just now.
Ask: TypeAlias = Callable[[Address, tuple[str, ...]], Any]

PLACE_URLS = "redis+sentinel://host:26379,host2:26379/service/db or redis+cluster://host:6379,host2:6379"

_PORTS = {"sentinel": 26379, "cluster": 6379}
_SENTINEL_LOGIN = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True)
class Place:
    """Several servers, of which one is right at a time.

    The two URLs are plain ones, whose login, database and options hold for every server, but not their address:
    `server_url` for the server that holds the queue, `asking_url` for those in `asked`.
    """

    asked: tuple[Address, ...]
    service: str | None  # of the sentinels; None in a cluster
    server_url: str
    asking_url: str


def parse_place(url: str) -> Place | None:
    """The place a URL names; None if it names one server. Raises ValueError, which does not quote the URL."""
    scheme, _, kind = url.partition("://")[0].partition("+")
    if scheme not in ("redis", "rediss") or kind not in _PORTS:
        return None
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    asked = tuple(_address(host, _PORTS[kind]) for host in hosts.split(","))
    service, database = _path(kind, parts.path)
    base, asking_login, query = f"{scheme}://", *_options(parts)
    server_url = f"{base}{login and login + '@'}localhost/{database}{query}"
    return Place(asked, service, server_url, f"{base}{asking_login}localhost{query}" if service else server_url)


class Finder:
    """Knows a place's servers, and asks them in turn which one is right. May be used from several threads.

    `slot` is the cluster slot of the queue, once a server has told it; until then any master will do, for it tells.
    """

    def __init__(self, place: Place) -> None:
        self._service, self._seeds = place.service, place.asked
        self._known = place.asked
        self.slot: int | None = None

    def find(self, ask: Ask) -> Address | None:
        """The address of the right server by the first that knows it; None if none does."""
        for address in self._known:
            found = self._master(ask, address) if self._service else self._owner(ask, address)
            # To the end: another is asked the next time, in case this one is gone or behind the times.
            self._known = (*(one for one in self._known if one != address), address)
            if found:
                return found
        return None

    def _master(self, ask: Ask, sentinel: Address) -> Address | None:
        answer = ask(sentinel, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", str(self._service)))
        return (answer[0].decode(), int(answer[1])) if answer else None

    def _owner(self, ask: Ask, node: Address) -> Address | None:
        ranges = ask(node, ("CLUSTER", "SLOTS")) or []
        servers = [[(one[0].decode() if one[0] else node[0], int(one[1])) for one in row[2:]] for row in ranges]
        self._known = tuple(dict.fromkeys([*(one for row in servers for one in row), *self._seeds, *self._known]))
        for (first, last, *_), row in zip(ranges, servers, strict=True):
            if self.slot is None or first <= self.slot <= last:
                return row[0]
        return None


def _address(text: str, port: int) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("expected one host or more, separated by commas")
    return parts.hostname, port if parts.port is None else parts.port


def _path(kind: str, path: str) -> tuple[str | None, str]:
    """Service and database of a URL's path."""
    words = [unquote(word) for word in path.strip("/").split("/") if word]
    service = words.pop(0) if kind == "sentinel" and words else None
    database = words.pop(0) if words else "0"
    if words or not database.isdecimal() or (kind == "sentinel") != bool(service):
        raise ValueError(f"expected {PLACE_URLS}")
    if kind == "cluster" and database != "0":
        raise ValueError(f"expected no database but 0: a cluster has no other, got {database}")
    return service, database


def _options(parts: SplitResult) -> tuple[str, str]:
    """The sentinels' login as it stands before a host, and the query without it."""
    options = dict(parse_qsl(parts.query))
    user, password = (quote(options.pop(name, ""), safe="") for name in _SENTINEL_LOGIN)
    return f"{user}:{password}@" if password else "", f"?{urlencode(options)}" if options else ""
