"""Every implementation of pooling on the CPU agrees with the definition; sparse rows agree with dense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels._threads import forced_threads
from irkit_kernels.splade_pool import ACTIVATIONS, POOLINGS, op, splade_pool, tiled
from irkit_kernels.splade_pool import cpu_kernel as cpu
from irkit_kernels.splade_pool import splade_pool_sparse as pool_sparse
from irkit_kernels.splade_pool.cpu_tile import Plan
from irkit_kernels.splade_pool.reference import pool_backward, pool_forward

AVX2 = {"avx2", "fma"}
CPUS = {"this CPU": None, "any": Target(frozenset({"sse2"})), "no compiler": Target(frozenset())}
if cpu_features() >= AVX2:
    CPUS |= {"avx2": Target(frozenset(AVX2), "haswell"), "any": Target(frozenset({"sse2"}), "x86-64")}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # half of the last digit


@pytest.fixture(params=CPUS, scope="module", autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the code for one of the CPUs; fresh memory is full of NaN and large integers."""
    torch.use_deterministic_algorithms(True)
    with compiling_for(CPUS[request.param]):
        yield request.param
    torch.use_deterministic_algorithms(False)


class Problem(NamedTuple):
    hidden: Tensor
    offsets: Tensor
    weight: Tensor
    bias: Tensor | None

    def map(self, function) -> Problem:
        parts = (function(self.hidden), self.offsets, function(self.weight))
        return Problem(*parts, None if self.bias is None else function(self.bias))

    @property
    def floats(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def inside(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values between rows of NaN, so that a read outside of them shows in the results."""
    framed = torch.full((len(values) + 2, *values.shape[1:]), math.nan, dtype=dtype)
    framed[1:-1] = values.to(dtype)
    return framed[1:-1]


def problem(lengths, v, d, dtype=torch.float32, seed=0, whole=False, bias=True) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), d), (v, d), (v,)]
    if whole:
        values = [torch.randint(-3, 4, shape, generator=generator) for shape in shapes]
    else:
        values = [torch.randn(shape, generator=generator) for shape in shapes]
    hidden, weight, shift = (inside(x, dtype) for x in values)
    return Problem(hidden, offsets_of(lengths), weight, shift if bias else None)


@st.composite
def problems(draw, whole=True):
    length = st.one_of(st.integers(0, 20), st.sampled_from([0, 1, 31, 32, 33, 70]))
    d = st.one_of(st.integers(1, 40), st.sampled_from([64, 100]))
    v = st.one_of(st.integers(1, 20), st.sampled_from([64, 131]))
    dtype, seed = st.sampled_from(DTYPES), st.integers(0, 2**31)
    lengths = draw(st.lists(length, max_size=5))
    return problem(lengths, draw(v), draw(d), draw(dtype), draw(seed), whole, draw(st.booleans()))


poolings, activations = st.sampled_from(POOLINGS), st.sampled_from(ACTIVATIONS)


@settings(deadline=None, max_examples=40)
@given(problems(), poolings, st.integers(0, 2**31))
def test_whole_numbers_are_exact(x, pooling, seed):
    weights, argmax = pool_forward(*x, "relu", pooling)
    got, tokens = op._forward(*x, "relu", pooling)
    assert torch.equal(got, weights)
    if pooling == "max":
        assert torch.equal(tokens, argmax)  # many logits are equal: the first counts
    assert torch.equal(splade_pool(*x, activation="relu", pooling=pooling), weights)

    leaves = x.map(lambda part: part.detach().requires_grad_())
    got = splade_pool(*leaves, activation="relu", pooling=pooling)
    assert torch.equal(got, weights)
    grad = torch.randint(-3, 4, weights.shape, generator=torch.Generator().manual_seed(seed)).float()
    gradients = torch.autograd.grad(got, leaves.floats, grad)
    expected = pool_backward(grad, *x, weights, argmax, "relu", pooling)
    for ours, theirs in zip(gradients, expected, strict=False):
        assert ours.dtype == x.hidden.dtype
        assert torch.equal(ours, theirs)


@settings(deadline=None, max_examples=40)
@given(problems(whole=False), activations, poolings, st.integers(0, 2**31))
def test_rounding_is_that_of_float32(x, activation, pooling, seed):
    names = (activation, pooling)
    weights, argmax = pool_forward(*x.map(Tensor.double), *names)
    got, tokens = op._forward(*x, *names)
    # d products, their additions and the bias in each logit; activations do not enlarge an error
    logits = x.map(lambda part: part.double().abs())
    steps, tokens = x.hidden.shape[1] + 1, max([1, *x.offsets.diff().tolist()])
    largest = pool_forward(*logits, "relu", pooling)[0]
    bound = 2**-23 * ((steps + 1) * largest + (tokens + 4) * weights) + 1e-30
    assert ((got - weights).abs() <= bound).all()

    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed))  # random in every axis
    mine = (weights.float(), argmax) if pooling == "max" else (got, tokens)
    actual = op._backward(grad, *x, *mine, *names)
    exact = pool_backward(grad.double(), *x.map(Tensor.double), weights, argmax, *names)
    size = pool_backward(grad.double().abs(), *logits, torch.ones_like(weights), argmax, "relu", pooling)
    # a slope is off by what the logit is off, at most twice, unless the logit crosses 0
    wrong = 2**-21 * (steps * float(largest.max()) if largest.numel() else 0) + 2**-20 * (len(x.hidden) + 4)
    sure = pooling == "max" or bool((_logits(x.map(Tensor.double)).abs() > wrong).all())
    for ours, theirs, most in zip(actual, exact, size, strict=True):
        bound = (wrong + 2**-23 * (len(weights) + weights.shape[1])) * most
        error = (ours.double() - theirs).abs()
        assert not sure or (error <= bound + HALF[ours.dtype] * theirs.abs() + 1e-6).all()


def _logits(x: Problem) -> Tensor:
    logits = x.hidden @ x.weight.T
    return logits if x.bias is None else logits + x.bias


@pytest.mark.parametrize("pooling", POOLINGS)
def test_nothing_flows_from_weights_of_zero(pooling):
    x = problem([2, 0, 5], 9, 4).map(lambda part: part.abs())
    x = x._replace(weight=-x.weight, bias=-x.bias).map(lambda part: part.requires_grad_())
    weights = splade_pool(*x, pooling=pooling)
    assert weights.eq(0).all()
    gradients = torch.autograd.grad(weights, x.floats, torch.full_like(weights, math.inf))
    assert pooling == "sum" or all(gradient.eq(0).all() for gradient in gradients)
    gradients = torch.autograd.grad(splade_pool(*x, pooling=pooling).sum(), x.floats)
    assert all(gradient.eq(0).all() for gradient in gradients)


def test_the_first_of_equals_gets_the_gradient():
    hidden = torch.tensor([[1.0, 0.0], [2.0, 0.0], [2.0, 1.0], [2.0, 1.0]], requires_grad=True)
    weights = splade_pool(hidden, offsets_of([4]), torch.eye(2), activation="relu")
    (gradient,) = torch.autograd.grad(weights.sum(), hidden)
    assert gradient.tolist() == [[0, 0], [1, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences(dtype):
    x = problem([1500, 1, 0, 513, 300], 29, 24, dtype, whole=True)
    for got, want in zip(op._forward(*x, "relu", "max"), pool_forward(*x, "relu", "max"), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_no_tokens(lengths, pooling):
    x = problem(lengths, 7, 3).map(lambda part: part.requires_grad_())
    weights = splade_pool(*x, pooling=pooling)
    assert torch.equal(weights, torch.zeros(len(lengths), 7))
    gradients = torch.autograd.grad(weights.sum(), x.floats)
    assert all(gradient.eq(0).all() for gradient in gradients)
    for top_k in (None, 2):
        counts, terms, values = pool_sparse(*x, pooling=pooling, top_k=top_k)
        assert counts.tolist() == [0] * len(lengths)
        assert len(terms) == len(values) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("token", [0, 6, 15])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_nan_is_seen_where_it_is(dtype, token, pooling):
    x = problem([16, 20], 17, 5, dtype)
    clean = splade_pool(*x, pooling=pooling)
    x.hidden[token, 4] = math.nan
    weights = splade_pool(*x, pooling=pooling)
    assert weights[0].isnan().all()
    assert torch.equal(weights[1], clean[1])
    if pooling == "max":
        argmax = op._forward(*x, "relu", "max")[1]
        assert argmax[0].min() >= 0
        assert argmax[0].max() < 16  # never out of the sequence
    counts, terms, _ = pool_sparse(*x, pooling=pooling, top_k=5)
    assert counts[0] == 5
    assert terms[:5].tolist() == list(range(5))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_threads_and_neighbours_change_nothing(pooling):
    x = problem([3, 0, 90, 41, 8, 17], 300, 70)
    weights, argmax = op._forward(*x, "log1p_relu", pooling)
    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(4))
    gradients = op._backward(grad, *x, weights, argmax, "log1p_relu", pooling)
    if pooling == "max":
        for i, (start, stop) in enumerate(zip(x.offsets[:-1].tolist(), x.offsets[1:].tolist(), strict=True)):
            alone = x._replace(hidden=x.hidden[start:stop], offsets=offsets_of([stop - start]))
            torch.testing.assert_close(splade_pool(*alone)[0], weights[i])
    with forced_threads(4), ThreadPoolExecutor(4) as pool:
        assert torch.equal(splade_pool(*x, pooling=pooling), weights)
        again = op._backward(grad, *x, weights, argmax, "log1p_relu", pooling)
        assert all(torch.equal(a, b) for a, b in zip(again, gradients, strict=True))
        for got in pool.map(lambda _: splade_pool(*x, pooling=pooling), range(8)):
            assert torch.equal(got, weights)


@pytest.mark.sampled
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("bias", [True, False])
def test_opcheck_and_compile(path, pooling, bias):
    x = problem([3, 0, 9, 4], 12, 6, bias=bias).map(lambda part: part.detach().clone().requires_grad_())
    if path == "this CPU":  # the code behind the operator makes no difference
        torch.library.opcheck(torch.ops.irkit.splade_pool.default, (*x, "log1p_relu", pooling))

    def loss(*parts):
        return splade_pool(*parts, pooling=pooling).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ([3, 0, 9, 4], [10, 6]):  # other numbers of sequences
        x = x._replace(offsets=offsets_of(lengths))
        ours, theirs = (function(*x) for function in (compiled, loss))
        assert torch.equal(ours, theirs)
        for a, b in zip(*(torch.autograd.grad(y, x.floats) for y in (ours, theirs)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_mixed_types_are_fine(dtype):
    x = problem([4, 5], 7, 6, dtype, whole=True)
    expected = splade_pool(*x)
    strided = x.map(lambda part: torch.stack([part, part], part.dim())[..., 1])
    assert torch.equal(splade_pool(*strided), expected)
    ends = torch.stack([x.offsets, x.offsets], 1)[:, 0]
    assert torch.equal(splade_pool(x.hidden, ends, x.weight, x.bias.float()), expected)
    assert torch.equal(splade_pool(x.hidden, ends, x.weight.T.contiguous().T, x.bias), expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_autocast_rounds_and_keeps_no_copy_of_the_matrix(pooling):
    x = problem([4, 5], 200, 6).map(lambda part: part.detach().requires_grad_())
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        got = splade_pool(*x, pooling=pooling)
    saved = [part for part in saved if part.shape == x.weight.shape]
    assert [part.data_ptr() for part in saved] == [x.weight.data_ptr()]
    low = Problem(x.hidden.bfloat16(), x.offsets, x.weight.bfloat16(), x.bias)
    assert torch.equal(got, splade_pool(*low, pooling=pooling))
    assert torch.equal(got, splade_pool(*low._replace(weight=x.weight), pooling=pooling))

    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad(got, x.floats, grad)
    results = pool_forward(*low.map(Tensor.double), "log1p_relu", pooling)
    exact = pool_backward(grad.double(), *low.map(Tensor.double), *results, "log1p_relu", pooling)
    size = pool_backward(
        grad.double().abs(), *low.map(lambda part: part.double().abs()), *results, "relu", pooling
    )
    for ours, theirs, most in zip(actual, exact, size, strict=True):
        assert ours.dtype == torch.float32
        # the matrix that hidden's gradient has and that of hidden itself are rounded, to 8 bits each
        assert ((ours - theirs).abs() <= 2**-7 * most + 1e-6).all()


@settings(deadline=None, max_examples=40)
@given(
    problems(),
    activations,
    poolings,
    st.sampled_from([0.0, 0.7, 2.0, 50.0]),
    st.one_of(st.none(), st.integers(1, 140)),
    st.lists(st.integers(0, 200), max_size=20),
)
def test_sparse_rows_are_the_dense_ones(x, activation, pooling, threshold, top_k, excluded):
    v = len(x.weight)
    names = {"activation": activation, "pooling": pooling}
    banned = [term for term in excluded if term < v]
    tiles = [slice(i, min(i + 50, v)) for i in range(0, v, 50)]

    def weights_of(terms: slice) -> Tensor:
        bias = None if x.bias is None else x.bias[terms]
        return splade_pool(*x._replace(weight=x.weight[terms], bias=bias), **names)

    dense = torch.cat([weights_of(terms) for terms in tiles], 1)
    options = {"threshold": threshold, "top_k": top_k, "excluded": torch.tensor(banned, dtype=torch.int64)}
    counts, terms, weights = tiled.sparse_rows(weights_of, len(dense), tiles, **options)
    for ours, theirs in zip(pool_sparse(*x, **names, **options)[:2], (counts, terms), strict=True):
        assert torch.equal(ours, theirs)  # of one tile
    expected = []
    for row in dense.tolist():
        eligible = [(-w, term) for term, w in enumerate(row) if w > threshold and term not in banned]
        expected.append(sorted(term for _, term in sorted(eligible)[:top_k]))
    assert counts.tolist() == [len(row) for row in expected]
    assert terms.tolist() == [term for row in expected for term in row]
    rows = torch.repeat_interleave(torch.arange(len(dense)), counts)
    assert torch.equal(weights, dense[rows, terms])


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operator returned, views excepted."""

    numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        old = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, Tensor)}
        for x in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in old:
                self.numbers = max(self.numbers, x.numel())
        return result


