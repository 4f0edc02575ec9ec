"""What benches of kernels share: time and memory of several ways to the same result."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["on_cores", "peak_memory", "take_turns"]


def take_turns(ways: Mapping[str, Callable[[], Any]], rounds: int, cores: int) -> dict[str, list[float]]:
    """Seconds of every way in every round; of CPU time on one core, which neighbours disturb less."""
    clock = time.process_time if cores == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, function in ways.items():
            start = clock()
            function()
            seconds[way].append(clock() - start)
    return seconds


def peak_memory(function: Callable[[], Any], device: str) -> float:
    """Most memory a call takes at a time, in MB."""
    gc.collect()
    if device == "cuda":
        _wait(device)
        before = torch.cuda.memory_allocated() / 2**20
        torch.cuda.reset_peak_memory_stats()
        function()
        _wait(device)
        return torch.cuda.max_memory_allocated() / 2**20 - before
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed goes back to the system
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    function()
    return _status("VmHWM") - before


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Let all threads of the process run on so many cores, whatever they belong to; 0 changes nothing."""
    threads, mine = torch.get_num_threads(), os.sched_getaffinity(0)
    try:
        if count:
            torch.set_num_threads(count)
            _pin(set(sorted(mine)[:count]))
        yield
    finally:
        torch.set_num_threads(threads)
        _pin(mine)


def _pin(cores: set[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _status(name: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1024
