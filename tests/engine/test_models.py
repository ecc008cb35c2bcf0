"""Models of many makes: each is run by a strategy that gives what transformers gives, or refused with a reason."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from worker.engine import Classifier, opening
from worker.engine.model import load_model, load_tokenizer
from worker.engine.padded import Single
from worker.errors import ConfigError

Tiny = Callable[..., str]
# Tickets of many lengths, several of them longer than the windows below.
WINDOW = 24
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
LFM = ["conv", "full_attention", "conv"]
FLOAT32 = 1e-4


def load(folder: str, dtype: str = "float32", strategy: str | None = None) -> Classifier:
    """A classifier on one thread, nothing measured."""
    return Classifier.load("support", folder, strategy=strategy, dtype=dtype, threads=1, tokens=512)


def scores(classifier: Classifier, texts: Sequence[str]) -> torch.Tensor:
    """Scores `[texts, labels]`."""
    return torch.tensor([list(result.scores.values()) for result in classifier.classify(texts)])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 16}), ("llama", {"attention_bias": True, "mlp_bias": True})],
)
def test_common_decoders_get_our_layers(tiny: Tiny, tickets: list[str], kind: str, changes: dict[str, Any]) -> None:
    """Llama, Qwen2 (biases) and Qwen3 (norms on heads) run packed: as stock in float32, fused near it in bfloat16."""
    folder = tiny(kind, **changes)
    expected = scores(load(folder, strategy="single"), tickets)
    plain, fused = load(folder), load(folder, "bfloat16")
    assert (plain.choices.strategy, plain.choices.fused) == ("packed", False)
    assert (fused.choices.strategy, fused.choices.fused) == ("packed", True)
    torch.testing.assert_close(scores(plain, tickets), expected, atol=FLOAT32, rtol=0)
    torch.testing.assert_close(scores(fused, tickets), expected, atol=0.5, rtol=0)
    assert fused.certificate is not None
    assert fused.certificate.labels_differ == 0


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"sliding_window": WINDOW}),
        ("gemma2", {"sliding_window": WINDOW, **GEMMA}),
        ("gemma3_text", {"sliding_window": WINDOW, **GEMMA}),
        (
            "gpt_neo",
            {
                "num_layers": 2,
                "num_hidden_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 24,
            },
        ),
        ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048}),
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("falcon", {"alibi": False}),
        ("stablelm", {}),
        ("granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.2}),
        ("lfm2", {"layer_types": LFM}),
    ],
)
def test_every_make_scores_as_transformers_runs_it(
    tiny: Tiny, tickets: list[str], kind: str, changes: dict[str, Any]
) -> None:
    """Sliding windows, caps, learned or no positions, attention of their own, convolutions: the strategy that is chosen
    gives what the model itself gives one by one, also for tickets past every window.
    """
    folder, texts = tiny(kind, **changes), tickets[:12]
    chosen = load(folder)
    torch.testing.assert_close(
        scores(chosen, texts), scores(load(folder, strategy="single"), texts), atol=FLOAT32, rtol=0
    )


def test_a_linear_attention_model_runs_one_by_one(tiny: Tiny) -> None:
    """Mamba has no attention that could be packed and no cache of keys to expand; it is labelled all the same."""
    chosen = load(tiny("mamba", state_size=8, num_hidden_layers=2))
    assert chosen.choices.strategy == "single"
    assert set(chosen.choices.reasons) == {"packed", "padded"}
    assert chosen.classify(["I was charged twice"])[0].label in chosen.labels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forgotten_window_is_noticed(tiny: Tiny, dtype: str) -> None:
    """The fault: packed attention knows no window, alone no more than in a batch, so no certificate shows it.

    It is held against the stock model with a ticket past the window, and left out, and the reason is said.
    """
    folder = tiny("mistral", sliding_window=WINDOW)
    reason = load(folder, dtype).choices.reasons["packed"]
    assert reason.startswith("gives other states than the model itself, off by ")
    with pytest.raises(ConfigError, match=r"cannot be used here\. packed: gives other states.*leave the strategy out"):
        load(folder, dtype, strategy="packed")


@pytest.mark.parametrize("window", [200, 700])
def test_the_probe_is_longer_than_the_window(tiny: Tiny, window: int) -> None:
    """A wide window is noticed as well as a narrow one, if a ticket can be longer; one that none can pass is not."""
    assert load(tiny("mistral", sliding_window=window)).choices.strategy == "single"
    assert load(tiny("mistral", sliding_window=2048)).choices.strategy == "packed"


def test_our_layers_are_left_if_they_differ(tiny: Tiny, tickets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that pass one by one and are wrong together are put back: the model runs as transformers wrote it."""
    folder = tiny("llama")

    def wrong(model: Any) -> bool:
        torch.nn.init.normal_(model.base_model.layers[0].mlp.up_proj.weight)
        return True

    expected = scores(load(folder, "bfloat16", strategy="single"), tickets[:6])
    monkeypatch.setattr(opening, "fuse", wrong)
    chosen = load(folder, "bfloat16")
    assert (chosen.choices.strategy, chosen.choices.fused) == ("packed", False)
    torch.testing.assert_close(scores(chosen, tickets[:6]), expected, atol=0.5, rtol=0)


def test_bfloat16_rounds_no_rotary_frequency(tiny: Tiny) -> None:
    """The fault: a model turned into bfloat16 as a whole has rotary frequencies of three digits."""
    for kind in ("llama", "phi", "gemma"):
        model: Any = load(tiny(kind, head_dim=16), "bfloat16").strategy._model  # type: ignore[attr-defined]  # a Protocol
        assert model.base_model.rotary_emb.inv_freq.dtype is torch.float32


def test_a_model_that_cannot_be_run_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing works the message tells of every strategy, and no exception of the model's code comes through."""
    monkeypatch.setattr(Single, "hidden", Mock(side_effect=KeyError("states")))
    with pytest.raises(ConfigError, match=r"packed: cannot run.*padded: cannot run.*single: cannot run"):
        load(tiny("llama"))


def test_only_safetensors_are_read(tiny: Tiny, tmp_path: Path) -> None:
    """A folder with pickled weights alone is refused: reading them could run anything."""
    folder = tiny("llama")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path)
    load_tokenizer(folder).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*safetensors"):
        load_model(str(tmp_path), torch.float32)


def test_no_code_of_the_models_makers_is_run(tiny: Tiny, tmp_path: Path) -> None:
    """A folder that brings its own Python is refused, and the Python is not touched."""
    folder = Path(tiny("llama"))
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: ...\nclass Config: ...\n")
    config = (tmp_path / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "evil"')
    auto = '{"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},'
    (tmp_path / "config.json").write_text(config.replace("{", auto, 1))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(tmp_path), torch.float32)
    assert not (tmp_path / "ran").exists()


def test_an_unknown_dtype_is_refused(tiny: Tiny) -> None:
    """The message lists what there is."""
    with pytest.raises(ConfigError, match="dtype 'float16': expected one of float32, bfloat16"):
        load(tiny("llama"), "float16")
