"""`lengthwise fit` and `evaluate` as a user runs them, with a tiny model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from producer import samples
from wire import BatchReport, Keys, Label
from worker.commands.evaluate import evaluate
from worker.commands.fit import fit
from worker.commands.labelled import read_labelled
from worker.commands.work import work
from worker.engine import Classifier
from worker.errors import ConfigError, UsageError
from worker.queue.streams import StreamReader, read_totals

Tiny = Callable[..., str]
MARKER = "QzxjQzxj"


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty labelled tickets, each with a word that must not come out anywhere."""
    file = tmp_path_factory.mktemp("labelled") / "tickets.jsonl"
    rows = [{**row, "body": f"{row['body']} {MARKER}"} for row in samples.load(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(command: click.Command, *arguments: object) -> Result:
    """The command's result; errors of ours are raised as `lengthwise` meets them."""
    result = CliRunner().invoke(command, list(map(str, arguments)))
    if isinstance(result.exception, (UsageError, ConfigError)):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def fitted(labelled: Path, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder that `fit` wrote, and what it said."""
    folder = tmp_path_factory.mktemp("fit") / "out"
    options = ("--model", tiny("llama"), "--dtype", "float32", "--threads", 1)
    return folder, run(fit, labelled, "--out", folder, *options, "--plot", folder.parent / "p.png")


def test_fit_writes_a_folder(fitted: tuple[Path, Result]) -> None:
    """Task, head, report and card are there, the picture is drawn, and no ticket's text is in any of it."""
    folder, result = fitted
    assert sorted(file.name for file in folder.iterdir()) == [
        "README.md",
        "head.safetensors",
        "report.json",
        "task.toml",
    ]
    report = json.loads((folder / "report.json").read_text())
    assert report["examples"] == 40
    assert set(report["fitted"]) >= {"accuracy", "interval", "ece", "per_label", "confusion", "coverage", "most_wrong"}
    assert set(report["fitted"]["most_wrong"]) <= {f"sample-{number:04}" for number in range(1, 41)}
    assert [count for count, _ in report["learning_curve"]][-1] == 32
    assert (folder.parent / "p.png").read_bytes().startswith(b"\x89PNG")
    written = [file.read_bytes() for file in folder.iterdir()]
    assert not any(MARKER.encode() in content for content in (*written, result.output.encode()))


def test_a_task_that_is_there_is_kept(fitted: tuple[Path, Result], labelled: Path, tiny: Tiny) -> None:
    """Nothing is written over unless it is asked for, and that is said before the model is loaded."""
    with pytest.raises(UsageError, match="--force"):
        run(fit, labelled, "--out", fitted[0], "--model", "no model at all")


def test_evaluate_tells_machines(fitted: tuple[Path, Result], labelled: Path, tiny: Tiny) -> None:
    """The JSON has what an operator's script looks for; compared with another task, the tickets that change."""
    options = ("--model", tiny("llama"), "--dtype", "float32", "--threads", 1, "--tokens", 512)
    result = run(evaluate, labelled, "--task", fitted[0], "--compare", "support", "--json", *options)
    found = json.loads(result.stdout)
    assert set(found) >= {
        "accuracy",
        "interval",
        "ece",
        "per_label",
        "confusion",
        "coverage",
        "tickets_per_s",
        "changes",
    }
    assert found["accuracy"] > 0.9, "these examples were learnt from"
    assert found["compared_accuracy"] < 0.9, "a random model knows no label"
    changed = sum(change["label"] == change["truth"] for change in found["changes"])
    others = sum(change["other"] == change["truth"] for change in found["changes"])
    assert round(40 * (found["accuracy"] - found["compared_accuracy"])) == changed - others
    assert MARKER not in result.output


def test_labels_of_the_file_make_a_task(tmp_path: Path, tiny: Tiny) -> None:
    """New labels need no code: a file with others than the built-in task's gives a task with these."""
    file = tmp_path / "fruit.jsonl"
    rows = [{"body": f"{fruit} number {number}", "label": fruit} for number in range(4) for fruit in ("apple", "pear")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(fit, file, "--out", tmp_path / "out", "--model", tiny("llama"), "--dtype", "float32", "--threads", 1)
    assert 'name = "fruit"' in (tmp_path / "out" / "task.toml").read_text()
    with pytest.raises(UsageError, match="the task has no label 'apple', 'pear'"):
        run(fit, file, "--task", "support", "--model", "no model at all")


def test_a_prior_needs_no_labels(labelled: Path, tiny: Tiny, tmp_path: Path) -> None:
    """With labels beside it, the prompt form that labels best is taken; this model has no chat template."""
    options = ("--model", tiny("llama"), "--dtype", "float32", "--threads", 1)
    run(fit, "--unlabelled", labelled, "--out", tmp_path / "a", *options)
    chosen = run(fit, labelled, "--unlabelled", labelled, "--out", tmp_path / "b", *options)
    assert "form chat: " in chosen.stderr
    assert "no chat template" in chosen.stderr.replace("\n", " ")
    for folder in ("a", "b"):
        assert run(evaluate, labelled, "--task", tmp_path / folder, *options, "--tokens", 512, "--json").stdout


def test_no_file_is_a_usage_error() -> None:
    """What was expected is said."""
    with pytest.raises(UsageError, match="a file of labelled tickets, or --unlabelled FILE"):
        run(fit)


def test_a_worker_uses_the_folder_and_abstains(
    fitted: tuple[Path, Result], labelled: Path, tiny: Tiny, redis_url: str, redis_client: Any, tmp_path: Path
) -> None:
    """From a folder that was moved to the results stream: every label is the classifier's own, in the head's dtype.

    What is less probable than `--min-confidence` is published without a label, counted, and no text is in the log.
    """
    folder, limit, keys = shutil.copytree(fitted[0], tmp_path / "moved"), 0.8, Keys("tickets")
    tickets = read_labelled(labelled)
    redis_client.rpush(keys.waiting, *(line for line in labelled.read_bytes().splitlines()))
    options = ("--task", folder, "--model", tiny("llama"), "--threads", 1, "--tokens", 512)
    said = run(work, "--burst", "--url", redis_url, "--min-confidence", limit, *options)
    published = {label.id: label for label in StreamReader(redis_client, keys.results, Label).available()}
    expected = Classifier.load(str(folder), tiny("llama"), threads=1, tokens=512).classify(tickets.texts, limit)
    assert {name: label.label for name, label in published.items()} == {
        name: one.label for name, one in zip(tickets.ids, expected, strict=True)
    }
    abstained = [label for label in published.values() if label.label is None]
    assert 0 < len(abstained) < len(published) == 40
    assert all((label.confidence < limit) == bool(label.abstained) for label in published.values())
    assert read_totals(redis_client, keys).abstained == len(abstained)
    reports = StreamReader(redis_client, keys.metrics, BatchReport).available()
    assert sum(report.abstained for report in reports) == len(abstained)
    assert MARKER not in said.output


def test_nothing_else_of_the_users_is_written_over(labelled: Path, tmp_path: Path) -> None:
    """A folder with a README of somebody's own is no place for a task, unless it is forced."""
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UsageError, match=r"has README\.md already; name another folder with --out"):
        run(fit, labelled, "--out", tmp_path, "--model", "no model at all")
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_fitted_folder_can_be_fitted_anew(
    fitted: tuple[Path, Result], labelled: Path, tiny: Tiny, tmp_path: Path
) -> None:
    """Its head is forgotten, and its prompt names the labels again; the same examples give the same head."""
    folder, options = shutil.copytree(fitted[0], tmp_path / "again"), ("--model", tiny("llama"), "--dtype", "float32")
    task = folder / "task.toml"
    task.write_text(task.read_text().replace('form = "plain"', 'form = "bare"'))
    run(fit, labelled, "--task", folder, "--out", folder, "--force", *options, "--threads", 1)
    for name in ("task.toml", "head.safetensors"):
        assert (folder / name).read_bytes() == (fitted[0] / name).read_bytes()
    run(fit, "--unlabelled", labelled, "--task", folder, "--out", tmp_path / "prior", *options, "--threads", 1)
    assert 'form = "plain"' in (tmp_path / "prior" / "task.toml").read_text()


def test_evaluate_tells_people(fitted: tuple[Path, Result], labelled: Path, tiny: Tiny, tmp_path: Path) -> None:
    """Tables of the split that was asked for, with the tickets that another task labels differently, by their ids."""
    rows = [
        json.loads(line) | {"split": "test" if number < 9 else "dev"}
        for number, line in enumerate(labelled.read_text().splitlines())
    ]
    (tmp_path / "split.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--model", tiny("llama"), "--dtype", "float32", "--threads", 1, "--tokens", 512)
    arguments = ("--split", "test", "--task", fitted[0], "--compare", "support", "--plot", tmp_path / "p.png")
    said = run(evaluate, tmp_path / "split.jsonl", *arguments, *options).output
    assert "9 tickets, task" in said.replace("\n", "")
    assert "Labelled differently" in said
    assert "sample-000" in said
    assert (tmp_path / "p.png").exists()
    assert MARKER not in said
