"""LLVM IR that rotates rows, and rotates them back: the definition is in `rotation`.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.
"""

from __future__ import annotations

from .._typed import Function, Struct, module
from .cpu_frame import CHUNK, LANES
from .cpu_prepare import ROUNDS, hadamard

__all__ = ["ROTATION", "write_rotation"]

ROTATION = Struct(
    8,
    n="i64",
    width="i64",
    rows="float*",  # (n, width), which are replaced
    signs="float*",  # (3, width), in the order in which they are applied
    order="u32*",  # (3, width), too
    scratch="float*",  # (width,)
)


def write_rotation(back: bool) -> str:
    """Return the LLVM IR module of ``rotate_rows(frame)``.

    A round multiplies by signs, transforms chunks and permutes; with ``back`` it permutes first, and
    multiplies last.
    """
    x = Function("rotate_rows", public=True, f=ROTATION)
    (f,) = x.parameters
    width, other, last = f.width, f.scratch, f.width - 1
    with x.range(0, f.n) as rows:
        row = f.rows.at(rows.i * width)
        with x.range(0, ROUNDS) as rounds:
            signs, order = f.signs.at(rounds.i * width), f.order.at(rounds.i * width)
            source, target = (other, row) if back else (row, other)

            def permute() -> None:
                with x.range(0, width, 4) as loop:
                    for j in range(4):
                        here = x.minimum(order[loop.i + j].to("i64"), last)
                        source[loop.i + j] = target[here]

            if back:
                permute()
            with x.range(0, width, CHUNK) as chunks:
                places = [chunks.i + j for j in range(0, CHUNK, LANES)]
                parts = [source.vectors(LANES)[place] for place in places]
                factors = [signs.vectors(LANES)[place] for place in places]
                if back:
                    parts = [part * sign for part, sign in zip(hadamard(x, parts), factors, strict=True)]
                else:
                    parts = hadamard(x, [part * sign for part, sign in zip(parts, factors, strict=True)])
                for place, part in zip(places, parts, strict=True):
                    target.vectors(LANES)[place] = part
            if not back:
                permute()
    return module(x)
