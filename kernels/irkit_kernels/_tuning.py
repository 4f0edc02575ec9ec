"""What the Triton kernels share: how a configuration is chosen, and for which launches it holds."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton

__all__ = ["INTERPRETED", "size_class", "tuned"]

INTERPRETED = bool(triton.knobs.runtime.interpret)
_PROGRAMS = (256, 4096)  # up to here: less than two programs a multiprocessor, a wave or a few, many
_LENGTHS = (32, 128, 512)  # rows that a program goes through


def size_class(programs: int, length: int = 0) -> int:
    """Number of the class of problems that a launch belongs to: few programs or many, of short loops or long.

    What is fastest for ten documents is not for a thousand, but to tune for every number would take a second
    each time. There are three classes of programs, and four of lengths.

    Args:
        programs: Independent pieces of work, such as documents to be scored.
        length: Rows that each of them goes through, on average.
    """
    return 10 * sum(programs > most for most in _PROGRAMS) + sum(length > most for most in _LENGTHS)


def tuned(configs: Sequence[triton.Config]) -> Callable[[Any], Any]:
    """Decorate a kernel so that it runs with the fastest of some configurations.

    A configuration is chosen once for every dtype, every value of a ``constexpr`` that the configurations do
    not set, and every value of the argument ``size``, which is a `size_class`. Triton keeps what it has
    measured in its cache on disk. The interpreter takes the first configuration.
    """

    def decorate(kernel: Any) -> Any:
        if INTERPRETED:
            return triton.autotune(configs=configs[:1], key=[])(kernel)
        flags = [p.name for p in kernel.params if p.is_constexpr and p.name not in configs[0].kwargs]
        return triton.autotune(configs=list(configs), key=[*flags, "size"], cache_results=True)(kernel)

    return decorate
