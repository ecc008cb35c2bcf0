"""What the demo and the load tests may rely on in the sample tickets."""

import json
import re
from collections import Counter

from producer import samples

ADDRESS = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")


def test_the_committed_file_is_what_the_generator_writes() -> None:
    """Nobody edits tickets.jsonl by hand, or the texts without running `python -m producer.samples`."""
    assert samples.path().read_bytes() == samples.to_jsonl(samples.generate()).encode()


def test_a_seed_decides_the_tickets() -> None:
    """The same seed gives the same tickets, another seed gives others."""
    assert samples.generate(50, seed=7) == samples.generate(50, seed=7)
    assert samples.generate(50, seed=7) != samples.generate(50, seed=8)


def test_the_file_has_600_tickets_that_can_be_told_apart() -> None:
    """No id and no body occurs twice, so a result can be traced to its ticket by either one."""
    tickets = samples.load()
    assert len(tickets) == 600
    assert len({ticket["id"] for ticket in tickets}) == 600
    assert len({ticket["body"] for ticket in tickets}) == 600


def test_a_ticket_has_the_producers_fields_and_no_empty_one() -> None:
    """Every ticket has id, body and label; a subject is there with text in it or not at all."""
    for ticket in samples.load():
        assert set(ticket) - {"subject"} == {"id", "body", "label"}
        assert all(value.strip() for value in ticket.values())


def test_no_slot_stays_open() -> None:
    """Every {placeholder} of texts.toml has become text."""
    text = samples.to_jsonl(samples.generate(2_000))
    assert not re.search(r"\{[a-z]\w*\}", text)


def test_labels_are_balanced_in_every_beginning() -> None:
    """In the first N tickets, for any N, no label leads another by more than one."""
    seen = Counter(dict.fromkeys(samples.LABELS, 0))
    for ticket in samples.load():
        seen[ticket["label"]] += 1
        assert max(seen.values()) - min(seen.values()) <= 1
    assert set(seen) == {"billing", "technical", "account"}


def test_a_beginning_has_the_lengths_of_the_whole() -> None:
    """The first 100 tickets, like all 600, are mostly short with a long tail, so a short demo shows both."""
    for tickets in (samples.load(100), samples.load()):
        words = sorted(len(ticket["body"].split()) for ticket in tickets)
        median = words[len(words) // 2]
        assert 25 <= median <= 45
        assert words[0] <= 5
        assert words[-1] >= 5 * median


def test_load_takes_the_first_tickets_of_the_file() -> None:
    """A count within the file reads its first lines; 0 reads none."""
    lines = samples.path().read_text(encoding="utf-8").splitlines()
    assert samples.load(5) == [json.loads(line) for line in lines[:5]]
    assert samples.load(0) == []


def test_load_goes_on_past_the_end_of_the_file() -> None:
    """A count beyond 600 begins with the file, and what follows repeats no id and no body of it."""
    tickets = samples.load(700)
    assert tickets[:600] == samples.load()
    assert len({ticket["id"] for ticket in tickets}) == 700
    assert len({ticket["body"] for ticket in tickets}) == 700


def test_twenty_thousand_tickets_differ() -> None:
    """A load test can ask for far more than the file has and still never sends the same body twice."""
    tickets = samples.generate(20_000)
    assert len({ticket["body"] for ticket in tickets}) == 20_000
    assert len({ticket["id"] for ticket in tickets}) == 20_000


def test_every_mail_address_is_at_an_example_domain() -> None:
    """The invented people can't be written to: no address is outside example.com and example.invalid."""
    addresses = ADDRESS.findall(samples.to_jsonl(samples.generate(2_000)))
    assert addresses
    assert {address.partition("@")[2] for address in addresses} <= {"example.com", "example.invalid"}
