"""How many tokens a batch should have on this machine: measured once for each machine, model and version."""

import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from worker.engine.catalogue import models_folder
from worker.engine.machine import median_seconds
from worker.engine.prompt import Prompt

CANDIDATES = (256, 512, 1024, 2048)
# Lengths that tickets often have; repeated until a batch is full.
_TICKET_TOKENS = (12, 25, 40, 55, 75, 110)
# A smaller batch is preferred while it loses no more than this: labels come sooner and a crash costs less.
_TOLERATED_LOSS = 0.03


def tokens_a_batch(
    score: Callable[[Sequence[Prompt]], object], wrap: Callable[[Sequence[int]], Prompt], ids: Sequence[int], key: str
) -> tuple[int, str]:
    """The token budget of a batch, and why: remembered under `key`, or measured now and remembered."""
    remembered = _read().get(_versioned(key))
    if isinstance(remembered, int) and remembered > 0:
        return remembered, "measured here before"
    speeds = {tokens: _speed(score, batch) for tokens, batch in _trials(wrap, ids)}
    best = max(speeds.values())
    chosen = min(tokens for tokens, speed in speeds.items() if speed >= (1 - _TOLERATED_LOSS) * best)
    _remember(_versioned(key), chosen)
    return chosen, ", ".join(f"{tokens}: {speed:.0f} tokens/s" for tokens, speed in speeds.items())


def _speed(score: Callable[[Sequence[Prompt]], object], batch: Sequence[Prompt]) -> float:
    """Tokens a second over one batch."""
    return sum(len(prompt.ids) for prompt in batch) / median_seconds(lambda: score(batch), repeats=3)


def _trials(wrap: Callable[[Sequence[int]], Prompt], ids: Sequence[int]) -> list[tuple[int, list[Prompt]]]:
    trials = []
    for tokens in CANDIDATES:
        batch: list[Prompt] = []
        while sum(len(prompt.ids) for prompt in batch) < tokens:
            batch.append(wrap(ids[: _TICKET_TOKENS[len(batch) % len(_TICKET_TOKENS)]]))
        trials.append((tokens, sorted(batch, key=lambda prompt: len(prompt.ids))))
    return trials


def _versioned(key: str) -> str:
    try:
        return f"{version('lengthwise')}, {key}"
    except PackageNotFoundError:
        return f"unpackaged, {key}"


def _file() -> Path:
    return models_folder().parent / "tuning.json"


def _read() -> dict[str, object]:
    try:
        content = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}  # never measured, or torn: measured anew
    return content if isinstance(content, dict) else {}


def _remember(key: str, tokens: int) -> None:
    """Write the file anew in one step; of two workers that measure at once, the later one's word stands."""
    temporary = _file().with_suffix(f".{os.getpid()}")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(_read() | {key: tokens}, indent=2))
        temporary.replace(_file())
    except OSError:
        return  # a read-only home costs a measurement at each start, nothing else
