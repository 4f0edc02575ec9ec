"""Times on a GPU: its own events, inputs that its cache does not hold, and limits of the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib.util import find_spec
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

import torch
from irkit_kernels._benching import peak_memory
from torch import Tensor

from benchmarks.harness import Row

__all__ = [
    "Case",
    "Device",
    "Limits",
    "ends_all",
    "find_device",
    "in_words",
    "measure",
    "measure_limits",
    "needs",
    "share",
]

ROUNDS, ROUND = 9, 0.05  # rounds, and seconds of a contender in each
MOST_CALLS = 20
TOLERANCE = {
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 2e-2,
    "int8": 2e-2,
}  # of the norm of the difference to that of what is exact

Way = Callable[[Any], Any]


class Device(NamedTuple):
    """Where tensors are, and how time is taken there.

    Attributes:
        name: Name in torch: ``cuda``, or ``cpu``, where everything is tiny, to see that it works.
        cache: Bytes of its last cache.
        seconds: Function that runs a function and returns its time on the device, and from call to end.
    """

    name: str
    cache: int
    seconds: Callable[[Callable[[], Any]], tuple[float, float]]


class Case(NamedTuple):
    """Ways to compute one result.

    Attributes:
        labels: The first columns of its rows, which name it.
        dtype: Precision of the inputs.
        inputs: Function that makes random inputs from a seed, in the memory of the device.
        ways: Functions from inputs to results by name, or the reason why a way is missing. ``irkit`` has to
            agree with ``exact`` in all results, other ways in the first one.
        exact: Function from the inputs to results in float64, or to their first rows.
        nbytes: Fewest bytes to be moved through memory.
        flops: Operations on the matrix units.
    """

    labels: Row
    dtype: str
    inputs: Callable[[int], Any]
    ways: Mapping[str, Way | str]
    exact: Callable[[Any], tuple[Tensor, ...]]
    nbytes: float
    flops: float = 0.0


class Limits(NamedTuple):
    """What the machine can do: bytes per second that a copy reads and writes, and FLOP/s by dtype."""

    copy: float
    products: Mapping[str, float]


def find_device() -> Device:
    """Return the GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return Device("cpu", 1 << 16, _host_seconds)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device("cuda", getattr(properties, "L2_cache_size", 0) or 64 << 20, _event_seconds)


