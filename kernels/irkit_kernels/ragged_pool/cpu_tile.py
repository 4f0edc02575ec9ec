"""The machine code of pooling on the CPU, in LLVM IR: weighted sums of rows, 64 columns at a time."""

from __future__ import annotations

from functools import partial

from .._jit import Code, Values, splat

__all__ = ["write_ir"]

_LANES = 16  # of a vector; LLVM splits it where registers are smaller
_VECTORS = 4  # that a sum takes at a time, enough to hide the latency of a multiply-add


def write_ir(bfloat16: bool, transposed: bool, rounds: bool) -> str:
    """The LLVM module of ``ragged_pool``, which fills rows ``start`` to ``stop`` of the output.

    ``rounds`` says whether the CPU has an instruction that rounds to bfloat16.

    Forward, a row is a window and sums its tokens; transposed, it is a token and sums the windows it lies in.
    Either way a summand weighs 1 / the number of tokens of its window, which only a sequence's last may cut.
    """
    c = Code()
    size = 2 if bfloat16 else 4
    full = _reciprocal(c, "%kernel")

    def sequence(i: str, _: Values) -> None:
        first_token, tokens = _span(c, "%offsets", i)
        first_window, windows = _span(c, "%pooled", i)
        last = c.sub(windows, 1)
        cut = _reciprocal(c, c.sub(tokens, c.mul(last, "%stride")))
        first, count = (first_token, tokens) if transposed else (first_window, windows)
        source = first_window if transposed else first_token

        def row(r: str, _: Values) -> None:
            local = c.sub(r, first)
            if transposed:  # windows that end before the token are over
                over = c.op(f"sdiv i64 {c.add(c.sub(local, '%kernel'), '%stride')}, %stride")
                start = c.maximum(over, 0)
                stop = c.minimum(c.add(c.op(f"sdiv i64 {local}, %stride"), 1), windows)
            else:
                start = c.mul(local, "%stride")
                stop = c.minimum(c.add(start, "%kernel"), tokens)

            def columns(lanes: int, vectors: int, column: str, _: Values) -> None:
                kind, step = f"<{lanes} x float>", lanes * size

                def add(j: str, sums: Values) -> Values:
                    is_cut = c.op(f"icmp eq i64 {j if transposed else local}, {last}")
                    weight = c.op(f"select i1 {is_cut}, float {cut}, float {full}")
                    weight = c.broadcast(lanes, "float", weight)
                    element = c.add(c.mul(c.add(source, j), "%d"), column)
                    pointer = c.at("%values", c.mul(element, size))
                    loaded = [_load(c, bfloat16, lanes, c.at(pointer, v * step)) for v in range(vectors)]
                    return tuple(
                        c.op(
                            f"call {kind} @llvm.fmuladd.v{lanes}f32({kind} {x}, {kind} {weight}, {kind} {s})"
                        )
                        for x, s in zip(loaded, sums, strict=True)
                    )

                sums = c.loop(start, stop, 1, add, ("zeroinitializer",) * vectors, kind)
                target = c.at("%out", c.mul(c.add(c.mul(r, "%d"), column), size))
                for v, total in enumerate(sums):
                    _store(c, bfloat16, rounds, lanes, total, c.at(target, v * step))

            blocks, whole = (c.op(f"and i64 %d, {-step}") for step in (_VECTORS * _LANES, _LANES))
            c.loop(0, blocks, _VECTORS * _LANES, partial(columns, _LANES, _VECTORS))
            c.loop(blocks, whole, _LANES, partial(columns, _LANES, 1))
            c.loop(whole, "%d", 1, partial(columns, 1, 1))

        c.loop(c.maximum("%start", first), c.minimum("%stop", c.add(first, count)), 1, row)

    c.loop(0, "%n", 1, sequence)
    declared = [
        f"declare {kind} @llvm.fmuladd.v{lanes}f32({kind}, {kind}, {kind})"
        for lanes, kind in ((lanes, f"<{lanes} x float>") for lanes in (_LANES, 1))
    ]
    pointers = ", ".join(f"ptr %{name}" for name in ("out", "values", "offsets", "pooled"))
    numbers = ", ".join(f"i64 %{name}" for name in ("n", "d", "kernel", "stride", "start", "stop"))
    return "\n".join([*declared, c.function(f"define void @ragged_pool({pointers}, {numbers})")])


def _span(c: Code, offsets: str, i: str) -> tuple[str, str]:
    """Where row ``i`` begins, and its length."""
    start, stop = (c.op(f"sext i32 {c.load('i32', offsets, c.mul(c.add(i, k), 4))} to i64") for k in (0, 1))
    return start, c.sub(stop, start)


def _reciprocal(c: Code, integer: str) -> str:
    return c.op(f"fdiv float 1.0, {c.op(f'sitofp i64 {integer} to float')}")


def _load(c: Code, bfloat16: bool, lanes: int, pointer: str) -> str:
    if not bfloat16:
        return c.load(f"<{lanes} x float>", pointer)
    ints, sixteen = f"<{lanes} x i32>", splat(lanes, "i32", 16)
    wide = c.op(f"zext <{lanes} x i16> {c.load(f'<{lanes} x i16>', pointer)} to {ints}")
    return c.op(f"bitcast {ints} {c.op(f'shl {ints} {wide}, {sixteen}')} to <{lanes} x float>")


def _store(c: Code, bfloat16: bool, rounds: bool, lanes: int, value: str, pointer: str) -> None:
    if not bfloat16:
        c.store(f"<{lanes} x float>", value, pointer)
        return
    if rounds:
        half = c.op(f"fptrunc <{lanes} x float> {value} to <{lanes} x bfloat>")
        c.store(f"<{lanes} x bfloat>", half, pointer)
        return
    # to the nearest, ties to even; a NaN stays one, as those of bfloat16 have no low bits to carry
    ints, sixteen = f"<{lanes} x i32>", splat(lanes, "i32", 16)
    bits = c.op(f"bitcast <{lanes} x float> {value} to {ints}")
    odd = c.op(f"and {ints} {c.op(f'lshr {ints} {bits}, {sixteen}')}, {splat(lanes, 'i32', 1)}")
    more = c.op(f"add {ints} {odd}, {splat(lanes, 'i32', 0x7FFF)}")
    bits = c.op(f"lshr {ints} {c.op(f'add {ints} {bits}, {more}')}, {sixteen}")
    c.store(f"<{lanes} x i16>", c.op(f"trunc {ints} {bits} to <{lanes} x i16>"), pointer)
