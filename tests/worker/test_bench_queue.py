"""`lengthwise bench --queue`: small, but the real thing, on a real server."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import worker.bench_queue
from worker.bench import bench
from worker.bench_queue import measure

TICKETS = 600


def test_what_is_measured(redis_url: str, redis_client: Any) -> None:
    """The figures are of these tickets: each through the scripts once, and what it costs in commands and memory."""
    row = measure(redis_url, 2, TICKETS)
    assert (row.workers, row.tickets) == (2, TICKETS)
    assert row.pushed_per_s > 0
    assert row.tickets_per_s > 0
    # A claim moves 256 tickets with a handful of commands; a commit needs two for each: the id and the result.
    assert 2.0 <= row.commands_a_ticket < 3.0
    assert 6 / TICKETS <= row.round_trips_a_ticket < 60 / TICKETS
    assert row.bytes_waiting is not None
    assert row.bytes_kept is not None
    assert 100 < row.bytes_waiting < 1000
    assert 100 < row.bytes_kept < 1000
    assert {"claim", "commit"} <= set(row.script_ms) == set(row.longest_script_ms)
    assert all(0 <= row.script_ms[verb] <= row.longest_script_ms[verb] < 1000 for verb in row.script_ms)


def test_the_server_is_left_as_it_was(redis_url: str, redis_client: Any) -> None:
    """No key of the measurement stays, and the server's settings are the old ones, after a failure too."""
    settings = {"slowlog-log-slower-than": "12345", "slowlog-max-len": "77"}
    before = redis_client.config_get("slowlog-*")
    for name, value in settings.items():
        redis_client.config_set(name, value)
    try:
        measure(redis_url, 1, 10)
        assert redis_client.keys("*") == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker.bench_queue, "_drain", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                measure(redis_url, 1, 10)
        assert redis_client.keys("*") == []
        assert settings.items() <= redis_client.config_get("slowlog-*").items()
    finally:
        for name, value in before.items():
            redis_client.config_set(name, value)


@pytest.mark.parametrize("named", [True, False])
def test_the_command(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """`bench --queue` measures the server named, else REDIS_URL's, and writes a row a number of workers as JSON."""
    monkeypatch.setattr(worker.bench_queue, "WORKERS", (1, 2))
    monkeypatch.setattr(worker.bench_queue, "TICKETS", 50)
    if not named:
        monkeypatch.setenv("REDIS_URL", redis_url)
    file = tmp_path / "out.json"
    done = CliRunner().invoke(bench, ["--json", str(file), "--queue", *([redis_url] if named else [])])
    assert done.exit_code == 0, done.output
    assert "drain/s" in done.output
    rows = json.loads(file.read_text())["rows"]
    assert [(row["workers"], row["tickets"]) for row in rows] == [(1, 50), (2, 50)]
