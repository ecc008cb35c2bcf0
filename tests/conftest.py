"""Fixtures shared by all tests: a real server, and the real small model.

`REDIS_URL` selects a server that is running already; without it an embedded one is started for the session.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from worker.embedded import embedded_server


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """URL of a server whose database the tests may empty. Refuses one that holds somebody's data."""
    url = os.environ.get("REDIS_URL")
    if url is None:
        with embedded_server() as server:
            yield server.url
        return
    with redis.Redis.from_url(url) as client:
        if client.dbsize():
            pytest.exit(f"REDIS_URL: the tests empty the database they use, and {url} is not empty", returncode=64)
    yield url


@pytest.fixture
def redis_url(server_url: str) -> str:
    """URL of a real server with an empty database."""
    with redis.Redis.from_url(server_url) as client:
        client.flushdb()
    return server_url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[Any]:
    """A client of the same database, answering in bytes."""
    with redis.Redis.from_url(redis_url) as client:
        yield client
        client.flushdb()
