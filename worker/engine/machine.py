"""What this machine is and can do: cores we may use, and how fast its matrix products are."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

# Large enough to be limited by arithmetic, small enough to take milliseconds.
_PRODUCT_ROWS, _PRODUCT_WIDTH = 256, 1024
_REPEATS = 5
# bfloat16 is worth its rounding only where the processor multiplies it natively.
_WORTH_IT = 1.3


def usable_cores() -> int:
    """Cores this process may use: those it is bound to, and no more than its container's quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _container_quota()
    return max(1, min(bound, int(quota) if quota else bound))


def _container_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The cores a container may use on average (cgroup 2, then 1); None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if quota in ("max", "-1") else float(quota) / float(period)


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe(device: str) -> str:
    """The machine in one line, for figures and for the tuning cache."""
    if device != "cpu":
        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
        return f"{name}, torch {torch.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{processor()}, {usable_cores()} cores, {capability}, torch {torch.__version__}"


def product_gflops(
    dtype: torch.dtype, device: str = "cpu", rows: int = _PRODUCT_ROWS, inner: int = _PRODUCT_WIDTH, outer: int = 0
) -> float:
    """Speed of a product `[rows, inner] x [inner, outer]`, the median of a few, in 10^9 operations a second."""
    outer = outer or inner
    states = torch.randn(rows, inner, device=device).to(dtype)
    weight = torch.randn(outer, inner, device=device).to(dtype)
    seconds = median_seconds(lambda: torch.nn.functional.linear(states, weight), device)
    return 2 * rows * inner * outer / seconds / 1e9


def layer_tokens_per_s(dtype: torch.dtype, width: int, inner: int, threads: int) -> float:
    """Tokens a second through the larger half of a decoder layer, on so many threads; torch keeps its own number."""
    before = torch.get_num_threads()
    rows = torch.randn(_PRODUCT_ROWS, width).to(dtype)
    up, down = torch.randn(inner, width).to(dtype), torch.randn(width, inner).to(dtype)
    functional = torch.nn.functional
    try:
        torch.set_num_threads(threads)
        seconds = median_seconds(
            lambda: functional.linear(functional.silu(functional.linear(rows, up)), down), repeats=4 * _REPEATS
        )
    finally:
        torch.set_num_threads(before)
    return _PRODUCT_ROWS / seconds


def median_seconds(run: Callable[[], object], device: str = "cpu", repeats: int = _REPEATS) -> float:
    """Median time of a few runs after one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        _wait_for(device)
        began_s = time.perf_counter()
        run()
        _wait_for(device)
        times.append(time.perf_counter() - began_s)
    return max(median(times), 1e-9)


def _wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device.startswith("mps"):
        torch.mps.synchronize()


def faster_dtype(device: str) -> tuple[torch.dtype, str]:
    """The dtype to run in on this machine, and why. float16 is never tried: most processors emulate it."""
    plain, short = (product_gflops(dtype, device) for dtype in (torch.float32, torch.bfloat16))
    reason = f"bfloat16 products at {short:.0f} GFLOP/s, float32 at {plain:.0f}"
    return (torch.bfloat16 if short > _WORTH_IT * plain else torch.float32), reason
