"""Fuzzing: mutations are tried in forked children, where a crash or a hang is one outcome among others.

A target is a test that calls the fixture ``fuzz``::

    def test_reader(fuzz, mutate):
        def make(random):  # a case: a list of steps that JSON can hold; fewer steps are a smaller case
            return [mutate.choose(random, GOOD) for _ in range(random.randint(1, 3))]

        def run(case):  # in the child; an IrkitError is "clean", any other exception "foreign"
            content = functools.reduce(mutate.apply, case, GOOD)
            return "right" if read(content) == expected else "wrong"

        fuzz("reader", make, run)

``run`` should have been called once before, as every child imports anew what the parent has not.

Outcomes are ``clean``, ``right`` and ``different`` (a result of mutated values, none that is promised). What
fails is ``wrong``, ``foreign``, ``memory``, ``crash``, ``hang`` and any other word that ``run`` returns. The
cases in ``corpus/NAME.json`` are always tried; then random ones, for IRKIT_FUZZ_SECONDS, of IRKIT_FUZZ_SEED.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import itertools
import json
import os
import resource
import select
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch

from irkit.errors import IrkitError

Case: TypeAlias = list[Any]
Outcome: TypeAlias = tuple[str, str]  # its name, and what is known of it

SECONDS = float(os.environ.get("IRKIT_FUZZ_SECONDS", "0.2"))  # a target
SEED = os.environ.get("IRKIT_FUZZ_SEED", "0")
PASSING = ("clean", "right", "different")
_CPU_SECONDS = 10  # a case may take; by the clock _WAITING
_WAITING = 120
_MEMORY = 2 << 30  # bytes that a child may take beyond what it begins with
_BATCH = 200  # cases a child
_MOST = 12  # different findings, after which a target gives up

# ---- mutations ----

_INTEGERS = sorted(
    {
        sign * ((1 << bits) + more)
        for bits in (0, 7, 8, 15, 16, 31, 32, 53, 63, 64)
        for more in (-1, 0, 1)
        for sign in (1, -1)
    }
)
_FLOATS = (0.5, -0.0, 1e-320, 3e38, 1e308, float("inf"), float("-inf"), float("nan"))
_OTHERS = (
    None,
    True,
    False,
    "",
    "x",
    "0",
    "\0",
    "\ud800",
    "../x",
    "/dev/zero",
    [],
    {},
    [0],
    {"x": 0},
    [[[]]],
)


def _choose(random: Random, value: Any) -> list[Any]:
    """An edit of bytes, or of a value of JSON, itself one."""
    return _choose_bytes(random, value) if isinstance(value, bytes) else _choose_json(random, value)


def _choose_bytes(random: Random, content: bytes) -> list[Any]:
    size = len(content)
    place = random.randrange(size + 1)
    kind = random.choice(("flip", "write", "write", "write", "cut", "extend", "fill", "move"))
    if kind == "flip":
        return [kind, place, random.randrange(8)]
    if kind == "write":  # a number that is at the border of something, at a place where one may be
        width = random.choice((1, 2, 4, 8))
        number = random.choice((*_INTEGERS, size, size - 1, size + 1)) + random.choice(
            (0, 0, 0, random.randrange(64))
        )
        return [kind, place // width * width, (number % (1 << 8 * width)).to_bytes(width, "little").hex()]
    if kind == "cut":
        return [kind, place]
    if kind == "extend":
        return [kind, random.choice((1, 3, 8, 64, 4096)), random.choice((0, 0xFF, 0x41))]
    if kind == "fill":
        return [kind, place, random.choice((1, 8, 64, 1024)), random.choice((0, 0xFF, 0x7F, 0x80))]
    return [kind, place, random.randrange(size + 1), random.choice((1, 4, 8, 64))]


def _choose_json(random: Random, value: Any) -> list[Any]:
    path, here = [], value
    while isinstance(here, dict | list) and here and random.random() < 0.9:  # some way down
        step = random.choice(list(here)) if isinstance(here, dict) else random.randrange(len(here))
        path.append(step)
        here = here[step]
    if path and random.random() < 0.1:
        return ["drop", path]
    choices: list[Any] = [
        random.choice(_INTEGERS),
        random.choice(_FLOATS),
        copy.deepcopy(random.choice(_OTHERS)),
    ]
    if isinstance(here, int | float):
        choices += [here + 1, here - 1, -here, here * 2, str(here), [here]] * 2
    elif isinstance(here, str):
        choices += [here[:-1], here + "0", here * 50, here[::-1], [here]] * 2
    elif isinstance(here, list):
        choices += [here[:-1], here + here, here[::-1], dict.fromkeys(map(str, here))] * 2
    elif isinstance(here, dict):
        choices += [list(here), {**here, "more": 0}] * 2
    return ["deep", path, 300] if random.random() < 0.02 else ["set", path, random.choice(choices)]


def _apply(value: Any, edit: list[Any]) -> Any:
    """The mutated value; places that are not there, after other edits, stay as they are."""
    name, *rest = edit
    if isinstance(value, bytes):
        return bytes(_apply_bytes(bytearray(value), name, *rest))
    path, *what = rest
    new: Any = copy.deepcopy(what[0]) if what else None
    if name == "deep":
        new = []
        for _ in range(what[0]):
            new = [new]
    if not path:
        return new
    result = copy.deepcopy(value)
    with contextlib.suppress(KeyError, IndexError, TypeError):
        here = result
        for step in path[:-1]:
            here = here[step]
        if name == "drop":
            del here[path[-1]]
        else:
            here[path[-1]] = new
    return result


def _apply_bytes(content: bytearray, name: str, *what: Any) -> bytearray:
    size = len(content)
    if name == "flip" and what[0] < size:
        content[what[0]] ^= 1 << what[1]
    elif name == "write":
        new = bytes.fromhex(what[1])[: max(0, size - what[0])]
        content[what[0] : what[0] + len(new)] = new
    elif name == "cut":
        del content[what[0] :]
    elif name == "extend":
        content += bytes([what[1]]) * what[0]
    elif name == "fill":
        some = min(what[1], max(0, size - what[0]))
        content[what[0] : what[0] + some] = bytes([what[2]]) * some
    elif name == "move":  # what is at one place, to another
        new = content[what[0] : what[0] + what[2]][: max(0, size - what[1])]
        content[what[1] : what[1] + len(new)] = new
    return content


@pytest.fixture(scope="session")
def mutate() -> SimpleNamespace:
    """``choose(random, value)`` makes an edit of bytes or JSON, ``apply(value, edit)`` applies it."""
    return SimpleNamespace(choose=_choose, apply=_apply)


# ---- running ----


@pytest.fixture(scope="session")
def attempt() -> Callable[..., Iterator[tuple[Case, Outcome]]]:
    """Cases with their outcomes, each tried in a child."""
    return _attempt


def _attempt(
    cases: Iterator[Case], run: Callable[[Case], str], deadline: float, cpu_seconds: float = _CPU_SECONDS
) -> Iterator[tuple[Case, Outcome]]:
    left: list[Case] = []
    while time.monotonic() < deadline:
        left = left or list(itertools.islice(cases, _BATCH))
        if not left:
            return
        outcomes = _in_child(left, run, deadline, cpu_seconds)
        yield from zip(left, outcomes, strict=False)
        left = left[len(outcomes) :]


def _in_child(
    cases: list[Case], run: Callable[[Case], str], deadline: float, cpu_seconds: float
) -> list[Outcome]:
    """Outcomes of the cases that one child came to, the last of which may have ended it."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as errors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks beside threads, of which the child makes no use
            child = os.fork()
        if not child:
            try:
                os.close(reading)
                _be_child(cases, run, deadline, cpu_seconds, writing, errors.fileno())
            finally:
                os._exit(1)  # it never returns to pytest
        os.close(writing)
        content = b""
        while waiting := bool(select.select([reading], [], [], _WAITING)[0]):
            part = os.read(reading, 1 << 16)
            content += part
            if not part:  # it has ended
                break
        os.close(reading)
        if not waiting:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcomes: list[Outcome] = [tuple(json.loads(line)) for line in content.splitlines() if line]
        if status:
            errors.seek(0)
            stack = errors.read().decode(errors="replace")[:3000]
            reason = signal.Signals(-status).name if status < 0 else f"exit {status}"
            hung = not waiting or status == -signal.SIGPROF
            outcomes.append(("hang" if hung else "crash", f"{reason}\n{stack}"))
    return outcomes


