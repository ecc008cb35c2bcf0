"""Every error a user can cause, and the exit code each ends the command with (after BSD's sysexits)."""

EXIT_DONE = 0
EXIT_USAGE = 64
EXIT_REDIS = 69
EXIT_BUG = 70
EXIT_CONFIG = 78


class LengthwiseError(Exception):
    """A failure with a message for the user: what was expected, what came, and where."""

    exit_code = EXIT_BUG


class UsageError(LengthwiseError):
    """The command line asked for something that makes no sense."""

    exit_code = EXIT_USAGE


class RedisUnavailableError(LengthwiseError):
    """No Redis answered at the URL, or it answered with a refusal that waiting will not mend."""

    exit_code = EXIT_REDIS


class ConfigError(LengthwiseError):
    """A task, a model or a setting cannot be used as it is; the message says how to mend it."""

    exit_code = EXIT_CONFIG
