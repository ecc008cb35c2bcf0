"""Find a model, fetch and convert it once, load it."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.engine.catalogue import CATALOGUE, DEFAULT_MODEL, fetch, quieten
from worker.errors import ConfigError

if TYPE_CHECKING:
    import torch

# Of each tensor, spread over it.
_SAMPLED_WEIGHTS = 1024

__all__ = ["DEFAULT_MODEL", "LoadedModel", "layer_shape", "load_model", "load_tokenizer", "locate"]


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode, with its tokenizer. `window` is its longest input in tokens."""

    name: str
    model: Any
    tokenizer: Any
    window: int
    dtype: "torch.dtype"
    fingerprint: str  # a hash of a sample of every weight, the same in every dtype: other weights give another


def locate(name: str, *, offline: bool = False) -> str:
    """What transformers should load for `name`: a folder on this machine, or a Hugging Face id as it is.

    A catalogue name is fetched and converted if it was not yet; with `offline` it is not, and ConfigError says so.
    """
    if name in CATALOGUE:
        return str(fetch(name, offline=offline))
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name
    raise ConfigError(
        f"no model {name!r}: expected one of {', '.join(CATALOGUE)}, a folder with safetensors, or a Hugging Face id "
        "like Qwen/Qwen2.5-0.5B-Instruct"
    )


def load_tokenizer(name: str) -> Any:
    """The tokenizer alone; enough to show a prompt. Raises ConfigError."""
    place = locate(name)
    from transformers import AutoTokenizer

    with _explained(name):
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False)


def load_model(name: str, dtype: "torch.dtype", *, device: str = "cpu") -> LoadedModel:
    """Load model and tokenizer. Safetensors only, no code from the model's makers. Raises ConfigError."""
    tokenizer = load_tokenizer(name)
    from transformers import AutoModelForCausalLM

    with _explained(name):
        model = AutoModelForCausalLM.from_pretrained(
            locate(name), dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    # from_pretrained has put it into evaluation mode already.
    model.requires_grad_(False).to(device)  # type: ignore[arg-type]  # its decorator hides the overloads
    window = getattr(model.config, "max_position_embeddings", None) or 2048
    return LoadedModel(name, model, tokenizer, int(window), dtype, _fingerprint(model))


def _fingerprint(model: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLED_WEIGHTS)].cpu().bfloat16()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def layer_shape(name: str) -> tuple[int, int]:
    """Width of a model's residual stream, and of the inside of its layers. Raises ConfigError."""
    place = locate(name)
    from transformers import AutoConfig

    with _explained(name):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False).get_text_config()
    width = int(config.hidden_size)
    return width, int(getattr(config, "intermediate_size", None) or 4 * width)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what transformers says of a model it cannot load into one sentence for the user."""
    quieten()
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model {name!r} cannot be loaded: {reason}. Expected a folder with config.json, tokenizer.json and "
            f"*.safetensors, or a Hugging Face id and a way to reach the hub; `--model {DEFAULT_MODEL}` always works."
        ) from error
