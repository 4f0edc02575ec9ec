"""Scores of tensors agree with the definition: in torch, on CUDA, and interpreted (TRITON_INTERPRET=1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from irkit_kernels._testing import DEVICE, INTERPRETED, compiles, needs_no_gpu, on_device, poison
from irkit_kernels.residual_maxsim import (
    TensorTokens,
    Tokens,
    reference,
    tensor_interaction,
    tensor_maxsim,
    tensor_probe,
)

pytest.importorskip("triton")
_poison = poison  # a fixture of this module


class Problem(NamedTuple):
    queries: Tensor
    table: Tensor
    query_offsets: Tensor
    tokens: TensorTokens
    document_offsets: Tensor
    codebook: Tensor
    pairs: Tensor

    def on(self, device: str) -> Problem:
        moved = (
            x.to(device) if isinstance(x, Tensor) else TensorTokens(*(y.to(device) for y in x)) for x in self
        )
        return Problem(*moved)

    @property
    def rough(self) -> tuple[Tensor, ...]:
        return self.table, self.query_offsets, self.tokens.codes, self.document_offsets, self.pairs


def problem(q_lengths, d_lengths, k: int, dim: int, nbits: int, seed: int, wide: bool = True) -> Problem:
    """Draw small integers, which are exact in every dtype and in every order of addition."""
    rng = np.random.default_rng(seed)
    tq, td = sum(q_lengths), sum(d_lengths)
    codebook = rng.permutation(np.arange(-128, 128)).astype(np.int8).reshape(-1, 2**nbits)
    packed = rng.integers(0, 256, (td, reference.packed_width(dim, nbits))).astype(np.uint8)
    codes = rng.integers(0, k + 2 * wide, td).astype(np.int32 if wide else np.uint16)  # some are no centroid
    coefficients = rng.integers(-2, 3, (td, 2)).astype(np.float16)
    queries, table = rng.integers(-2, 3, (tq, dim)), rng.integers(-9, 10, (k, tq))
    pairs = (
        np.stack([rng.integers(0, len(x), 6) if x else np.zeros(0, int) for x in (q_lengths, d_lengths)], 1)
        if q_lengths and d_lengths
        else np.zeros((0, 2), int)
    )
    offsets = [np.concatenate([[0], np.cumsum(x, dtype=np.int64)]) for x in (q_lengths, d_lengths)]
    return Problem(
        torch.from_numpy(queries.astype(np.float32)),
        torch.from_numpy(table.astype(np.float32)),
        torch.from_numpy(offsets[0].astype(np.int32)),
        TensorTokens(torch.from_numpy(codes), torch.from_numpy(coefficients), torch.from_numpy(packed)),
        torch.from_numpy(offsets[1]),
        torch.from_numpy(codebook),
        torch.from_numpy(pairs.astype(np.int64)),
    )


lengths = st.lists(st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 17, 33])), max_size=3)
problems = st.builds(
    problem,
    lengths,
    lengths,
    st.integers(1, 20),
    st.sampled_from([1, 8, 24, 40, 128]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 2**31),
    st.booleans(),
)


@needs_no_gpu
@settings(max_examples=40, deadline=None)
@given(problems)
def test_definition(x):
    """The scores of tensors equal those of the search in numpy."""
    k = len(x.table)
    codes = np.minimum(x.tokens.codes.numpy(), k - 1)
    tokens = Tokens(codes, x.tokens.coefficients.numpy(), x.tokens.packed.numpy())
    got, rough = tensor_maxsim(*x), tensor_interaction(*x.rough)
    for (query, document), score, rough_score in zip(x.pairs.tolist(), got, rough, strict=True):
        rows = slice(*x.query_offsets[query : query + 2].tolist())
        at = slice(*x.document_offsets[document : document + 2].tolist())
        if at.start == at.stop:
            assert score == rough_score == -torch.inf
            continue
        part = Tokens(*(y[at] for y in tokens))
        scores = x.table.numpy()[part.codes][:, rows]
        assert rough_score == scores.max(0).sum()
        centroids = np.zeros((k, x.queries.shape[1]), np.float32)
        levels = reference.decode_reference(part, centroids, x.codebook.numpy())
        a = part.coefficients[:, :1].astype(np.float32)
        assert score == (a * scores + levels @ x.queries.numpy()[rows].T).max(0).sum()


@on_device
@settings(max_examples=12 if INTERPRETED else 20, deadline=None)
@given(problems)
def test_kernel(x):
    from irkit_kernels.residual_maxsim import triton_kernel

    moved = x.on(DEVICE)
    assert torch.equal(triton_kernel.interaction(*moved.rough).cpu(), tensor_interaction(*x.rough))
    assert torch.equal(triton_kernel.residual_maxsim(*moved).cpu(), tensor_maxsim(*x))
    half = moved._replace(queries=moved.queries.half(), table=moved.table.half())
    assert torch.equal(triton_kernel.residual_maxsim(*half).cpu(), tensor_maxsim(*x))


class Lists(NamedTuple):
    offsets: Tensor
    documents: Tensor
    visits: Tensor
    n_q: int
    n: int

    def on(self, device: str) -> Lists:
        return Lists(*(x.to(device) if isinstance(x, Tensor) else x for x in self))


def lists_of(sizes: list[int], n_q: int, n: int, visits: int, seed: int) -> Lists:
    """Lists have each document at most once, and documents that do not exist, like a damaged file."""
    rng = np.random.default_rng(seed)
    documents = [np.sort(rng.permutation(n + 3)[:size]) for size in sizes]
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in documents], dtype=np.int64)])
    both = np.stack([rng.integers(0, n_q, visits), rng.integers(-1, len(sizes), visits)], axis=1)
    documents_of_list = np.concatenate(documents).astype(np.int32)
    return Lists(*map(torch.from_numpy, (offsets, documents_of_list, both.astype(np.int64))), n_q, n)


list_problems = st.builds(
    lists_of,
    st.lists(st.sampled_from([0, 1, 5, 40]), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 30),
    st.integers(0, 9),
    st.integers(0, 2**31),
)


@needs_no_gpu
@settings(max_examples=40, deadline=None)
@given(list_problems)
def test_visits_are_counted(x):
    expected = np.zeros((x.n_q, x.n), np.int32)
    for query, centroid in x.visits.tolist():
        if centroid >= 0:
            documents_of_list = x.documents[x.offsets[centroid] : x.offsets[centroid + 1]].numpy()
            expected[query, documents_of_list[documents_of_list < x.n]] += 1
    np.testing.assert_array_equal(tensor_probe(*x), expected)


@on_device
@settings(max_examples=12 if INTERPRETED else 20, deadline=None)
@given(list_problems)
def test_kernel_of_lists(x):
    from irkit_kernels.residual_maxsim import triton_kernel

    moved = x.on(DEVICE)
    counts = torch.zeros(x.n_q, x.n, dtype=torch.int32, device=DEVICE)
    got = triton_kernel.probe(*moved[:3], counts, entries=16, shares=2)  # more blocks than programs
    assert torch.equal(got.cpu(), tensor_probe(*x))


@on_device
def test_kernel_reads_bytes():
    from irkit_kernels.residual_maxsim import triton_kernel

    x = problem([5, 40], [3, 17, 0], 9, 8, 4, 0)
    moved = x._replace(table=(x.table + 9).to(torch.uint8)).on(DEVICE)
    rough = tensor_interaction(x.table + 9, *x.rough[1:])
    assert torch.equal(triton_kernel.interaction(*moved.rough).cpu(), rough)
    assert torch.equal(tensor_interaction((x.table + 9).to(torch.uint8), *x.rough[1:]), rough)


@needs_no_gpu
@pytest.mark.gpu
def test_error_is_that_of_torch():
    x = problem([32] * 4, [100] * 50, 64, 128, 4, 0)
    rng = torch.Generator().manual_seed(0)
    x = x._replace(
        queries=torch.randn(x.queries.shape, generator=rng), table=torch.randn(x.table.shape, generator=rng)
    )
    exact = tensor_maxsim(*x)
    moved = x._replace(queries=x.queries.half(), table=x.table.half()).on("cuda")
    rounded = tensor_maxsim(*x._replace(queries=x.queries.half().float(), table=x.table.half().float()))
    error = (tensor_maxsim(*moved).cpu() - exact).abs().max()
    assert error <= 2 * (rounded - exact).abs().max()


@needs_no_gpu
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("nbits", [0, 1, 4, 8])
def test_compiles_for_gpus(capability, nbits):
    from irkit_kernels.residual_maxsim import triton_kernel

    width = 96 * nbits // 8 or 1
    arguments = {
        "table": "*fp16" if nbits else "*u8",
        "queries": "*fp16",
        "query_offsets": "*i32",
        "codes": "*u16",
    }
    arguments |= {"coefficients": "*fp16", "packed": "*u8", "document_offsets": "*i64", "codebook": "*i8"}
    arguments |= {"pairs": "*i64", "out": "*fp32", "n_centroids": "i32", "n_queries": "i32", "size": "i32"}
    arguments |= {"D": 96, "NBITS": nbits, "WIDTH": width, "BLOCK_W": 16 if nbits < 2 else 64}
    arguments |= {"BLOCK_Q": 32, "BLOCK_D": 64}
    assert compiles(triton_kernel.score, arguments, capability)


@needs_no_gpu
@pytest.mark.parametrize("capability", [80, 90])
def test_lists_compile_for_gpus(capability):
    from irkit_kernels.residual_maxsim import triton_kernel

    arguments = {"list_offsets": "*i64", "lists": "*i32", "visits": "*i64", "counts": "*i32", "n": "i32"}
    assert compiles(triton_kernel.visit, arguments | {"BLOCK": 1024, "SHARES": 8}, capability)


@needs_no_gpu
def test_errors():
    x = problem([3], [4], 5, 8, 4, 0)
    with pytest.raises(ValueError, match=r"tensor_interaction: table must be \(K, total_q\)"):
        tensor_interaction(x.table[0], *x.rough[1:])
    with pytest.raises(ValueError, match=r"tensor_maxsim: table must be .* got torch\.uint8"):
        tensor_maxsim(*x._replace(table=x.table.to(torch.uint8)))
    rows = lists_of([4], 1, 9, 2, 0)
    with pytest.raises(ValueError, match=r"tensor_probe: lists must be torch\.int32 .* got torch\.int64"):
        tensor_probe(rows.offsets, rows.documents.long(), *rows[2:])
    with pytest.raises(ValueError, match=r"tensor_interaction: pairs must be torch\.int64"):
        tensor_interaction(*x.rough[:-1], x.pairs.int())
    with pytest.raises(
        ValueError, match=r"codes must be torch\.uint16 or torch\.int32 .* on cpu, got torch\.int64"
    ):
        tensor_maxsim(*x._replace(tokens=x.tokens._replace(codes=x.tokens.codes.long())))
    with pytest.raises(ValueError, match=r"expected \[\(3, 8\), \(4, 2\), \(4, 4\)\]"):
        tensor_maxsim(*x._replace(tokens=x.tokens._replace(packed=x.tokens.packed[:, :2])))
    with pytest.raises(ValueError, match=r"codebook torch\.int8 of shape \(3, 16\)"):
        tensor_maxsim(*x._replace(codebook=x.codebook[:3]))
