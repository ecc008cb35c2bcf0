"""What of a Redis URL is shown."""

import pytest

from wire.url import mask_url


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://:a/b@c:d@h:6379/0", "redis://:***@h:6379/0"),
        ("rediss://me:pw@h", "rediss://me:***@h"),
        ("unix:///s.sock?password=pw&db=1", "unix:///s.sock?password=***&db=1"),
        ("redis+cluster://me:p@w@a:1,b:2", "redis+cluster://me:***@a:1,b:2"),
        (
            "rediss+sentinel://:pw@a:1,b/main/0?sentinel_username=u&sentinel_password=pw2&password=pw",
            "rediss+sentinel://:***@a:1,b/main/0?sentinel_username=u&sentinel_password=***&password=***",
        ),
    ],
)
def test_passwords_are_masked(url: str, masked: str) -> None:
    """A URL in a message never shows its password, wherever it stands and whatever it holds."""
    assert mask_url(url) == masked
