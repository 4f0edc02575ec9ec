"""LLVM IR for exact scores of documents, from the documents themselves.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

A score is added up element by element in the order of the document, as `irkit.score` does: to the same bits.
Bounds decide which documents are scored; scores alone decide which documents are hits.

With AVX-512 most elements are skipped. The marks are a filter of 512 bits, in which bit ``term % 512`` is set
for each term of the query. Six instructions look 32 terms of a document up in it. A term that passes by
chance adds 0.
"""

from __future__ import annotations

from .._simd import half_to_float
from .._typed import Array, Function, Record, Value, size_of, vector
from .cpu_frame import FRAME

__all__ = [
    "clear_marks",
    "mark",
    "number_of",
    "row_scaled",
    "write_score_candidates",
    "write_score_document",
    "write_score_pair",
]

_MARKS = 512  # bits of a register; the bit of a term is its remainder
_PERMUTE = {"u16": "llvm.x86.avx512.permvar.hi.512", "u32": "llvm.x86.avx512.permvar.si.512"}
_FETCHED = 8  # documents fetched in advance


class _Document:
    """A document: elements ``start`` to ``stop`` of the arrays of terms and weights."""

    def __init__(self, f: Record, arrays: tuple[Array, Array, Array], document: Value) -> None:
        self.table, self.terms, self.weights = arrays
        self.start, self.stop = f.offsets[document], f.offsets[document + 1]
        self.scale = None if self.weights.kind in ("float", "half") else f.row_scales[document]
        self.dim = f.dim if self.terms.kind == "u32" else None  # the table has all terms of 16 bits
        self.x = self.start.code

    def add_product(self, element: Value, total: Value) -> Value:
        """Return ``total`` plus the product of an element."""
        term = self.terms[element].to("i64")
        query_weight = self.table[self.x.minimum(term, self.dim) if self.dim is not None else term]
        weight = number_of(self.weights[element])
        if self.scale is not None:
            weight = weight * self.scale
        return self.x.fma(weight, query_weight, total)

    def add_rest(self, element: Value, total: Value) -> Value:
        """Return ``total`` plus the products of the elements from ``element`` on."""
        with self.x.range(element, self.stop, total=total) as loop:
            loop.total = self.add_product(loop.i, loop.total)
        return loop.total

    def marked_score(self, marks: Value, left: Array) -> Value:
        """Return the score, from the elements whose terms are marked; the others would add 0.

        Args:
            marks: The query's marks.
            left: Memory for a mask.
        """
        x, kind = self.x, self.terms.kind
        bits = 8 * size_of(kind)
        lanes = _MARKS // bits  # words of the marks, and terms of a turn
        many, mask = vector(lanes, kind), f"u{lanes}"
        words = marks.cast(many)
        with x.range(self.start, self.stop, lanes, total=0.0) as loop:
            # Load a register of terms, as far as the document has them.
            number = x.minimum(self.stop - loop.i, lanes)
            ones = x.constant(mask, -1) >> (lanes - number).to(mask)
            exists = ones.cast(vector(lanes, "i1"))
            terms = x.masked_load(self.terms.at(loop.i), exists, bits // 8)
            # A permutation fetches for each term the word of the marks that has its bit.
            word = x.call(_PERMUTE[kind], words, terms >> (bits.bit_length() - 1), kind=many)
            present = word & x.constant(many, 1) << (terms & (bits - 1))
            marked = (exists & (present != 0)).cast(mask)
            # Add the products of the marked elements, one bit of the mask after the other.
            left.value = marked.to("u32")
            count = left.value.count_ones()
            with x.range(0, count.to("i64"), total=loop.total) as element:
                rest = left.value
                lane = rest.lowest_bit().to("i64")
                left.value = rest & (rest - 1)
                element.total = self.add_product(loop.i + lane, element.total)
            loop.total = element.total
        return loop.total


def number_of(weight: Value) -> Value:
    """Return a weight, or a vector of weights, as float32."""
    if weight.element == "half":
        return half_to_float(weight)
    return weight if weight.element == "float" else weight.to("float")


def _documents(f: Record, terms: str, weights: str, *numbers: Value) -> list[_Document]:
    arrays = f.table, f.terms.cast(terms), f.weights.cast(weights)
    return [_Document(f, arrays, number) for number in numbers]


def write_score_document(terms: str, weights: str) -> Function:
    """Write the score of a document to ``%out``."""
    x = Function("score_document", f=FRAME, document="i64", out="float*")
    f, number, out = x.parameters
    (document,) = _documents(f, terms, weights, number)
    start = document.start
    whole = start + ((document.stop - start) & -8)
    with x.range(start, whole, 8, total=0.0) as loop:
        first = loop.i - start
        for j in range(8):
            loop.total = document.add_product(start + (first + j), loop.total)
    out.value = document.add_rest(whole, loop.total)
    return x


def write_score_pair(terms: str, weights: str, wide: bool = False) -> Function:
    """Write the scores of two documents to ``%out``.

    Each addition waits for the one before it, so two documents take hardly longer than one. A ``wide``
    processor (AVX512-BW) looks terms up among the marks instead.
    """
    x = Function("score_pair", f=FRAME, document="i64", other="i64", out="float*")
    f, first, second, out = x.parameters
    documents = _documents(f, terms, weights, first, second)
    if wide:
        left = x.local("u32")
        marks = f.marks.cast(vector(_MARKS // 32, "u32")).value
        for index, document in enumerate(documents):
            out[index] = document.marked_score(marks, left)
        return x
    shorter = x.minimum(*(document.stop - document.start for document in documents))
    whole = shorter & -4
    with x.range(0, whole, 4, totals=[0.0, 0.0]) as loop:
        for j in range(4):
            elements = [document.start + (loop.i + j) for document in documents]
            columns = zip(documents, elements, loop.totals, strict=True)
            loop.totals = [document.add_product(at, total) for document, at, total in columns]
    for index, (document, total) in enumerate(zip(documents, loop.totals, strict=True)):
        out[index] = document.add_rest(document.start + whole, total)
    return x


def mark(f: Record, term: Value) -> None:
    """Set the bit of a query term in the marks."""
    bit = term & (_MARKS - 1)
    byte = f.marks.at(bit >> 3)
    one = 1 << (bit & 7).to("u8")
    byte.value = byte.value | one


def clear_marks(f: Record) -> None:
    """Set all bits of the marks to 0."""
    f.marks.cast(vector(_MARKS // 32, "u32")).value = 0


def row_scaled(f: Record, weights: str, document: Value, score: Value) -> Value:
    """Return a score times the scale of its document; float and half weights have no scale."""
    return score if weights in ("float", "half") else score * f.row_scales[document]


def write_score_candidates(terms: str, weights: str) -> Function:
    """Score the candidates, two at a time, and push those that reach theta."""
    x = Function("score_candidates", f=FRAME)
    (f,) = x.parameters
    offsets, own_terms, own_weights = f.offsets, f.terms.cast(terms), f.weights.cast(weights)
    candidates, number = f.candidates, f.count
    scores = x.local("float", 2)

    def document(candidate: Value) -> Value:
        return candidates[candidate].to("i64")

    def fetch(candidate: Value) -> None:
        ahead = document(candidate)
        start, stop = offsets[ahead], offsets[ahead + 1]
        for array in (own_terms, own_weights):
            with x.range(start, stop, 64 // array.step) as line:
                x.prefetch(array.at(line.i))

    # Fetch where the documents begin, then the first of them.
    with x.range(0, number) as loop:
        x.prefetch(offsets.at(document(loop.i)))
    with x.range(0, x.minimum(number, _FETCHED)) as loop:
        fetch(loop.i)

    with x.range(0, number, 2) as loop:
        for j in range(2):
            ahead = loop.i + (_FETCHED + j)
            with x.when(ahead < number):
                fetch(ahead)
        # The last document twice, if their number is odd.
        pair = [document(loop.i), document(x.minimum(loop.i + 1, number - 1))]
        x.call("score_pair", f, *pair, scores)
        for index, row in enumerate(pair):
            candidate = loop.i + index
            score = scores[index]
            good = (candidate < number) & (score >= f.theta)
            with x.when(good & (score > 0)):
                x.call("push_hit", f, row, score)
    return x
