"""The machine code of exact search, in LLVM IR: bounds of all documents of a range, then scores of few.

A frame is a table of 64-bit words, `FIELDS`: addresses of arrays, sizes and variables. Functions get its
address.
"""

from __future__ import annotations

from collections.abc import Callable

from .._jit import Code, Values, splat

__all__ = ["DENSE_COST", "FIELDS", "RANGE", "STEP", "write_exact"]

RANGE = 16384  # documents: their 16-bit sums fill the first cache
_LANES, STEP = 32, 128  # sums in a register, sums looked at in a turn
_SUMS, _WORD = f"<{_LANES} x i16>", f"i{_LANES}"
_GROUP = 16  # postings scaled at once
_RECORD, _SLOT = 20, 16  # bytes of a row of ``lists``, and of what a query keeps of it
_HIGHEST, _MANY = 65200, 30000  # what a sum may reach, terms of a query for which that is enough
# in postings, whose time is the unit: between two looks at the sums; a score; a vector of so many documents
_CHECK, _SCORE, DENSE_COST = 4096, 600, 10
_EARLY = 0.12  # of the bound left: time to score some documents
_AHEAD, _FETCHED, _LINES = 2, 8, 12  # lists, documents and lines of the cache fetched in advance

FIELDS = (
    # the index
    *("list_offsets", "lists", "postings", "gains", "offsets", "terms", "weights", "row_scales"),
    *("n", "n_ranges", "dim"),
    # queries, results, scratch memory
    *("q_offsets", "q_terms", "q_weights", "k", "keep", "rows", "scores"),
    *("sums", "chosen", "slots", "slot_counts", "bounds", "table", "own_terms", "own_weights", "own_gains"),
    # variables: of a query, of a range
    *("out_rows", "out_scores", "hits", "theta", "least", "unit", "margin", "m"),
    *("range", "length", "place", "rest", "left", "since"),
    *("want", "above", "high", "low", "top", "number"),
)


def write_exact(terms: str, weights: str) -> str:
    """The module of ``exact(frame, first query, last query)``.

    Args:
        terms: LLVM type of the terms of a row, ``i16`` or ``i32``.
        weights: Of its weights, ``float``, ``half``, or ``i16`` or ``i8``, which a row's scale multiplies.
    """
    parts = [_scan(), _add(), _count(), _collect(), _score(terms, weights)]
    parts += [_insert(), _verify(terms, weights), _sift(), _range(), _sort(), _query()]
    x = _Frame()
    x.loop("%first", "%last", 1, lambda i, _: x.do(f"call void @query(ptr %f, i64 {i})"))
    parts.append(x.function("define void @exact(ptr %f, i64 %first, i64 %last)"))
    declarations = [
        f"declare i16 @llvm.vector.reduce.add.v{_LANES}i16({_SUMS})",
        f"declare {_SUMS} @llvm.umin.v{_LANES}i16({_SUMS}, {_SUMS})",
        "declare float @llvm.fma.f32(float, float, float)",
        "declare i32 @llvm.cttz.i32(i32, i1)",
        "declare float @llvm.ceil.f32(float)",
        "declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]
    return "\n".join(dict.fromkeys(declarations)) + "\n" + "\n".join(parts)


class _Frame(Code):
    """Code with the frame ``%f``, whose fields are read and set by name."""

    def __init__(self, *held: str) -> None:
        """``held``: arrays whose addresses are read once, not in every turn of a loop."""
        super().__init__()
        self._held = {name: self.get(name, "ptr") for name in held}

    def get(self, name: str, kind: str = "i64") -> str:
        return self.load(kind, "%f", 8 * FIELDS.index(name), 8)

    def set(self, name: str, value: str | int, kind: str = "i64") -> None:
        self.store(kind, str(value), "%f", 8 * FIELDS.index(name), 8)

    def item(self, name: str, index: str | int, kind: str) -> str:
        """Element ``index`` of the array at a field, integers widened to 64 bits."""
        value = self.load(kind, self.place(name, index, kind), align=_bytes(kind))
        return value if kind in ("float", "i64") else self.op(f"zext {kind} {value} to i64")

    def place(self, name: str, index: str | int, kind: str) -> str:
        base = self._held.get(name) or self.get(name, "ptr")
        return self.at(base, self.mul(index, _bytes(kind)))

    def cmp(self, test: str, a: str | int, b: str | int, kind: str = "i64") -> str:
        return self.op(f"{'fcmp' if kind == 'float' else 'icmp'} {test} {kind} {a}, {b}")

    def both(self, a: str, b: str) -> str:
        return self.op(f"and i1 {a}, {b}")

    def either(self, a: str, b: str) -> str:
        return self.op(f"or i1 {a}, {b}")

    def flip(self, a: str) -> str:
        return self.op(f"xor i1 {a}, true")

    def select(self, test: str, a: str | int, b: str | int, kind: str = "i64") -> str:
        return self.op(f"select i1 {test}, {kind} {a}, {kind} {b}")

    def floats(self, action: str, a: str, b: str) -> str:
        return self.op(f"{action} float {a}, {b}")

    def whole(self, value: str) -> str:
        return self.op(f"fptosi float {value} to i64")

    def real(self, value: str) -> str:
        return self.op(f"sitofp i64 {value} to float")

    def repeat(self, body: Callable[[], str]) -> None:
        """``do: body() while`` what it returns, an i1."""
        head, after = self._name(), self._name()
        self.do(f"br label %{head}")
        self._begin(head)
        more = body()
        self.do(f"br i1 {more}, label %{head}, label %{after}")
        self._begin(after)

    def rest(self) -> str:
        """What the lists that are left may add to a sum, at most."""
        value = self.op(f"call float @llvm.ceil.f32(float {self.get('rest', 'float')})")
        return self.maximum(self.whole(value), 0)

    def prefetch(self, place: str) -> None:
        self.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 3, i32 1)")


