"""A task and a tokenizer -> prefix ids, tail ids, label ids; texts -> prompts (pure).

A prompt is `prefix | lead + ticket + tail`, each tokenised apart, so that nothing in a ticket ever merges with the
instruction or the answer cue. The prefix is the same for every ticket and is run once.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.engine.plain_tokenizer import PlainTokenizer
from worker.engine.tap import Reading, Tap
from worker.engine.task import Task
from worker.engine.tree import NO_LABELS, Branch, LabelTree, build_tree
from worker.errors import ConfigError

# Matrix products over a multiple of this many rows take the same kernel with and without a reused prefix, so that
# both give the same bits.
ALIGNMENT = 16

_PLAIN_AFTER = "\n\nTicket:\n"
_TICKET, _FILLER = "\x00ticket\x00", "\x00filler\x00"


@dataclass(frozen=True)
class Prompt:
    """What has to be run for one ticket: `ids` follow the prefix. `truncated` tokens were cut from its middle."""

    ids: tuple[int, ...]
    truncated: int = 0


@dataclass(frozen=True)
class Form:
    """The text around a ticket. Filler tokens may go between `before` and `after` to bring the prefix to length."""

    before: str
    after: str
    tail: str  # what stands between the ticket and the question
    label_lead: str  # what stands directly in front of a label


def plain_form(task: Task) -> Form:
    """A completion: `Ticket: ... Category:`. Few tokens, and it suits models without a chat template."""
    lines = [task.instruction, *_label_lines(task)]
    for example in task.examples:
        lines.append(f"\nTicket:\n{example.text}\nCategory: {example.label}")
    return Form(before="\n".join(lines), after=_PLAIN_AFTER, tail="\n", label_lead=" ")


def bare_form(task: Task) -> Form:
    """A completion that names no labels: what a fitted head reads need not know them, and the prefix stays short."""
    return Form(before=task.instruction, after=_PLAIN_AFTER, tail="\n", label_lead=" ")


def chat_form(task: Task, tokenizer: Any) -> Form:
    """The model's own chat template, the ticket as the user's turn, the label as the answer's first words.

    Raises ConfigError if the tokenizer has no template, or one that changes what it is given.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError('form = "chat": this model has no chat template; use form = "plain"')
    turns = [{"role": "system", "content": "\n".join([task.instruction, *_label_lines(task)])}]
    for example in task.examples:
        turns.append({"role": "user", "content": example.text})
        turns.append({"role": "assistant", "content": example.label})
    turns.append({"role": "user", "content": f"{_FILLER}{_TICKET}"})
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    if text.count(_FILLER) != 1 or text.count(_TICKET) != 1:
        raise ConfigError(
            'form = "chat": this model\'s chat template does not keep the ticket whole; use form = "plain"'
        )
    before, rest = text.split(_FILLER)
    after, tail = rest.split(_TICKET)
    return Form(before=before, after=after, tail=tail, label_lead="")


def form_of(task: Task, tokenizer: Any) -> Form:
    """The form the task asks for."""
    if task.form == "chat":
        return chat_form(task, tokenizer)
    return bare_form(task) if task.form == "bare" else plain_form(task)


