"""Questions and labels of several tokens as one tree, so that all are scored in the same forward pass (pure).

A label's probability is that of constrained decoding: at every branching the model chooses among the tokens that
lead to some label, and the probabilities along the label's path are multiplied. They add up to one over all labels,
and a stretch without a choice costs nothing, so a long label neither loses nor wins by its length. Only tokens that
lead to a branching need to be run at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from worker.errors import ConfigError

ROOT = -1


@dataclass(frozen=True)
class LabelTree:
    """Tokens to run after the prompt, and what to read there. A node indexes `ids`, or is ROOT: the prompt's end."""

    ids: tuple[int, ...]  # tokens to run, every parent before its children
    parents: tuple[int, ...]  # of each token: the token it follows, or ROOT
    reads: tuple[int, ...]  # branching nodes, whose next-token scores are needed
    choices: tuple[tuple[int, ...], ...]  # of each read: the token ids to choose among
    paths: tuple[tuple[tuple[int, int], ...], ...]  # of each label of each question: its (read, choice) at branchings

    def path_to(self, node: int) -> list[int]:
        """The tokens from just after the prompt up to and including `node`."""
        path: list[int] = []
        while node != ROOT:
            path.append(self.ids[node])
            node = self.parents[node]
        return path[::-1]

    def sees(self) -> list[list[bool]]:
        """For each token of `ids`, which of them it attends to: its ancestors and itself."""
        rows = [[False] * len(self.ids) for _ in self.ids]
        for node in range(len(self.ids)):
            seen = node
            while seen != ROOT:
                rows[node][seen] = True
                seen = self.parents[seen]
        return rows

    def depths(self) -> list[int]:
        """For each token of `ids`, how many tokens after the prompt it stands, counted from 0."""
        return [len(self.path_to(node)) - 1 for node in range(len(self.ids))]


# For passes of which no label's token is read.
NO_LABELS = LabelTree(ids=(), parents=(), reads=(ROOT,), choices=((),), paths=())


@dataclass(frozen=True)
class Branch:
    """One question: the tokens that ask it, and each answer's tokens after them."""

    cue: Sequence[int]
    labels: Mapping[str, Sequence[int]]


def build_tree(branches: Sequence[Branch], end_id: int) -> LabelTree:
    """The tree of some questions with their labels. `end_id` ends a label that is the beginning of another.

    Raises ConfigError for labels that the model cannot tell apart, because their tokens are the same.
    """
    builder = _Builder()
    paths: list[tuple[tuple[int, int], ...]] = []
    for branch in branches:
        _refuse_equal(branch.labels)
        sequences = _ended(branch.labels, end_id)
        trie = _Trie()
        for sequence in sequences:
            trie.add(sequence)
        builder.visit(trie, builder.chain(branch.cue))
        paths += [tuple(_branchings(trie, sequence)) for sequence in sequences]
    return LabelTree(
        ids=tuple(builder.ids),
        parents=tuple(builder.parents),
        reads=tuple(builder.reads),
        choices=tuple(builder.choices),
        paths=tuple(paths),
    )


@dataclass
class _Trie:
    children: dict[int, "_Trie"] = field(default_factory=dict)
    read: int = -1  # its place among the reads, once it is known to branch

    def add(self, sequence: Sequence[int]) -> None:
        node = self
        for token in sequence:
            node = node.children.setdefault(token, _Trie())

    @property
    def leads_to_choice(self) -> bool:
        return len(self.children) > 1 or any(child.leads_to_choice for child in self.children.values())


@dataclass
class _Builder:
    """Walks the trie and keeps what has to be run and read."""

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    choices: list[tuple[int, ...]] = field(default_factory=list)

    def chain(self, tokens: Sequence[int]) -> int:
        """Run these tokens one after the other, from the root on; gives the last one's node."""
        node = ROOT
        for token in tokens:
            self.ids.append(token)
            self.parents.append(node)
            node = len(self.ids) - 1
        return node

    def visit(self, trie: _Trie, node: int) -> None:
        if len(trie.children) > 1:
            trie.read = len(self.reads)
            self.reads.append(node)
            self.choices.append(tuple(trie.children))
        for token, child in trie.children.items():
            if child.leads_to_choice:
                self.ids.append(token)
                self.parents.append(node)
                self.visit(child, len(self.ids) - 1)


def _branchings(trie: _Trie, sequence: Sequence[int]) -> list[tuple[int, int]]:
    path = []
    for token in sequence:
        if trie.read >= 0:
            path.append((trie.read, list(trie.children).index(token)))
        trie = trie.children[token]
    return path


def _refuse_equal(label_ids: Mapping[str, Sequence[int]]) -> None:
    seen: dict[tuple[int, ...], str] = {}
    for label, ids in label_ids.items():
        if not ids:
            raise ConfigError(f"label {label!r}: the model's tokenizer makes no token of it; give it another name")
        other = seen.setdefault(tuple(ids), label)
        if other != label:
            raise ConfigError(f"labels {other!r} and {label!r} are the same tokens to this model; rename one of them")


def _ended(label_ids: Mapping[str, Sequence[int]], end_id: int) -> list[tuple[int, ...]]:
    """The labels' tokens; one that begins another label gets an end, so that both end in a leaf."""
    sequences = [tuple(ids) for ids in label_ids.values()]
    return [
        (*ids, end_id) if any(other[: len(ids)] == ids and other != ids for other in sequences) else ids
        for ids in sequences
    ]
