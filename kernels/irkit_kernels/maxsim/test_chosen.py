"""Chosen documents score where they lie as they do back to back."""

from __future__ import annotations

import pytest
import torch

from irkit_kernels._jit import Target, compiling_for
from irkit_kernels._threads import forced_threads
from irkit_kernels.maxsim import maxsim, maxsim_chosen, maxsim_stored, quantize_rows

LENGTHS = [3, 0, 40, 8, 1, 17, 70, 9]
CHOSEN = [6, 2, 1, 2, 7, 0]
BY = [0, 2, 0, 1, 1, 2]


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def arguments(dtype, d=24, queries=(5, 0, 33)):
    generator = torch.Generator().manual_seed(d)
    given = {
        "queries": torch.randn(sum(queries), d, generator=generator),
        "query_offsets": offsets_of(queries),
    }
    documents = torch.randn(sum(LENGTHS), d, generator=generator)
    given["documents"] = documents.to(dtype) if dtype != torch.int8 else documents
    if dtype == torch.int8:
        given["documents"], given["document_scales"] = quantize_rows(documents)
    ends = offsets_of(LENGTHS).long()
    given["spans"] = torch.stack([ends[:-1], ends[1:]], dim=1)[CHOSEN]
    return given | {"chosen_by": torch.tensor(BY)}


@pytest.mark.parametrize("target", [None, Target(frozenset())], ids=["compiled", "not compiled"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("d", [1, 24, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_chosen_documents_score_as_all_do(dtype, d, threads, target):
    given = arguments(dtype, d)
    sides = given["queries"], given["query_offsets"], given["documents"], offsets_of(LENGTHS)
    pairs = torch.tensor([BY, CHOSEN]).T
    with compiling_for(target), forced_threads(threads):
        every = (
            maxsim(*sides, pairs)
            if dtype == torch.float32
            else maxsim_stored(*sides, given.get("document_scales"), pairs)
        )
        assert torch.equal(maxsim_chosen(**given), every)
        for first in (0, 2, 6):  # fewer of them begin elsewhere in the array
            fewer = given | {name: given[name][first:] for name in ("spans", "chosen_by")}
            assert torch.equal(maxsim_chosen(**fewer), every[first:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(38, 24).half()}, "queries in float32, .* got torch.float16"),
        ({"documents": torch.zeros(148, 24).double()}, "and torch.float64 without scales"),
        ({"documents": torch.zeros(148, 24, dtype=torch.int8)}, "int8 without scales"),
        ({"document_scales": torch.ones(148)}, "float16 with scales"),
        ({"documents": torch.zeros(148, 23).half()}, "of one d"),
        ({"query_offsets": torch.tensor([0, 5, 5, 37]).int()}, "must rise from 0 to 38"),
        ({"spans": torch.zeros(5, 2, dtype=torch.int64)}, r"spans must be \(6, 2\) int64, got \(5, 2\)"),
        ({"spans": torch.zeros(6, 2)}, "spans must be .* torch.float32"),
        ({"spans": torch.tensor([[0, 149]] * 6)}, "spans must go up within 0 to 148"),
        ({"spans": torch.tensor([[-1, 1]] * 6)}, "spans must go up within 0 to 148"),
        ({"spans": torch.tensor([[3, 1]] * 6)}, "spans must go up within 0 to 148"),
        ({"chosen_by": torch.tensor([0, 0, 0, 0, 0, 3])}, "rows of 3 queries"),
        ({"chosen_by": torch.zeros(6)}, "int64"),
        ({"chosen_by": torch.zeros(6, 1, dtype=torch.int64)}, "pairs must be"),
    ],
)
def test_wrong_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        maxsim_chosen(**(arguments(torch.float16) | change))


def test_scales_that_do_not_fit():
    given = arguments(torch.int8)
    with pytest.raises(ValueError, match=r"document_scales must be \(148,\)"):
        maxsim_chosen(**(given | {"document_scales": torch.ones(147)}))


def test_defaults_do_not_matter():
    given = arguments(torch.float16)
    expected = maxsim_chosen(**given)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert torch.equal(maxsim_chosen(**given), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_chosen():
    given = arguments(torch.float32)
    given |= {name: given[name][:0] for name in ("spans", "chosen_by")}
    assert maxsim_chosen(**given).shape == (0,)