def test_nothing_large_is_stored():
    x = problem([60] * 8, 20_000, 16)  # tokens x terms are 9.6 million
    grad = torch.randn(8, 20_000, generator=torch.Generator().manual_seed(0))
    for pooling in POOLINGS:
        with Largest() as largest:
            results = op._forward(*x, "log1p_relu", pooling)
            op._backward(grad, *x, *results, "log1p_relu", pooling)
        assert largest.numbers <= 1 << 22  # a tile
    with Largest() as largest:
        pool_sparse(*x, top_k=10)
    assert largest.numbers <= 1 << 22


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(9, 5)}, r"of one d, got \(9, 5\) and \(6, 4\)"),
        ({"hidden": torch.zeros(9)}, "expected hidden"),
        ({"hidden": torch.zeros(9, 0), "weight": torch.zeros(6, 0)}, "expected hidden"),
        ({"weight": torch.zeros(0, 4)}, "expected hidden"),
        ({"weight": torch.zeros(6, 4, dtype=torch.float16)}, "one dtype among"),
        ({"hidden": torch.zeros(9, 4).double(), "weight": torch.zeros(6, 4).double()}, "float64"),
        ({"bias": torch.zeros(5)}, r"bias must be \(6,\) torch.float32 or float32, got \(5,\)"),
        ({"bias": torch.zeros(6).half()}, "got .* torch.float16"),
        ({"offsets": torch.tensor([0, 9])}, "offsets must be .* int32, got .* torch.int64"),
        ({"offsets": torch.tensor([], dtype=torch.int32)}, "offsets must be"),
        ({"offsets": offsets_of([8])}, "offsets must rise from 0 to 9"),
        ({"offsets": torch.tensor([1, 9], dtype=torch.int32)}, "offsets must rise from 0 to 9"),
        ({"offsets": torch.tensor([0, 5, 4, 9], dtype=torch.int32)}, "offsets must rise from 0 to 9"),
        ({"activation": "gelu"}, "expected an activation of .* got 'gelu'"),
        ({"pooling": "mean"}, "a pooling of .* 'mean'"),
        ({"weight": torch.zeros(6, 4, device="meta")}, "one CPU or CUDA device"),
    ],
)
def test_wrong_arguments(change, message):
    good = {"hidden": torch.zeros(9, 4), "offsets": offsets_of([4, 5]), "weight": torch.zeros(6, 4)}
    assert splade_pool(**good).shape == (2, 6)
    for function in (splade_pool, pool_sparse):
        with pytest.raises(ValueError, match=message):
            function(**(good | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": -1.0}, "threshold must be a finite number of at least 0, got -1"),
        ({"threshold": math.nan}, "threshold must be"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"excluded": torch.tensor([6])}, r"terms from 0 to 5, got \[6\]"),
        ({"excluded": torch.tensor([-1])}, "terms from 0 to 5"),
        ({"excluded": torch.tensor([1], dtype=torch.int32)}, r"excluded must be \(m,\) int64"),
    ],
)
def test_wrong_arguments_of_sparse_rows(change, message):
    with pytest.raises(ValueError, match=message):
        pool_sparse(torch.zeros(9, 4), offsets_of([4, 5]), torch.zeros(6, 4), **change)


def test_plans(path):
    plans = [cpu.plan_for(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    expected = {"avx2": [Plan("float32", 8)] * 3, "any": [Plan("float32", 4)] * 3, "no compiler": [None] * 3}
    if path in expected:
        assert plans == expected[path]
    elif "avx512bf16" in cpu_features():
        assert plans == [Plan(kind, 16) for kind in ("float32", "bfloat16", "float32")]
