"""The 600 sample tickets of the demo, and as many more of the same kind as a load test asks for.

`texts.toml` holds tickets and fragments written by hand, and this module puts them together. The lengths
follow a log-normal distribution because those of real support mail do: half of the tickets stay under 50
tokens, a tenth run past 130, and it is this spread that makes batching by length worth while.

A tokenizer would be a heavy thing to need for a demo, so lengths are estimated from the text. The constants
below were tuned once against SmolLM2's tokenizer, so that the 600 tickets of the default seed, which
`tickets.jsonl` keeps, have from 3 to 401 of its tokens: 49 in the median, 65 on average, 130 at the 90th
percentile. Other seeds and longer runs come within a few percent of that.
"""

import json
import random
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import exp
from pathlib import Path
from statistics import NormalDist

LABELS = ("billing", "technical", "account")
COUNT = 600
SEED = 600

# Of the logarithm of the estimated length. e^3.85 is 47; the estimate runs a little low for short texts.
_LOG_LENGTH = NormalDist(mu=3.85, sigma=0.77)
_LONGEST = 400

# The kinds of fragment in the order in which a mail has them; the ticket itself follows the greeting.
_KINDS = ("greeting", "context", "signoff", "signature", "postscript", "footer", "quote")
# What may still follow a ticket that greets and signs off by itself.
_KINDS_AFTER = ("postscript", "footer", "quote")

# Context lines make one paragraph, and nobody leaves an empty line between "Regards" and the name.
_SEPARATORS = {("context", "context"): " ", ("signoff", "signature"): "\n"}

_SLOT = re.compile(r"\{(\w+)\}")
# Tokenizers of this family split near here: digits one by one, words (long ones again), runs of
# punctuation, line breaks.
_TOKEN = re.compile(r"\d|[^\W\d_]{1,9}|[^\w\s]+|_|\n+| {2,}")
_PER_MATCH = 1.07


@dataclass(frozen=True)
class _Ticket:
    """A ticket of `texts.toml`, its slots still open."""

    subject: str
    body: str
    complete: bool
    tokens: int


@dataclass(frozen=True)
class _Fragment:
    """A neutral piece of mail; `tokens` counts the line break that sets it off."""

    kind: str
    text: str
    tokens: int


@dataclass(frozen=True)
class _Texts:
    """All of `texts.toml`."""

    slots: dict[str, list[str]]
    tickets: dict[str, list[_Ticket]]
    fragments: list[_Fragment]


def path() -> Path:
    """Where the 600 committed tickets are; they ship with the package."""
    return Path(__file__).with_name("tickets.jsonl")


def load(count: int | None = None) -> list[dict[str, str]]:
    """Read the first `count` committed tickets, all of them for None.

    Past the end of the file the generator goes on where the file stops: a larger load always begins with
    a smaller one.
    """
    with path().open(encoding="utf-8") as lines:
        tickets: list[dict[str, str]] = [json.loads(line) for line in islice(lines, count)]
    if count is not None and count > len(tickets):
        tickets += generate(count)[len(tickets) :]
    return tickets


