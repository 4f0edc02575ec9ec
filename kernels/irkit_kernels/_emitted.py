"""Lists a hash of every LLVM module that the CPU kernels write, for every plan and kind of CPU.

Two equal lists prove that a change to the code that writes LLVM IR did not change what it writes.
`test_emitted.py` compares with ``_emitted.txt``. If a change of the text is intended, renew that file, and
give the reason with numbers in the commit::

    PYTHONPATH=kernels python -m irkit_kernels._emitted > kernels/irkit_kernels/_emitted.txt

Nothing is compiled, and the features of this CPU do not matter. To see what changed, write the modules of two
commits into two folders and compare them::

    PYTHONPATH=kernels python -m irkit_kernels._emitted FOLDER
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

from ._jit import Target, compiling_for
from ._products import write_add_rows
from .dense_scan.cpu_rank import write_hits, write_keys, write_products
from .dense_scan.cpu_scan import write_scan
from .dense_search.cpu_frame import Plan as DensePlan
from .dense_search.cpu_rotate import write_rotation
from .dense_search.cpu_search import write_candidates, write_places
from .dense_search.cpu_search import write_search as write_dense_search
from .dense_search.op import SHUFFLES
from .maxsim import cpu_tile as maxsim
from .packed_linear.cpu_tile import ACTIVATIONS as LINEAR_ACTIVATIONS
from .packed_linear.cpu_tile import Plan as LinearPlan
from .packed_linear.cpu_tile import write_feed_forward, write_linear
from .ragged_attention.cpu_backward import write_differentiate
from .ragged_attention.cpu_kernel import Plan as AttentionPlan
from .ragged_attention.cpu_kernel import write_attend
from .ragged_pool.cpu_tile import write_ir as write_ragged_pool
from .residual_maxsim import cpu_tile as residual
from .residual_maxsim.cpu_assign import write_assign
from .residual_maxsim.cpu_probe import write_collect, write_probe
from .residual_maxsim.cpu_search import write_interaction, write_maxsim, write_table
from .residual_maxsim.cpu_vectors import write_decode, write_encode
from .residual_maxsim.reference import packed_width
from .rotary.cpu_rotate import write_rotate
from .row_norm.cpu_rows import write_norm
from .sparse_search.cpu_approximate import write_approximate
from .sparse_search.cpu_exact import write_exact
from .sparse_search.cpu_few import write_few
from .splade_pool import cpu_tile as splade_pool

__all__ = ["hashes", "modules"]

_LANES = (4, 8, 16)  # NEON or SSE, AVX2, AVX-512
_FLAGS = (False, True)
_INTEGERS = ("i16", "i32")
_BYTES = {  # how `_simd.dot_bytes` multiplies
    "vnni=False": Target(frozenset()),
    "vnni=False, avx2": Target(frozenset({"avx2", "f16c"})),
    "vnni=True": Target(frozenset({"avx2", "f16c", "avx512f"})),
}
_HALVES = {"": Target(frozenset({"f16c"})), ", f16c=False": Target(frozenset())}  # how float16 is converted


def hashes(step: int = 1) -> list[str]:
    """Return a line per module: its name and the hash of its functions.

    Declarations do not count: LLVM refuses a module that lacks one, and ignores one that nothing uses.

    Args:
        step: Write only every ``step``-th module.
    """
    return [
        f"{name} {hashlib.sha256(_functions(write()).encode()).hexdigest()[:16]}"
        for number, (name, write) in enumerate(modules())
        if number % step == 0
    ]


def _functions(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.startswith("declare "))


def modules() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of every module, and what writes its text if called before the next one is asked for."""
    for lanes in _LANES:
        yield f"add_rows({lanes})", partial(write_add_rows, lanes)
    yield from _packed_linear()
    for flags in product(_FLAGS, repeat=4):
        yield "row_norm(rms={}, add={}, weight={}, bias={})".format(*flags), partial(write_norm, *flags)
    yield "rotary()", write_rotate
    for bfloat16, transposed, rounds in product(_FLAGS, _FLAGS, _FLAGS):
        name = f"ragged_pool(bfloat16={bfloat16}, transposed={transposed}, rounds={rounds})"
        yield name, partial(write_ragged_pool, bfloat16, transposed, rounds)
    vectors = [("float32", lanes) for lanes in _LANES] + [("bfloat16", 16)]
    for kind, lanes in vectors:
        yield f"splade_pool({kind}, {lanes})", partial(splade_pool.write_ir, splade_pool.Plan(kind, lanes))
    for (kind, lanes), paired in product([*vectors, ("int8", 16)], _FLAGS):
        name = f"maxsim({kind}, {lanes}, paired={paired})"
        yield name, partial(maxsim.write_maxsim, maxsim.Plan(kind, lanes, paired))
    for lanes, paired, stored in product(_LANES, _FLAGS, ("float16", "int8")):
        plan = maxsim.Plan("float32", lanes, paired, stored)
        yield (
            f"maxsim(float32, {lanes}, paired={paired}, stored={stored})",
            partial(maxsim.write_maxsim, plan),
        )
    yield from _ragged_attention()
    yield from _residual_maxsim()
    yield from _sparse_search()
    yield from _dense_search()
    yield from _dense_scan()


