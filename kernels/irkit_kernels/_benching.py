"""Measure time and memory of several implementations of one operation; shared by all benches of kernels."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

__all__ = ["against_torch", "each", "on_cores", "peak_memory", "print_rows", "take_turns"]


def each(way: Callable[[int], Any], count: int) -> Callable[[], None]:
    """Return a function that calls ``way`` with 0 to ``count - 1``."""

    def call_all() -> None:
        for number in range(count):
            way(number)

    return call_all


def print_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print each row on a line, with the name of a number before it; a float has 4 digits."""
    for row in rows:
        texts = (
            f"{name} {value:.4g}" if isinstance(value, float) else str(value) for name, value in row.items()
        )
        print("  ".join(texts))  # noqa: T201


def take_turns(ways: Mapping[str, Callable[[], Any]], rounds: int, cores: int) -> dict[str, list[float]]:
    """Time every implementation once per round, so that all of them meet the same load of the machine.

    Args:
        ways: Functions by name.
        rounds: How often each function is called.
        cores: Number of cores that the functions use. With 1, the CPU time is measured, which other processes
            disturb less than wall time; otherwise the wall time.

    Returns:
        The seconds of each call, by name.
    """
    clock = time.process_time if cores == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, function in ways.items():
            start = clock()
            function()
            seconds[way].append(clock() - start)
    return seconds


def against_torch(
    name: str, theirs: Callable[[], Any], ours: Callable[[], Any], rounds: int
) -> dict[str, Any]:
    """Time a kernel called ``name`` and torch in turns, on ``torch.get_num_threads()`` threads.

    Returns:
        The threads; the best milliseconds of both; and ``x torch``, the median over the rounds of torch's
        time divided by the kernel's.
    """
    times = take_turns({"torch": theirs, name: ours}, rounds, cores=0)
    ratios = (a / b for a, b in zip(*times.values(), strict=True))
    best = {f"{way} ms": round(1e3 * min(seconds), 4) for way, seconds in times.items()}
    return {"threads": torch.get_num_threads(), **best, "x torch": round(median(ratios), 2)}


def peak_memory(function: Callable[[], Any], device: str) -> float:
    """Return the largest amount of memory that a call occupies at one time, in MB."""
    gc.collect()
    if device == "cuda":
        _wait(device)
        before = torch.cuda.memory_allocated() / 2**20
        torch.cuda.reset_peak_memory_stats()
        function()
        _wait(device)
        return torch.cuda.max_memory_allocated() / 2**20 - before
    ctypes.CDLL(None).malloc_trim(0)  # give freed memory back to the system
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    function()
    return _status("VmHWM") - before


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Restrict all threads of the process to ``count`` cores; 0 changes nothing."""
    threads, available = torch.get_num_threads(), os.sched_getaffinity(0)
    try:
        if count:
            torch.set_num_threads(count)
            _set_affinity(set(sorted(available)[:count]))
        yield
    finally:
        torch.set_num_threads(threads)
        _set_affinity(available)


def _set_affinity(cores: set[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _status(name: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1024
