"""The ways of labelling a set of tickets that `lengthwise bench` compares."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import nn

from worker.engine.classifier import Classifier
from worker.engine.machine import product_gflops
from worker.engine.model import layer_shape, locate
from worker.engine.opening import DTYPES, fitted_of, head_for, load_cut
from worker.engine.packed import Packed
from worker.engine.padded import Padded, Single
from worker.engine.plan import Limits, plan
from worker.engine.reading import layers_of
from worker.engine.scorer import Strategy
from worker.engine.task import Task

BATCH_ROWS = 32

Prompts = Sequence[Sequence[int]]
Batches = list[list[tuple[int, ...]]]  # of rows; a row lists the tickets that share its tokens


class AllLogits(Single):
    """One ticket at a time with every logit of every token, as `model(**inputs)` does unless told otherwise."""

    def _last_state(self, ids: Sequence[int]) -> torch.Tensor:
        states = self._states(ids)
        self._model.get_output_embeddings()(states)
        return states[0, -1]


class PaddedGlobal(Padded):
    """Every batch padded to the longest prompt of all, as with `padding="max_length"`."""

    longest = 0

    def hidden(self, prompts: Prompts) -> tuple[torch.Tensor, int]:
        """As `Padded`; the longest prompt joins each batch's width, though not its result."""
        return self.padded_to(max(self.longest, *map(len, prompts)), prompts)


@dataclass(frozen=True)
class Way:
    """A strategy, whether it reuses the prefix, and how it cuts the tickets into batches."""

    strategy: Callable[..., Strategy]
    reuses_prefix: bool
    batches: Callable[[Prompts], Batches]


def _one_by_one(prompts: Prompts) -> Batches:
    return [[(index,)] for index in range(len(prompts))]


def _as_they_come(prompts: Prompts) -> Batches:
    rows: list[tuple[int, ...]] = [(index,) for index in range(len(prompts))]
    return [rows[start : start + BATCH_ROWS] for start in range(0, len(rows), BATCH_ROWS)]


def _planned(prompts: Prompts, limits: Limits) -> Batches:
    return [list(batch.rows) for batch in plan(prompts, limits)]


def _sorted(prompts: Prompts) -> Batches:
    no_budget = sum(map(len, prompts)) * BATCH_ROWS
    return _planned(prompts, Limits(BATCH_ROWS, no_budget, padded=True))


WAYS = {
    "single-all": Way(AllLogits, False, _one_by_one),
    "single": Way(Single, False, _one_by_one),
    "padded-global": Way(PaddedGlobal, False, _as_they_come),
    "padded-unsorted": Way(Padded, False, _as_they_come),
    "padded-sorted": Way(Padded, False, _sorted),
    "padded-sorted-prefix": Way(Padded, True, _sorted),
}
PACKED, PACKED_EACH = "packed", "packed-each-question"


@dataclass(frozen=True)
class Run:
    """One run over all tickets: log-probabilities `[tickets, labels]` and what it took from ids to them."""

    log_probs: torch.Tensor
    tokens_computed: int
    seconds: float


