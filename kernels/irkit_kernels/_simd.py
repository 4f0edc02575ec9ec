"""What several kernels do with vectors: dot products of bytes, bfloat16 and float16, and choice of lanes."""

from __future__ import annotations

from collections.abc import Iterable

from ._jit import cpu_features
from ._typed import Array, Function, Value, vector

__all__ = [
    "converts_half",
    "dot_bytes",
    "half_to_float",
    "lanes_of",
    "load_floats",
    "move_half",
    "multiply_add_words",
    "store_floats",
    "store_lanes",
]

_HALF_DOT = "llvm.x86.avx512.vpdpbusd.256"  # which LLVM writes as the instruction of AVX-VNNI, too
_LANES = 16
_PLACES = [  # for each mask of 8 bits the numbers of these bits, a byte for each
    sum(bit << 8 * place for place, bit in enumerate(bit for bit in range(8) if mask >> bit & 1))
    for mask in range(256)
]
_HALF = -0x80000000 | 0x0FFFE000  # sign, and the exponent and fraction of a float16 moved up by 13 bits


def dot_bytes(total: Value, a: Value, b: Value, vnni: bool) -> Value:
    """Return ``total`` plus the sum of ``a * b`` over the 4 bytes of each of 16 lanes.

    Args:
        total: 16 i32.
        a: 16 words of 4 unsigned bytes.
        b: 16 words of 4 signed bytes.
        vnni: Use the instruction of AVX512-VNNI. Without it, use that of AVX-VNNI if the CPU has it, or else
            multiply in 16 bits; the result is the same.
    """
    code, lanes = total.code, total.lanes
    if vnni:
        return code.call("llvm.x86.avx512.vpdpbusd.512", total, a, b, kind=total.kind)
    if "avxvnni" in cpu_features():  # the CPU has VNNI without AVX-512, or as well
        numbers, half, sums = [x.cast(total.kind) for x in (total, a, b)], lanes // 2, []
        for start in (0, half):
            words = [code.shuffle(x, None, range(start, start + half)) for x in numbers]
            sums.append(code.call(_HALF_DOT, *words, kind=vector(half, "i32")))
        return code.shuffle(sums[0], sums[1], range(lanes))
    # bytes 0 and 2 of each word, then bytes 1 and 3, as numbers of 16 bits
    halves = vector(2 * lanes, "i16")
    a, b = a.cast(halves), b.cast(halves)
    for unsigned, signed in ((a & 255, (b << 8).shift_signed(8)), (a >> 8, b.shift_signed(8))):
        total = total + _multiply_add_pairs(unsigned, signed)
    return total


