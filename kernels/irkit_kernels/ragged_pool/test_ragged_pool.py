"""Every implementation of pooling on the CPU agrees with float64 means of windows, sliced one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels._testing import poison
from irkit_kernels._threads import forced_threads
from irkit_kernels.ragged_pool import pooled_lengths, ragged_pool, ragged_pool_reference
from irkit_kernels.ragged_pool.reference import pool_backward, pool_forward

_poison = poison  # a fixture of this module: fresh memory is full of NaN
CPUS = {"this CPU": None, "no compiler": Target(frozenset())}
if cpu_features() >= {"avx2", "fma"}:
    CPUS |= {"avx2": Target(frozenset({"avx2"}), "haswell"), "any": Target(frozenset({"sse2"}), "x86-64")}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUNDING = {torch.float64: 2**-53, torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.fixture(params=CPUS, scope="module")
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the code for one of the CPUs."""
    with compiling_for(CPUS[request.param]):
        yield


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def inside(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values between rows of NaN, so that a read outside of them shows in the results."""
    framed = torch.full((len(values) + 2, values.shape[1]), math.nan, dtype=dtype)
    framed[1:-1] = values.to(dtype)
    return framed[1:-1]


def expected_lengths(lengths: list[int], kernel: int, stride: int) -> list[int]:
    return [n and math.ceil(max(0, n - kernel) / stride) + 1 for n in lengths]


def plain(values: Tensor, lengths: list[int], kernel: int, stride: int) -> Tensor:
    """Compute the pooling by slices and means of torch, independently of the code under test."""
    means = [
        row[i * stride : i * stride + kernel].mean(0)
        for row in values.split(lengths)
        for i in range(*expected_lengths([len(row)], kernel, stride))
    ]
    return torch.stack(means) if means else values[:0] * 1


@st.composite
def problems(draw):
    length = st.one_of(st.integers(0, 20), st.sampled_from([0, 1, 33, 70]))
    lengths = draw(st.lists(length, max_size=6))
    kernel = draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 64])))
    stride = draw(st.integers(1, kernel))
    d = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 67, 80, 130])))
    return lengths, kernel, stride, d, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**31))


@pytest.mark.usefixtures("path")
@settings(deadline=None, max_examples=50)
@given(problems())
def test_values_and_gradients_are_the_definition(problem):
    lengths, kernel, stride, d, dtype, seed = problem
    generator = torch.Generator().manual_seed(seed)
    offsets = offsets_of(lengths)
    values = inside(torch.randn(sum(lengths), d, generator=generator), dtype).requires_grad_()
    true = values.detach().double().requires_grad_()
    got, exact = ragged_pool(values, offsets, kernel, stride), plain(true, lengths, kernel, stride)
    grad = inside(torch.randn(exact.shape, generator=generator), dtype)  # random in every axis
    (gradient,) = torch.autograd.grad(got, values, grad)
    (exact_gradient,) = torch.autograd.grad(exact, true, grad.double(), retain_graph=True)
    size = plain(true.abs(), lengths, kernel, stride)
    (gradient_size,) = torch.autograd.grad(exact, true, grad.double().abs())
    assert got.dtype == gradient.dtype == dtype
    # sums of at most kernel products, with rounded weights, in float32 or better; then one rounding to dtype
    work = min(2**-24, ROUNDING[dtype])
    for mine, theirs, most in ((got, exact, size), (gradient, exact_gradient, gradient_size)):
        bound = (kernel + 3) * work * most + ROUNDING[dtype] * theirs.abs() + 1e-7
        assert ((mine.double() - theirs).abs() <= bound).all()


@pytest.mark.usefixtures("path")
@settings(deadline=None, max_examples=30)
@given(problems())
def test_windows_of_powers_of_two_are_exact_means(problem):
    lengths, _, _, d, dtype, seed = problem
    if dtype == torch.bfloat16:
        dtype = torch.float32  # 8 bits are too few
    generator = torch.Generator().manual_seed(seed)
    lengths = [8 * (n // 8) for n in lengths]
    values = torch.randint(-8, 9, (sum(lengths), d), generator=generator).to(dtype)
    for kernel, stride in ((2, 2), (8, 4), (4, 1), (8, 8)):
        got = ragged_pool(values, offsets_of(lengths), kernel, stride)
        assert torch.equal(got, plain(values, lengths, kernel, stride))


@settings(deadline=None, max_examples=30)
@given(problems())
def test_the_reference_is_what_autograd_says(problem):
    lengths, kernel, stride, _, _, seed = problem
    generator = torch.Generator().manual_seed(seed)
    lengths, d = [min(n, 9) for n in lengths[:4]], 2
    values = torch.randn(sum(lengths), d, dtype=torch.float64, generator=generator).requires_grad_()
    offsets = offsets_of(lengths)
    got, theirs = (
        ragged_pool_reference(values, offsets, kernel, stride),
        plain(values, lengths, kernel, stride),
    )
    torch.testing.assert_close(got, theirs)
    grad = torch.randn(got.shape, dtype=torch.float64, generator=generator)
    pair = (torch.autograd.grad(result, values, grad)[0] for result in (got, theirs))
    torch.testing.assert_close(*pair)


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (5, 3), (4, 1), (9, 9)])
def test_gradcheck(kernel, stride):
    offsets = offsets_of([5, 0, 1, 7, 2])
    values = torch.randn(15, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ragged_pool_reference(x, offsets, kernel, stride), values)
    assert torch.autograd.gradcheck(lambda x: ragged_pool(x, offsets, kernel, stride), values)
    assert torch.autograd.gradgradcheck(lambda x: ragged_pool(x, offsets, kernel, stride), values)


@settings(deadline=None)
@given(st.lists(st.integers(0, 600), max_size=8), st.integers(1, 70), st.data())
def test_lengths_follow_the_formula(lengths, kernel, data):
    stride = data.draw(st.integers(1, kernel))
    for dtype in (torch.int32, torch.int64):
        got = pooled_lengths(torch.tensor(lengths, dtype=dtype), kernel, stride)
        assert got.dtype == dtype
        assert got.tolist() == expected_lengths(lengths, kernel, stride)
    assert pooled_lengths(torch.tensor([512]), 512, 512).tolist() == [1]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_windows(dtype):
    values = torch.randn(9, 70).to(dtype)
    clean = ragged_pool(values, offsets_of([5, 4]), 3, 2)
    values[3, 66] = math.nan
    values[4, 2] = math.inf
    got = ragged_pool(values, offsets_of([5, 4]), 3, 2)
    assert got.isnan().nonzero().tolist() == [[1, 66]]
    assert got.isinf().nonzero().tolist() == [[1, 2]]
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.usefixtures("path")
def test_threads_and_neighbours_change_nothing():
    lengths = [300, 1, 0, 41, 8, 517]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(lengths), 70, generator=generator).requires_grad_()
    offsets = offsets_of(lengths)
    once = ragged_pool(values, offsets, 3, 2)
    grad = torch.randn(once.shape, generator=generator)
    (gradient,) = torch.autograd.grad(once, values, grad)
    alone = [ragged_pool(row, offsets_of([len(row)]), 3, 2) for row in values.split(lengths)]
    assert torch.equal(torch.cat(alone), once)
    with forced_threads(4), ThreadPoolExecutor(4) as pool:
        again = ragged_pool(values, offsets, 3, 2)
        assert torch.equal(again, once)
        assert torch.equal(torch.autograd.grad(again, values, grad)[0], gradient)
        assert all(
            torch.equal(got, once) for got in pool.map(lambda _: ragged_pool(values, offsets, 3, 2), range(8))
        )


def test_offsets_of_the_result_can_be_given():
    values, offsets = torch.randn(7, 3), offsets_of([4, 3])
    expected = ragged_pool(values, offsets, 2, 2)
    ends = offsets_of([2, 2])
    assert torch.equal(ragged_pool(values, offsets, 2, 2, pooled_offsets=ends, total=4), expected)
    assert torch.equal(ragged_pool(values, offsets, 2, 2, pooled_offsets=ends), expected)
    for wrong in ({"pooled_offsets": offsets_of([1, 3])}, {"pooled_offsets": offsets_of([4])}, {"total": 5}):
        with pytest.raises(ValueError, match=r"pooled_offsets and total=\d must be those of windows of 2"):
            ragged_pool(values, offsets, 2, 2, **wrong)


def test_views_are_fine():
    values, offsets = torch.randn(7, 6), offsets_of([4, 3])
    expected = ragged_pool(values, offsets, 3, 2)
    strided = torch.stack([values, values], 2)[..., 1].requires_grad_()
    ends = torch.stack([offsets, offsets], 1)[:, 0]
    got = ragged_pool(strided, ends, 3, 2)
    assert torch.equal(got, expected)
    constant = torch.autograd.grad(got.sum(), strided)[0]  # the gradient of a sum is one number, expanded
    assert torch.equal(constant, pool_backward(torch.ones_like(expected), offsets, 3, 2))


def test_opcheck_and_compile():
    values, offsets = torch.randn(16, 6, requires_grad=True), offsets_of([3, 0, 9, 4])
    pooled = offsets_of([1, 0, 4, 2])
    windows = torch.randn(7, 6, requires_grad=True)
    for arguments in ((values, offsets, pooled, 3, 2, 7, False), (windows, offsets, pooled, 3, 2, 16, True)):
        torch.library.opcheck(torch.ops.irkit.ragged_pool.default, arguments)

    def loss(values, offsets, pooled_offsets, total):
        pooled = ragged_pool(values, offsets, 3, 2, pooled_offsets=pooled_offsets, total=total)
        return pooled.square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ([3, 0, 9, 4], [10, 6], [30, 2, 1]):  # other numbers of sequences, tokens and windows
        windows = expected_lengths(lengths, 3, 2)
        values = torch.randn(sum(lengths), 6, requires_grad=True)
        arguments = values, offsets_of(lengths), offsets_of(windows), sum(windows)
        ours, theirs = (function(*arguments) for function in (compiled, loss))
        assert torch.equal(ours, theirs)
        gradients = [torch.autograd.grad(y, values)[0] for y in (ours, theirs)]
        assert torch.equal(*gradients)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens(lengths):
    values = torch.empty(0, 5, requires_grad=True)
    got = ragged_pool(values, offsets_of(lengths), 2, 2)
    assert got.shape == (0, 5)
    assert torch.autograd.grad(got.sum(), values)[0].shape == (0, 5)
    assert torch.equal(got, pool_forward(values, offsets_of(lengths), 2, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": 2, "stride": 3}, "1 <= stride <= kernel, got kernel=2 and stride=3"),
        ({"stride": 0}, "1 <= stride <= kernel"),
        ({"values": torch.zeros(4)}, r"values must be \(t, d\)"),
        ({"values": torch.zeros(4, 2, dtype=torch.int32)}, r"of a dtype among"),
        ({"offsets": torch.tensor([0, 4])}, "offsets must be .* int32"),
        ({"offsets": offsets_of([])[:0]}, "offsets must be"),
        ({"offsets": offsets_of([3])}, "offsets must rise from 0 to 4, the number of tokens"),
        ({"offsets": torch.tensor([0, 5, 4], dtype=torch.int32)}, "offsets must rise from 0 to 4"),
        ({"offsets": torch.tensor([1, 4], dtype=torch.int32)}, "offsets must rise"),
        ({"offsets": offsets_of([4]).to("meta")}, "all tensors on one CPU or CUDA device"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    arguments = {"values": torch.zeros(4, 2), "offsets": offsets_of([4]), "kernel": 2, "stride": 2, **changes}
    with pytest.raises(ValueError, match=message):
        ragged_pool(**arguments)
