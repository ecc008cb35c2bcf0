"""What a machine offers: cores within a container's quota, the faster dtype and why, figures kept for next time."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from worker.engine import machine, tuning
from worker.engine.machine import describe, faster_dtype, usable_cores
from worker.engine.prompt import Prompt
from worker.engine.tuning import CANDIDATES, tokens_a_batch


@pytest.mark.parametrize(
    ("content", "cores"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("50000 100000\n", 0.5), ("", None), ("nonsense\n", None)],
)
def test_the_quota_of_cgroup_2(tmp_path: Path, content: str, cores: float | None) -> None:
    """`cpu.max` holds quota and period; `max`, an empty or a strange file are no limit."""
    (tmp_path / "cpu.max").write_text(content)
    assert machine._container_quota(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("200000", 2.0), ("25000", 0.25)])
def test_the_quota_of_cgroup_1(tmp_path: Path, quota: str, cores: float | None) -> None:
    """Quota and period are files of their own; -1 is no limit."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert machine._container_quota(tmp_path) == cores


def test_no_container_is_no_limit(tmp_path: Path) -> None:
    """Without these files there is no quota."""
    assert machine._container_quota(tmp_path) is None


@pytest.mark.parametrize(("quota", "expected"), [(0.25, 1), (1.9, 1), (None, 3), (64.0, 3)])
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    """No more than the quota, no more than the process is bound to, and never none."""
    monkeypatch.setattr(machine, "_container_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert usable_cores() == expected


@pytest.mark.parametrize(
    ("short", "expected"), [(400.0, torch.bfloat16), (105.0, torch.float32), (10.0, torch.float32)]
)
def test_the_faster_dtype_is_measured(monkeypatch: pytest.MonkeyPatch, short: float, expected: torch.dtype) -> None:
    """bfloat16 where it is clearly faster, float32 elsewhere; the reason has both figures."""
    speeds = {torch.float32: 100.0, torch.bfloat16: short}
    monkeypatch.setattr(machine, "product_gflops", lambda dtype, _: speeds[dtype])
    dtype, reason = faster_dtype("cpu")
    assert dtype is expected
    assert f"{short:.0f} GFLOP/s" in reason
    assert "float32 at 100" in reason


def test_this_machine_has_a_dtype_and_a_name() -> None:
    """Measured here and now, one of the two comes out; the description has what speed depends on."""
    assert faster_dtype("cpu")[0] in (torch.float32, torch.bfloat16)
    assert torch.__version__ in describe("cpu")


def wrap(ids: Sequence[int]) -> Prompt:
    """A prompt of a ticket's ids alone."""
    return Prompt(tuple(ids))


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A home of its own and a clock that shows how many prompts were scored: a batch of 512 tokens is the fastest."""
    seen: list[int] = []
    monkeypatch.setenv("LENGTHWISE_HOME", str(tmp_path))

    def seconds(run: object, **_: object) -> float:
        assert callable(run)
        run()
        return seen[-1] / (100 if seen[-1] < 500 else 1000)

    monkeypatch.setattr(tuning, "median_seconds", seconds)
    return seen


def tune(scored: list[int], key: str = "here") -> tuple[int, str]:
    """The budget, by a scorer that notes each batch's tokens."""
    return tokens_a_batch(lambda batch: scored.append(sum(len(prompt.ids) for prompt in batch)), wrap, range(1000), key)


def test_the_smallest_of_the_fastest_is_chosen_and_remembered(scored: list[int]) -> None:
    """Batches are tried once for a machine and model; the second start reads what the first one found."""
    tokens, reason = tune(scored)
    assert tokens == 512
    assert "512: 1000 tokens/s" in reason
    assert len(scored) == len(CANDIDATES)
    assert tune(scored) == (512, "measured here before")
    assert len(scored) == len(CANDIDATES)
    assert tune(scored, "another model")[1] != "measured here before"
    assert tune(scored)[1] == "measured here before"


@pytest.mark.parametrize("content", ["", "{", '{"here": 5', "[1]", '"x"', "\x00"])
def test_a_torn_memory_is_ignored(scored: list[int], tmp_path: Path, content: str) -> None:
    """A file that is torn or strange is measured anew and mended."""
    (tmp_path / "tuning.json").write_text(content)
    assert tune(scored)[0] == 512
    assert tune(scored) == (512, "measured here before")


@pytest.mark.parametrize("value", ['"many"', "null", "-5", "[512]", "0.5"])
def test_a_strange_figure_is_measured_anew(scored: list[int], tmp_path: Path, value: str) -> None:
    """A file that is whole and holds something that is no budget is not believed."""
    tune(scored)
    memory = tmp_path / "tuning.json"
    memory.write_text(memory.read_text().replace("512", value))
    assert tune(scored)[0] == 512
    assert len(scored) == 2 * len(CANDIDATES)


def test_a_home_that_cannot_be_written_costs_only_the_memory(
    scored: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be kept, the measurement is made at each start, and that is all."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LENGTHWISE_HOME", str(tmp_path / "file"))
    assert tune(scored)[0] == tune(scored)[0] == 512
    assert len(scored) == 2 * len(CANDIDATES)
