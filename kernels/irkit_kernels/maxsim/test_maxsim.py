"""Every implementation of MaxSim on the CPU agrees with the definition."""

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
from irkit_kernels._threads import forced_threads
from irkit_kernels.maxsim import cpu_kernel as cpu
from irkit_kernels.maxsim import maxsim, maxsim_int8, maxsim_stored, op, quantize_rows
from irkit_kernels.maxsim.cpu_tile import Plan
from irkit_kernels.maxsim.reference import Tokens, maxsim_backward, maxsim_forward, maxsim_reference

AVX2 = {"avx2", "fma"}
CPUS = {"this CPU": None, "any": Target(frozenset({"sse2"})), "no compiler": Target(frozenset())}
if cpu_features() >= AVX2:
    CPUS |= {"avx2": Target(frozenset(AVX2), "haswell"), "any": Target(frozenset({"sse2"}), "x86-64")}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=CPUS, scope="module", autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the code for one of the CPUs; fresh memory is full of NaN and large integers."""
    torch.use_deterministic_algorithms(True)
    with compiling_for(CPUS[request.param]):
        yield request.param
    torch.use_deterministic_algorithms(False)


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def tokens(lengths: list[int], d: int, dtype: torch.dtype, generator: torch.Generator, whole: bool) -> Tokens:
    """Draw tokens between rows of NaN (127 for int8), so that a read outside of them shows in the results."""
    bad = 127 if dtype == torch.int8 else math.nan
    framed = torch.full((sum(lengths) + 2, d), bad, dtype=dtype)
    shape = (sum(lengths), d)
    values = (
        torch.randint(-3, 4, shape, generator=generator) if whole else torch.randn(shape, generator=generator)
    )
    framed[1:-1] = values.to(dtype)
    return Tokens(framed[1:-1], offsets_of(lengths))


@st.composite
def problems(draw, whole=True, dtypes=DTYPES):
    length = st.one_of(st.integers(0, 20), st.sampled_from([0, 1, 31, 32, 33, 70]))
    lengths = [draw(st.lists(length, max_size=4)) for _ in range(2)]
    d = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 128])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(dtypes))
    queries, documents = (tokens(rows, d, dtype, generator, whole) for rows in lengths)
    pairs = None
    if draw(st.booleans()):  # in any order, some twice
        count = draw(st.integers(0, 6)) if all(lengths) else 0
        highs = [max(1, len(rows)) for rows in lengths]
        pairs = torch.stack([torch.randint(high, (count,), generator=generator) for high in highs], 1)
    return queries, documents, pairs, generator


def flat(queries: Tokens, documents: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return queries.values, queries.offsets, documents.values, documents.offsets


@settings(deadline=None, max_examples=40)
@given(problems())
def test_whole_numbers_are_exact(problem):
    queries, documents, pairs, generator = problem
    scores, argmax = maxsim_forward(queries, documents, pairs)
    got, rows = op._run(queries, documents, pairs, with_argmax=True)
    assert torch.equal(got, scores)
    assert torch.equal(rows, argmax)  # many similarities are equal: the first counts
    assert torch.equal(maxsim(*flat(queries, documents), pairs), scores)

    for x in (queries, documents):
        x.values.requires_grad_()
    grad = torch.randint(-3, 4, scores.shape, generator=generator).float()
    got = maxsim(*flat(queries, documents), pairs)
    assert torch.equal(got, scores)
    gradients = torch.autograd.grad(got, (queries.values, documents.values), grad)
    with torch.no_grad():
        expected = maxsim_backward(grad, queries, documents, pairs, argmax)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours.dtype == queries.values.dtype
        assert torch.equal(ours, theirs)


@settings(deadline=None, max_examples=40)
@given(problems(whole=False))
def test_rounding_is_that_of_float32(problem):
    queries, documents, pairs, generator = problem
    scores = maxsim(*flat(queries, documents), pairs)
    exact = [Tokens(x.values.double(), x.offsets) for x in (queries, documents)]
    expected, argmax = maxsim_forward(*exact, pairs)
    largest = [Tokens(x.values.abs(), x.offsets) for x in exact]
    # d products and additions in each similarity, and the additions of the tokens
    steps = queries.values.shape[1] + len(queries.values)
    bound = 2**-23 * steps * maxsim_forward(*largest, pairs)[0].nan_to_num(neginf=0) + 1e-30
    assert torch.equal(scores.isinf(), expected.isinf())
    error = (scores - expected).nan_to_num(0)
    assert (error.abs() <= bound).all()

    grad = torch.randn(scores.shape, generator=generator)  # random in every axis
    got = op._backward(grad, *flat(queries, documents), pairs, argmax)
    want = maxsim_backward(grad.double(), *exact, pairs, argmax)
    sums = maxsim_backward(grad.double().abs(), *largest, pairs, argmax)
    half = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[queries.values.dtype]
    for ours, theirs, most in zip(got, want, sums, strict=True):
        bound = (argmax.numel() + 1) * 2**-23 * most + half * theirs.abs() + 1e-7
        assert ((ours - theirs).abs() <= bound).all()


@settings(deadline=None, max_examples=40)
@given(problems(dtypes=[torch.int8]))
def test_int8_is_exact(problem):
    queries, documents, pairs, generator = problem
    for x in (queries, documents):  # all the values there are
        x.values.copy_(torch.randint(-128, 128, x.values.shape, generator=generator))
    scales = [
        torch.randint(low, 3, (len(x.values),), generator=generator).float()
        for low, x in ((0, queries), (-2, documents))
    ]
    got = maxsim_int8(
        queries.values, scales[0], queries.offsets, documents.values, scales[1], documents.offsets, pairs
    )
    exact = [
        Tokens(x.values.double() * scale[:, None], x.offsets)
        for x, scale in zip((queries, documents), scales, strict=True)
    ]
    longest = int(queries.offsets.diff().amax()) if len(queries.offsets) > 1 else 0
    largest = longest * queries.values.shape[1] * 2.0**16  # a sum of products with scales of 2, at most
    rounding = longest * 2**-24 * largest if largest > 2**24 else 0  # float32 has all integers up to there
    torch.testing.assert_close(got.double(), maxsim_forward(*exact, pairs)[0], rtol=0, atol=rounding)


@settings(deadline=None, max_examples=40)
@given(problems(whole=False, dtypes=[torch.float32]), st.sampled_from([torch.float16, torch.int8]))
def test_stored_documents_score_as_converted_ones(problem, dtype):
    queries, documents, pairs, _ = problem
    if dtype == torch.int8:
        values, scales = quantize_rows(documents.values)
        stored = documents._replace(values=values, scales=scales)
    else:
        stored = documents._replace(values=documents.values.half())
    sides = queries.values, queries.offsets, stored.values, stored.offsets, stored.scales
    expected = maxsim(queries.values, queries.offsets, stored.floats().values, documents.offsets, pairs)
    assert torch.equal(maxsim_stored(*sides, pairs), expected)
    with forced_threads(3):
        assert torch.equal(maxsim_stored(*sides, pairs), expected)


def test_int8_of_real_vectors():
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        Tokens(torch.nn.functional.normalize(x.values, dim=1), x.offsets)
        for x in (tokens(lengths, 128, torch.float32, generator, False) for lengths in ([32] * 3, [90] * 9))
    )
    (q, q_scales), (d, d_scales) = quantize_rows(queries.values), quantize_rows(documents.values)
    error = (q * q_scales[:, None] - queries.values).abs()
    assert (error <= q_scales[:, None] / 2 * (1 + 1e-5)).all()
    scores = maxsim_int8(q, q_scales, queries.offsets, d, d_scales, documents.offsets)
    exact = maxsim_reference(*flat(queries, documents))
    # a similarity of unit vectors is off by the two roundings, at most sqrt(d) scale / 2 each
    bound = (q_scales.max() + d_scales.max()) * 128**0.5 / 2 * 1.01
    assert ((scores - exact).abs() <= 32 * bound).all()
    assert quantize_rows(torch.zeros(2, 3))[0].eq(0).all()


@pytest.mark.parametrize("pairs", [None, torch.tensor([[1, 0], [0, 2], [1, 0]])])
def test_gradcheck_of_the_reference(pairs):
    generator = torch.Generator().manual_seed(8)
    queries, documents = (tokens(rows, 3, torch.float64, generator, False) for rows in ([2, 1, 0], [3, 1, 2]))
    values = tuple(x.values.requires_grad_() for x in (queries, documents))
    assert torch.autograd.gradcheck(
        lambda q, d: maxsim_reference(q, queries.offsets, d, documents.offsets, pairs), values
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_texts(dtype):
    generator = torch.Generator().manual_seed(1)
    queries = tokens([1500, 1, 0, 300], 24, dtype, generator, True)
    documents = tokens([1, 2100, 0, 777], 24, dtype, generator, True)
    expected = maxsim_forward(queries, documents, None)
    for got, want in zip(op._run(queries, documents, None, with_argmax=True), expected, strict=True):
        assert torch.equal(got, want)
    assert expected[0][0, 2] == -math.inf
    assert expected[0][2].eq(0).all()


def test_nothing_flows_into_empty_texts():
    generator = torch.Generator().manual_seed(2)
    queries, documents = (tokens([2, 0], 3, torch.float32, generator, False) for _ in range(2))
    for x in (queries, documents):
        x.values.requires_grad_()
    scores = maxsim(*flat(queries, documents))
    assert scores[0, 1] == -math.inf
    torch.softmax(scores[0], 0)[0].backward()
    assert queries.values.grad.eq(0).all()
    assert documents.values.grad.eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("token", [0, 6, 7, 15])
def test_nan_is_seen_where_it_is(dtype, token):
    generator = torch.Generator().manual_seed(3)
    queries = tokens([3, 20], 17, dtype, generator, False)
    documents = tokens([16, 16], 17, dtype, generator, False)
    clean = maxsim(*flat(queries, documents))
    documents.values[token, 4] = math.nan
    scores = maxsim(*flat(queries, documents))
    assert scores[:, 0].isnan().all()
    assert torch.equal(scores[:, 1], clean[:, 1])
    queries.values[1, 0] = math.nan
    assert torch.equal(maxsim(*flat(queries, documents)).isnan(), torch.tensor([[True, True], [True, False]]))


@pytest.mark.parametrize("paired", [False, True])
def test_threads_change_nothing(paired):
    generator = torch.Generator().manual_seed(4)
    queries = tokens([5, 32, 0, 40], 70, torch.float32, generator, False)
    documents = tokens([3, 0, 90, 41, 8, 17], 70, torch.float32, generator, False)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(6)).flip(0) if paired else None
    scores, argmax = op._run(queries, documents, pairs, with_argmax=True)
    grad = torch.randn(scores.shape, generator=generator)
    gradients = op._backward(grad, *flat(queries, documents), pairs, argmax)
    with forced_threads(4):
        assert torch.equal(op._run(queries, documents, pairs, with_argmax=True)[0], scores)
        again = op._backward(grad, *flat(queries, documents), pairs, argmax)
        assert all(torch.equal(x, y) for x, y in zip(again, gradients, strict=True))
        with ThreadPoolExecutor(4) as pool:
            for got in pool.map(lambda _: maxsim(*flat(queries, documents), pairs), range(8)):
                assert torch.equal(got, scores)


def test_a_document_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(5)
    queries = tokens([32, 7], 48, torch.float32, generator, False)
    documents = tokens([3, 0, 90, 41], 48, torch.float32, generator, False)
    whole = maxsim(*flat(queries, documents))
    for i, (a, b) in enumerate(torch.stack([documents.offsets[:-1], documents.offsets[1:]], 1).tolist()):
        alone = maxsim(queries.values, queries.offsets, documents.values[a:b], offsets_of([b - a]))
        assert torch.equal(alone[:, 0], whole[:, i])


@pytest.mark.sampled
@pytest.mark.parametrize("paired", [False, True])
def test_opcheck_and_compile(path, paired):
    generator = torch.Generator().manual_seed(6)
    queries = tokens([5, 0, 20], 12, torch.float32, generator, False)
    documents = tokens([3, 0, 9, 4], 12, torch.float32, generator, False)
    pairs = torch.tensor([[2, 0], [0, 3], [2, 1]]) if paired else None
    values = [x.values.clone().requires_grad_() for x in (queries, documents)]
    arguments = (values[0], queries.offsets, values[1], documents.offsets, pairs)
    if path == "this CPU":  # opcheck tests the operator, which is the same for every CPU
        floats = (values[0], queries.offsets, None, values[1], documents.offsets, None, pairs, None)
        torch.library.opcheck(torch.ops.irkit.maxsim.default, floats)
        quantized = [
            Tokens(q, x.offsets, s) for x in (queries, documents) for q, s in [quantize_rows(x.values)]
        ]
        torch.library.opcheck(torch.ops.irkit.maxsim.default, (*quantized[0], *quantized[1], pairs, None))

    def loss(*arguments):
        scores = maxsim(*arguments)
        return torch.where(scores.isinf(), 0, scores).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for _ in range(2):
        ours, theirs = (f(*arguments) for f in (compiled, loss))
        assert torch.equal(ours, theirs)
        for x, y in zip(torch.autograd.grad(ours, values), torch.autograd.grad(theirs, values), strict=True):
            assert torch.equal(x, y)
        if not paired:  # other numbers of texts and of tokens
            arguments = (values[0], offsets_of([25]), values[1], offsets_of([3, 0, 6, 3, 4]), None)


def test_views_are_fine():
    generator = torch.Generator().manual_seed(7)
    queries, documents = (tokens([4, 5], 6, torch.float32, generator, True) for _ in range(2))
    expected = maxsim(*flat(queries, documents))
    q, d = (torch.stack([x.values, x.values], 2)[:, :, 1] for x in (queries, documents))
    ends = torch.stack([queries.offsets, queries.offsets], 1)[:, 0]
    assert torch.equal(maxsim(q, ends, d, ends), expected)
    pairs = torch.tensor([[1, 0], [0, 1]])
    assert torch.equal(maxsim(q, ends, d, ends, pairs.flip(1)), expected.T[pairs[:, 0], pairs[:, 1]])


def test_defaults_do_not_matter(path):
    generator = torch.Generator().manual_seed(8)
    arguments = flat(*(tokens([40, 25], 6, torch.float32, generator, True) for _ in range(2)))
    pairs = torch.tensor([[0, 1], [1, 1]])
    expected, expected_pairs = maxsim(*arguments), maxsim(*arguments, pairs)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cpu" if path == "no compiler" else "meta"):
            assert torch.equal(maxsim(*arguments), expected)
            sides = map(Tokens, arguments[::2], arguments[1::2])
            assert torch.equal(op._run(*sides, pairs, True)[0], expected_pairs)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(9, 5)}, r"of one d, got \(9, 5\) and \(9, 4\)"),
        ({"queries": torch.zeros(9)}, "expected queries and documents"),
        ({"queries": torch.zeros(9, 0), "documents": torch.zeros(9, 0)}, "expected queries and documents"),
        ({"queries": torch.zeros(9, 4, dtype=torch.float16)}, "expected one dtype"),
        ({"queries": torch.zeros(9, 4).double(), "documents": torch.zeros(9, 4).double()}, "float64"),
        ({"query_offsets": torch.tensor([0, 9])}, "query_offsets must be .* int32, got .* torch.int64"),
        ({"query_offsets": torch.tensor([], dtype=torch.int32)}, "query_offsets must be"),
        (
            {"document_offsets": torch.tensor([0, 8], dtype=torch.int32)},
            "document_offsets must rise from 0 to 9",
        ),
        (
            {"document_offsets": torch.tensor([1, 9], dtype=torch.int32)},
            "document_offsets must rise from 0 to 9",
        ),
        ({"document_offsets": torch.tensor([0, 5, 4, 9], dtype=torch.int32)}, "must rise from 0 to 9"),
        ({"pairs": torch.tensor([0, 1])}, r"pairs must be \(p, 2\) int64"),
        ({"pairs": torch.tensor([[0, 1]], dtype=torch.int32)}, r"pairs must be \(p, 2\) int64"),
        ({"pairs": torch.tensor([[0, 2]])}, "rows of 2 queries and 2 documents, got rows 0 and 2"),
        ({"pairs": torch.tensor([[0, 0]] * 40 + [[1, 2]])}, "got rows 1 and 2"),
        ({"pairs": torch.tensor([[0, 0], [-1, 0]])}, "rows of 2 queries and 2 documents"),
        ({"queries": torch.zeros(9, 4, device="meta")}, "one CPU or CUDA device"),
    ],
)
def test_wrong_arguments(change, message):
    good = {"queries": torch.zeros(9, 4), "query_offsets": offsets_of([4, 5]), "documents": torch.zeros(9, 4)}
    good |= {"document_offsets": offsets_of([4, 5])}
    assert maxsim(**good).shape == (2, 2)
    with pytest.raises(ValueError, match=message):
        maxsim(**(good | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(9, 4)}, "expected one dtype among"),
        ({"query_scales": torch.ones(8)}, r"query_scales must be \(9,\) float32"),
        ({"document_scales": torch.ones(9).double()}, r"document_scales must be \(9,\) float32"),
        ({"query_scales": -torch.ones(9)}, "not be negative"),
        (
            {f"{x}": torch.zeros(9, 2**17, dtype=torch.int8) for x in ("queries", "documents")},
            "at most 65536",
        ),
        ({"document_offsets": offsets_of([4])}, "must rise from 0 to 9"),
    ],
)
def test_wrong_arguments_of_int8(change, message):
    good = {x: torch.zeros(9, 4, dtype=torch.int8) for x in ("queries", "documents")}
    good |= {f"{x}_scales": torch.ones(9) for x in ("query", "document")}
    good |= {f"{x}_offsets": offsets_of([4, 5]) for x in ("query", "document")}
    assert maxsim_int8(**good).shape == (2, 2)
    with pytest.raises(ValueError, match=message):
        maxsim_int8(**(good | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(9, 4).half()}, "queries in float32, .* got torch.float16 and torch.float16"),
        ({"documents": torch.zeros(9, 4)}, "documents in float16"),
        ({"documents": torch.zeros(9, 4, dtype=torch.int8)}, "int8 without scales"),
        ({"document_scales": torch.ones(9)}, "float16 with scales"),
        ({"documents": torch.zeros(9, 5).half()}, "of one d"),
        ({"document_offsets": offsets_of([4])}, "must rise from 0 to 9"),
        ({"pairs": torch.tensor([[0, 2]])}, "rows of 2 queries and 2 documents"),
    ],
)
def test_wrong_arguments_of_stored(change, message):
    good = {"queries": torch.zeros(9, 4), "documents": torch.zeros(9, 4).half()}
    good |= {f"{x}_offsets": offsets_of([4, 5]) for x in ("query", "document")}
    assert maxsim_stored(**good).shape == (2, 2)
    with pytest.raises(ValueError, match=message):
        maxsim_stored(**(good | change))


def test_plans(path):
    plans = [cpu.plan_for(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)]
    expected: dict[str, list[Plan | None]] = {
        name: [*[Plan("float32", lanes, False)] * 2, Plan("float32", lanes, False, "int8")]
        for name, lanes in (("avx2", 8), ("any", 4))
    }
    expected["no compiler"] = [None] * 3
    if path in expected:
        assert plans == expected[path]
    elif {"avx512bf16", "avx512vnni"} <= cpu_features():
        assert plans == [Plan(kind, 16, False) for kind in ("float32", "bfloat16", "int8")]
