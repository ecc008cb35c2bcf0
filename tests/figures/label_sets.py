"""Accuracy of fitted heads on other label sets: `python -m tests.figures.label_sets FOLDER [--model M]`.

FOLDER has JSON Lines files with `body` and `label`. Of each label some examples are learnt from, and at most a
thousand others tested. Prints a Markdown table.
"""

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from worker.engine import Classifier
from worker.engine.catalogue import DEFAULT_MODEL
from worker.engine.fitter import fit_task
from worker.engine.task import Task
from worker.quality import assess

SETS = {
    "bitext_support.jsonl": "label",
    "clinc_test_domains.jsonl": "label",
    "banking77_test_77intents.jsonl": "label",
    "arbanking77_bta.jsonl": "label",
    "multidogo_bta.jsonl": "label",
}
EXAMPLES = (10, 30)
MOST_TESTED = 1000

Row = tuple[str, str]  # text, label


def rows_of(file: Path, field: str) -> list[Row]:
    """Each distinct text of the file once, with its label."""
    found: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["body"], row[field])
    return list(found.items())


def split(rows: list[Row], per_label: int) -> tuple[list[Row], list[Row]]:
    """So many examples of each label, and others to test on."""
    shuffled = random.Random(per_label).sample(rows, len(rows))
    taken: dict[str, int] = defaultdict(int)
    learnt: list[Row] = []
    others: list[Row] = []
    for row in shuffled:
        taken[row[1]] += 1
        (learnt if taken[row[1]] <= per_label else others).append(row)
    return learnt, others[:MOST_TESTED]


def measure(file: Path, field: str, model: str) -> Iterator[str]:
    """A table row for each number of examples."""
    rows = rows_of(file, field)
    labels = dict.fromkeys(sorted({label for _, label in rows}), "")
    task = Task(name=file.stem, instruction="Sort each support ticket into its category.", labels=labels)
    classifier = Classifier.load(task, model, tokens=1024)
    for per_label in EXAMPLES:
        learnt, tested = split(rows, per_label)
        began_s = time.monotonic()
        outcome = fit_task(classifier, [text for text, _ in learnt], [label for _, label in learnt], "balanced", print)
        seconds = time.monotonic() - began_s
        with tempfile.TemporaryDirectory() as folder:
            outcome.fitted.save(Path(folder))
            fitted = Classifier.load(folder, model, tokens=1024)
        found = fitted.classify([text for text, _ in tested])
        quality = assess(
            [str(number) for number in range(len(tested))],
            [label for _, label in tested],
            list(fitted.labels),
            [list(one.scores.values()) for one in found],
        )
        eighty = next(row for row in quality.coverage if row.coverage <= 0.85)
        yield (
            f"| {file.stem} | {len(labels)} | {per_label} | {quality.accuracy:.1%} | {quality.ece:.1%} | "
            f"{eighty.accuracy:.1%} | {outcome.fit.chosen.depth} | {seconds:.0f} s |"
        )


def main() -> None:
    """Measure every set there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--sets", default=",".join(SETS))
    arguments = parser.parse_args()
    print("| set | labels | examples a label | accuracy | calibration error | right at 80 % coverage | layers | fit |")
    for name in arguments.sets.split(","):
        for row in measure(arguments.folder / name, SETS[name], arguments.model):
            print(row, flush=True)


if __name__ == "__main__":
    main()
