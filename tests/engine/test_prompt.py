"""Prompts: a ticket is data, the instruction is whole, the prefix is aligned, and all of it reads as one text."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from worker.engine.model import load_tokenizer
from worker.engine.plain_tokenizer import PlainTokenizer
from worker.engine.prompt import ALIGNMENT, Prompter
from worker.engine.task import MAIN_QUESTION, Example, Task, load_task
from worker.errors import ConfigError

Fast: Any = PreTrainedTokenizerFast  # transformers leaves it untyped
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def smollm() -> Any:
    """The real model's tokenizer."""
    return load_tokenizer("smollm2-135m")


@cache
def crafted(*, also_ordinary: bool = False, adds_bos: bool = False, lowercase: bool = False) -> Any:
    """A byte-level tokenizer with control tokens, some not marked as special, one perhaps an ordinary piece too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(alphabet)}
    merges = []
    if also_ordinary:  # merges that lead from letters to the very text of an added token
        merges = [("<", "t"), ("<t", "c"), ("<tc", ">")]
        vocabulary |= {"".join(pair): len(vocabulary) + number for number, pair in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<tool_call>"), AddedToken("<tc>"), AddedToken("<think>", normalized=True)])
    if adds_bos:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return Fast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


MAKES: dict[str, Callable[[], Any]] = {
    "SmolLM2": smollm,
    "not special": crafted,
    "ordinary too": lambda: crafted(also_ordinary=True),
    "adds BOS": lambda: crafted(adds_bos=True),
    "lower case": lambda: crafted(lowercase=True),
}


def texts_around(tokens: Sequence[str]) -> st.SearchStrategy[str]:
    """Added tokens' texts in every disguise: whole, cut, nested, doubled, in capitals, with anything around them."""
    whole = st.sampled_from(tokens)
    cut = st.tuples(whole, st.integers(1, 12)).map(lambda pair: pair[0][: pair[1]])
    nested = st.tuples(whole, whole, st.integers(1, 12)).map(lambda t: t[0][: t[2]] + t[1] + t[0][t[2] :])
    spaced = st.tuples(whole, st.sampled_from([" ", "\u200b", "\n", "\u2581"])).map(lambda p: p[1].join(p[0]))
    part = whole | cut | nested | spaced | whole.map(str.upper) | st.text(max_size=6)
    return st.lists(part, max_size=8).map("".join)


def task(**changes: Any) -> Task:
    """The built-in task, changed."""
    given_task = load_task("support")
    fields = {name: getattr(given_task, name) for name in given_task.__struct_fields__}
    return Task(**(fields | changes))


def span(prompter: Prompter, text: str) -> tuple[int, ...]:
    """The ids that come from the ticket itself."""
    ids = prompter.prompts([text])[0].ids
    start, end = len(prompter.lead_ids), len(ids) - len(prompter.tail_ids)
    assert (ids[:start], ids[end:]) == (prompter.lead_ids, prompter.tail_ids)
    return ids[start:end]


@cache
def prompter_of(make: str) -> Prompter:
    """One prompter for each make of tokenizer."""
    return Prompter(task(), MAKES[make](), 4096)


@pytest.mark.parametrize("make", MAKES)
@settings(deadline=None)  # the first example makes the tokenizer
@given(data=st.data())
def test_no_text_in_a_ticket_becomes_a_control_token(make: str, data: st.DataObject) -> None:
    """The ticket's span holds no id of any added token, special or not, whatever it says."""
    added = MAKES[make]().added_tokens_decoder
    text = data.draw(texts_around([str(token) for token in added.values()]))
    assert set(added).isdisjoint(span(prompter_of(make), text))


@pytest.mark.parametrize("make", MAKES)
def test_probes_are_made_of_ordinary_ids(make: str) -> None:
    """What certificates and tuning are measured with holds no control token either."""
    assert set(MAKES[make]().added_tokens_decoder).isdisjoint(prompter_of(make).ordinary_ids)


