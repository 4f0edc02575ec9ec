"""The Triton kernels agree with the definition, on CUDA, or interpreted with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from irkit_kernels._testing import (
    DEVICE,
    INTERPRETED,
    TRITON_DTYPES,
    compiles,
    needs_no_gpu,
    on_device,
    poison,
)
from irkit_kernels.maxsim import maxsim, op
from irkit_kernels.maxsim.reference import Tokens, maxsim_backward, maxsim_forward

pytest.importorskip("triton")
_poison = poison  # a fixture of this module


def tokens(lengths: list[int], d: int, dtype: torch.dtype, generator: torch.Generator) -> Tokens:
    values = torch.randint(-3, 4, (sum(lengths), d), generator=generator).to(dtype)
    offsets = torch.tensor(
        [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32
    )
    return Tokens(values, offsets)


def move(x: Tokens) -> Tokens:
    return Tokens(*(None if part is None else part.to(DEVICE) for part in x))


@st.composite
def problems(draw, dtypes=TRITON_DTYPES):
    length = st.one_of(st.integers(0, 20), st.sampled_from([0, 1, 33, 70]))
    lengths = [draw(st.lists(length, max_size=2 if INTERPRETED else 4)) for _ in range(2)]
    d = draw(st.sampled_from([1, 3, 16, 31, 64, 130]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(dtypes))
    queries, documents = (tokens(rows, d, dtype, generator) for rows in lengths)
    pairs = None
    if draw(st.booleans()):
        count = draw(st.integers(0, 4)) if all(lengths) else 0
        highs = [max(1, len(rows)) for rows in lengths]
        pairs = torch.stack([torch.randint(high, (count,), generator=generator) for high in highs], 1)
    return queries, documents, pairs, generator


@on_device
@settings(deadline=None, max_examples=8 if INTERPRETED else 15)
@given(problems())
def test_whole_numbers_are_exact(problem):
    from irkit_kernels._products.triton_kernel import product_gradients
    from irkit_kernels.maxsim import triton_gradients, triton_kernel

    queries, documents, pairs, generator = problem
    scores, argmax = maxsim_forward(queries, documents, pairs)
    moved = None if pairs is None else pairs.to(DEVICE)
    got, rows = triton_kernel.forward(move(queries), move(documents), moved, True)
    assert torch.equal(got.cpu(), scores)
    assert torch.equal(rows.cpu(), argmax)

    grad = torch.randint(-3, 4, scores.shape, generator=generator).float()
    expected = maxsim_backward(grad, queries, documents, pairs, argmax)
    ours = queries.values.to(DEVICE), documents.values.to(DEVICE)
    entries = op._entries(grad.to(DEVICE), queries.offsets.to(DEVICE), len(queries.values), moved, rows)
    results = [product_gradients(*ours, *entries)]
    if pairs is None:
        results.append(triton_gradients.backward(grad.to(DEVICE), move(queries), move(documents), rows))
    for gradients in results:
        for mine, theirs in zip(gradients, expected, strict=True):
            assert torch.equal(mine.cpu(), theirs)


@on_device
@settings(deadline=None, max_examples=5 if INTERPRETED else 8)
@given(problems(dtypes=[torch.int8]))
def test_int8_is_exact(problem):
    from irkit_kernels.maxsim import triton_kernel

    queries, documents, pairs, generator = problem
    scales = [
        torch.randint(low, 3, (len(x.values),), generator=generator).float()
        for low, x in ((0, queries), (-2, documents))
    ]
    pairs = None if pairs is None else pairs.to(DEVICE)
    scaled = [move(x._replace(scales=s)) for x, s in zip((queries, documents), scales, strict=True)]
    got, _ = triton_kernel.forward(*scaled, pairs, False)
    exact = [
        Tokens(x.values.double() * s[:, None], x.offsets)
        for x, s in zip((queries, documents), scales, strict=True)
    ]
    assert torch.equal(got.cpu().double(), maxsim_forward(*exact, None if pairs is None else pairs.cpu())[0])


@on_device
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_nan_is_seen_where_it_is(dtype):
    from irkit_kernels.maxsim import triton_kernel

    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        tokens([3, 20, 0, 30], 17, dtype, generator),
        tokens([9, 40, 0], 17, dtype, generator),
    )
    documents.values[:9] = torch.nan
    queries.values[1, 0] = torch.nan
    scores, argmax = triton_kernel.forward(move(queries), move(documents), None, True)
    assert scores.isnan().T.tolist() == [[True, True, False, True], [True, False, False, False], [False] * 4]
    assert scores[:, 2].tolist() == [-torch.inf, -torch.inf, 0, -torch.inf]
    assert argmax[0].min() >= 0
    assert argmax[0].max() < 9  # never out of the document


MANY = [0, 5, 32, 0, 0, 40, 1, 33, 64, 7, 0]  # tokens of queries: more than 128, with gaps


@on_device
@pytest.mark.parametrize("lengths", [MANY, [40] * 5, [0, 0, 130], [150, 20, 140], [1] * 40, [32] * 4, []])
@pytest.mark.parametrize("each", [1, 2])
def test_many_queries(lengths, each, monkeypatch):
    """Blocks of tokens of several queries, that end within a query, have room left, or hold none at all."""
    from irkit_kernels.maxsim import triton_kernel

    monkeypatch.setattr(triton_kernel, "_PROGRAMS", 1 if each == 2 else 10**9)
    monkeypatch.setattr(triton_kernel, "_EACH", 2)
    generator = torch.Generator().manual_seed(4)
    queries, documents = (tokens(x, 20, torch.float16, generator) for x in (lengths, [0, 33, 0, 1, 70]))
    scores, argmax = maxsim_forward(queries, documents, None)
    for with_argmax in (True, False):
        got, rows = triton_kernel.forward(move(queries), move(documents), None, with_argmax)
        assert torch.equal(got.cpu(), scores)
        if with_argmax:
            assert torch.equal(rows.cpu(), argmax)


def test_blocks_of_queries():
    from irkit_kernels.maxsim.triton_kernel import _groups

    assert _groups(1024, 32, True) == (4, 128)  # of one length: blocks are full
    assert _groups(1023, 32, True) == (3, 128)  # ragged
    assert _groups(64, 2, True) == (2, 64)
    assert _groups(100, 40, True) == (16, 128)
    assert _groups(900, 3, True) == (1, 128)
    assert _groups(32, 1, True) == _groups(1024, 32, False) == (1, 32)
    assert _groups(0, 0, True) == (1, 16)


@on_device
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_gradients_of_many_queries(dtype):
    from irkit_kernels.maxsim import triton_gradients

    generator = torch.Generator().manual_seed(3)
    queries, documents = (tokens(x, 20, dtype, generator) for x in (MANY, [0, 70, 0, 1, 150, 0]))
    scores, argmax = maxsim_forward(queries, documents, None)
    # gradients with more bits than float16 and bfloat16 have; sums of few of them are exact in float32
    grad = torch.randint(-999, 1000, scores.shape, generator=generator) / 1024
    grad[0] = torch.inf  # of a query without tokens
    expected = maxsim_backward(grad.double(), queries, documents, None, argmax)
    moved = grad.to(DEVICE).T.contiguous().T  # any strides
    sides = move(queries), move(documents)
    first, again = (triton_gradients.backward(moved, *sides, argmax.to(DEVICE)) for _ in range(2))
    for mine, repeated, theirs in zip(first, again, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)
        assert torch.equal(mine, repeated)


@needs_no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_error_is_at_most_twice_that_of_torch(dtype):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(n, 128, generator=generator).to("cuda", dtype).requires_grad_() for n in (96, 900)]
    ends = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 32, 96], [0, 100, 350, 900])]

    def plain(q: Tensor, d: Tensor) -> Tensor:
        similarity = q @ d.T
        best = torch.stack([similarity[:, a:b].amax(1) for a, b in ((0, 100), (100, 350), (350, 900))], 1)
        return torch.stack([best[:32].sum(0), best[32:].sum(0)])

    exact = plain(*(x.double() for x in values))
    grad = torch.randn(2, 3, generator=generator).cuda()
    ours, theirs = maxsim(values[0], ends[0], values[1], ends[1]), plain(*values)
    results = [
        [scores, *torch.autograd.grad(scores, values, grad.to(scores.dtype))]
        for scores in (exact, ours, theirs)
    ]
    for true, mine, naive in zip(*results, strict=True):
        errors = [(x.double() - true.double()).square().mean().sqrt() for x in (mine, naive)]
        assert errors[0] <= 2 * errors[1]


@needs_no_gpu
@pytest.mark.gpu
def test_gradients_are_the_same_every_time():
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(n, 128, generator=generator).cuda().requires_grad_() for n in (1024, 4000)]
    ends = [torch.arange(0, n + 1, step, dtype=torch.int32).cuda() for n, step in ((1024, 32), (4000, 100))]
    grad = torch.randn(32, 40, generator=generator).cuda()
    first, second = (
        torch.autograd.grad(maxsim(values[0], ends[0], values[1], ends[1]), values, grad) for _ in range(2)
    )
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@needs_no_gpu
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "i8"])
def test_compiles_for_gpus(capability, dtype):
    from irkit_kernels.maxsim import triton_kernel

    names = ("query_offsets", "document_offsets", "argmax")
    arguments = dict.fromkeys(("queries", "documents"), f"*{dtype}") | dict.fromkeys(names, "*i32")
    arguments |= dict.fromkeys(("query_scales", "document_scales", "out"), "*fp32")
    arguments |= {"pairs": "*i64", "argmax_offsets": "*i64", "n_q": "i32", "n_d": "i32", "size": "i32"}
    arguments |= {"group": "i32", "each": "i32", "SLOTS": 4 if dtype == "fp16" else 1}
    arguments |= {"D": 96, "BLOCK_Q": 32, "BLOCK_D": 64, "BLOCK_K": 32 if dtype == "fp32" else 128}
    arguments |= {"PAIRED": dtype == "bf16", "WITH_ARGMAX": dtype != "i8", "QUANTIZED": dtype == "i8"}
    assert compiles(triton_kernel.score, arguments, capability)