def load_examples() -> list[dict[str, str]]:
    """Read the ninety labelled examples, thirty of each label. They share no sentence with the tickets of `load`."""
    with Path(__file__).with_name("examples.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def generate(count: int = COUNT, seed: int = SEED) -> list[dict[str, str]]:
    """Make `count` tickets with distinct bodies, the same ones for the same seed.

    Lengths and labels are shuffled so that any first N tickets have about the same mix of both.
    """
    return list(islice(_stream(random.Random(seed)), count))  # noqa: S311 - sample text, no secret


def to_jsonl(tickets: Iterable[dict[str, str]]) -> str:
    """Write tickets the way `tickets.jsonl` has them: one JSON object a line, accents left readable."""
    return "".join(json.dumps(ticket, ensure_ascii=False) + "\n" for ticket in tickets)


def _stream(rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield tickets for ever.

    A body that came up before is drawn again a little longer. So when all the three-word tickets there can
    be are used up, which takes some thousands of tickets, four-word ones take their place.
    """
    seen: set[str] = set()
    used: Counter[str] = Counter()
    for number, (label, target) in enumerate(zip(_labels(rng), _lengths(rng), strict=True), start=1):
        ticket = _assemble(label, target, used, rng)
        while ticket["body"] in seen:
            target = 1.1 * target + 1
            ticket = _assemble(label, target, used, rng)
        seen.add(ticket["body"])
        yield {"id": f"sample-{number:04}", **ticket, "label": label}


def _labels(rng: random.Random) -> Iterator[str]:
    """Yield labels for ever, each once in every three, so that no first N leans on one by more than one."""
    while True:
        yield from rng.sample(LABELS, len(LABELS))


def _lengths(rng: random.Random) -> Iterator[float]:
    """Yield target lengths in tokens for ever, in shuffled rounds of 600.

    A round is the quantiles of the distribution and not 600 random draws: its longest ticket, which decides
    the widest batch, is then about 400 tokens with every seed.
    """
    targets = [min(exp(_LOG_LENGTH.inv_cdf((i + 0.5) / COUNT)), _LONGEST) for i in range(COUNT)]
    while True:
        yield from rng.sample(targets, COUNT)


def _assemble(label: str, target: float, used: Counter[str], rng: random.Random) -> dict[str, str]:
    """Make one ticket of about `target` tokens, without id and label."""
    texts = _texts()
    ticket = _choose(texts.tickets[label], target, used, rng)
    used[ticket.body] += 1
    fragments = _surround(ticket, target, texts.fragments, rng)
    values = _values(texts.slots, rng)
    body = _fill(_join(ticket, fragments, rng), values)
    return {"subject": _fill(ticket.subject, values), "body": body} if ticket.subject else {"body": body}


def _choose(tickets: list[_Ticket], target: float, used: Counter[str], rng: random.Random) -> _Ticket:
    """Pick a ticket that fills at least half of `target`, or 120 tokens where that's less.

    The least used ones come first, so that 600 tickets draw on most of the hand-written ones.
    """
    fits = [ticket for ticket in tickets if min(target / 2, 120) <= ticket.tokens <= target]
    fits = fits or [min(tickets, key=lambda ticket: abs(ticket.tokens - target))]
    rarest = min(used[ticket.body] for ticket in fits)
    return rng.choice([ticket for ticket in fits if used[ticket.body] == rarest])


def _surround(ticket: _Ticket, target: float, pool: list[_Fragment], rng: random.Random) -> list[_Fragment]:
    """Pick the fragments that bring the ticket to `target`.

    Of a few random choices it takes the one that comes closest, less three tokens for each fragment: a mail
    with one long paragraph more reads like mail, one with ten short lines more does not.
    """
    kinds = _KINDS_AFTER if ticket.complete else _KINDS
    room = target - ticket.tokens
    fits = [fragment for fragment in pool if fragment.kind in kinds and fragment.tokens <= room]
    choices = [_pack(rng.sample(fits, len(fits)), room) for _ in range(6)]
    return max(choices, key=lambda choice: sum(fragment.tokens - 3 for fragment in choice))


def _pack(fragments: list[_Fragment], room: float) -> list[_Fragment]:
    """Take what fits into `room`, first come first served, and put it in the order of a mail.

    Of each kind there is one, except that several context lines may follow one another.
    """
    taken: list[_Fragment] = []
    kinds: set[str] = set()
    for fragment in fragments:
        if fragment.tokens <= room and fragment.kind not in kinds:
            taken.append(fragment)
            room -= fragment.tokens
            if fragment.kind != "context":
                kinds.add(fragment.kind)
    return sorted(taken, key=lambda fragment: _KINDS.index(fragment.kind))


def _join(ticket: _Ticket, fragments: list[_Fragment], rng: random.Random) -> str:
    """Put the ticket after the greeting and before all else, in paragraphs or, if it is short, in lines."""
    gap = "\n\n" if "\n" in ticket.body else rng.choice(("\n", "\n\n"))
    greeting = [fragment.text for fragment in fragments if fragment.kind == "greeting"]
    body = gap.join([*greeting, ticket.body])
    before = "ticket"
    for fragment in fragments[len(greeting) :]:
        body += _SEPARATORS.get((before, fragment.kind), gap) + fragment.text
        before = fragment.kind
    return body


def _values(slots: dict[str, list[str]], rng: random.Random) -> dict[str, str]:
    """Draw a value for every slot, and a digit for every # in it."""
    drawn = {slot: rng.choice(choices) for slot, choices in slots.items()}
    return _with_sender({slot: re.sub("#", lambda _: rng.choice("123456789"), drawn[slot]) for slot in drawn})


def _with_sender(values: dict[str, str]) -> dict[str, str]:
    """Add the slots that follow from the sender's name."""
    first, last = values["name"].split()
    return {**values, "first": first, "email": f"{first}.{last}@example.com".lower()}


def _fill(text: str, values: dict[str, str]) -> str:
    """Put values into slots, and into the slots that the values have ({currency} in an amount)."""
    return _SLOT.sub(lambda slot: _fill(values[slot[1]], values), text)


def _estimate(text: str) -> int:
    """Guess how many tokens a language model's tokenizer would make of a text, to within a few percent."""
    return round(_PER_MATCH * len(_TOKEN.findall(text)))


@cache
def _texts() -> _Texts:
    """Read `texts.toml`, each text measured with the first value of its slots."""
    parts = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
    slots: dict[str, list[str]] = parts["slots"]
    firsts = _with_sender({slot: choices[0] for slot, choices in slots.items()})

    def ticket(subject: str = "", body: str = "", complete: bool = False) -> _Ticket:
        whole = f"{subject}\n\n{body}" if subject else body
        return _Ticket(subject, body, complete, _estimate(_fill(whole, firsts)))

    def fragment(kind: str, text: str) -> _Fragment:
        return _Fragment(kind, text, 1 + _estimate(_fill(text, firsts)))

    return _Texts(
        slots=slots,
        tickets={label: [ticket(**entry) for entry in parts["ticket"][label]] for label in LABELS},
        fragments=[fragment(kind, text) for kind in _KINDS for text in parts["fragment"][kind]],
    )