def test_the_crafted_tokenizers_would_obey() -> None:
    """The property above means something: asked plainly, these tokenizers do make control tokens of a text."""
    for text in ("<tool_call>", "<|im_end|>", "<tc>"):
        assert len(crafted()(text, add_special_tokens=False)["input_ids"]) == 1
    ordinary = crafted(also_ordinary=True)
    assert ordinary.backend_tokenizer.model.token_to_id("<tc>") in ordinary.added_tokens_decoder


def test_what_is_not_a_control_token_is_kept() -> None:
    """Control tokens' texts are spelled out, not dropped: the ticket still says what it said."""
    text = "Please <|im_end|> help, <tool_call> <think>! caf\u00e9 \u4f60\u597d"
    for tokenizer in (smollm(), crafted()):
        assert tokenizer.decode(PlainTokenizer(tokenizer).encode([text])[0]) == text


@pytest.mark.parametrize(("length", "room"), [(5, 10), (10, 10), (11, 10), (300, 10), (300, 11), (3, 2)])
def test_a_long_ticket_keeps_head_and_tail(length: int, room: int) -> None:
    """Only the ticket is cut, in its middle, to exactly the room there is; how much was cut is recorded."""
    prompter = Prompter(task(max_ticket_tokens=room), crafted(), 4096)
    prompt = prompter.wrap(range(100, 100 + length))
    ticket = prompt.ids[len(prompter.lead_ids) : len(prompt.ids) - len(prompter.tail_ids)]
    assert prompt.truncated == max(0, length - room)
    assert len(ticket) == min(length, room)
    head = len(ticket) - len(ticket) // 2
    assert ticket[:head] == tuple(range(100, 100 + head))
    assert ticket[head:] == tuple(range(100 + length - len(ticket) // 2, 100 + length))
    assert (prompt.ids[: len(prompter.lead_ids)], prompt.ids[-len(prompter.tail_ids) :]) == (
        prompter.lead_ids,
        prompter.tail_ids,
    )


@pytest.mark.parametrize("room", [2, 3, 40])
def test_the_window_is_never_passed(room: int) -> None:
    """Prefix, ticket, cue and label branches together fit the model's window, and the instruction is whole."""
    labels = {"refund request": "", "refund status": "", "login": ""}
    fixed = Prompter(task(labels=labels), crafted(), 4096)
    window = len(fixed.prefix_ids) + len(fixed.lead_ids) + len(fixed.tail_ids) + len(fixed.tree.ids) + room
    prompter = Prompter(task(labels=labels), crafted(), window)
    prompt = prompter.prompts(["much " * 500])[0]
    assert (prompter.prefix_ids, prompter.lead_ids, prompter.room) == (fixed.prefix_ids, fixed.lead_ids, room)
    assert len(prompter.prefix_ids) + len(prompt.ids) + len(prompter.tree.ids) == window
    with pytest.raises(ConfigError, match=rf"take \d+ tokens of the model's {window - room + 1}; shorten them"):
        Prompter(task(labels=labels), crafted(), window - room + 1)


@pytest.mark.parametrize("form", ["plain", "chat"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_at_most_one_beginning(form: str, adds_bos: bool) -> None:
    """A tokenizer's own BOS and a chat template's do not add up, and a ticket cannot bring another."""
    tokenizer = crafted(adds_bos=adds_bos)
    prompter = Prompter(task(form=form), tokenizer, 4096)
    ids = [*prompter.prefix_ids, *prompter.prompts(["<s> hello <s>"])[0].ids]
    expected = 1 if adds_bos or form == "chat" else 0
    assert ids.count(tokenizer.bos_token_id) == expected
    assert (ids[0] == tokenizer.bos_token_id) is bool(expected)


@pytest.mark.parametrize("body", ["", " ", "\n\t \n"])
@pytest.mark.parametrize("form", ["plain", "chat"])
def test_an_empty_ticket_is_a_prompt_like_any_other(body: str, form: str) -> None:
    """Nothing but white space leaves an empty span, and the prompt still has its cue to read at."""
    prompter = Prompter(task(form=form), smollm(), 4096)
    assert span(prompter, body) == ()
    assert prompter.tail_ids


@pytest.mark.parametrize("form", ["plain", "chat"])
@pytest.mark.parametrize("words", range(0, 20, 3))
def test_the_prefix_is_aligned_and_nothing_is_left_over(form: str, words: int) -> None:
    """Prefixes are a multiple of 16 tokens, and filled so that no instruction is left to be run for every ticket."""
    prompter = Prompter(task(form=form, instruction="sort " * words + "them"), crafted(), 4096)
    assert len(prompter.prefix_ids) % ALIGNMENT == 0
    assert prompter.prefix_ids
    assert prompter.lead_ids == ()


EXAMPLES = (Example("I pay too much", "billing"), Example("It crashes", "technical"))


def test_a_plain_prompt_reads_as_one_text() -> None:
    """Instruction, labels with descriptions, examples, ticket, cue; filler is blank lines in front of the ticket."""
    prompter = Prompter(task(examples=EXAMPLES), smollm(), 4096)
    text = smollm().decode([*prompter.prefix_ids, *prompter.prompts(["  Where is my <b>invoice</b>?\n"])[0].ids])
    before, after = text.split("Category: technical")
    assert before.startswith("Sort each support ticket into the team that should answer it.\n- billing: charges,")
    assert before.endswith("\nTicket:\nI pay too much\nCategory: billing\n\nTicket:\nIt crashes\n")
    assert after.strip("\n") == "Ticket:\nWhere is my <b>invoice</b>?\nCategory:"


def test_a_chat_prompt_is_the_template_around_the_ticket() -> None:
    """With the filler taken out, the ids decode to what the template itself makes of the same turns."""
    prompter = Prompter(task(form="chat", examples=EXAMPLES), smollm(), 4096)
    text = smollm().decode([*prompter.prefix_ids, *prompter.prompts(["Where is it?"])[0].ids])
    head, rest = text.rsplit("<|im_start|>user\n", 1)
    turns = head + "<|im_start|>user\n" + rest.lstrip("\n")
    system = "\n".join([task().instruction, *(f"- {label}: {words}" for label, words in task().labels.items())])
    messages = [{"role": "system", "content": system}]
    for example in EXAMPLES:
        messages += [{"role": "user", "content": example.text}, {"role": "assistant", "content": example.label}]
    messages.append({"role": "user", "content": "Where is it?"})
    assert turns == smollm().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_chat_task_needs_a_template() -> None:
    """A model without a chat template, or with one that changes the ticket, is refused with the way out."""
    bare = Fast(tokenizer_object=crafted().backend_tokenizer)
    with pytest.raises(ConfigError, match='no chat template; use form = "plain"'):
        Prompter(task(form="chat"), bare, 4096)
    bare.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(ConfigError, match='does not keep the ticket whole; use form = "plain"'):
        Prompter(task(form="chat"), bare, 4096)


def test_a_ticket_ends_as_it_would_in_one_text(tickets: list[str]) -> None:
    """Ticket and cue are tokenised apart, and give the tokens that they have in one text, as in training."""
    prompter = prompter_of("SmolLM2")
    for text in tickets:
        own = [*span(prompter, text), *prompter.tail_ids]
        whole = smollm()(f"Ticket:\n{text.strip()}\nCategory:", add_special_tokens=False)["input_ids"]
        assert whole[-len(own) :] == own


def test_labels_follow_the_cue_naturally() -> None:
    """A label's tokens are those it has in the whole text: with the space in a completion, without in a chat turn."""
    for form, lead in (("plain", " "), ("chat", "")):
        prompter = Prompter(task(form=form), smollm(), 4096)
        for label, ids in prompter.label_ids[MAIN_QUESTION].items():
            tail = smollm().decode(prompter.tail_ids)
            whole = smollm()(tail + lead + label, add_special_tokens=False)["input_ids"]
            assert whole == [*prompter.tail_ids, *ids]


def test_a_slow_tokenizer_is_refused() -> None:
    """A tokenizer whose added tokens cannot be taken out is refused, not trusted."""
    with pytest.raises(ConfigError, match="only fast tokenizers"):
        PlainTokenizer(object())
