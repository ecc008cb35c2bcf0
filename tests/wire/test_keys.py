"""The keys: what they are called, that they share a slot, which queue names are refused."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from wire.keys import Keys

GOLDEN = json.loads((Path(__file__).parent / "golden" / "keys.json").read_text("utf-8"))

queue_names = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp"), exclude_characters="{}"), min_size=1, max_size=200
)
claim_ids = st.text(st.characters(codec="utf-8"))


def every_key(queue: str, claim_id: str) -> dict[str, str]:
    """All keys of a queue by name. A new property is found by itself; a new method must be added here."""
    keys = Keys(queue)
    public = {name: member for name, member in vars(Keys).items() if not name.startswith("_")}
    assert {name for name, member in public.items() if callable(member)} == {"claim"}
    return {name: getattr(keys, name) for name, member in public.items() if isinstance(member, property)} | {
        "claim": keys.claim(claim_id)
    }


def test_every_key_of_the_queue_tickets_is_as_written_down() -> None:
    """No key is renamed, added or dropped unnoticed: queues outlive releases, and ACLs name these keys."""
    assert every_key(GOLDEN["queue"], GOLDEN["claim_id"]) == GOLDEN["keys"]


@settings(deadline=None)
@given(queue_names, claim_ids)
def test_all_keys_of_a_queue_share_one_cluster_slot(queue: str, claim_id: str) -> None:
    """One script may touch all keys of a queue on a cluster, whatever valid name and claim id it has."""
    assert {key_slot(key.encode()) for key in every_key(queue, claim_id).values()} == {key_slot(queue.encode())}


@settings(deadline=None)
@given(queue_names, queue_names, claim_ids)
def test_keys_never_collide(one: str, other: str, claim_id: str) -> None:
    """All keys of a queue differ from each other, and two queues on one server share none."""
    assume(one != other)
    mine, theirs = every_key(one, claim_id), every_key(other, claim_id)
    assert len(set(mine.values())) == len(mine)
    assert not set(mine.values()) & set(theirs.values())


@pytest.mark.parametrize("name", ["t", "a" * 200, "team:tickets", "støtte-票", "*?[x]\"'", "\u200b"])
def test_plain_and_odd_names_are_taken_as_they_are(name: str) -> None:
    """A valid name is the list's own key, so that anyone can RPUSH to it by the name they know."""
    assert Keys(name).waiting == name


@pytest.mark.parametrize(
    "name",
    [
        *["", "a" * 201, " ", "a b", " a", "a ", "a\n", "a\tb", "\u00a0", "\u2028", "\u3000"],
        *["{", "}", "{a}", "a{b}c"],
        *["a\x00", "\x1f", "\x7f", "\x80", "\x85", "\x9b"],
        *["\ud800", "a\udcff"],
    ],
)
def test_a_bad_name_is_refused(name: str) -> None:
    """Every kind of name that would move the slot, break a tool or not encode is a ValueError at once."""
    with pytest.raises(ValueError, match="queue name"):
        Keys(name)


@settings(deadline=None)
@given(
    st.text(max_size=50),
    st.sampled_from("{}") | st.characters(categories=("Cs", "Cc", "Zs", "Zl", "Zp")),
    st.text(max_size=50),
)
def test_one_bad_character_anywhere_spoils_a_name(before: str, bad: str, after: str) -> None:
    """Braces, controls, white space and lone surrogates are refused wherever they stand in a name."""
    with pytest.raises(ValueError, match="queue name"):
        Keys(before + bad + after)
