"""Every variant of the forward agrees with softmax attention written out in float64."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels._threads import forced_threads
from irkit_kernels.ragged_attention import ragged_attention
from irkit_kernels.ragged_attention.cpu_kernel import FAR, Plan, compile_plan, plan_for, scratch_layout
from irkit_kernels.ragged_attention.reference import attention_reference

X86 = platform.machine() == "x86_64"
DOT = "avx512bf16" in cpu_features()
HEAD_DIMS = [8, 16, 32, 40, 48, 64, 96, 128]
# (lanes, dot, compiled for): this CPU, and code that AVX2 and plain SSE2 can run
VARIANTS = [(16, False, None), (4, False, None)]
VARIANTS += [(8, False, "haswell"), (4, False, "x86-64")] if X86 and "avx2" in cpu_features() else []
VARIANTS += [(16, True, None)] if DOT else []


def offsets_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def make(lengths_q, lengths_k, heads, head_dim, dtype=torch.float32, layout="fused", seed=0):
    """Draw normal q, k, v between NaN, so that a read outside of a row or head shows in the results."""
    torch.manual_seed(seed)
    result = []
    for i, lengths in enumerate((lengths_q, lengths_k, lengths_k)):
        total = int(sum(lengths))
        if layout == "fused":  # (tokens, 3, heads, head_dim), as one projection makes it
            memory = torch.full((total + 2, 3, heads, head_dim), float("nan"), dtype=dtype)
            view = memory[1:-1, i]
        else:  # heads outermost, and a gap after each token
            memory = torch.full((heads, total + 1, head_dim + 3), float("nan"), dtype=dtype)
            view = memory[:, :-1, :head_dim].transpose(0, 1)
        result.append(view.copy_(torch.randn(total, heads, head_dim)))
    return (*result, offsets_of(lengths_q), offsets_of(lengths_k))


def exact(query, key, value, *rest):
    return attention_reference(query.double(), key.double(), value.double(), *rest)


def run(variant, query, key, value, query_offsets, key_offsets, window=None):
    """Call the compiled code on memory full of NaN, and assert that it writes nothing but its output."""
    lanes, dot, cpu = variant
    plan = Plan(query.shape[2], query.dtype == torch.bfloat16, dot, lanes)
    out = torch.full((query.shape[0] + 2, *query.shape[1:]), float("nan"), dtype=query.dtype)
    scratch = torch.full((scratch_layout(plan)[1],), 255, dtype=torch.uint8)
    tensors = (query, key, value, query_offsets, key_offsets, scratch)
    strides = [x.element_size() * x.stride(i) for x in (query, key, value) for i in (0, 1)]
    heads, items = query.shape[1], (len(query_offsets) - 1) * query.shape[1]
    reach = FAR if window is None else window
    limits = (1, reach, reach, 0, 0, items, 0, 0, 1.0)
    *pointers, last = (x.data_ptr() for x in tensors)
    pointers = (out[1:].data_ptr(), 0, *pointers, 0, last)
    compile_plan(plan, cpu)(*pointers, *strides, heads, *limits)
    assert out[0].isnan().all()
    assert out[-1].isnan().all()
    return out[1:-1]


@st.composite
def problems(draw):
    length = st.one_of(st.integers(0, 40), st.sampled_from([61, 97, 128, 257, 511, 512, 513, 1031]))
    lengths_k = draw(st.lists(length, min_size=0, max_size=4))
    window = draw(st.one_of(st.none(), st.integers(0, 80)))
    lengths_q = lengths_k
    if window is None:  # pooled, which a kernel of 1 is not; or as it comes
        kernel = draw(st.one_of(st.integers(1, 9), st.just(64)))
        stride = draw(st.integers(1, kernel))
        pooled = [x and -(-max(0, x - kernel) // stride) + 1 for x in lengths_k]
        lengths_q = pooled if draw(st.booleans()) else [draw(st.integers(0, 20)) for _ in lengths_k]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return {
        "window": window,
        "arguments": make(
            lengths_q,
            lengths_k,
            draw(st.integers(1, 3)),
            draw(st.sampled_from(HEAD_DIMS)),
            dtype,
            draw(st.sampled_from(["fused", "heads first"])),
            draw(st.integers(0, 2**31)),
        ),
    }


def assert_close(got, expected, value):
    """Weights and output are rounded to bfloat16 once each; float32 scores of unit variance err by 1e-6."""
    bound = 2**-7 if got.dtype == torch.bfloat16 else 3e-6
    assert got.isfinite().all()
    if got.numel() and value.numel():
        error = (got.double() - expected).abs().max() / value.double().abs().max()
        assert error <= bound


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(deadline=None, max_examples=20)
@given(problem=problems())
def test_matches_float64(variant, problem):
    arguments, window = problem["arguments"], problem["window"]
    got = run(variant, *arguments, window)
    query, key, value = arguments[:3]
    if variant[1]:  # float32 is rounded, and the output is not
        rounded = (x.bfloat16() for x in (query, key, value))
        assert_close(got.bfloat16(), exact(*rounded, *arguments[3:], window), value)
    else:
        assert_close(got, exact(*arguments, window), value)


@settings(deadline=None, max_examples=20)
@given(problem=problems())
def test_rough_attention_is_near(problem):
    arguments, window = problem["arguments"], problem["window"]
    got = ragged_attention(*arguments, window, rough=True)
    assert got.dtype == arguments[0].dtype
    if DOT:
        rounded = (*(x.bfloat16() for x in arguments[:3]), *arguments[3:])
        assert_close(got.bfloat16(), exact(*rounded, window), arguments[2])
    else:
        assert torch.equal(got, ragged_attention(*arguments, window))


@settings(deadline=None, max_examples=40)
@given(problem=problems())
def test_op_matches_float64(problem):
    arguments, window = problem["arguments"], problem["window"]
    got = ragged_attention(*arguments, window)
    assert got.is_contiguous()
    assert got.dtype == arguments[0].dtype
    assert_close(got, exact(*arguments, window), arguments[2])


@st.composite
def positioned(draw):
    """Draw rows for causal, biased and grouped attention, and its settings."""
    length = st.one_of(st.integers(0, 40), st.sampled_from([61, 128, 257, 512, 530]))
    lengths, group = draw(st.lists(length, min_size=1, max_size=3)), draw(st.integers(1, 3))
    dtype, heads = draw(st.sampled_from([torch.float32, torch.bfloat16])), group * draw(st.integers(1, 2))
    query, key, value, *offsets = make(lengths, lengths, heads, draw(st.sampled_from([8, 16, 40, 64])), dtype)
    key, value = key[:, : heads // group], value[:, : heads // group]
    bias = torch.randn(heads, 2 * (max(lengths) + draw(st.integers(0, 9))) + 1)
    settings = {
        "window": draw(st.none() | st.integers(0, 80)),
        "causal": draw(st.booleans()),
        "bias": bias if draw(st.booleans()) else None,
    }
    return (query, key, value, *offsets), settings


@settings(deadline=None, max_examples=40)
@given(problem=positioned())
def test_causal_biased_and_grouped_attention_matches_float64(problem):
    arguments, settings = problem
    got = ragged_attention(*arguments, **settings)
    wide = settings | {"bias": None if settings["bias"] is None else settings["bias"].double()}
    expected = attention_reference(*(x.double() for x in arguments[:3]), *arguments[3:], **wide)
    assert_close(got, expected, arguments[2])
    with compiling_for(Target(frozenset())):
        assert_close(ragged_attention(*arguments, **settings), expected, arguments[2])


def sdpa(query, key, value, query_offsets, key_offsets):
    rows = zip(
        query.split(query_offsets.diff().tolist()),
        *(x.split(key_offsets.diff().tolist()) for x in (key, value)),
        strict=True,
    )
    outputs = [F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in row)) for row in rows]
    return torch.cat([out[0].transpose(0, 1) for out in outputs])


@pytest.mark.sampled
@pytest.mark.parametrize("scale", [1.0, 8.0, 3000.0**0.5], ids="logits x{}".format)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pooled", [False, True])
def test_error_is_at_most_twice_that_of_torch(pooled, dtype, head_dim, scale):
    lengths = [5, 31, 64, 80, 127, 300, 700]
    lengths_q = [-(-n // 2) for n in lengths] if pooled else lengths
    q, k, v, *offsets = make(lengths_q, lengths, 4, head_dim, dtype)
    q, k = q * scale, k * scale  # the largest logits reach 1e4
    expected = exact(q, k, v, *offsets)
    ours, theirs = (
        (f(q, k, v, *offsets).double() - expected).square().mean().sqrt() for f in (ragged_attention, sdpa)
    )
    assert ours <= 2 * theirs


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("logit", [1e3, -1e3, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_logits_stay_finite(variant, logit, dtype):
    q, k, v, *offsets = make([70], [70], 2, 32, torch.bfloat16)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    q, k = torch.full_like(q, 1.0), torch.full_like(k, logit / 32**0.5)

    def check(expected):
        got = run(variant, q, k, v, *offsets)
        assert_close(got.bfloat16() if variant[1] else got, expected, v)

    check(exact(q, k, v, *offsets))  # all weights are equal
    k[7] = 2 * k[7].abs()  # one key takes all
    check(v[7].double().expand_as(q))


def test_a_nan_stays_in_its_row_and_head():
    q, k, v, *offsets = make([20, 30], [20, 30], 2, 16)
    for x in (q, k, v):
        broken = x.clone()
        broken[25, 1, 3] = float("nan")
        out = ragged_attention(*(broken if y is x else y for y in (q, k, v)), *offsets)
        hit = out.isnan().any(-1)
        assert hit[20:, 1].any()
        assert not hit[:20].any()
        assert not hit[:, 0].any()


@pytest.mark.parametrize("rough", [False, True])
def test_rows_do_not_depend_on_their_neighbours(rough):
    lengths_q, lengths = [2, 0, 39, 1, 1], [3, 0, 77, 1, 600]
    q, k, v, *offsets = make(lengths_q, lengths, 2, 64)
    whole = ragged_attention(q, k, v, *offsets, rough=rough)
    rows = zip(*(x.split(n) for x, n in ((q, lengths_q), (k, lengths), (v, lengths))), strict=True)
    alone = [ragged_attention(*row, *(offsets_of([len(x)]) for x in row[:2]), rough=rough) for row in rows]
    assert torch.equal(torch.cat(alone), whole)


def test_long_row():
    q, k, v, *offsets = make([8192], [8192], 1, 32)
    near, far = ragged_attention(q, k, v, *offsets, 64), ragged_attention(q, k, v, *offsets)
    for i in (0, 63, 64, 511, 512, 5000, 8191):
        for out, keys in ((near, slice(max(0, i - 64), i + 65)), (far, slice(None))):
            part = (q[i : i + 1], k[keys], v[keys])
            expected = exact(*part, offsets_of([1]), offsets_of([len(part[1])]))
            assert_close(out[i : i + 1], expected, v[keys])


def test_a_wide_window_is_none():
    q, k, v, *offsets = make([50, 9], [50, 9], 2, 16)
    assert torch.equal(ragged_attention(q, k, v, *offsets, 2**40), ragged_attention(q, k, v, *offsets))


def test_intra_op_threads_give_the_same():
    arguments = make([17, 0, 1, 7, 45], [33, 0, 200, 7, 90], 3, 32)
    alone = ragged_attention(*arguments)
    with forced_threads(4):
        assert torch.equal(ragged_attention(*arguments), alone)


def test_callers_in_many_threads():
    problems = [make([i, 150 + i], [i, 150 + i], 2, HEAD_DIMS[i % 8], seed=i) for i in range(16)]
    expected = [ragged_attention(*problem) for problem in problems]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for got, want in zip(pool.map(lambda x: ragged_attention(*x), problems), expected, strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("window", [None, 4])
def test_without_a_kernel_torch_answers(window):
    arguments = make([12, 0, 5], [12, 0, 5], 2, 32)
    with compiling_for(Target(frozenset())):
        assert_close(ragged_attention(*arguments, window), exact(*arguments, window), arguments[2])
    odd = make([12, 0, 5], [12, 3, 0], 2, 20)  # no kernel for this head size; a row without keys
    assert_close(ragged_attention(*odd), exact(*odd), odd[2])
    half = tuple(x.double() for x in arguments[:3])
    assert ragged_attention(*half, *arguments[3:]).dtype == torch.float64


def test_plans():
    if X86 and "avx512f" in cpu_features():
        assert plan_for(64, True) == Plan(64, True, DOT, 16)
        assert plan_for(64, False) == Plan(64, False, False, 16)
        assert plan_for(64, False, rough=True) == Plan(64, False, DOT, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(9, 2, 16)}, "equal heads"),
        ({"query": torch.zeros(9, 2, 8, dtype=torch.bfloat16)}, "one dtype"),
        ({"query_offsets": torch.tensor([0, 4, 9])}, "int32"),
        ({"query_offsets": torch.tensor([0, 5, 4, 9], dtype=torch.int32)}, "rise from 0 to 9"),
        ({"key_offsets": torch.tensor([0, 4, 10], dtype=torch.int32)}, "rise from 0 to 9"),
        ({"key_offsets": torch.tensor([], dtype=torch.int32)}, "rise from 0 to 9"),
        ({"key_offsets": torch.tensor([0, 9], dtype=torch.int32)}, "rows"),
        ({"key_offsets": torch.tensor([0, 5, 9], dtype=torch.int32), "window": 3}, "equal length"),
        ({"key_offsets": torch.tensor([0, 5, 9], dtype=torch.int32), "causal": True}, "equal length"),
        ({"window": -1}, "window=-1"),
        ({"bias": torch.zeros(2, 7)}, r"of shape \(2, 9\)"),
        ({"bias": torch.zeros(1, 9)}, r"of shape \(2, 9\)"),
        ({"bias": torch.zeros(2, 9, requires_grad=True)}, "no gradient of the bias"),
        ({"key": torch.zeros(9, 3, 8), "value": torch.zeros(9, 3, 8)}, "divide those of queries"),
        ({"query": torch.zeros(9, 2, 8, device="meta")}, "CPU"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": -0.1}, "below 1, got -0.1"),
    ],
)
def test_wrong_arguments(change, message):
    names = ("query", "key", "value", "query_offsets", "key_offsets")
    with pytest.raises(ValueError, match=message):
        ragged_attention(**(dict(zip(names, make([4, 5], [4, 5], 2, 8), strict=True)) | change))


def test_opcheck_and_compile():
    q, k, v, *offsets = make([12, 0, 5], [12, 0, 5], 2, 32)
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    table = torch.randn(2, 23 + 64)
    for rest in ((False, None, 0.0, None), (True, table, 0.25, torch.tensor([7]))):
        torch.library.opcheck(torch.ops.irkit.ragged_attention, (*leaves, *offsets, 3, *rest))
    arguments = make([6, 0, 3], [12, 0, 5], 2, 32)
    leaves = tuple(x.clone().requires_grad_() for x in arguments[:3])
    rest = (None, False, None, 0.0, None)
    torch.library.opcheck(torch.ops.irkit.ragged_attention, (*leaves, *arguments[3:], *rest))
    compiled = torch.compile(
        lambda *x: ragged_attention(*x) * 2, fullgraph=True, dynamic=True, backend="eager"
    )
    torch.testing.assert_close(compiled(*arguments), ragged_attention(*arguments) * 2)