def _multiply_add_pairs(a: Value, b: Value) -> Value:
    """Return the sums of pairs of products: 16 i32 of 32 i16; each product fits into 16 bits."""
    code, lanes = a.code, a.lanes // 2
    if "avx2" not in cpu_features():
        products = (a * b).cast(vector(lanes, "i32"))
        return (products << 16).shift_signed(16) + products.shift_signed(16)
    low, high = (
        code.call(
            "llvm.x86.avx2.pmadd.wd",
            code.shuffle(a, None, range(start, start + lanes)),
            code.shuffle(b, None, range(start, start + lanes)),
            kind=vector(lanes // 2, "i32"),
        )
        for start in (0, lanes)
    )
    return code.shuffle(low, high, range(lanes))


def multiply_add_words(total: Value, a: Value, b: Value, *, bfloat16: bool) -> Value:
    """Return ``total + a * b`` of words: each is a float32, or 2 bfloat16 whose products are summed.

    Args:
        total: Vector of float32.
        a: Vector of i32 of the same length.
        b: Vector of i32 of the same length.
        bfloat16: Multiply bfloat16 (AVX512-BF16, 16 lanes) instead of float32.
    """
    kind = vector(32, "bfloat") if bfloat16 else total.kind
    a, b = a.cast(kind), b.cast(kind)
    if not bfloat16:
        return total.code.intrinsic("fmuladd", kind, a, b, total)
    return total.code.call("llvm.x86.avx512bf16.dpbf16ps.512", total, a, b, kind=total.kind)


def load_floats(array: Array, lanes: int) -> Value:
    """Load float32 numbers from an array of ``float`` or, widened, from an array of bfloat16 as ``u16``."""
    numbers: Value = array.vectors(lanes)[0]
    if array.kind == "float":
        return numbers
    return (numbers.to("i32") << 16).cast(vector(lanes, "float"))


def store_floats(array: Array, numbers: Value, rounds: bool) -> None:
    """Store float32 numbers to an array of ``float`` or, rounded, to an array of bfloat16 as ``u16``.

    Args:
        array: The array.
        numbers: A vector.
        rounds: The CPU has an instruction that rounds to bfloat16. Without one, LLVM would call a function
            that need not be there, so integers round to the nearest, ties to even; a NaN remains one.
    """
    lanes = numbers.lanes
    if array.kind == "float":
        array.vectors(lanes)[0] = numbers
    elif rounds:
        array.cast("bfloat", array.align).vectors(lanes)[0] = numbers.to("bfloat")
    else:
        bits = numbers.cast(vector(lanes, "i32"))
        odd = (bits >> 16) & 1
        rounded = (bits + (odd + 0x7FFF)) >> 16
        nan = numbers.compare("uno", numbers).mask("i32") & 0x7FC0
        array.vectors(lanes)[0] = (rounded | nan).to("u16")


def lanes_of(x: Function, mask: Value) -> Value:
    """Return the bits of a mask ``u16`` as 16 lanes ``i1``.

    Without AVX-512, LLVM would move the bits one by one, so here each lane is compared with its own bit.
    """
    if "avx512f" in cpu_features():
        return mask.cast(vector(_LANES, "i1"))
    own = x.constants("i32", [1 << lane for lane in range(_LANES)])
    return (mask.to("i32").broadcast(_LANES) & own) == own


def store_lanes(x: Function, pairs: Iterable[tuple[Array, Value]], index: Value, mask: Value) -> None:
    """Store the lanes of vectors that a mask holds side by side, from an index of their arrays on.

    Args:
        x: The function.
        pairs: Arrays, each with 16 numbers of 4 bytes to be stored in it. 16 numbers may be overwritten.
        index: Where the first of these lanes goes, ``i64``.
        mask: A bit for each lane, ``u16``.
    """
    features = cpu_features()
    if "avx512f" in features or "avx2" not in features:
        lanes = lanes_of(x, mask)
        for array, values in pairs:
            together = x.intrinsic("experimental.vector.compress", values.kind, values, lanes, values)
            array.vectors(_LANES)[index] = together
        return
    # AVX2 moves 8 lanes to the places that a table has for their bits
    table, half = x.table("places", "u64", _PLACES), _LANES // 2
    eight, pairs = vector(half, "i32"), list(pairs)
    for start in (0, half):
        bits = (mask >> start) & 255
        lanes = table[bits.to("i64")].cast(vector(half, "u8")).to("i32")
        for array, values in pairs:
            part = x.shuffle(values.cast(vector(_LANES, "i32")), None, range(start, start + half))
            together = x.call("llvm.x86.avx2.permd", part, lanes, kind=eight)
            array.cast("i32", array.align).vectors(half)[index] = together
        index = index + bits.count_ones().to("i64")


def converts_half() -> bool:
    """Return whether the CPU has an instruction that converts float16; otherwise LLVM calls a function.

    That function need not be there, and a call of it would then end the process.
    """
    return bool(cpu_features() & {"f16c", "avx512f", "neon"})


def half_to_float(numbers: Value) -> Value:
    """Return finite numbers of kind ``half``, a value or a vector, as float32."""
    if converts_half():
        return numbers.to("float")
    return move_half(numbers.cast(vector(numbers.lanes, "i16") if numbers.lanes else "i16"))


def move_half(bits: Value) -> Value:
    """Return finite float16 numbers, given as i16, as float32, with instructions that every CPU has.

    Sign, exponent and fraction move to their places in a float32, whose exponent then gets its bias by a
    product. It is exact, also for numbers below the normal ones. What is infinite or NaN becomes finite.
    """
    moved = (bits.to("i32") << 13) & _HALF
    return moved.cast(vector(bits.lanes, "float") if bits.lanes else "float") * 2.0**112
