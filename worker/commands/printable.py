"""Output that does no harm where it arrives: on a terminal, or in a pipe that closes."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def printable(text: str) -> str:
    """The text without what could move the cursor: anybody who may push chooses a ticket's id."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


@contextmanager
def until_pipe_closes() -> Iterator[None]:
    """End the block quietly when nobody reads standard output any more."""
    try:
        yield
    except BrokenPipeError:  # `| head` has seen enough, and what is left to flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