def _packed_linear() -> Iterator[tuple[str, Callable[[], str]]]:
    cpus = [("int8", cpu) for cpu in _BYTES] + [("bfloat16", f"bf16={native}") for native in _FLAGS]
    for kind, cpu in cpus:
        with compiling_for(_BYTES.get(cpu, Target(frozenset()))):
            native = cpu in ("vnni=True", "bf16=True")
            for activation, gated in product(LINEAR_ACTIVATIONS, _FLAGS):
                plan = LinearPlan(kind, activation, gated, native)
                name = f"{kind}, {activation}, gated={gated}, {cpu}"
                yield f"packed_linear({name})", partial(write_linear, plan)
                yield f"packed_linear.feed_forward({name})", partial(write_feed_forward, plan)
            for halves in product(_FLAGS, _FLAGS):
                plan = LinearPlan(kind, "none", False, native, *halves)
                name = "{}, reads_half={}, writes_half={}, {}".format(kind, *halves, cpu)
                yield f"packed_linear({name})", partial(write_linear, plan)
            plan = LinearPlan(kind, "gelu", False, native, normed=True)
            yield f"packed_linear({kind}, normed=True, {cpu})", partial(write_linear, plan)
            yield f"packed_linear.feed_forward({kind}, normed=True, {cpu})", partial(write_feed_forward, plan)


def _dense_scan() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "dense_scan.keys()", write_keys
    yield "dense_scan.hits()", write_hits
    for kind in ("float", "u16", "u8"):
        yield f"dense_scan.products({kind})", partial(write_products, kind)
    for cpu, target in _HALVES.items():
        with compiling_for(target):
            yield f"dense_scan.products(half{cpu})", partial(write_products, "half")
    for cpu, target in _BYTES.items():
        with compiling_for(target):
            yield f"dense_scan({cpu})", partial(write_scan, "vnni=True" in cpu)


def _ragged_attention() -> Iterator[tuple[str, Callable[[], str]]]:
    kinds = [(bfloat16, False, lanes) for bfloat16 in _FLAGS for lanes in _LANES]
    kinds += [(True, True, 16), (False, True, 16)]
    for head_dim, (bfloat16, dot, lanes), dropout in product((8, 40, 64), kinds, _FLAGS):
        plan = AttentionPlan(head_dim, bfloat16, dot, lanes, dropout)
        name = f"{head_dim}, bfloat16={bfloat16}, dot={dot}, {lanes}, dropout={dropout}"
        yield f"ragged_attention({name})", partial(write_attend, plan)
        yield f"ragged_attention.backward({name})", partial(write_differentiate, plan)
    for bfloat16, dot, lanes in kinds:
        plan = AttentionPlan(64, bfloat16, dot, lanes, biased=True)
        name = f"64, bfloat16={bfloat16}, dot={dot}, {lanes}, biased=True"
        yield f"ragged_attention({name})", partial(write_attend, plan)
        yield f"ragged_attention.backward({name})", partial(write_differentiate, plan)