class Contestant:
    """One way, loaded and ready to run over its tickets. `tokens_real` are the whole prompts', for every ticket."""

    def __init__(self, way: str, task: Task, model: str, texts: Sequence[str], dtype: str, threads: int) -> None:
        self._labels = task.all_labels
        self._make(way, task, model, dtype, threads)
        prompts = self._prompter.prompts(texts)
        prefix, branches = self._prompter.prefix_ids, len(self._prompter.tree.ids)
        self.tokens_real = sum(len(prefix) + len(prompt.ids) + branches for prompt in prompts)
        whole = () if self._reuses_prefix else prefix
        self._prompts = [(*whole, *prompt.ids) for prompt in prompts]
        self.leaves_out = isinstance(self._strategy, Packed) and self._fused and not self._prompter.reading.taps
        self._batches = self._cut(self._prompts)
        if isinstance(self._strategy, PaddedGlobal):
            self._strategy.longest = max(map(len, self._prompts))
        rows = [row for batch in self._batches for row in batch]
        self.tokens_needed = sum(len(self._prompts[row[0]]) + branches for row in rows)

    def run(self) -> Run:
        """Score every ticket, in batches."""
        began_s, computed = time.perf_counter(), 0
        log_probs = torch.empty(len(self._prompts), len(self._labels))
        with torch.inference_mode():
            for rows in self._batches:
                states, tokens = self._strategy.hidden([self._prompts[row[0]] for row in rows])
                computed += tokens
                for row, scores in zip(rows, self._head.log_probs(states), strict=True):
                    log_probs[list(row)] = scores
        return Run(log_probs, computed, time.perf_counter() - began_s)

    def warm_up(self) -> None:
        """Run the shortest and the longest ticket alone: code and weights are then where a run wants them."""
        shortest, longest = min(self._prompts, key=len), max(self._prompts, key=len)
        with torch.inference_mode():
            for prompt in (shortest, longest):
                self._head.log_probs(self._strategy.hidden([prompt])[0])

    def run_alone(self) -> torch.Tensor:
        """The same tickets one at a time in the same arithmetic: what this way must not differ from."""
        with torch.inference_mode():
            return torch.cat([self._head.log_probs(self._alone.hidden([prompt])[0]) for prompt in self._prompts])

    def _make(self, way: str, task: Task, model: str, dtype: str, threads: int) -> None:
        if way == PACKED:
            classifier = Classifier.load(task, model, strategy=PACKED, dtype=dtype, threads=threads)
            self._prompter, self._head = classifier.prompter, classifier.head
            self._strategy = self._alone = classifier.strategy
            self._reuses_prefix, limits = True, classifier.limits
            self._fused, self.layers = classifier.choices.fused, len(layers_of(classifier.loaded.model))
            self._cut: Callable[[Prompts], Batches] = lambda prompts: _planned(prompts, limits)
            return
        torch.set_num_threads(threads)
        fitted, chosen = fitted_of(task), WAYS[way]
        loaded, self._prompter = load_cut(task, fitted, model, dtype)
        reading, prefix = self._prompter.reading, self._prompter.prefix_ids if chosen.reuses_prefix else ()
        with torch.inference_mode():
            self._strategy = chosen.strategy(loaded.model, prefix, reading)
            self._head = head_for(task, fitted, loaded.model, self._prompter)
        self._alone, self.layers = Single(loaded.model, prefix, reading), len(layers_of(loaded.model))
        self._reuses_prefix, self._cut = chosen.reuses_prefix, chosen.batches


class EachQuestion:
    """Every question of a task in a packed pass of its own: what several questions in one pass are held against."""

    leaves_out = True

    def __init__(self, task: Task, model: str, texts: Sequence[str], dtype: str, threads: int) -> None:
        alone = [replace(task, labels=labels, questions={}) for labels in task.asked.values()]
        self._passes = [Contestant(PACKED, one, model, texts, dtype, threads) for one in alone]
        self.layers = self._passes[0].layers
        self.tokens_real = sum(one.tokens_real for one in self._passes)
        self.tokens_needed = sum(one.tokens_needed for one in self._passes)

    def run(self) -> Run:
        """One pass after the other."""
        runs = [one.run() for one in self._passes]
        return Run(
            torch.cat([run.log_probs for run in runs], dim=1),
            sum(run.tokens_computed for run in runs),
            sum(run.seconds for run in runs),
        )

    def warm_up(self) -> None:
        """See `Contestant`."""
        for one in self._passes:
            one.warm_up()

    def run_alone(self) -> torch.Tensor:
        """See `Contestant`."""
        return torch.cat([one.run_alone() for one in self._passes], dim=1)


def contestant_for(
    way: str, task: Task, model: str, texts: Sequence[str], dtype: str, threads: int
) -> Contestant | EachQuestion:
    """A way by its name, loaded."""
    if way == PACKED_EACH:
        return EachQuestion(task, model, texts, dtype, threads)
    return Contestant(way, task, model, texts, dtype, threads)


def layer_weights(model: str, layers: int) -> tuple[int, int]:
    """Weights of the matrix products of the first layers, and of those the last may leave out for unread tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(locate(model))
        model_ = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers' own
        backbone = model_.base_model
    linears = {
        name: module.weight.numel()
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear) and _layer_of(name) < layers
    }
    heads = ("q_proj", "k_proj", "v_proj")
    left_out = sum(size for name, size in linears.items() if _layer_of(name) == layers - 1 and not name.endswith(heads))
    return sum(linears.values()), left_out


def _layer_of(name: str) -> int:
    """The layer that a module belongs to, by its name; those outside all layers come with the first."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else 0


def peak_gflops(dtype: str, model: str) -> float:
    """This machine's best speed over the shapes of a model's products, in 10^9 operations a second."""
    width, inner = layer_shape(model)
    shapes = [(rows, *sides) for rows in (256, 1024) for sides in ((width, inner), (inner, width))]
    return max(product_gflops(DTYPES[dtype], "cpu", *shape) for shape in shapes)
