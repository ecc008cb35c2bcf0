"""Every failure a push can end with. `exit_code` is what the command line ends with (after BSD's sysexits)."""

from wire.ticket import TicketError

EXIT_DONE = 0
EXIT_USAGE = 64
EXIT_DATA = 65  # some lines were no tickets; the others were pushed
EXIT_REDIS = 69
EXIT_BUG = 70
EXIT_FULL = 75  # nothing is broken: the same push may work later


class ProducerError(Exception):
    """A failure with a message for the user. No message ever quotes a ticket."""

    exit_code = EXIT_BUG


class UsageError(ProducerError):
    """The command line asked for something that makes no sense."""

    exit_code = EXIT_USAGE


class RedisUnavailableError(ProducerError):
    """No Redis answered, or it refused the push.

    `pushed` tickets of this call are in the queue for certain. Of `uncertain` more it is not known, because the
    reply was lost: either all of them are in the queue, or none.
    """

    exit_code = EXIT_REDIS

    def __init__(self, cause: str, pushed: int = 0, uncertain: int = 0) -> None:
        super().__init__(f"{cause}\n{_what_became_of(pushed, uncertain)}")
        self.pushed = pushed
        self.uncertain = uncertain


class QueueFullError(ProducerError):
    """The push would have taken the queue past its cap.

    `depth` tickets were waiting, `cap` is the limit; `pushed` tickets of this call went in before, and `refused`
    did not. Where the input was a stream of unknown length, more than `refused` may have been to come.
    """

    exit_code = EXIT_FULL

    def __init__(self, queue: str, *, depth: int, cap: int, pushed: int, refused: int, known_total: bool) -> None:
        at_least = "" if known_total else "at least "
        super().__init__(
            f"queue '{queue}' holds {depth:,} of at most {cap:,} tickets: "
            f"{at_least}{refused:,} were refused, {pushed:,} were pushed before"
        )
        self.depth = depth
        self.cap = cap
        self.pushed = pushed
        self.refused = refused


class RefusedTicketError(TicketError):
    """A ticket handed to the producer is none: number `index` of the call, from 0.

    `pushed` tickets of this call were in the queue already; none is left half pushed.
    """

    exit_code = EXIT_DATA

    def __init__(self, error: TicketError, index: int) -> None:
        super().__init__(error.reason, f"ticket {index} of this call: {error.detail}")
        self.index = index
        self.pushed = 0


def _what_became_of(pushed: int, uncertain: int) -> str:
    if not pushed and not uncertain:
        return "Nothing was pushed."
    certain = f"{pushed:,} tickets were pushed for certain"
    return f"{certain}; of {uncertain:,} more it is not known." if uncertain else f"{certain}."