def _residual_maxsim() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "residual_maxsim.collect", write_collect
    cpus = {f"{cpu}, permutes=False": target for cpu, target in _BYTES.items()}
    for cpu, target in (cpus | {"vnni=True, permutes=True": Target(frozenset({"avx512vbmi"}))}).items():
        vnni = "vnni=True" in cpu
        with compiling_for(target):
            for dim, vectors in product((4, 48, 128), (1, 2)):
                plan = residual.Plan(dim, vectors, vnni)
                name = f"{dim}, {vectors}, {cpu}"
                yield f"residual_maxsim.table({name})", partial(write_table, plan)
                yield f"residual_maxsim.probe({name})", partial(write_probe, plan)
                for code in _INTEGERS:
                    yield (
                        f"residual_maxsim.interaction({name}, {code})",
                        partial(write_interaction, plan, code),
                    )
                    for nbits, exact in product((1, 2, 4, 8), _FLAGS):
                        width, kind = packed_width(dim, nbits), "exact_maxsim" if exact else "residual_maxsim"
                        write = partial(write_maxsim, plan, code, nbits, width, dim * exact)
                        yield f"{kind}({name}, {code}, nbits={nbits})", write
            for dim in (3, 48, 128):
                yield f"residual_maxsim.assign({dim}, {cpu})", partial(write_assign, dim, vnni)
                for code, nbits in product(_INTEGERS, (1, 2, 4, 8)):
                    name, width = f"{dim}, {code}, nbits={nbits}, {cpu}", packed_width(dim, nbits)
                    yield (
                        f"residual_maxsim.encode({name})",
                        partial(write_encode, dim, code, nbits, width, vnni),
                    )
                    yield (
                        f"residual_maxsim.decode({name})",
                        partial(write_decode, dim, code, nbits, width, vnni),
                    )


def _sparse_search() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "sparse_search.few()", write_few
    for terms, weights, cpu in product(("u16", "u32"), ("float", "half", "u16", "u8"), _HALVES):
        if cpu and weights != "half":
            continue
        with compiling_for(_HALVES[cpu]):
            for wide in _FLAGS:
                yield (
                    f"sparse_search.exact({terms}, {weights}, wide={wide}{cpu})",
                    partial(write_exact, terms, weights, wide),
                )
            yield (
                f"sparse_search.approximate({terms}, {weights}{cpu})",
                partial(write_approximate, terms, weights),
            )


def _dense_search() -> Iterator[tuple[str, Callable[[], str]]]:
    for back in _FLAGS:
        yield f"dense_search.rotate_rows(back={back})", partial(write_rotation, back)
    cpus = [("vnni=True", "avx512bw"), ("vnni=False", "")]
    for feature in SHUFFLES:
        cpus.append(("vnni=False, avx2" if feature.startswith("avx") else "vnni=False", feature))
    for cpu, feature in cpus:
        shuffle, implied = SHUFFLES.get(feature, ("", 0)), {"avx512f"} if feature == "avx512bw" else set()
        with compiling_for(Target(_BYTES[cpu].features | {feature} | implied)):
            for nbits, keep in product((1, 2, 4), ("none", "int8", "float16", "float32")):
                for width in (64, 1088):
                    plan = DensePlan(width, nbits, keep, "vnni=True" in cpu, shuffle)
                    look_up = shuffle[0] or "no shuffle"
                    name = f"{width}, nbits={nbits}, keep={keep}, {cpu}, {look_up}"
                    yield f"dense_search({name})", partial(write_dense_search, plan)
                    yield f"dense_search.candidates({name})", partial(write_candidates, plan)
                    yield f"dense_search.rank_places({name})", partial(write_places, plan)


def main(folder: str = "") -> None:
    """Print the hashes; if a folder is named, write each module to a file in it instead."""
    if not folder:
        print("\n".join(hashes()))  # noqa: T201
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, write in modules():
        (Path(folder) / f"{name}.ll").write_text(write() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
