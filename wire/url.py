"""A Redis URL fit to be shown: producers and workers name theirs in messages and logs."""

import re

_USER_PASSWORD = re.compile(r"(://[^:/?#]*):.*@")  # greedy: a password may hold any character, an @ too
_QUERY_PASSWORD = re.compile(r"([?&](?:sentinel_)?password=)[^&]*")


def mask_url(url: str) -> str:
    """The URL with its password hidden."""
    return _QUERY_PASSWORD.sub(r"\1***", _USER_PASSWORD.sub(r"\1:***@", url))
