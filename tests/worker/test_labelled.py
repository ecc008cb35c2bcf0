"""Files of labelled tickets: what is read of them, and errors that name the line and what was expected there."""

from pathlib import Path

import pytest

from worker.commands.labelled import Labelled, check_counts, check_known, read_labelled
from worker.errors import UsageError

SECRET = "my-card-is-4111"


def read(tmp_path: Path, *lines: str, name: str = "tickets.jsonl", split: str | None = None) -> Labelled:
    """What a file with these lines holds."""
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return read_labelled(tmp_path / name, split)


def refusal(tmp_path: Path, *lines: str, name: str = "tickets.jsonl", split: str | None = None) -> str:
    """The message for a file with these lines. It names the file and quotes no ticket."""
    with pytest.raises(UsageError) as caught:
        read(tmp_path, *lines, name=name, split=split)
    assert str(tmp_path / name) in str(caught.value)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_jsonl_is_read_in_its_order(tmp_path: Path) -> None:
    """Ids, texts as the model reads them (subject above body) and labels without white space; blank lines are none."""
    found = read(
        tmp_path,
        '{"id": "1", "body": "b ", "label": " billing "}',
        "",
        '{"id": 7, "subject": "s", "body": "c", "label": "x"}',
    )
    assert found == Labelled(["1", "7"], ["b", "s\nc"], ["billing", "x"])


def test_csv_is_read_alike(tmp_path: Path) -> None:
    """Columns body and label, an id where there is one; a cell may have line breaks."""
    found = read(tmp_path, "id,body,label", '1,"two', 'lines, one",billing', "2,no,account", name="t.csv")
    assert found == Labelled(["1", "2"], ["two\nlines, one", "no"], ["billing", "account"])


def test_equal_texts_count_once(tmp_path: Path) -> None:
    """The same text with the same label is one example, or it would be learnt from and tested on."""
    found = read(tmp_path, '{"id": "1", "body": "b", "label": "x"}', '{"id": "2", "body": " b\\n", "label": "x"}')
    assert found.ids == ["1"]


def test_the_same_text_with_two_labels_names_both_lines(tmp_path: Path) -> None:
    """Every such pair is told with its two lines and labels, whatever white space is around the text."""
    lines = [f'{{"body": "{SECRET}", "label": "a"}}', "", f'{{"body": " {SECRET} ", "label": "b"}}']
    assert "different labels, 1 times: lines 1 and 3 ('a' and 'b')" in refusal(tmp_path, *lines)


def test_a_split_is_a_part_of_the_file(tmp_path: Path) -> None:
    """Only its lines count; the others need no label; one that is not there is named."""
    lines = [
        '{"body": "1", "label": "a", "split": "dev"}',
        '{"body": "1", "label": "b", "split": "test"}',
        '{"body": "3", "split": "rest"}',
        '{"body": "4", "label": "a", "split": 5}',
    ]
    assert read(tmp_path, *lines, split="dev").labels == ["a"]
    assert read(tmp_path, *lines, split="test").labels == ["b"]
    assert "with split 'train', one JSON object" in refusal(tmp_path, *lines, split="train")
    assert "line 3: expected a field 'label'" in refusal(tmp_path, *lines, split="rest")
    assert read(tmp_path, "body,label,split", "1,a,dev", "2,b,test", name="t.csv", split="test").texts == ["2"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f'{{"body": "{SECRET}"}}', "line 2: expected a field 'label' with a text, found none"),
        (
            f'{{"body": "{SECRET}", "label": null}}',
            "line 2: expected a field 'label' with a text, found something",
        ),
        (f'{{"body": "{SECRET}", "label": 3}}', "line 2: expected a field 'label' with a text, found something"),
        (f'{{"body": "{SECRET}", "label": " "}}', "line 2: expected a field 'label' with a text"),
        (f'{{"text": "{SECRET}", "label": "a"}}', "line 2: expected a string field 'body', found none (missing_field)"),
        (f"{SECRET} is no JSON", "line 2: JSON is malformed"),
        (f'["{SECRET}"]', "line 2: expected a JSON object"),
        (f'{{"body": "{SECRET}", "label": "\\ud800"}}', "line 2: an escaped surrogate"),
    ],
)
def test_a_line_that_is_no_labelled_ticket_is_named(tmp_path: Path, line: str, says: str) -> None:
    """The line's number, and what was expected there; nothing of the ticket."""
    assert says in refusal(tmp_path, '{"body": "fine", "label": "a"}', line)


def test_an_empty_file_says_what_was_expected(tmp_path: Path) -> None:
    """A file without a ticket is no set of none, and a CSV file without the column says which it has."""
    assert "expected labelled tickets, one JSON object with body and label a line; found none" in refusal(tmp_path)
    assert "found none" in refusal(tmp_path, "body,label", name="t.csv")
    assert "expected a column 'body', found text, label" in refusal(tmp_path, "text,label", "x,a", name="t.csv")
    assert "line 2: expected a field 'label'" in refusal(tmp_path, "body", "x", name="t.csv")


def test_one_label_alone_cannot_be_learnt() -> None:
    """Two labels at least, and the message names the only one."""
    with pytest.raises(UsageError, match=r"f\.jsonl: expected examples of at least two labels, found only 'a'"):
        check_counts(["a", "a", "a"], Path("f.jsonl"))


def test_one_example_of_a_label_cannot_be_tested() -> None:
    """Every label with a single example is named, ten of them at most; two of each are enough."""
    with pytest.raises(UsageError, match=r"at least two examples of each label; there is one of 'b', 'c'$"):
        check_counts(["a", "a", "c", "b"], Path("f.jsonl"))
    with pytest.raises(UsageError, match=r"'10', '11', .* and 3 more"):
        check_counts([str(number) for number in range(10, 23)], Path("f.jsonl"))
    check_counts(["a", "b", "b", "a"], Path("f.jsonl"))


def test_an_unknown_label_is_named_with_those_there_are() -> None:
    """A label that the task does not have is a mistake in one of both; the message shows both."""
    with pytest.raises(UsageError, match="the task has no label 'biling'; it has 'billing', 'account'"):
        check_known(["billing", "biling"], ["billing", "account"], Path("f.jsonl"))
    check_known(["billing"], ["billing", "account"], Path("f.jsonl"))
