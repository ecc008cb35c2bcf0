"""The parent of an embedded server: ends it when its owner is gone, however the owner went.

Run by path, with the standard library only, so that it starts fast and needs nothing to be importable:

    python -I -S supervisor.py [--remove FOLDER]... -- PROGRAM ARGUMENT...

Standard input is a pipe whose other end only the owner holds. The kernel closes it even when the owner dies
by SIGKILL: a pipe, unlike a pid that one polls, cannot be mistaken for somebody else's. Standard output gets
one line, the server's pid. The server itself writes to standard error, which the owner points at a log file.
"""

import argparse
import os
import select
import shutil
import signal
import subprocess
import sys

GRACE_S = 3.0
"""How long a server may take to write its data out after SIGTERM, before SIGKILL."""

OWNER_FD = 0
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Run the program until it, or its owner, or our patience ends; then leave nothing behind."""
    remove, command = parse(arguments)
    try:
        supervise(command)
    finally:
        for folder in remove:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def parse(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split our own arguments into the folders to remove at the end, and the command to run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--remove", action="append", default=[], metavar="FOLDER")
    parser.add_argument("command", nargs="+")
    parsed = parser.parse_args(arguments)
    return parsed.remove, parsed.command


def supervise(command: list[str]) -> None:
    """Start the server, say its pid, and end it when it is time."""
    wake_fd = signals_as_bytes()
    # close_fds=False hands the owner's lock on the data folder down to the server: the folder stays locked
    # while any server lives in it, even one whose supervisor was killed. (Our pipes are not inheritable.)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, close_fds=False)
    try:
        os.write(sys.stdout.fileno(), b"%d\n" % server.pid)
        wait_for_the_end(server, wake_fd)
    finally:
        end(server)


def signals_as_bytes() -> int:
    """Turn the signals that matter here into bytes on a pipe, so that one select() can wait for everything."""
    wake_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd)
    for number in (*ENDING, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)
    return wake_fd


def wait_for_the_end(server: subprocess.Popen[bytes], wake_fd: int) -> None:
    """Return when the server has ended, the owner is gone, or somebody asked us to end."""
    while server.poll() is None:  # SIGCHLD also comes for a server that was only stopped (SIGSTOP)
        ready, _, _ = select.select([OWNER_FD, wake_fd], [], [])
        if OWNER_FD in ready and not os.read(OWNER_FD, 64):
            return
        if wake_fd in ready and any(number in ENDING for number in os.read(wake_fd, 64)):
            return


def end(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to write its data and end; kill it when it does not."""
    server.terminate()
    server.send_signal(signal.SIGCONT)  # a stopped server would never see the SIGTERM
    try:
        server.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
