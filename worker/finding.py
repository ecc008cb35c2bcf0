"""What a check of a worker's surroundings found, how bad it is, and what to do about it."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

EXIT_TO_MEND = 1
EXIT_WOULD_LOSE = 2


class Level(StrEnum):
    """How bad it is. The order is that of the exit codes."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"  # to be mended, but no ticket is lost by it while all goes on as it does
    LOSE = "lose"  # would lose tickets that the server has acknowledged, or write half a batch


class Finding(msgspec.Struct, frozen=True):
    """The answer of one check; `advice` is empty where there is nothing to do."""

    name: str
    level: Level
    found: str
    advice: str = ""


def hidden(name: str, why: str, advice: str = "") -> Finding:
    """What a check gives that is not allowed to look: no fault, but nothing was seen either."""
    return Finding(name, Level.INFO, f"cannot see: {why}", advice)


def exit_code(findings: Iterable[Finding]) -> int:
    """The worst of them as an exit code: 0 fine, 1 something to mend that loses nothing, 2 would lose tickets."""
    levels = {finding.level for finding in findings}
    if Level.LOSE in levels:
        return EXIT_WOULD_LOSE
    return EXIT_TO_MEND if Level.WARN in levels else 0
