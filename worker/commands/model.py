"""`lengthwise model`: which models there are, and what a task makes of one."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from worker.commands.options import json_option, model_option, task_option
from worker.engine.catalogue import CATALOGUE, DEFAULT_MODEL, fetch, folder_of


@click.group()
def model() -> None:
    """List, fetch and inspect models. Any folder with safetensors and any Hugging Face id can be used beside these."""


@model.command("list")
def list_models() -> None:
    """List the models that come by name."""
    for name, entry in CATALOGUE.items():
        place = str(folder_of(name)) if folder_of(name).is_dir() else f"not fetched yet, {entry.megabytes} MB"
        default = " (default)" if name == DEFAULT_MODEL else ""
        click.echo(f"{name}{default}: {entry.title}, {entry.licence}: {place}")


@model.command()
@click.argument("name", default=DEFAULT_MODEL, type=click.Choice(list(CATALOGUE)))
def pull(name: str) -> None:
    """Fetch, verify and convert a model now rather than when it is first needed."""
    click.echo(str(fetch(name)))


@model.command()
@task_option
@model_option
@json_option
def show(task: str, model: str, as_json: bool) -> None:
    """Show the prompt a task makes for a model, and the token ids of its labels."""
    import msgspec

    from worker.engine.model import load_tokenizer
    from worker.engine.prompt import Prompter
    from worker.engine.task import MAIN_QUESTION, load_task

    question = load_task(task)  # first: what is wrong with it should be said at once
    tokenizer = load_tokenizer(model)
    prompter = Prompter(question, tokenizer, window=min(int(tokenizer.model_max_length), 1 << 20))
    head, tail = tokenizer.decode([*prompter.prefix_ids, *prompter.lead_ids]), tokenizer.decode(prompter.tail_ids)
    shown = {
        "prefix_tokens": len(prompter.prefix_ids),
        "prompt": f"{head}<ticket>{tail}",
        "tail_tokens": len(prompter.tail_ids),
        "labels": _spelled(prompter.label_ids[MAIN_QUESTION], tokenizer),
        "questions": {name: _spelled(prompter.label_ids[name], tokenizer) for name in question.questions},
        "branch_tokens": len(prompter.tree.ids),
    }
    if as_json:
        click.echo(msgspec.json.encode(shown))
        return
    click.echo(f"{shown['prompt']}\n")
    click.echo(
        f"prefix, run once: {shown['prefix_tokens']} tokens; answer cue: {shown['tail_tokens']}; "
        f"tokens run for long labels and further questions: {shown['branch_tokens']}"
    )
    for name, labels in prompter.label_ids.items():
        click.echo(f"{name}:")
        for label, spelled in _spelled(labels, tokenizer).items():
            click.echo(f"  {label}: {' '.join(spelled['tokens'])}  {list(spelled['ids'])}")


def _spelled(labels: Mapping[str, Sequence[int]], tokenizer: Any) -> dict[str, dict[str, Any]]:
    return {label: {"ids": ids, "tokens": tokenizer.convert_ids_to_tokens(ids)} for label, ids in labels.items()}
