"""Sparse representations read as terms: decoding, statistics, explanations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from irkit import Model, Ragged, Retriever, Sparse, score
from irkit.errors import BadTypeError, BadValueError
from irkit.model.embeddings import as_sparse, decode, sparsity
from irkit.retrieval.explanation import TermWeights, explain, match_terms
from irkit.tokenizer import TokenSpan

VALUES = st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, 2.5])
MATRICES = arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 6)), elements=VALUES)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")  # of torch, at what this test does
@given(MATRICES)
def test_decoding_lists_the_terms_of_each_row_by_weight(matrix: np.ndarray) -> None:
    vocabulary = [f"t{number}" for number in range(matrix.shape[1])]
    wanted = [
        [(vocabulary[term], row[term]) for term in np.argsort(-row, kind="stable") if row[term] != 0]
        for row in matrix
    ]
    tensor = torch.from_numpy(matrix)
    for form in (tensor, tensor.to_sparse(), tensor.to_sparse_csr(), matrix, Sparse.from_dense(tensor)):
        rows = as_sparse("decode", form)
        assert decode(rows, vocabulary) == wanted
        assert decode(rows, vocabulary, 2) == [row[:2] for row in wanted]
        counts = sparsity(rows)
        filled = float((matrix != 0).sum(1).mean()) if len(matrix) else 0.0
        assert counts["active_dims"] == pytest.approx(filled)
        assert counts["sparsity_ratio"] == pytest.approx(1 - filled / matrix.shape[1])


def test_decoding_knows_no_order_of_the_terms() -> None:
    rows = Sparse(Ragged.from_rows([[2, 0, 1]]), torch.tensor([1.0, 1.0, 3.0]), 3)
    assert decode(rows, ["a", "b", "c"]) == [[("b", 3.0), ("a", 1.0), ("c", 1.0)]]


def test_what_cannot_be_decoded_is_refused() -> None:
    rows = Sparse.from_dense(torch.eye(2))
    assert len(decode(rows, ["a", "b"], np.int64(1))[0]) == 1
    for k in (0, -1, 1.5):
        with pytest.raises(BadValueError, match="k is"):
            decode(rows, ["a", "b"], k)
    with pytest.raises(BadValueError, match="a vocabulary of 1 for rows over 2 terms"):
        decode(rows, ["a"])
    with pytest.raises(BadTypeError, match="expected Sparse or a tensor"):
        as_sparse("decode", [("a", 1.0)])
    with pytest.raises(BadValueError, match=r"shape \(1, 2, 2\)"):
        as_sparse("decode", torch.zeros(1, 2, 2))


def _weights(text: str, terms: dict[str, float], *places: TokenSpan) -> TermWeights:
    vocabulary = ["cat", "dog", "pet", "big"]
    row = torch.zeros(1, 4)
    for term, weight in terms.items():
        row[0, vocabulary.index(term)] = weight
    return TermWeights(text, Sparse.from_dense(row), vocabulary, places)


def test_terms_match_where_they_first_stand() -> None:
    query = _weights(
        "cat cat", {"cat": 2.0, "pet": 0.5, "big": 1.0}, TokenSpan("cat", 0, 3), TokenSpan("cat", 4, 7)
    )
    document = _weights(
        "A pet", {"cat": 0.25, "pet": 1.5, "dog": 3.0}, TokenSpan("a", 0, 1), TokenSpan("pet", 2, 5)
    )
    found = match_terms(query, document)
    assert found.score == pytest.approx(1.25)
    assert [match.score for match in found.matches] == [0.75, 0.5]
    pet, cat = found.matches
    assert (pet.query, pet.document, pet.weights) == (
        TokenSpan("pet", 7, 7),
        TokenSpan("pet", 2, 5),
        (0.5, 1.5),
    )
    assert (cat.query, cat.document, cat.weights) == (
        TokenSpan("cat", 0, 3),
        TokenSpan("cat", 5, 5),
        (2.0, 0.25),
    )
    assert found.to_dict()["matches"][0]["weights"] == [0.5, 1.5]
    assert "0.5000 x 1.5000" in found.to_html()
    assert match_terms(query, _weights("", {})).matches == ()
    other = TermWeights("", Sparse.from_dense(torch.ones(1, 3)), ["a", "b", "c"], ())
    with pytest.raises(BadValueError, match="over 4 and 3 terms"):
        match_terms(query, other)


def test_the_parts_of_an_explanation_add_up(tiny_bert: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model.sparse(tiny_bert)
    query, document = "the cat", "a dog saw the cat"
    found = explain(model, query, document)
    pair = model.encode_representation([query], "query"), model.encode_representation([document], "document")
    assert found.score == pytest.approx(score(*pair).item(), rel=1e-6)
    assert sum(match.score for match in found.matches) == pytest.approx(found.score, rel=1e-5)
    [terms] = model.decode(pair[0])
    assert {match.query.token for match in found.matches} <= {term for term, _ in terms}
    for match in found.matches:
        assert match.document.start == match.document.end or (
            document[match.document.start : match.document.end] == match.document.token.removeprefix("##")
        )
    retriever = Retriever.build(model, [("d", document)], tmp_path / "index", index="flat")
    assert retriever.explain(query, "d") == found


def test_a_model_decodes_what_it_encodes(tiny_bert: Path) -> None:
    model = Model.sparse(tiny_bert)
    one, several = model.encode_query("a cat"), model.encode_query(["a cat", ""])
    assert model.decode(several, 3) == [model.decode(one, 3), model.decode(several[1], 3)]
    assert model.sparsity(one)["active_dims"] == len(model.decode(one))
    with pytest.raises(BadValueError, match="dimensions have no names"):
        Model.multi_vector(tiny_bert).decode(torch.zeros(1, 3))
