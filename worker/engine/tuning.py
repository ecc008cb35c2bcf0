"""How many tokens a batch and how many threads a model should have: measured once a machine, model and version."""

import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from worker.engine.catalogue import models_folder
from worker.engine.machine import describe, layer_tokens_per_s, median_seconds
from worker.engine.model import layer_shape
from worker.engine.prompt import Prompt

CANDIDATES = (256, 512, 1024, 2048)
# Lengths that tickets often have; repeated until a batch is full.
_TICKET_TOKENS = (12, 25, 40, 55, 75, 110)
# The smaller number is preferred while it loses no more than this: of a smaller batch labels come sooner and a crash
# costs less, and fewer threads leave cores to other workers.
_TOLERATED_LOSS = 0.03


def tokens_a_batch(
    score: Callable[[Sequence[Prompt]], object], wrap: Callable[[Sequence[int]], Prompt], ids: Sequence[int], key: str
) -> tuple[int, str]:
    """The token budget of a batch, and why: remembered under `key`, or measured now and remembered."""
    return _smallest_good(key, lambda: {tokens: _speed(score, batch) for tokens, batch in _trials(wrap, ids)})


def threads_for(dtype: torch.dtype, model: str, cores: int) -> tuple[int, str]:
    """How many threads a model's products are worth on up to `cores` cores, and why; remembered likewise.

    Measured with products of the model's size: a small model gains little from many cores, and other workers may have
    what it leaves.
    """
    if cores == 1:
        return 1, "one core"
    width, inner = layer_shape(model)

    def speeds() -> dict[int, float]:
        return {threads: layer_tokens_per_s(dtype, width, inner, threads) for threads in thread_counts(cores)}

    return _smallest_good(f"threads, {describe('cpu')}, {dtype}, {width} x {inner}", speeds)


def thread_counts(cores: int) -> list[int]:
    """Numbers of threads that are tried: powers of two, and all cores."""
    return sorted({1 << power for power in range(cores.bit_length())} | {cores})


def _smallest_good(key: str, measure: Callable[[], dict[int, float]]) -> tuple[int, str]:
    """The smallest number whose speed is nearly the best; remembered under `key`, or measured now and remembered."""
    remembered = _read().get(_versioned(key))
    if isinstance(remembered, int) and remembered > 0:
        return remembered, "measured here before"
    speeds = measure()
    chosen = min(number for number, speed in speeds.items() if speed >= (1 - _TOLERATED_LOSS) * max(speeds.values()))
    _remember(_versioned(key), chosen)
    return chosen, ", ".join(f"{number}: {speed:.0f} tokens/s" for number, speed in speeds.items())


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


def _remember(key: str, number: int) -> None:
    """Write the file anew in one step; of two workers that measure at once, the later one's word stands."""
    temporary = _file().with_suffix(f".{os.getpid()}")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(_read() | {key: number}, indent=2))
        temporary.replace(_file())
    except OSError:
        return  # a read-only home costs a measurement at each start, nothing else