def _be_child(
    cases: list[Case], run: Callable[[Case], str], deadline: float, cpu_seconds: float, to: int, errors: int
) -> None:
    torch.set_num_threads(1)  # OpenMP's other threads did not survive the fork
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    faulthandler.enable(errors)
    warnings.simplefilter("ignore")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.write(to, b"\n")
    for case in cases:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF ends it, also inside of native code
        os.write(to, json.dumps(_outcome(case, run)).encode() + b"\n")
        if time.monotonic() > deadline:
            break
    os._exit(0)


def _outcome(case: Case, run: Callable[[Case], str]) -> Outcome:
    try:
        return run(copy.deepcopy(case)), ""
    except IrkitError as error:
        return "clean", str(error)[:300]
    except BaseException as error:
        full = ("not enough memory", "bad_alloc")  # as torch and FAISS have it
        exhausted = isinstance(error, MemoryError) or any(words in str(error) for words in full)
        stack = "".join(traceback.format_tb(error.__traceback__)[-6:])
        return "memory" if exhausted else "foreign", f"{type(error).__name__}: {error!s:.200}\n{stack}"


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``fuzz(name, make, run)`` tries the corpus of a target, then random cases; fails with what it found."""

    def fuzz(name: str, make: Callable[[Random], Case], run: Callable[[Case], str]) -> None:
        corpus = Path(__file__).parent / "corpus" / f"{name}.json"
        kept = json.loads(corpus.read_text()) if corpus.exists() else []
        fresh = (make(Random(f"{SEED}/{name}/{number}")) for number in itertools.count())
        forever, deadline = float("inf"), time.monotonic() + SECONDS
        counts, found = Counter[str](), dict[str, tuple[Case, Outcome]]()
        for case, outcome in itertools.chain(
            _attempt(iter(kept), run, forever), _attempt(fresh, run, deadline)
        ):
            counts[outcome[0]] += 1
            if outcome[0] not in PASSING:
                found.setdefault(_signature(outcome), (case, outcome))
            if len(found) >= _MOST:
                break
        told = f"{name}: {counts.total()} cases: " + ", ".join(
            f"{n} {what}" for what, n in sorted(counts.items())
        )
        request.node.user_properties.append(("fuzz", told))
        if found:
            parts = [_describe(_smallest(case, outcome, run), outcome) for case, outcome in found.values()]
            pytest.fail(
                f"{told}; seed {SEED}. Once repaired, keep each case in {corpus}:\n" + "\n".join(parts),
                pytrace=False,
            )

    return fuzz


def _signature(outcome: Outcome) -> str:
    """The same for findings that have one cause, most likely."""
    name, detail = outcome
    lines = [line for line in detail.splitlines() if "/irkit" in line and "File " in line]
    place = lines[:2] if name in ("crash", "hang") else lines[-1:]  # where faulthandler, or Python, was last
    return " ".join([name, detail.partition(":")[0][:60], *place])


def _smallest(case: Case, outcome: Outcome, run: Callable[[Case], str]) -> Case:
    """As few of the steps as give the same outcome."""
    for place in reversed(range(len(case))):
        less = case[:place] + case[place + 1 :]
        tried = [found for _, found in _attempt(iter([less]), run, float("inf"))] if less else []
        if tried and _signature(tried[0]) == _signature(outcome):
            case = less
    return case


def _describe(case: Case, outcome: Outcome) -> str:
    return f"\n{json.dumps(case)}\n  {outcome[0]}: " + outcome[1].strip().replace("\n", "\n    ")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many cases of each target had which outcome."""
    reports = itertools.chain(*(terminalreporter.stats.get(kind, []) for kind in ("passed", "failed")))
    lines = [told for report in reports for key, told in report.user_properties if key == "fuzz"]
    if lines:
        terminalreporter.section("fuzz")
        terminalreporter.write("\n".join(sorted(lines)) + "\n")
