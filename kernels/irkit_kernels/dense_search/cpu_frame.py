"""The frame: a table of 64-bit words that Python fills and the machine code reads and writes.

It holds the addresses of arrays, sizes, and the variables that functions share. Each thread has its own
frame.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._typed import Struct, vector

__all__ = ["BLOCK", "BYTES", "CHUNK", "FLOATS", "FRAME", "INTS", "LANES", "PANEL", "SEGMENT", "SLACK", "Plan"]

LANES = 16
PANEL = 32  # centroids that are multiplied together
BLOCK = 32  # rows whose signs are looked up together
CHUNK = 64  # dimensions that are rotated together; vectors are padded to whole chunks
SLACK = 512  # items that a collection may have beside those that are wanted
INTS, FLOATS, BYTES = vector(LANES, "i32"), vector(LANES, "float"), vector(4 * LANES, "u8")


@dataclass(frozen=True)
class Plan:
    """The variant of the code.

    Attributes:
        width: Dimensions of a vector, padded to whole chunks.
        nbits: Bits of a code per dimension: 1, 2 or 4.
        keep: Rows that candidates are ranked by: none, int8, float16 or float32.
        vnni: Multiply bytes with AVX512-VNNI.
        shuffle: The instruction that looks up 16 bytes: LLVM's name of a function, and the bytes of its
            operands; empty and 0 without one.
    """

    width: int
    nbits: int
    keep: str
    vnni: bool
    shuffle: tuple[str, int]


SEGMENT = Struct(
    8,
    first="i64",  # the number of its first row among the rows of all segments
    offsets="i64*",  # (lists + 1,)
    rows="u32*",
    signs="u8*",
    planes="u8*",
    factors="u32*",  # two bfloat16: of the signs, and of the base
    level_factors="u32*",  # two bfloat16: of the levels, and of the base
    biases="float*",  # null unless distances are euclidean
)

FRAME = Struct(
    8,
    # The index, see `layout`.
    dim="i64",
    n_rows="i64",
    n_segments="i64",
    segments=[SEGMENT],
    rotation_signs="float*",
    rotation_order="u32*",
    # The lists, group by group, see `cpu_lists`.
    n_groups="i64",
    group_slots="i64*",  # (groups + 1,)
    group_panels="u8*",
    group_scales="float*",
    group_biases="float*",
    group_numbers="u32*",
    panels="u8*",
    list_scales="float*",
    list_biases="float*",
    list_numbers="u32*",
    kept="u8*",
    kept_scales="float*",
    euclidean="i64",
    # Queries and results; ``allowed`` is null, or a byte for each row that is 0 if it must not be found.
    n_q="i64",
    queries="float*",
    k="i64",
    allowed="u8*",
    rows="i64*",
    scores="float*",
    # How much is read.
    groups="i64",
    probes="i64",
    candidates="i64",
    refined="i64",
    # Scratch memory.
    query="float*",  # the query that is searched for
    values="float*",  # the rotated query; then as much for its permutation
    bytes="u8*",  # the query as bytes
    levels="i32*",  # the query as small integers, of which 4 sum to at most 63
    table="u8*",  # sums of 4 levels
    keys="i32*",  # the collection: keys, items, and what else is known of each
    items="u32*",
    bases="float*",
    sums="float*",
    sorted_keys="i32*",
    sorted_items="u32*",
    probed="u32*",  # groups, then lists, best first
    probed_scores="float*",
    # Variables of a query.
    factor="float",  # of the query: 2 if distances are euclidean
    bias_factor="float",  # of the lists' biases
    byte_scale="float",
    byte_total="i64",
    level_scale="float",
    level_total="i64",
    below="i64",  # what the table adds to each sum
    result_bias="float",
    # Variables of a collection.
    count="i64",
    n_kept="i64",
    threshold="float",  # items must score more
    # Centroids list by list, in bytes: of codes of more than a bit without kept rows.
    n_lists="i64",
    list_bits="i64",  # of the largest number of a list
    list_codes="u8*",  # int8
    list_code_scales="float*",
    # Candidates and chosen places, see `cpu_search`.
    places="u32*",
    ranks="u32*",
    rough="float*",
    fine="float*",
)
