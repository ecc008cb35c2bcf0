"""`lengthwise server`: a queue server of one's own, for a machine without a Redis."""

import os
import signal
import socket
import time
from pathlib import Path

import click

from worker.embedded import EmbeddedServer, embedded_server
from worker.errors import RedisUnavailableError, UsageError

USUAL_PORT = 6379
LOOK_EVERY_S = 0.2


def default_folder() -> Path:
    """Return where the data lives unless told otherwise, by the XDG base directory rules."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "lengthwise" / "server"


@click.command()
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_folder,
    show_default="~/.local/share/lengthwise/server",
    help="Where the data is kept.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"Listen on 127.0.0.1 at this port; {USUAL_PORT} unless told otherwise.",
)
@click.option("--socket", "socket_only", is_flag=True, help="Listen on a unix socket only, at no port.")
def server(folder: Path, port: int | None, socket_only: bool) -> None:
    """Run a Valkey server here until Ctrl-C. Its data is kept.

    For trying things out and for one machine: it listens on this machine only and asks for no password.
    """
    if socket_only and port:
        raise UsageError("--port and --socket exclude each other: choose one")
    if not socket_only:
        port = port or USUAL_PORT
        require_free(port)
    # Both signals as one exception, which also ends a start that is still under way.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with embedded_server(folder=folder, port=port, appendonly=True) as running:
            announce(running)
            stay(running)
    except KeyboardInterrupt:
        click.echo("The server has ended; its data is kept.", err=True)


def require_free(port: int) -> None:
    """Refuse a port that cannot be had, before the server fails on it with less helpful words."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(
                f"port {port} on 127.0.0.1 cannot be used ({error.strerror}). If a Redis runs there, use it: "
                f"export REDIS_URL=redis://127.0.0.1:{port}/0. Otherwise choose another port, "
                f"such as --port {other_port(port)}, or --socket"
            ) from error


def other_port(port: int) -> int:
    """Suggest a port that an ordinary user may open and that is likely to be free."""
    return port + 1 if 1024 <= port < 65535 else USUAL_PORT + 1


def announce(running: EmbeddedServer) -> None:
    """Print what the user's other terminals need. Plain lines: somebody will pipe this into a script."""
    click.echo(running.url)
    click.echo(f"export REDIS_URL={running.url}")
    click.echo(f"The data is in {running.folder}. Ctrl-C ends the server.", err=True)


def stay(running: EmbeddedServer) -> None:
    """Wait for a signal (KeyboardInterrupt), or complain when the server ends without one."""
    while running.is_running():
        time.sleep(LOOK_EVERY_S)
    raise RedisUnavailableError(f"the server has ended by itself; see {running.folder / 'server.log'}")
