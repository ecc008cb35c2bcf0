"""Whether this machine is fit to run the model: one small function a question, each giving one finding.

The first two are quick; the others load torch.
"""

import os
from pathlib import Path

from worker.engine.catalogue import CATALOGUE
from worker.engine.model import locate
from worker.errors import ConfigError
from worker.finding import Finding, Level

CPUINFO = Path("/proc/cpuinfo")
# As Linux names them on x86 and on ARM.
BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


def judge_machine(model_name: str, *, quick: bool) -> list[Finding]:
    """All that concerns this machine; `quick` leaves out what loads torch."""
    findings = [model(model_name), processor()]
    return findings if quick else [*findings, *_judge_with_torch()]


def model(name: str) -> Finding:
    """Whether a model is here and whole. The sha256 of one that comes by name was checked before it was converted."""
    try:
        place = locate(name, offline=True)
    except ConfigError as error:
        advice = f"lengthwise model pull {name}" if name in CATALOGUE else "Choose another --model"
        return Finding("model", Level.WARN, str(error), advice)
    folder = Path(place)
    if not folder.is_dir():
        return _hub_model(name)
    if lacking := [word for word in ("config.json", "*.safetensors", "tokenizer*") if not any(folder.glob(word))]:
        return Finding("model", Level.WARN, f"{folder} lacks {', '.join(lacking)}", _mend_model(name, folder))
    if faulty := [fault for file in sorted(folder.glob("*.safetensors")) if (fault := _fault_of(file))]:
        return Finding("model", Level.WARN, "; ".join(faulty), _mend_model(name, folder))
    checked = ", made from a file with the right sha256" if name in CATALOGUE else ""
    return Finding("model", Level.OK, f"{name} in {folder}, whole{checked}")


def processor(cpuinfo: Path = CPUINFO) -> Finding:
    """Whether the processor multiplies bfloat16 natively; torch is not asked, so that this is quick."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return Finding("processor", Level.INFO, f"cannot see: there is no {cpuinfo} here")
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    found = [flag for flag in BFLOAT16_FLAGS if flag in flags]
    if found:
        return Finding("processor", Level.OK, f"bfloat16 products by {', '.join(found)}")
    return Finding(
        "processor", Level.INFO, "no bfloat16 products: float32, which is several times slower, will be used"
    )


def _judge_with_torch() -> list[Finding]:
    try:
        from worker.engine.machine import faster_dtype, usable_cores
    except ImportError as error:
        return [Finding("torch", Level.WARN, f"{error}: no model can be run here", "pip install 'lengthwise[worker]'")]
    usable, present = usable_cores(), os.cpu_count() or 1
    dtype, reason = faster_dtype("cpu")
    return [
        Finding("cores", Level.OK if usable == present else Level.INFO, f"{usable} of {present} may be used"),
        Finding("dtype", Level.INFO, f"{str(dtype).removeprefix('torch.')}: {reason}"),
    ]


def _hub_model(name: str) -> Finding:
    """A Hugging Face id: in the cache or to be fetched."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        return Finding("model", Level.WARN, f"{error}", "pip install 'lengthwise[worker]'")
    place = try_to_load_from_cache(name, "config.json")
    if isinstance(place, str):
        return Finding(
            "model", Level.OK, f"{name} in the Hugging Face cache, {Path(place).parent}; its files were not checked"
        )
    return Finding("model", Level.INFO, f"{name} is not in the Hugging Face cache: the first start fetches it")


def _fault_of(file: Path) -> str | None:
    """What is wrong with a file of weights: its header is read, and its length must be what that says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            return None
    except (OSError, SafetensorError) as error:
        return f"{file}: {error}"


def _mend_model(name: str, folder: Path) -> str:
    if name in CATALOGUE:
        return f"Remove {folder}, then lengthwise model pull {name}"
    return "Copy the folder anew: it needs config.json, the tokenizer and every *.safetensors file"
