"""LLVM IR for scores of many documents, most of which are not good enough."""

from __future__ import annotations

from .._jit import Values, array
from .cpu_frame import Frame, size_of
from .cpu_score import row_scaled

__all__ = ["write_examine"]

_FETCHED = 8  # documents that are fetched ahead
_ELEMENTS, _FLOATS = 16, "<16 x float>"  # of a document, multiplied at once
_PLACES = "<16 x i32>"


def write_examine(terms: str, weights: str) -> str:
    """``examine``: score the chosen documents.

    Args:
        terms: LLVM type of the terms of a row, as for exact search.
        weights: Of its weights.
    """
    declarations = [
        f"declare {_FLOATS} @llvm.fma.v{_ELEMENTS}f32({_FLOATS}, {_FLOATS}, {_FLOATS})",
        f"declare float @llvm.vector.reduce.fadd.v{_ELEMENTS}f32(float, {_FLOATS})",
        f"declare {_FLOATS} @llvm.masked.gather.v{_ELEMENTS}f32.v{_ELEMENTS}p0(<{_ELEMENTS} x ptr>, i32, "
        f"<{_ELEMENTS} x i1>, {_FLOATS})",
        f"declare {_PLACES} @llvm.umin.v{_ELEMENTS}i32({_PLACES}, {_PLACES})",
    ]
    for kind in dict.fromkeys((terms, weights)):
        vector = f"<{_ELEMENTS} x {kind}>"
        name = f"@llvm.masked.load.{_suffix(kind)}.p0"
        declarations.append(f"declare {vector} {name}(ptr, i32, <{_ELEMENTS} x i1>, {vector})")
    return "\n".join([*declarations, _near(terms, weights), _examine(terms, weights)])


def _near(terms: str, weights: str) -> str:
    """About the score of a document, 16 elements at once: not rounded as defined."""
    x = Frame("table", "terms", "weights")
    start, stop = x.item("offsets", "%document", "i64"), x.item("offsets", x.add("%document", 1), "i64")
    lanes = array(_ELEMENTS, "i64", range(_ELEMENTS))
    dim = x.broadcast(_ELEMENTS, "i32", x.op(f"trunc i64 {x.get('dim')} to i32"))

    def some(i: str, state: Values) -> Values:
        left = x.broadcast(_ELEMENTS, "i64", x.sub(stop, i))
        mask = x.op(f"icmp slt <{_ELEMENTS} x i64> {lanes}, {left}")

        def read(name: str, kind: str) -> str:
            vector = f"<{_ELEMENTS} x {kind}>"
            return x.op(
                f"call {vector} @llvm.masked.load.{_suffix(kind)}.p0(ptr {x.place(name, i, kind)}, i32 1, "
                f"<{_ELEMENTS} x i1> {mask}, {vector} zeroinitializer)"
            )

        places = read("terms", terms)
        if terms == "i16":
            places = x.op(f"zext <{_ELEMENTS} x i16> {places} to {_PLACES}")
        else:
            places = x.op(f"call {_PLACES} @llvm.umin.v{_ELEMENTS}i32({_PLACES} {places}, {_PLACES} {dim})")
        places = x.op(f"getelementptr float, ptr {x.get('table', 'ptr')}, {_PLACES} {places}")
        looked = x.op(
            f"call {_FLOATS} @llvm.masked.gather.v{_ELEMENTS}f32.v{_ELEMENTS}p0("
            f"<{_ELEMENTS} x ptr> {places}, i32 4, <{_ELEMENTS} x i1> {mask}, {_FLOATS} zeroinitializer)"
        )
        values = read("weights", weights)
        if weights != "float":
            action = "fpext" if weights == "half" else "uitofp"
            values = x.op(f"{action} <{_ELEMENTS} x {weights}> {values} to {_FLOATS}")
        fma = f"@llvm.fma.v{_ELEMENTS}f32({_FLOATS} {values}, {_FLOATS} {looked}, {_FLOATS} {state[0]})"
        return (x.op(f"call {_FLOATS} {fma}"),)

    (sums,) = x.loop(start, stop, _ELEMENTS, some, ("zeroinitializer",), _FLOATS)
    score = x.op(f"call reassoc float @llvm.vector.reduce.fadd.v{_ELEMENTS}f32(float 0.0, {_FLOATS} {sums})")
    x.store("float", row_scaled(x, weights, score), "%out", align=4)
    return x.function("define internal void @near(ptr %f, i64 %document, ptr %out)")


def _suffix(kind: str) -> str:
    return f"v{_ELEMENTS}{ {'float': 'f32', 'half': 'f16'}.get(kind, kind) }"


def _examine(terms: str, weights: str) -> str:
    """Score the chosen documents; those that seem good enough as exact search does."""
    x = Frame("offsets", "terms", "weights")
    chosen, number = x.get("chosen", "ptr"), x.get("number")
    out = x.op("alloca float, align 4")

    def document(at: str) -> str:
        return x.op(f"zext i32 {x.load('i32', chosen, x.mul(at, 4), 4)} to i64")

    def fetch(i: str) -> None:
        ahead = document(i)
        start, stop = x.item("offsets", ahead, "i64"), x.item("offsets", x.add(ahead, 1), "i64")
        for name, kind in (("terms", terms), ("weights", weights)):
            lines(name, kind, start, stop)

    def lines(name: str, kind: str, start: str, stop: str) -> None:
        x.loop(start, stop, 64 // size_of(kind), lambda i, _: x.prefetch(x.place(name, i, kind)))
        x.prefetch(x.place(name, x.maximum(x.sub(stop, 1), start), kind))  # rows begin anywhere in a line

    x.loop(0, number, 1, lambda i, _: x.prefetch(x.place("offsets", document(i), "i64")))
    x.loop(0, x.minimum(number, _FETCHED), 1, lambda i, _: fetch(i))

    def one(i: str, _: Values) -> None:
        following = x.add(i, _FETCHED)
        x.when(x.cmp("slt", following, number), lambda: fetch(following))
        this = document(i)
        x.do(f"call void @near(ptr %f, i64 {this}, ptr {out})")
        theta = x.get("theta", "float")
        enough = x.floats("fmul", theta, x.get("margin", "float"))

        def exact() -> None:
            x.do(f"call void @score(ptr %f, i64 {this}, ptr {out})")
            score = x.load("float", out, align=4)
            good = x.both(x.cmp("oge", score, theta, "float"), x.cmp("ogt", score, "0.0", "float"))
            x.when(good, lambda: x.do(f"call void @insert(ptr %f, i64 {this}, float {score})"))

        x.when(x.cmp("oge", x.load("float", out, align=4), enough, "float"), exact)

    x.loop(0, number, 1, one)
    return x.function("define internal void @examine(ptr %f)")
