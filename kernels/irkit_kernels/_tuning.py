"""Tune Triton kernels: choose the fastest configuration once per class of launches."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import triton

__all__ = ["INTERPRETED", "size_class", "tuned"]

INTERPRETED = bool(triton.knobs.runtime.interpret)
_PROGRAMS = (256, 4096)  # at most so many: below two programs per multiprocessor; a few waves; above: many
_LENGTHS = (32, 128, 512)  # rows that each program reads


def size_class(programs: int, length: int = 0) -> int:
    """Return the class of a launch, by its number of programs and the length of their loops.

    The fastest configuration for ten documents is not the fastest for a thousand. Tuning takes about a
    second, too long to repeat for every size. There are three classes of programs and four of lengths.

    Args:
        programs: Independent pieces of work, such as documents to score.
        length: Average number of rows that one program reads.
    """
    return 10 * sum(programs > limit for limit in _PROGRAMS) + sum(length > limit for limit in _LENGTHS)


def tuned(configs: Sequence[triton.Config]) -> Callable[[Any], Any]:
    """Decorate a kernel so that it runs with the fastest of ``configs``.

    The choice is made once per dtype, per value of each ``constexpr`` that the configurations leave open,
    and per value of the argument ``size``, which is a `size_class`. Triton stores the measurements in its
    cache on disk. The interpreter always takes the first configuration. Threads launch one after the other,
    because the tuner keeps the arguments of a launch in itself (triton-lang/triton#11494).
    """

    def decorate(kernel: Any) -> Any:
        if INTERPRETED:
            return triton.autotune(configs=configs[:1], key=[])(kernel)
        flags = [p.name for p in kernel.params if p.is_constexpr and p.name not in configs[0].kwargs]
        tuner = triton.autotune(configs=list(configs), key=[*flags, "size"], cache_results=True)(kernel)
        lock = threading.RLock()

        def run(*arguments: Any, **named: Any) -> Any:
            with lock:
                return type(tuner).run(tuner, *arguments, **named)

        tuner.run = run
        return tuner

    return decorate