class Prompter:
    """Makes prompts for one task and one tokenizer.

    `window` is the model's longest input in tokens. With `taps` no label is read, and where no tap reads the last
    token, nothing follows the ticket. Raises ConfigError if the labels cannot be told apart, or if the instruction
    leaves no room for a ticket.
    """

    def __init__(self, task: Task, tokenizer: Any, window: int, taps: Sequence[Tap] = ()) -> None:
        self.form = form = form_of(task, tokenizer)
        self._plain = PlainTokenizer(tokenizer)
        head = self._head_ids(form, tokenizer)
        self.prefix_ids = tuple(head[: len(head) // ALIGNMENT * ALIGNMENT])
        self.lead_ids = tuple(head[len(self.prefix_ids) :])
        cues = {question: _ids(tokenizer, form.tail + _cue(task, question)) for question in task.asked}
        self.label_ids = {
            question: {label: tuple(_ids(tokenizer, _lead(task, form) + label)) for label in labels}
            for question, labels in task.asked.items()
        }
        # One question is asked in the prompt itself; of several, each is a branch of the tree.
        main, *more = cues.values()
        in_prompt = not more and (not taps or any(tap.pooling == "last" for tap in taps))
        self.tail_ids = tuple(main) if in_prompt else ()
        # So that a ticket without any text has a token to read.
        self._frame = self.lead_ids + self.tail_ids or tuple(_ids(tokenizer, "\n"))
        self.tree = NO_LABELS if taps else self._tree(cues if more else {}, _end_id(tokenizer, task.form))
        self.reading = Reading(self.tree, tuple(taps), len(self.lead_ids), len(self.tail_ids))
        fixed = len(head) + len(self.tail_ids) + len(self.tree.ids)
        self.ordinary_ids = self._plain.ordinary_ids
        self.room = min(task.max_ticket_tokens, window - fixed)
        if self.room < 2:
            raise ConfigError(
                f"task {task.name!r}: instruction, examples and labels take {fixed} tokens of the model's {window}; "
                "shorten them"
            )

    @property
    def fingerprint(self) -> str:
        """A hash of everything around a ticket, by its ids."""
        text = repr((self.prefix_ids, self.lead_ids, self.tail_ids, self.tree.ids))
        return hashlib.sha256(text.encode()).hexdigest()

    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        """One prompt a text, in their order. No id of an added token is in a text's span, whatever it contains."""
        return [self.wrap(ids) for ids in self._plain.encode([text.strip() for text in texts])]

    def wrap(self, ticket: Sequence[int]) -> Prompt:
        """The prompt around a ticket's ids; one that is too long keeps its head and its tail."""
        cut = max(0, len(ticket) - self.room)
        if cut:
            head = self.room - self.room // 2
            ticket = [*ticket[:head], *ticket[len(ticket) - self.room // 2 :]]
        ids = (*self.lead_ids, *ticket, *self.tail_ids) if ticket else self._frame
        return Prompt(ids, truncated=cut)

    def _tree(self, cues: Mapping[str, Sequence[int]], end_id: int) -> LabelTree:
        branches = [Branch(cues.get(question, ()), labels) for question, labels in self.label_ids.items()]
        return build_tree(branches, end_id)

    def _head_ids(self, form: Form, tokenizer: Any) -> list[int]:
        before, after = _bos(tokenizer, form.before) + _ids(tokenizer, form.before), _ids(tokenizer, form.after)
        newline = _ids(tokenizer, "\n")
        missing = -(len(before) + len(after)) % ALIGNMENT
        # Blank lines bring the prefix to the alignment, or up to 15 of its tokens would be run for every ticket.
        filler = newline * missing if len(newline) == 1 else []
        return before + filler + after


def _label_lines(task: Task) -> list[str]:
    lines = []
    for question, labels in task.asked.items():
        lines += [f"{question.capitalize()}:"] if task.questions else []
        lines += [f"- {label}: {description}" if description else f"- {label}" for label, description in labels.items()]
    return lines


def _cue(task: Task, question: str) -> str:
    """What asks the question. A chat's only question needs none: the answer is the turn."""
    return f"{question.capitalize()}:" if task.questions or task.form != "chat" else ""


def _lead(task: Task, form: Form) -> str:
    return " " if task.questions else form.label_lead


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _bos(tokenizer: Any, text: str) -> list[int]:
    """The one beginning-of-sequence id this tokenizer puts in front of texts, unless the text brings it itself."""
    bos = tokenizer.bos_token_id
    adds_it = bos is not None and list(tokenizer("x")["input_ids"])[:1] == [bos]
    brings_it = adds_it and _ids(tokenizer, text)[:1] == [bos]
    return [int(bos)] if adds_it and not brings_it else []


def _end_id(tokenizer: Any, form: str) -> int:
    """What follows a label that is complete: the end of the turn, or the end of the line."""
    if form == "chat" and tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    return _ids(tokenizer, "\n")[-1]