@cache
def measure_limits(device: Device) -> Limits:
    """Copy far more than the cache holds, and multiply large matrices of random numbers."""
    large = device.name == "cuda"
    numbers = torch.empty(2, 1 << (30 if large else 20), dtype=torch.uint8, device=device.name).random_()
    copy = numbers.nbytes / _fastest(device, partial(numbers[0].copy_, numbers[1]))
    del numbers
    size, products = 8192 if large else 256, {}
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        a, b = (torch.randn(size, size, device=device.name).mul_(20).to(dtype) for _ in range(2))
        multiply = torch._int_mm if dtype == torch.int8 else torch.mm
        try:
            seconds = _fastest(device, partial(multiply, a, b.T))
        except RuntimeError:  # this dtype has no such product here
            continue
        products[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    if "bfloat16" in products:
        products["float16"] = products["bfloat16"]
    return Limits(copy, products)


def share(limits: Limits, dtype: str, nbytes: float, flops: float, seconds: float) -> Row:
    """Return the column ``% of limit``, and the name of the limit: the one that takes the most time."""
    least = {"memory": nbytes / limits.copy}
    if flops and dtype in limits.products:
        least["matrix"] = flops / limits.products[dtype]
    name = max(least, key=least.__getitem__)
    return {"% of limit": 100 * least[name] / seconds, "limit": name}


def needs(module: str, way: Way) -> Way | str:
    """Return a way that needs a module, or a word that the module is missing."""
    return way if find_spec(module) else f"needs {module}"


def measure(case: Case, device: Device) -> Iterator[Row]:
    """Compare each way with the exact result, then time those that are right, in turns.

    Every call has inputs that were last used so long ago that the cache holds them no more: all ways take
    the next of one circle of inputs.
    """
    try:
        yield from _measure(case, device)
    except Exception as error:
        if ends_all(error):
            raise
        yield {**case.labels, "error": in_words(error)}


def _measure(case: Case, device: Device) -> Iterator[Row]:
    # inputs that fill the cache several times over
    inputs = [case.inputs(seed) for seed in range(2 + int(4 * device.cache // case.nbytes))]
    exact = case.exact(inputs[0])

    # leave out what is missing, fails or differs
    ways, differences = dict[str, Way](), dict[str, float]()
    for name, way in case.ways.items():
        row = {**case.labels, "way": name}
        if isinstance(way, str):
            yield {**row, "skipped": way}
            continue
        try:
            differences[name] = _difference(way(inputs[0]), exact if name == "irkit" else exact[:1])
            for each in inputs:  # what is made once for each input is made now
                way(each)
        except Exception as error:
            if ends_all(error):
                raise
            yield {**row, "error": in_words(error)}
            continue
        if not differences[name] <= TOLERANCE[case.dtype]:
            yield {**row, "error": f"differs by {differences[name]:.2g}; not timed"}
            continue
        ways[name] = way

    # time the others in turns, and compare each round with the same round of torch
    circle = cycle(inputs)
    times = _turns({name: (lambda way=way: way(next(circle))) for name, way in ways.items()}, device)
    limits = measure_limits(device)
    for name, (seconds, calls) in times.items():
        row = {**case.labels, "way": name, "ms": 1e3 * median(seconds), "call ms": 1e3 * median(calls)}
        pairs = zip(times.get("torch", times[name])[0], seconds, strict=True)
        row["x torch"] = median(theirs / mine for theirs, mine in pairs) if "torch" in times else None
        row |= share(limits, case.dtype, case.nbytes, case.flops, median(seconds))
        row |= {"difference": differences[name]}
        yield {**row, "MB": peak_memory(lambda way=ways[name]: way(inputs[0]), device.name)}


def ends_all(error: BaseException) -> bool:
    """Return True if nothing works any more in this process."""
    return any(sign in str(error) for sign in ("CUDA error", "Triton Error [CUDA]"))


def in_words(error: BaseException) -> str:
    """Return the type of an error and the start of its message."""
    return f"{type(error).__name__}: {error!s:.200}"


def _turns(
    ways: Mapping[str, Callable[[], Any]], device: Device
) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds per call in each round, on the device and with the wait for it; ways take turns."""
    counts = {}
    for name, way in ways.items():
        counts[name] = max(1, min(MOST_CALLS, int(ROUND / max(device.seconds(way)))))
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():

            def calls(way: Callable[[], Any] = way, count: int = counts[name]) -> None:
                for _ in range(count):
                    way()

            for found, seconds in zip(times[name], device.seconds(calls), strict=True):
                found.append(seconds / counts[name])
    return times


def _difference(found: Any, exact: tuple[Tensor, ...]) -> float:
    """Return the norm of the difference over the norm of the exact result, the largest of several."""
    results = found if isinstance(found, tuple) else (found,)
    differences = []
    for got, wanted in zip(results, exact, strict=False):
        wanted = wanted.detach().to(got.device)
        difference = got[: len(wanted)].detach().double() - wanted
        differences.append(float(difference.norm() / wanted.norm()))
    return max(differences) if all(error == error for error in differences) else float("nan")


def _fastest(device: Device, run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    return min(device.seconds(run)[0] for _ in range(10))


def _event_seconds(run: Callable[[], Any]) -> tuple[float, float]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    host = time.perf_counter() - begin
    # The device sleeps until everything is launched, or short kernels would wait for Python.
    torch.cuda._sleep(int(2e9 * min(host, 0.05)))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3, host


def _host_seconds(run: Callable[[], Any]) -> tuple[float, float]:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin,) * 2
