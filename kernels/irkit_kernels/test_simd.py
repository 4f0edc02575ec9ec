"""Arithmetic on vectors, as every CPU computes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels._simd import dot_bytes, half_to_float, lanes_of, store_floats, store_lanes
from irkit_kernels._testing import needs_x86
from irkit_kernels._typed import Function, module
from irkit_kernels.test_typed import runs

CPUS = {"this CPU": None, "any": Target(frozenset({"sse2"}))}
if "avx2" in cpu_features():
    CPUS |= {"avx2": Target(frozenset({"avx2"}), "haswell"), "any": Target(frozenset({"sse2"}), "x86-64")}
if "avxvnni" in cpu_features():
    CPUS["avxvnni"] = Target(frozenset({"avx2", "avxvnni"}), "alderlake")


@pytest.mark.parametrize("cpu", CPUS)
def test_dot_bytes(cpu: str) -> None:
    """All bytes of one side meet the extremes of the other."""
    numbers = np.random.default_rng(0)
    unsigned = numbers.choice([0, 1, 127, 128, 255], (512, 64)).astype(np.uint8)
    signed = numbers.choice([-128, -127, -1, 0, 127], (512, 64)).astype(np.int8)
    unsigned[:4], signed[:256] = np.arange(256, dtype=np.uint8).reshape(4, 64), -128
    unsigned[256:], signed[-4:] = 255, np.arange(-128, 128).astype(np.int8).reshape(4, 64)
    totals = numbers.integers(-(2**20), 2**20, (512, 16)).astype(np.int32)
    products = unsigned.astype(np.int32) * signed.astype(np.int32)
    expected = totals + products.reshape(512, 16, 4).sum(2, dtype=np.int32)
    with compiling_for(CPUS[cpu]):
        x = Function("dot_test", public=True, align=1, a="i32*", b="i32*", totals="i32*")
        a, b, sums = (parameter.vectors(16) for parameter in x.parameters)
        with x.range(0, 512 * 16, 16) as loop:
            sums[loop.i] = dot_bytes(sums[loop.i], a[loop.i], b[loop.i], vnni=False)
        runs(x, unsigned, signed, totals)
    np.testing.assert_array_equal(totals, expected)


@needs_x86
def test_dot_bytes_of_avx_vnni() -> None:
    """LLVM has the instruction for a CPU without AVX-512; it would end the process if it had not."""
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    with compiling_for(Target(frozenset({"avx2", "avxvnni"}))):
        x = Function("dot_test", public=True, align=1, a="i32*", b="i32*", totals="i32*")
        a, b, sums = (parameter.vectors(16) for parameter in x.parameters)
        sums[0] = dot_bytes(sums[0], a[0], b[0], vnni=False)
    cpu = llvm.Target.from_default_triple().create_target_machine(cpu="alderlake", opt=3)
    assembly = cpu.emit_assembly(llvm.parse_assembly(module(x)))
    assert assembly.count("vpdpbusd") == 2
    assert "zmm" not in assembly


@pytest.mark.parametrize("lanes", [0, 16])
@pytest.mark.parametrize("cpu", CPUS)
def test_half_to_float(cpu: str, lanes: int) -> None:
    """All finite numbers, also those below the normal ones, keep their value and their sign."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers[~np.isfinite(numbers)] = -0.0
    results = np.ones(1 << 16, np.float32)
    with compiling_for(CPUS[cpu]):
        x = Function("half_test", public=True, align=1, source="half*", target="float*")
        source, target = (array.vectors(lanes) if lanes else array for array in x.parameters)
        with x.range(0, 1 << 16, max(lanes, 1)) as loop:
            target[loop.i] = half_to_float(source[loop.i])
        runs(x, numbers, results)
    np.testing.assert_array_equal(results.view(np.uint32), numbers.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("cpu", CPUS)
def test_store_floats(cpu: str) -> None:
    """Numbers are rounded to bfloat16 to the nearest, ties to even; every NaN stays one."""
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (high | low).reshape(-1)
    with compiling_for(CPUS[cpu]):
        rounds = "avx512bf16" in cpu_features()
        if rounds:  # the instruction makes numbers below the normal ones 0
            bits = np.resize(bits[bits & 0x7F800000 != 0], len(bits))
        results = np.zeros(len(bits), np.uint16)
        x = Function("store_test", public=True, align=1, source="float*", target="u16*")
        source, target = x.parameters
        with x.range(0, len(bits), 16) as loop:
            store_floats(target.at(loop.i), source.vectors(16)[loop.i], rounds)
        runs(x, bits, results)
    expected = torch.from_numpy(bits.view(np.float32)).bfloat16()
    rounded = torch.from_numpy(results.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded[~expected.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("cpu", CPUS)
def test_lanes(cpu: str) -> None:
    """The lanes of every mask are stored side by side. Numbers beside these 16 stay as they are."""
    masks = np.arange(1 << 16, dtype=np.uint16)
    numbers = np.random.default_rng(0).integers(0, 1 << 30, (len(masks), 16), dtype=np.uint32)
    first, second = (np.full((len(masks), 24), -7, np.float32).view(kind) for kind in (np.uint32, np.float32))
    loaded = np.empty_like(numbers)
    with compiling_for(CPUS[cpu]):
        arrays = {"numbers": "u32*", "first": "u32*", "second": "float*", "loaded": "u32*"}
        x = Function("lanes_test", public=True, align=1, masks="u16*", **arrays)
        bits, source, *targets, whole = x.parameters
        with x.range(0, len(masks)) as loop:
            values, mask = source.at(loop.i * 16).vectors(16)[0], bits[loop.i]
            pairs = zip(targets, (values, values.cast("<16 x float>")), strict=True)
            store_lanes(x, pairs, loop.i * 24 + 4, mask)
            whole.at(loop.i * 16).vectors(16)[0] = x.masked_load(source.at(loop.i * 16), lanes_of(x, mask))
        runs(x, masks, numbers, first, second, loaded)
    held = (masks[:, None] >> np.arange(16) & 1).astype(bool)
    np.testing.assert_array_equal(loaded, np.where(held, numbers, 0))
    ahead = np.arange(16) < held.sum(1)[:, None]
    for stored in (first, second.view(np.uint32)):
        np.testing.assert_array_equal(stored[:, 4:20][ahead], numbers[held])
        assert (stored[:, :4].view(np.float32) == -7).all()
        assert (stored[:, 20:].view(np.float32) == -7).all()