def _bytes(kind: str) -> int:
    return {"float": 4, "half": 2, "ptr": 8}.get(kind) or int(kind[1:]) // 8


def _number(value: float) -> str:
    return splat(1, "float", value)[len("<float ") : -1]


def _scan() -> str:
    """Add the postings of a list: ``factor * code / 256``, rounded up, to the sums of its documents."""
    x = _Frame()
    sums, room = x.get("sums", "ptr"), x.op(f"alloca <{_GROUP} x i16>, align 32")
    vector = f"<{_GROUP} x i16>"
    factor = x.broadcast(_GROUP, "i16", x.op("trunc i64 %factor to i16"))
    rows, full = x.at("%list", "%count"), x.op(f"and i64 %count, {-_GROUP}")

    def add(row: str, value: str) -> None:
        place = x.at(sums, x.mul(x.op(f"zext i16 {row} to i64"), 2))
        x.store("i16", x.op(f"add i16 {x.load('i16', place, align=2)}, {value}"), place, align=2)

    def group(i: str, _: Values) -> None:
        codes = x.op(f"zext <{_GROUP} x i8> {x.load(f'<{_GROUP} x i8>', '%list', i)} to {vector}")
        x.store(vector, _scaled(x, _GROUP, codes, factor), room, align=32)
        own = x.at(rows, x.mul(i, 2))
        for lane in range(_GROUP):
            add(x.load("i16", own, 2 * lane), x.load("i16", room, 2 * lane, 2))

    def single(i: str, _: Values) -> None:
        code = x.op(f"zext i8 {x.load('i8', '%list', i)} to i64")
        value = x.add(x.op(f"lshr i64 {x.mul(code, '%factor')}, 8"), 1)
        add(x.load("i16", rows, x.mul(i, 2)), x.op(f"trunc i64 {value} to i16"))

    x.loop(0, full, _GROUP, group)
    x.loop(full, "%count", 1, single)
    return x.function("define internal void @scan(ptr %f, ptr %list, i64 %count, i64 %factor)")


def _scaled(x: _Frame, lanes: int, codes: str, factor: str) -> str:
    """``codes * factor / 256`` of 16-bit numbers, rounded down, plus 1."""
    wide, narrow = f"<{lanes} x i32>", f"<{lanes} x i16>"
    codes = x.op(f"shl {narrow} {codes}, {splat(lanes, 'i16', 8)}")
    product = x.op(
        f"mul {wide} {x.op(f'zext {narrow} {codes} to {wide}')}, {x.op(f'zext {narrow} {factor} to {wide}')}"
    )
    high = x.op(f"lshr {wide} {product}, {splat(lanes, 'i32', 16)}")
    high = x.op(f"trunc {wide} {high} to {narrow}")
    return x.op(f"add {narrow} {high}, {splat(lanes, 'i16', 1)}")


