"""Gradients and dropout agree with the definition, differentiated by torch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels._threads import forced_threads
from irkit_kernels.ragged_attention import cpu_backward, op, ragged_attention
from irkit_kernels.ragged_attention.cpu_kernel import FAR, Plan
from irkit_kernels.ragged_attention.reference import attention_reference, retained

# (lanes, compiled for): this CPU, and code that AVX2 and plain SSE2 can run
VARIANTS = [(16, None), (4, None)] + ([(8, "haswell"), (4, "x86-64")] if "avx2" in cpu_features() else [])


def offsets_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def make(lengths_q, lengths_k, heads, head_dim, dtype=torch.float32, seed=0):
    """Draw normal q, k, v as views of one projection, offsets, and a gradient that differs everywhere."""
    torch.manual_seed(seed)
    views = [
        torch.randn(sum(n) + 1, 3, heads, head_dim).to(dtype)[1:, i]
        for i, n in enumerate((lengths_q, lengths_k, lengths_k))
    ]
    grad = torch.randn(heads, sum(lengths_q), head_dim).transpose(0, 1).to(dtype)
    return (*views, offsets_of(lengths_q), offsets_of(lengths_k)), grad


def gradients(function, arguments, grad, *rest):
    """Return the gradients of query, key and value, and the output."""
    leaves = [x.detach().requires_grad_() for x in arguments[:3]]
    out = function(*leaves, *arguments[3:], *rest)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)]


def exact(arguments, grad, *rest):
    wide = (*(x.double() for x in arguments[:3]), *arguments[3:])
    return gradients(attention_reference, wide, grad.double(), *rest)


def assert_close(got, expected, bound):
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.isfinite().all()
        if ours.numel():
            scale = theirs.abs().max().clamp(min=1)
            assert (ours.double() - theirs).abs().max() <= bound * scale


@st.composite
def problems(draw):
    length = st.one_of(st.integers(0, 40), st.sampled_from([61, 128, 255, 256, 257, 530]))
    lengths_k = draw(st.lists(length, min_size=0, max_size=4))
    window = draw(st.one_of(st.none(), st.integers(0, 80)))
    lengths_q = lengths_k
    if window is None:  # pooled, which a kernel of 1 is not; or as it comes
        kernel = draw(st.one_of(st.integers(1, 9), st.just(64)))
        stride = draw(st.integers(1, kernel))
        pooled = [x and -(-max(0, x - kernel) // stride) + 1 for x in lengths_k]
        lengths_q = pooled if draw(st.booleans()) else [draw(st.integers(0, 20)) for _ in lengths_k]
    shape = draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 32, 40, 64, 96, 128]))
    dropout = draw(st.sampled_from([0.0, 0.1, 0.5]))
    return (lengths_q, lengths_k, *shape), draw(st.integers(0, 2**31)), window, dropout


@settings(deadline=None, max_examples=30)
@given(problem=problems(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_matches_float64(problem, dtype):
    shape, seed, window, dropout = problem
    arguments, grad = make(*shape, dtype, seed)
    torch.manual_seed(seed)
    got = gradients(ragged_attention, arguments, grad, window, dropout)
    torch.manual_seed(seed)
    drawn = int(torch.randint(2**62, (1,)))  # what the operator draws
    expected = exact(arguments, grad, window, dropout, drawn)
    assert all(x.dtype == dtype for x in got)
    # bfloat16 rounds inputs of products of unit variance, and each result once; the output as well, whose
    # products with its gradient cancel others
    assert_close(got, expected, 2**-5 if dtype == torch.bfloat16 else 2e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("window", "causal", "biased"), [(None, True, False), (9, True, True), (9, False, True)]
)
def test_causal_biased_and_grouped_gradients_match_float64(window, causal, biased, group, dropout):
    lengths = [300, 0, 17, 1, 64]
    (q, k, v, *offsets), grad = make(lengths, lengths, 4, 16)
    arguments = q, k[:, : 4 // group], v[:, : 4 // group], *offsets
    settings = {"causal": causal, "bias": torch.randn(4, 601) if biased else None}
    torch.manual_seed(3)
    got = gradients(lambda *x: ragged_attention(*x, window, dropout, **settings), arguments, grad)
    torch.manual_seed(3)
    seed = int(torch.randint(2**62, (1,)))
    expected = exact(arguments, grad, window, dropout, seed, *settings.values())
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(deadline=None, max_examples=15)
@given(problem=problems())
def test_code_for_every_cpu(variant, problem):
    (lengths_q, lengths_k, heads, head_dim), seed, window, dropout = problem
    arguments, grad = make(lengths_q, lengths_k, heads, head_dim, seed=seed)
    expected = exact(arguments, grad, window, dropout, seed)
    wide = arguments[0].double(), arguments[1].double(), arguments[2].double()
    stats = torch.zeros(sum(lengths_q), heads, 2)  # what the forward keeps
    for i, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        at_q, at_k = int(arguments[3][i]), int(arguments[4][i])
        if n_q and n_k:
            scores = torch.einsum("qhd,khd->qhk", wide[0][at_q : at_q + n_q], wide[1][at_k : at_k + n_k])
            if window is not None:
                far = (torch.arange(n_q)[:, None] - torch.arange(n_k)).abs() > window
                scores = scores.masked_fill(far[:, None], -torch.inf)
            largest = scores.amax(-1)
            sums = ((scores - largest[..., None]) * head_dim**-0.5).exp().sum(-1)
            stats[at_q : at_q + n_q] = torch.stack([largest, 1 / sums], -1).float()
    lanes, cpu = variant
    plan = Plan(head_dim, False, False, lanes, dropout > 0)
    kernel, size = (
        cpu_backward.compile_backward(plan, cpu),
        cpu_backward.scratch_layout(plan)[1],
    )
    memory = [torch.full((x.shape[0] + 2, *x.shape[1:]), torch.nan) for x in arguments[:3]]
    outs = [x[1:-1] for x in memory]
    outs[0].zero_()
    grad = grad.contiguous()
    deltas = (grad.double() * expected[0]).sum(-1).float()
    scratch = torch.full((size,), 255, dtype=torch.uint8)  # NaN
    tensors = (*outs, stats, deltas, grad, *arguments, scratch)
    *pointers, last = (x.data_ptr() for x in tensors)
    strides = [4 * x.stride(i) for x in arguments[:3] for i in (0, 1)]
    reach = FAR if window is None else window
    limits = (heads, 1, reach, reach, 0, 0, len(lengths_q) * heads)
    random = (seed, round(dropout * 2**32), 1 / (1 - dropout))
    kernel(*pointers, 0, last, *strides, *limits, *random)
    assert_close(outs, expected[1:], 1e-5)
    assert all(bool(x[[0, -1]].isnan().all()) for x in memory)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_the_reference(window, dropout):
    (q, k, v, *offsets), _ = make([5, 0, 3], [5, 0, 3], 2, 4)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    assert gradcheck(lambda *x: attention_reference(*x, *offsets, window, dropout, 9), leaves)


@pytest.mark.parametrize("lengths_q", [[31, 128, 300], [16, 64, 150], [1, 2, 5]], ids=str)
def test_error_is_at_most_twice_that_of_torch(lengths_q):
    for dtype in (torch.float32, torch.bfloat16):
        arguments, grad = make(lengths_q, [31, 128, 300], 4, 32, dtype)
        expected = exact(arguments, grad)
        ours, theirs = gradients(ragged_attention, arguments, grad), torch_gradients(arguments, grad)
        for got, peer, want in zip(ours, theirs, expected, strict=True):
            assert (got.double() - want).norm() <= 2 * (peer.double() - want).norm()


def torch_gradients(arguments, grad):
    return gradients(lambda *x: op._by_row(*x, None, False, None, 0.0), arguments, grad)


def test_what_is_dropped_looks_random():
    numbers = torch.arange(1000) * 12
    for dropout in (0.1, 0.5):
        here, there = (
            retained(numbers, 1000, dropout, seed).double() - (1 - dropout) for seed in (1, 2**40 + 1)
        )
        deviation = (dropout * (1 - dropout)) ** 0.5
        # means over a million, a query and a key, and of neighbours, in standard errors
        assert abs(here.mean()) < 5 * deviation / 1000
        for axis in (0, 1):
            assert here.mean(axis).abs().max() < 5 * deviation / 1000**0.5
            assert 0.9 < here.mean(axis).var() * 1000 / deviation**2 < 1.1 + 0.1
        for product in (here * there, here[1:] * here[:-1], here[:, 1:] * here[:, :-1]):
            assert abs(product.mean()) < 5 * deviation**2 / 999


def test_the_seed_is_drawn_from_torch():
    arguments, _ = make([50, 9], [50, 9], 2, 16)
    torch.manual_seed(3)
    first, second = (ragged_attention(*arguments, None, 0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(ragged_attention(*arguments, None, 0.5), first)
    assert not torch.equal(first, second)


def test_threads_give_the_same():
    arguments, grad = make([17, 0, 1, 7, 45], [33, 0, 200, 7, 90], 3, 32)
    torch.manual_seed(1)
    alone = gradients(ragged_attention, arguments, grad, None, 0.1)
    torch.manual_seed(1)
    with forced_threads(4):
        assert all(map(torch.equal, gradients(ragged_attention, arguments, grad, None, 0.1), alone))


def test_a_nan_stays_in_its_row_and_head():
    arguments, grad = make([20, 30], [20, 30], 2, 16)
    grad = grad.clone()
    grad[25, 1, 3] = torch.nan
    for gradient in gradients(ragged_attention, arguments, grad)[1:]:
        assert gradient[20:, 1].isnan().any()
        assert not gradient[:20].isnan().any()
        assert not gradient[:, 0].isnan().any()


def test_without_a_kernel_torch_differentiates():
    arguments, grad = make([12, 0, 5], [12, 3, 0], 2, 20)  # no kernel for this head size
    assert_close(gradients(ragged_attention, arguments, grad), exact(arguments, grad), 1e-5)
    arguments, grad = make([12, 0, 5], [12, 0, 5], 2, 32)
    with compiling_for(Target(frozenset())):
        assert_close(gradients(ragged_attention, arguments, grad, 2), exact(arguments, grad, 2), 1e-5)
        ones = (*arguments[:2], torch.ones_like(arguments[2]), *arguments[3:])
        torch.manual_seed(0)
        values = ragged_attention(*ones, None, 0.5)
        assert values.std() > 0.1  # some weights are dropped, others doubled


def test_gradients_of_some_inputs_alone():
    (q, k, v, *offsets), grad = make([7, 4], [7, 4], 2, 8)
    leaf = k.clone().requires_grad_()
    (got,) = torch.autograd.grad(ragged_attention(q, leaf, v, *offsets), leaf, grad)
    torch.testing.assert_close(got.double(), exact((q, k, v, *offsets), grad)[2], rtol=1e-4, atol=1e-5)
