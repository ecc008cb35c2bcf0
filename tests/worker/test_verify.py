"""`lengthwise verify` and the figures `lengthwise bench` gives."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import worker.engine
from worker.bench import WAYS, bench
from worker.engine.plan import Batch, Limits, plan
from worker.engine.prompt import Prompt
from worker.engine.task import Task
from worker.ports import Costs, Identity, Scored
from worker.verify import verify


class Fickle:
    """A classifier whose scores depend on how many tickets it is given at a time, if `fickle`."""

    costs, identity = Costs(prefix_tokens=16, reuses_prefix=True), Identity("m", "t", "packed", "exact")
    labels, task = ("a", "b"), Task(name="t", instruction="i", labels={"a": "", "b": ""})

    def __init__(self, fickle: bool) -> None:
        self.fickle = fickle

    def load(self, *_: Any, **__: Any) -> "Fickle":
        """Itself."""
        return self

    def tokenise(self, texts: Sequence[str]) -> list[Prompt]:
        """One token a byte."""
        return [Prompt(tuple(text.encode())) for text in texts]

    def plan(self, prompts: Sequence[Prompt]) -> list[Batch]:
        """All at once."""
        return plan([prompt.ids for prompt in prompts], Limits(rows=1000, tokens=10**9, padded=False))

    def score(self, prompts: Sequence[Prompt]) -> Scored:
        """The first label alone, the second in company."""
        scores = (-1.0, -0.5) if self.fickle and len(prompts) > 1 else (-0.5, -1.0)
        return Scored([scores] * len(prompts), 0)


@pytest.mark.parametrize("fickle", [True, False])
def test_verify_exits_with_1_if_a_label_differs(fickle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that changes labels is told, with how many and by how much, and by the exit code; else it is 0."""
    monkeypatch.setattr(worker.engine, "Classifier", Fickle(fickle), raising=False)
    result = CliRunner().invoke(verify, ["--limit", "5", "--json"])
    verdict = json.loads(result.stdout)
    assert (result.exit_code, verdict["labels_differ"], verdict["tickets"]) == (int(fickle), 5 * fickle, 5)
    assert verdict["largest_difference"] == (0.5 if fickle else 0.0)
    assert verdict["bit_equal"] == (0.0 if fickle else 1.0)
    assert sum(verdict["margins"].values()) == 5


def test_bench_measures_every_way(tmp_path: Path) -> None:
    """The real model, all ways: every figure is there and adds up, and a PNG is drawn."""
    figures, picture = tmp_path / "b.json", tmp_path / "b.png"
    options = ["--limit", "4", "--threads", "1", "--json", str(figures), "--plot", str(picture), "--log-level", "error"]
    result = CliRunner().invoke(bench, options)
    assert result.exit_code == 0, result.output
    rows = {row["way"]: row for row in json.loads(figures.read_text())["rows"]}
    assert list(rows) == list(WAYS)
    assert rows["single-all"]["ratio"] == rows["single-all"]["agreement_f32"] == 1.0
    for row in rows.values():
        padding = row["tokens_computed"] - (row["tokens_real"] - row["tokens_saved"])
        assert row["padding_overhead"] == pytest.approx(padding / row["tokens_computed"], abs=1e-4)
    assert rows["padded-global"]["padding_overhead"] >= rows["padded-sorted"]["padding_overhead"] > 0
    packed = rows["packed"]
    assert packed["padding_overhead"] == 0.0
    assert packed["agreement"] == 1.0
    assert packed["tokens_saved"] % (4 * 16) == 0
    assert packed["tokens_saved"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_names_a_way_it_does_not_know() -> None:
    """A misspelt way is refused with the ways there are, before anything is loaded."""
    result = CliRunner().invoke(bench, ["--ways", "packed,sideways"])
    assert "sideways" in str(result.exception)
    assert "padded-sorted" in str(result.exception)