def _add() -> str:
    """The same for a list kept as a vector: a code for each document, 0 where it has not the term."""
    x = _Frame()
    sums = x.get("sums", "ptr")
    factor = x.broadcast(_LANES, "i16", x.op("trunc i64 %factor to i16"))

    def turn(i: str, _: Values) -> None:
        for line in range(0, STEP, 64):
            x.prefetch(x.at("%list", x.add(i, 1024 + line)))
        for part in range(0, STEP, _LANES):
            place = x.at(sums, x.mul(x.add(i, part), 2))
            codes = x.load(f"<{_LANES} x i8>", "%list", x.add(i, part))
            codes = x.op(f"zext <{_LANES} x i8> {codes} to {_SUMS}")
            there = x.op(f"icmp ne {_SUMS} {codes}, zeroinitializer")
            value = _scaled(x, _LANES, codes, factor)
            value = x.op(f"select <{_LANES} x i1> {there}, {_SUMS} {value}, {_SUMS} zeroinitializer")
            x.store(_SUMS, x.op(f"add {_SUMS} {x.load(_SUMS, place, align=64)}, {value}"), place, align=64)

    x.loop(0, x.get("length"), STEP, turn)
    return x.function("define internal void @add(ptr %f, ptr %list, i64 %factor)")


def _count() -> str:
    """The number of sums of at least ``low``."""
    x = _Frame()
    sums = x.get("sums", "ptr")
    low = x.broadcast(_LANES, "i16", x.op("trunc i64 %low to i16"))

    def turn(i: str, state: Values) -> Values:
        place, result = x.at(sums, x.mul(i, 2)), []
        for part, number in enumerate(state):
            values = x.load(_SUMS, place, 2 * _LANES * part, 64)
            mask = x.op(f"icmp uge {_SUMS} {values}, {low}")
            result.append(x.op(f"sub {_SUMS} {number}, {x.op(f'sext <{_LANES} x i1> {mask} to {_SUMS}')}"))
        return tuple(result)

    parts = x.loop(0, x.get("length"), STEP, turn, ("zeroinitializer",) * (STEP // _LANES), _SUMS)
    total = parts[0]
    for part in parts[1:]:
        total = x.op(f"add {_SUMS} {total}, {part}")
    number = x.op(f"call i16 @llvm.vector.reduce.add.v{_LANES}i16({_SUMS} {total})")
    x.set("number", x.op(f"zext i16 {number} to i64"))
    return x.function("define internal void @count(ptr %f, i64 %low)")


def _collect() -> str:
    """Documents of the range with ``low <= sum < high`` that may be found, into ``chosen``."""
    x = _Frame()
    sums, keep = x.get("sums", "ptr"), x.get("keep", "ptr")
    filtered = x.op(f"icmp ne ptr {keep}, null")
    low = x.broadcast(_LANES, "i16", x.op("trunc i64 %low to i16"))
    top = x.broadcast(_LANES, "i16", x.op(f"trunc i64 {x.sub('%high', 1)} to i16"))
    first = x.mul(x.get("range"), RANGE)
    chosen = x.get("chosen", "ptr")
    x.set("number", 0)

    def turn(i: str, _: Values) -> None:
        values = x.load(_SUMS, sums, x.mul(i, 2), 64)
        inside = x.op(
            f"and <{_LANES} x i1> {x.op(f'icmp uge {_SUMS} {values}, {low}')}, "
            f"{x.op(f'icmp ule {_SUMS} {values}, {top}')}"
        )
        mask = x.op(f"bitcast <{_LANES} x i1> {inside} to {_WORD}")

        def some() -> None:
            def one() -> str:
                word = x.op(f"trunc i64 {x.get('place')} to i32")
                lane = x.op(f"zext i32 {x.op(f'call i32 @llvm.cttz.i32(i32 {word}, i1 true)')} to i64")
                document = x.add(x.add(first, i), lane)
                number = x.get("number")
                x.store("i32", x.op(f"trunc i64 {document} to i32"), chosen, x.mul(number, 4), 4)
                x.set("number", x.add(number, 1))

                def check() -> None:
                    wanted = x.op(f"zext i8 {x.load('i8', x.at(keep, document))} to i64")
                    x.set("number", x.add(number, wanted))

                x.when(filtered, check)
                rest = x.op(f"and i32 {word}, {x.op(f'sub i32 {word}, 1')}")
                x.set("place", x.op(f"zext i32 {rest} to i64"))
                return x.op(f"icmp ne i32 {rest}, 0")

            x.set("place", x.op(f"zext i32 {mask} to i64"))
            x.repeat(one)

        x.when(x.op(f"icmp ne i32 {mask}, 0"), some)

    x.loop(0, x.get("length"), _LANES, turn)
    return x.function("define internal void @collect(ptr %f, i64 %low, i64 %high)")


def _weight(x: _Frame, weights: str, index: str) -> str:
    value = x.load(weights, x.place("weights", index, weights), align=_bytes(weights))
    if weights == "float":
        return value
    return x.op(f"{'fpext' if weights == 'half' else 'uitofp'} {weights} {value} to float")


def _row_scaled(x: _Frame, weights: str, value: str) -> str:
    if weights in ("float", "half"):
        return value
    return x.floats("fmul", value, x.item("row_scales", "%document", "float"))


def _score(terms: str, weights: str) -> str:
    """The score of a document, added up element by element as `irkit.score` does."""
    x = _Frame("table", "terms", "weights")
    start, stop = x.item("offsets", "%document", "i64"), x.item("offsets", x.add("%document", 1), "i64")

    def elements(i: str, state: Values, number: int) -> Values:
        for j in range(number):
            at = x.add(i, j)
            looked = x.item("table", x.item("terms", at, terms), "float")
            value = _row_scaled(x, weights, _weight(x, weights, at))
            state = (x.op(f"call float @llvm.fma.f32(float {value}, float {looked}, float {state[0]})"),)
        return state

    full = x.add(start, x.op(f"and i64 {x.sub(stop, start)}, -8"))
    state = x.loop(start, full, 8, lambda i, s: elements(i, s, 8), ("0.0",), "float")
    (score,) = x.loop(full, stop, 1, lambda i, s: elements(i, s, 1), state, "float")
    x.store("float", score, "%out", align=4)
    return x.function("define internal void @score(ptr %f, i64 %document, ptr %out)")


def _insert() -> str:
    """Put a hit where it belongs among those found, unless it is there or not good enough."""
    x = _Frame()
    low, high = x.op("alloca i64, align 8"), x.op("alloca i64, align 8")
    hits, k = x.get("hits"), x.get("k")
    rows, scores = x.get("out_rows", "ptr"), x.get("out_scores", "ptr")

    def better(than: str) -> str:
        """Whether the new hit comes before hit ``than``."""
        old, row = x.load("float", scores, x.mul(than, 4), 4), x.load("i64", rows, x.mul(than, 8), 8)
        tie = x.both(x.cmp("oeq", old, "%score", "float"), x.cmp("sgt", row, "%row"))
        return x.either(x.cmp("olt", old, "%score", "float"), tie)

    x.store("i64", "0", low, align=8)
    x.store("i64", hits, high, align=8)

    def halve() -> str:
        middle = x.op(f"lshr i64 {x.add(x.load('i64', low, align=8), x.load('i64', high, align=8))}, 1")
        before = x.both(x.cmp("slt", middle, hits), better(x.minimum(middle, x.sub(k, 1))))
        stay = x.either(before, x.cmp("sge", middle, hits))
        x.store("i64", x.select(stay, middle, x.load("i64", high, align=8)), high, align=8)
        x.store("i64", x.select(stay, x.load("i64", low, align=8), x.add(middle, 1)), low, align=8)
        return x.cmp("slt", x.load("i64", low, align=8), x.load("i64", high, align=8))

    x.repeat(halve)
    at = x.load("i64", low, align=8)
    same = x.cmp("eq", x.load("i64", rows, x.mul(x.maximum(x.sub(at, 1), 0), 8), 8), "%row")
    there = x.both(x.cmp("sgt", at, 0), same)

    def put() -> None:
        moved = x.sub(x.minimum(hits, x.sub(k, 1)), at)
        for array, size in ((rows, 8), (scores, 4)):
            place, bytes_ = x.at(array, x.mul(at, size)), x.mul(moved, size)
            move = f"ptr {x.at(place, size)}, ptr {place}, i64 {bytes_}, i1 false"
            x.do(f"call void @llvm.memmove.p0.p0.i64({move})")
        x.store("i64", "%row", rows, x.mul(at, 8), 8)
        x.store("float", "%score", scores, x.mul(at, 4), 4)
        number = x.minimum(x.add(hits, 1), k)
        x.set("hits", number)

        def aim() -> None:  # what bounds must reach; rounding errors are allowed for
            theta = x.load("float", scores, x.mul(x.sub(k, 1), 4), 4)
            x.set("theta", theta, "float")
            bound = x.floats(
                "fmul", x.floats("fmul", theta, x.get("margin", "float")), x.get("unit", "float")
            )
            x.set("least", x.sub(x.whole(bound), 2))

        x.when(x.cmp("eq", number, k), aim)

    x.when(x.both(x.cmp("slt", at, k), x.flip(there)), put)
    return x.function("define internal void @insert(ptr %f, i64 %row, float %score)")


def _verify(terms: str, weights: str) -> str:
    """Score the chosen documents."""
    x = _Frame("offsets", "terms", "weights")
    chosen, number = x.get("chosen", "ptr"), x.get("number")
    out = x.op("alloca float, align 4")

    def document(at: str) -> str:
        return x.op(f"zext i32 {x.load('i32', chosen, x.mul(at, 4), 4)} to i64")

    def approach(i: str) -> None:
        ahead = document(i)
        start, stop = x.item("offsets", ahead, "i64"), x.item("offsets", x.add(ahead, 1), "i64")
        for name, kind in (("terms", terms), ("weights", weights)):
            size = _bytes(kind)
            x.loop(start, stop, 64 // size, lambda p, _, n=name, k=kind: x.prefetch(x.place(n, p, k)))

    x.loop(0, number, 1, lambda i, _: x.prefetch(x.place("offsets", document(i), "i64")))
    x.loop(0, x.minimum(number, _FETCHED), 1, lambda i, _: approach(i))

    def one(i: str, _: Values) -> None:
        following = x.add(i, _FETCHED)
        x.when(x.cmp("slt", following, number), lambda: approach(following))
        this = document(i)
        x.do(f"call void @score(ptr %f, i64 {this}, ptr {out})")
        score = x.load("float", out, align=4)
        good = x.cmp("oge", score, x.get("theta", "float"), "float")
        x.when(
            x.both(good, x.cmp("ogt", score, "0.0", "float")),
            lambda: x.do(f"call void @insert(ptr %f, i64 {this}, float {score})"),
        )

    x.loop(0, number, 1, one)
    return x.function("define internal void @verify(ptr %f)")


def _sift() -> str:
    """Score the documents of the range that may be among the best, those of the highest sums first.

    With ``%complete`` until no other can be, else only until k are found.
    """
    x = _Frame()
    k = x.get("k")
    x.set("high", 65536)
    x.set("above", 0)
    x.set("want", x.add(x.sub(k, x.get("hits")), 1))

    def turn() -> str:
        high = x.get("high")
        x.set("low", x.maximum(x.sub(x.get("least"), x.rest()), 1))

        def look() -> None:  # for the highest sum that enough reach, by bisection
            wanted, surplus = x.add(x.get("above"), x.get("want")), x.get("want")
            x.set("low", 1)
            x.set("top", high)

            def halve() -> str:
                low, top = x.get("low"), x.get("top")
                middle = x.maximum(x.op(f"lshr i64 {x.add(low, top)}, 1"), 1)
                x.do(f"call void @count(ptr %f, i64 {middle})")
                reached = x.cmp("sge", x.get("number"), wanted)
                x.set("low", x.select(reached, middle, low))
                x.set("top", x.select(reached, top, middle))
                fine = x.both(
                    reached, x.cmp("sle", x.get("number"), x.add(wanted, x.op(f"lshr i64 {surplus}, 2")))
                )
                return x.both(x.cmp("sgt", x.sub(x.get("top"), x.get("low")), 1), x.flip(fine))

            x.repeat(halve)
            x.set("want", x.mul(surplus, 2))

        x.when(x.cmp("slt", x.get("hits"), k), look)
        low = x.get("low")
        some = x.cmp("slt", low, high)

        def work() -> None:
            x.do(f"call void @collect(ptr %f, i64 {low}, i64 {high})")
            x.do("call void @verify(ptr %f)")
            x.do(f"call void @count(ptr %f, i64 {low})")
            x.set("above", x.get("number"))
            x.set("high", low)

        x.when(some, work)
        enough = x.both(x.cmp("eq", x.get("hits"), k), x.flip("%complete"))
        return x.both(x.both(some, x.cmp("sgt", low, 1)), x.flip(enough))

    x.repeat(turn)
    return x.function("define internal void @sift(ptr %f, i1 %complete)")


def _range() -> str:
    """Search a range: lists in order until what is left could only lift few documents high enough."""
    x = _Frame()
    x.set("range", "%range")
    documents = x.minimum(x.sub(x.get("n"), x.mul("%range", RANGE)), RANGE)
    length = x.op(f"and i64 {x.add(documents, STEP - 1)}, {-STEP}")
    x.set("length", length)
    sums = x.get("sums", "ptr")
    x.loop(0, x.mul(length, 2), 64, lambda i, _: x.store("<16 x i32>", "zeroinitializer", sums, i, 64))
    many = x.cmp("sgt", x.get("m"), _MANY)  # no sum could tell: score all documents
    x.when(many, lambda: x.loop(0, documents, 1, lambda i, _: x.store("i16", "1", sums, x.mul(i, 2), 2)))
    number = x.item("slot_counts", "%range", "i32")
    slots = x.at(x.get("slots", "ptr"), x.mul(x.mul("%range", x.get("m")), _SLOT))
    unit = x.get("unit", "float")
    full = x.floats("fmul", x.item("bounds", "%range", "float"), unit)
    x.set("rest", full, "float")
    x.set("since", 0)
    dense_cost = x.op(f"udiv i64 {length}, {DENSE_COST}")
    postings = x.get("postings", "ptr")

    def slot(i: str) -> tuple[str, str, str]:
        """The list of a slot, its postings, whether it is a vector."""
        place = x.at(slots, x.mul(i, _SLOT))
        count = x.op(f"sext i32 {x.load('i32', place, 8, 4)} to i64")
        return x.at(postings, x.load("i64", place, 0, 8)), count, x.cmp("slt", count, 0)

    def cost(i: str, total: Values) -> Values:
        _, count, dense = slot(i)
        return (x.add(total[0], x.select(dense, dense_cost, count)),)

    (left,) = x.loop(0, number, 1, cost, ("0",), "i64")
    x.set("left", left)
    at, go_on = x.op("alloca i64, align 8"), x.op("alloca i1, align 1")
    x.store("i64", "0", at, align=8)
    early = x.floats("fmul", full, _number(_EARLY))

    def step() -> str:
        i = x.load("i64", at, align=8)
        ahead, length_ahead, _ = slot(x.minimum(x.add(i, _AHEAD), x.sub(number, 1)))
        bytes_ahead = x.minimum(x.mul(length_ahead, 3), 64 * _LINES)
        x.loop(0, bytes_ahead, 64, lambda b, _: x.prefetch(x.at(ahead, b)))
        share = x.floats("fmul", x.load("float", slots, x.add(x.mul(i, _SLOT), 12), 4), unit)
        factor = x.whole(x.op(f"call float @llvm.ceil.f32(float {x.floats('fmul', share, _number(256))})"))
        own, count, dense = slot(i)
        x.when(dense, lambda: x.do(f"call void @add(ptr %f, ptr {own}, i64 {factor})"))
        x.when(x.flip(dense), lambda: x.do(f"call void @scan(ptr %f, ptr {own}, i64 {count}, i64 {factor})"))
        spent = x.select(dense, dense_cost, count)
        rest = x.floats("fsub", x.get("rest", "float"), x.floats("fmul", share, _number(255)))
        x.set("rest", rest, "float")
        x.set("left", x.sub(x.get("left"), spent))
        x.set("since", x.add(x.get("since"), spent))
        following = x.add(i, 1)
        x.store("i64", following, at, align=8)
        x.store("i1", x.cmp("slt", following, number), go_on, align=1)

        def look() -> None:
            missing = x.cmp("slt", x.get("hits"), x.get("k"))
            ready = x.both(missing, x.cmp("ole", rest, early, "float"))
            x.when(ready, lambda: x.do("call void @sift(ptr %f, i1 false)"))
            low = x.sub(x.get("least"), x.rest())
            possible = x.both(x.cmp("eq", x.get("hits"), x.get("k")), x.cmp("sgt", low, 0))

            def compare() -> None:
                x.set("since", 0)
                x.do(f"call void @count(ptr %f, i64 {low})")
                price = x.mul(x.get("number"), _SCORE)
                x.store("i1", x.cmp("sgt", price, x.get("left")), go_on, align=1)

            x.when(possible, compare)

        due = x.both(x.cmp("sge", x.get("since"), _CHECK), x.cmp("slt", following, number))
        x.when(due, look)
        return x.load("i1", go_on, align=1)

    x.when(x.flip(many), lambda: x.repeat(step))
    x.do("call void @sift(ptr %f, i1 true)")
    return x.function("define internal void @range(ptr %f, i64 %range)")


def _sort() -> str:
    """Copy the known terms of a query, those first that bring most for what they cost."""
    own = {"own_terms": "i32", "own_weights": "float", "own_gains": "float"}
    x = _Frame("q_terms", "q_weights", "gains", "table", "list_offsets", *own)
    start, stop = x.item("q_offsets", "%query", "i64"), x.item("q_offsets", x.add("%query", 1), "i64")
    dim, at = x.get("dim"), x.op("alloca i64, align 8")

    def term(j: str, state: Values) -> Values:
        number, weight = x.item("q_terms", j, "i32"), x.item("q_weights", j, "float")
        known = x.cmp("slt", number, dim)

        def insert() -> None:
            x.prefetch(x.place("table", number, "float"))
            x.prefetch(x.place("list_offsets", number, "i64"))
            gain = x.floats("fmul", weight, x.item("gains", number, "float"))
            x.store("i64", state[0], at, align=8)

            def move() -> str:
                here = x.load("i64", at, align=8)
                before = x.maximum(x.sub(here, 1), 0)
                less = x.cmp("olt", x.item("own_gains", before, "float"), gain, "float")
                ahead = x.both(x.cmp("sgt", here, 0), less)

                def shift() -> None:
                    for name, kind in own.items():
                        value = x.load(kind, x.place(name, before, kind), align=4)
                        x.store(kind, value, x.place(name, here, kind), align=4)
                    x.store("i64", before, at, align=8)

                x.when(ahead, shift)
                return ahead

            x.repeat(move)
            here = x.load("i64", at, align=8)
            values = (x.op(f"trunc i64 {number} to i32"), weight, gain)
            for (name, kind), value in zip(own.items(), values, strict=True):
                x.store(kind, value, x.place(name, here, kind), align=4)

        x.when(known, insert)
        return (x.add(state[0], x.op(f"zext i1 {known} to i64")),)

    (number,) = x.loop(start, stop, 1, term, ("0",), "i64")
    x.set("m", number)
    return x.function("define internal void @sort(ptr %f, i64 %query)")


def _query() -> str:
    """Find the lists of a query, and search the range of the highest bound first."""
    x = _Frame("own_terms", "own_weights", "table", "list_offsets", "lists")
    x.do("call void @sort(ptr %f, i64 %query)")
    m, k, n_ranges = x.get("m"), x.get("k"), x.get("n_ranges")
    x.set("hits", 0)
    x.set("theta", "0.0", "float")
    x.set("least", 0)
    rows, scores = x.place("rows", x.mul("%query", k), "i64"), x.place("scores", x.mul("%query", k), "float")
    x.set("out_rows", rows, "ptr")
    x.set("out_scores", scores, "ptr")

    def nothing(i: str, _: Values) -> None:
        x.store("i64", "-1", rows, x.mul(i, 8), 8)
        x.store("float", _number(float("-inf")), scores, x.mul(i, 4), 4)

    x.loop(0, k, 1, nothing)
    bounds, counts, slots = (x.get(name, "ptr") for name in ("bounds", "slot_counts", "slots"))

    def clear(i: str, _: Values) -> None:
        x.store("i32", "0", bounds, x.mul(i, 4), 4)
        x.store("i32", "0", counts, x.mul(i, 4), 4)

    x.loop(0, n_ranges, 1, clear)

    def approach(j: str, _: Values) -> None:
        record = x.place(
            "lists", x.mul(x.item("list_offsets", x.item("own_terms", j, "i32"), "i64"), _RECORD), "i8"
        )
        for line in range(_LINES):
            x.prefetch(x.at(record, 64 * line))

    x.loop(0, m, 1, approach)

    def term(j: str, _: Values) -> None:
        number, weight = x.item("own_terms", j, "i32"), x.item("own_weights", j, "float")
        x.store("float", weight, x.place("table", number, "float"), align=4)

        def entry(e: str, _: Values) -> None:
            record = x.place("lists", x.mul(e, _RECORD), "i8")
            this = x.op(f"zext i32 {x.load('i32', record, 8, 4)} to i64")
            share = x.floats("fmul", weight, x.load("float", record, 16, 4))
            place = x.at(counts, x.mul(this, 4))
            count = x.load("i32", place, align=4)
            slot = x.at(slots, x.mul(x.add(x.mul(this, m), x.op(f"zext i32 {count} to i64")), _SLOT))
            x.store("i64", x.load("i64", record, 0, 4), slot, align=8)
            x.store("i32", x.load("i32", record, 12, 4), slot, 8, 4)
            x.store("float", share, slot, 12, 4)
            x.store("i32", x.op(f"add i32 {count}, 1"), place, align=4)
            place = x.at(bounds, x.mul(this, 4))
            bound = x.floats("fadd", x.load("float", place, align=4), x.floats("fmul", share, _number(255)))
            x.store("float", bound, place, align=4)

        x.loop(
            x.item("list_offsets", number, "i64"), x.item("list_offsets", x.add(number, 1), "i64"), 1, entry
        )

    x.loop(0, m, 1, term)
    best = x.op("alloca i64, align 8")
    x.store("i64", "0", best, align=8)

    def higher(i: str, state: Values) -> Values:
        value = x.load("float", bounds, x.mul(i, 4), 4)
        above = x.cmp("ogt", value, state[0], "float")
        x.when(above, lambda: x.store("i64", i, best, align=8))
        return (x.select(above, value, state[0], "float"),)

    (highest,) = x.loop(0, n_ranges, 1, higher, ("0.0",), "float")

    def search() -> None:
        # a list adds 2 more by rounding; a factor has 16 bits, too
        room = x.real(x.maximum(x.sub(_HIGHEST, x.mul(m, 2)), 1))
        x.set("unit", x.floats("fdiv", room, highest), "float")
        x.set(
            "margin",
            x.floats("fsub", _number(1), x.floats("fmul", x.real(x.add(m, 8)), _number(2**-22))),
            "float",
        )
        first = x.load("i64", best, align=8)

        def visit(i: str, _: Values) -> None:
            before = x.select(x.cmp("sle", i, first), x.sub(i, 1), i)
            this = x.select(x.cmp("eq", i, 0), first, before)
            bound = x.floats("fmul", x.load("float", bounds, x.mul(this, 4), 4), x.get("unit", "float"))
            hope = x.cmp("sge", x.whole(x.op(f"call float @llvm.ceil.f32(float {bound})")), x.get("least"))
            lists_there = x.cmp("sgt", x.item("slot_counts", this, "i32"), 0)
            x.when(x.both(hope, lists_there), lambda: x.do(f"call void @range(ptr %f, i64 {this})"))

        x.loop(0, n_ranges, 1, visit)

    x.when(x.cmp("ogt", highest, "0.0", "float"), search)

    def forget(j: str, _: Values) -> None:
        x.store("float", "0.0", x.place("table", x.item("own_terms", j, "i32"), "float"), align=4)

    x.loop(0, m, 1, forget)
    return x.function("define internal void @query(ptr %f, i64 %query)")
