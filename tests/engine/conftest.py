"""Fixtures of the engine's tests: the real small model in each of its ways, and tiny random ones made here.

A way is loaded once a session, on one thread: what is tested is what comes out, and torch's threads are set once for
the whole process.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from producer import samples
from worker.commands.texts import sample_text
from worker.engine import Classifier
from worker.engine.catalogue import DEFAULT_MODEL, quieten
from worker.engine.classifier import Choices
from worker.engine.fitter import fit_task
from worker.engine.model import LoadedModel, load_model
from worker.engine.opening import Opened
from worker.engine.packed import Packed
from worker.engine.padded import Padded, Single
from worker.engine.plan import Limits
from worker.engine.prompt import Prompter
from worker.engine.scorer import LabelHead
from worker.engine.task import Task, load_task

THREADS = 1
WAYS: dict[str, type[Packed] | type[Padded] | type[Single]] = {"packed": Packed, "padded": Padded, "single": Single}
TOKENS = 512  # a batch's budget; given, so that no test waits for it to be measured

# Large initial weights, or every label would be as likely as any other and nothing could go visibly wrong.
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
# Shared first tokens, labels that are the beginning of others, and branches beside each other.
REFUNDS = Task(
    name="refunds",
    instruction="Sort each ticket.",
    labels=dict.fromkeys(
        ("refund request", "refund status", "refund request overdue", "refund", "login", "login page"), ""
    ),
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    quieten()
    yield
    torch.set_num_threads(before)


@cache
def _loaded() -> Classifier:
    """SmolLM2 as the product loads it on a machine with fast bfloat16."""
    return Classifier.load("support", dtype="bfloat16", threads=THREADS, tokens=TOKENS)


@cache
def _model(*, packs: bool) -> LoadedModel:
    """SmolLM2 in float32. `packs` keeps apart the one whose attention is replaced."""
    return load_model(DEFAULT_MODEL, torch.float32)


@cache
def _way(name: str, strategy: str, dtype: str) -> Classifier:
    """SmolLM2 run in one way. Models are shared, nothing is certified: both take long in float32 on one thread."""
    task = REFUNDS if name == REFUNDS.name else load_task(name)
    if dtype == "bfloat16":
        loaded = replace(_model(packs=False), model=_loaded().strategy._model)  # type: ignore[attr-defined]  # a Protocol
    else:
        loaded = _model(packs=strategy == "packed")
    prompter = Prompter(task, loaded.tokenizer, loaded.window)
    with torch.inference_mode():
        way = WAYS[strategy](loaded.model, prompter.prefix_ids, prompter.reading)
        opened = Opened(loaded, prompter, way, LabelHead(loaded.model, prompter.tree), dtype == "bfloat16")
    limits = Limits(rows=32, tokens=TOKENS, padded=strategy == "padded")
    return Classifier(task, opened, limits, Choices(strategy, dtype, "cpu", THREADS, TOKENS, fused=False))


@pytest.fixture(scope="session")
def loaded() -> Classifier:
    """SmolLM2 with the built-in task, bfloat16, as `Classifier.load` makes and certifies it."""
    return _loaded()


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the built-in task fitted to the shipped examples, for SmolLM2 in bfloat16."""
    rows, folder = samples.load_examples(), tmp_path_factory.mktemp("fitted")
    texts, labels = [sample_text(row) for row in rows], [row["label"] for row in rows]
    fit_task(_loaded(), texts, labels, "balanced", lambda _: None).fitted.save(folder)
    return str(folder)


@pytest.fixture(scope="session")
def taught(fitted: str) -> Classifier:
    """SmolLM2 with that task, as `Classifier.load` makes and certifies it."""
    return Classifier.load(fitted, threads=THREADS, tokens=TOKENS)


@pytest.fixture(scope="session")
def real() -> Callable[[str, str], Classifier]:
    """SmolLM2 with the built-in task, by strategy and dtype."""
    return lambda strategy, dtype: _way("support", strategy, dtype)


@pytest.fixture(scope="session")
def refunds() -> Callable[[str, str], Classifier]:
    """SmolLM2 with labels of several tokens, by strategy and dtype."""
    return lambda strategy, dtype: _way(REFUNDS.name, strategy, dtype)


@pytest.fixture(scope="session")
def tickets() -> list[str]:
    """Forty sample tickets, of three to some hundred tokens."""
    return [ticket["body"] for ticket in samples.load(40)]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A small byte-level tokenizer of ordinary make."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([ticket["body"] for ticket in samples.load(200)], trainer)
    fast: Any = PreTrainedTokenizerFast  # transformers leaves it untyped
    return fast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tiny(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The folder of a tiny random model of any type transformers has, with changes to its configuration."""

    made: dict[str, str] = {}

    def make(kind: str, **changes: Any) -> str:
        key = f"{kind} {changes}"
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            torch.manual_seed(1)
            config = AutoConfig.for_model(kind, **(_TINY | changes))
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers' own
            model.float().save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[key] = str(folder)
        return made[key]

    return make
