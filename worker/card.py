"""What is known of a fitted task, for people and for machines (pure)."""

from collections.abc import Sequence

import msgspec

from worker.figures import share
from worker.quality import Quality

# What is gained by the last quarter of the examples, from which on more of them are worth the work.
_WORTH_IT = 0.01


class FitReport(msgspec.Struct, kw_only=True):
    """How a task was fitted. The folder's report.json, and what `fit --json` prints."""

    task: str
    model: str
    model_hash: str
    dtype: str
    examples: int
    reads: str
    layers: str
    form: str
    strength: float
    temperature: float
    zero_shot: Quality  # the same examples by the model's own label scores
    fitted: Quality  # each example by a head that was fitted without it, on taps chosen by the other folds' results
    learning_curve: list[tuple[int, float]]  # examples learnt from, accuracy
    seconds: float


def learning_told(curve: Sequence[tuple[int, float]]) -> str:
    """The learning curve as a sentence, and what it says of further examples."""
    points = ", ".join(f"{count}: {accuracy:.1%}" for count, accuracy in curve)
    gained = curve[-1][1] - curve[-2][1]
    advice = "more of them will probably help" if gained > _WORTH_IT else "more of them will help little"
    return f"accuracy by number of examples learnt from: {points}; {advice}"


def card(report: FitReport) -> str:
    """The model card of a fitted task, in Markdown."""
    low, high = report.fitted.interval
    rows = "\n".join(
        f"| {label} | {share(one.precision)} | {share(one.recall)} | {one.tickets} |"
        for label, one in report.fitted.per_label.items()
    )
    return f"""# {report.task}: a head fitted by `lengthwise fit`

For {report.model} in {report.dtype} (weights {report.model_hash[:16]}). It is refused with any other model, prompt,
dtype or labels. Reads the states {report.reads} ({report.layers} layers are run), prompt form `{report.form}`.

Cross-validated on {report.examples} examples, each labelled by a head that was fitted without it, reading what the
other folds' results chose (of very few, very noisy examples this is still some points too good):
**{report.fitted.accuracy:.1%}** right (95 %: {low:.1%} to {high:.1%}), expected calibration error
{report.fitted.ece:.1%}. Without a head the model labels {report.zero_shot.accuracy:.1%} of them right.

| label | precision | recall | examples |
|---|---|---|---|
{rows}

{learning_told(report.learning_curve).capitalize()}.

Regularisation C {report.strength:g}, temperature {report.temperature:g}. Figures hold for tickets like the examples.
"""
