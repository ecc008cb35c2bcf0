"""The label tree: the probabilities of constrained decoding, all of them from one pass."""

import math
import zlib
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.tree import ROOT, Branch, LabelTree, build_tree
from worker.errors import ConfigError

END = 99
# Few tokens, so that shared beginnings, and labels that begin another, are common.
LABELS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=2, max_size=8, unique=True)


def logit(path: Sequence[int], token: int) -> float:
    """A toy model: the score of a token after a path, arbitrary but always the same."""
    return zlib.crc32(repr((*path, token)).encode()) / 2**32 * 8


def named(labels: Sequence[Sequence[int]]) -> Mapping[str, Sequence[int]]:
    """The labels with names."""
    return {f"label {number}": ids for number, ids in enumerate(labels)}


def by_steps(labels: Sequence[Sequence[int]]) -> list[float]:
    """Each label's probability by decoding token after token, among those that some label allows (the definition)."""
    complete = [(*label, END) for label in labels]
    probabilities = []
    for label in complete:
        probability, possible = 1.0, complete
        for depth, token in enumerate(label):
            allowed = {other[depth] for other in possible}
            weights = {choice: math.exp(logit(label[:depth], choice)) for choice in allowed}
            probability *= weights[token] / sum(weights.values())
            possible = [other for other in possible if other[depth] == token]
        probabilities.append(probability)
    return probabilities


def by_tree(tree: LabelTree) -> list[float]:
    """The same by what the tree says is to be read."""
    reads = []
    for node, choices in zip(tree.reads, tree.choices, strict=True):
        weights = [math.exp(logit(tree.path_to(node), choice)) for choice in choices]
        reads.append([weight / sum(weights) for weight in weights])
    return [math.prod(reads[read][choice] for read, choice in path) for path in tree.paths]


@given(LABELS)
def test_the_tree_is_constrained_decoding(labels: list[tuple[int, ...]]) -> None:
    """A label's probability is that of decoding it step by step among the labels' tokens, and all add up to one."""
    found = by_tree(build_tree([Branch((), named(labels))], END))
    assert found == pytest.approx(by_steps(labels))
    assert sum(found) == pytest.approx(1.0)


@given(LABELS)
def test_only_what_leads_to_a_choice_is_run(labels: list[tuple[int, ...]]) -> None:
    """Every read has a real choice, every token that is run is on the way to one, parents come first."""
    tree = build_tree([Branch((), named(labels))], END)
    assert all(len(set(choices)) == len(choices) > 1 for choices in tree.choices)
    needed = {tuple(tree.path_to(read)[:depth]) for read in tree.reads for depth in range(len(tree.path_to(read)) + 1)}
    run = {tuple(tree.path_to(node)) for node in range(len(tree.ids))}
    assert run | {()} == needed | {()}
    assert len(run) == len(tree.ids), "a shared beginning is run once"
    assert all(parent < node for node, parent in enumerate(tree.parents))


@given(LABELS)
def test_a_branch_sees_its_ancestors_and_itself(labels: list[tuple[int, ...]]) -> None:
    """`sees` shows a token its own path and no other branch; `depths` puts it right behind the prompt."""
    tree = build_tree([Branch((), named(labels))], END)
    for node, seen in enumerate(tree.sees()):
        assert [tree.ids[other] for other, is_seen in enumerate(seen) if is_seen] == tree.path_to(node)
        assert sum(seen) == tree.depths()[node] + 1


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_long_label_neither_loses_nor_wins_by_its_length(length: int) -> None:
    """The fault: log-probabilities added up over a label's tokens punish long ones, averaged they favour them.

    A stretch without a choice counts for nothing, so two labels of any length split by their first token alone.
    """
    tree = build_tree([Branch((), {"short": [1], "long": [2, *range(10, 10 + length)]})], END)
    one, other = math.exp(logit((), 1)), math.exp(logit((), 2))
    assert by_tree(tree) == pytest.approx([one / (one + other), other / (one + other)])
    assert (tree.ids, tree.reads) == ((), (ROOT,))


def test_a_label_that_begins_another_ends_by_the_end_token() -> None:
    """`refund` beside `refund status` is a choice between the end and the next word, and both stay possible."""
    tree = build_tree([Branch((), {"refund": [5], "refund status": [5, 6]})], END)
    assert (tree.ids, tree.reads) == ((5,), (0,))
    assert set(tree.choices[0]) == {END, 6}


def test_equal_labels_are_refused_with_both_names() -> None:
    """Labels of the same tokens could not be told apart; the message names both."""
    with pytest.raises(ConfigError, match="'Refund' and 'refund' are the same tokens"):
        build_tree([Branch((), {"Refund": [1, 2], "other": [3], "refund": [1, 2]})], END)


def test_a_label_without_tokens_is_refused() -> None:
    """A label that the tokenizer makes nothing of would win or lose every time; it is named."""
    with pytest.raises(ConfigError, match=r"label 'odd'.*no token"):
        build_tree([Branch((), {"fine": [1], "odd": []})], END)
