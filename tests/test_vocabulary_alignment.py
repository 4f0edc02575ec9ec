"""Which tokens two vocabularies share, sparsemax, and what new tokens are made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tokenizers import models, normalizers, pre_tokenizers

from irkit.core.ragged import Ragged
from irkit.core.representation import Sparse
from irkit.errors import BadValueError, ConfigError
from irkit.tokenizer import Tokenizer
from irkit.vocabulary import align, sparsemax
from irkit.vocabulary.alignment import Alignment, Form, Spelling
from irkit.vocabulary.initialization import (
    align_prior,
    anchors,
    carry_over,
    count_tokens,
    mix,
    semantic_mixture,
    subtoken_mixture,
)

WORDPIECE = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")


def wordpiece(*tokens: str, special: Sequence[str] = WORDPIECE) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate([*special, *tokens])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=special[1]))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return wrapped(backend, special)


def byte_level(*tokens: str, special: Sequence[str] = ROBERTA) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate([*special, *tokens])}
    pairs = [(token[:i], token[i:]) for token in tokens for i in range(1, len(token))]
    merges = [pair for pair in pairs if set(pair) <= vocabulary.keys()]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return wrapped(backend, special)


def sentencepiece(*tokens: str, special: Sequence[str] = ROBERTA) -> Tokenizer:
    scores = [(token, -1.0) for token in [*special, *tokens]]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=1, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return wrapped(backend, special)


def wrapped(backend: tokenizers.Tokenizer, special: Sequence[str]) -> Tokenizer:
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, Path(), {})


def shared(source: Tokenizer, target: Tokenizer, **options: bool) -> dict[str, str]:
    """Tokens of the target that are not special, and those of the source they correspond to."""
    alignment, names = align(source, target, **options), source.tokens(source.vocab_size)
    return {
        str(token): names[number]
        for token, number in zip(alignment.tokens, alignment.source_ids.tolist(), strict=True)
        if number >= 0 and token not in WORDPIECE and token not in ROBERTA
    }


FAMILIES = {
    "wordpiece": wordpiece("play", "##ing", "Paris", ",", "é", "日", "##,"),
    "bytes": byte_level("Ġplay", "ing", "ĠParis", ",", "Ġ,", "ĠÃ©", "æĹ¥", "Ã", "play"),
    "spaces": sentencepiece("▁play", "ing", "▁Paris", ",", "▁,", "▁é", "日", "<0xC3>", "play"),
}
SAME = {
    ("wordpiece", "bytes"): {
        **{"Ġplay": "play", "ing": "##ing", "ĠParis": "Paris", ",": ",", "Ġ,": ",", "ĠÃ©": "é"},
        "æĹ¥": "日",
    },
    ("wordpiece", "spaces"): {
        **{"▁play": "play", "ing": "##ing", "▁Paris": "Paris", ",": ",", "▁,": ",", "▁é": "é"},
        "日": "日",
    },
    ("bytes", "wordpiece"): {
        **{"play": "Ġplay", "##ing": "ing", "Paris": "ĠParis", ",": ",", "##,": ",", "é": "ĠÃ©"},
        "日": "æĹ¥",
    },
    ("bytes", "spaces"): {
        **{"▁play": "Ġplay", "ing": "ing", "▁Paris": "ĠParis", ",": ",", "▁,": ",", "▁é": "ĠÃ©"},
        **{"日": "æĹ¥", "<0xC3>": "Ã", "play": "play"},
    },
    ("spaces", "bytes"): {
        **{"Ġplay": "▁play", "ing": "ing", "ĠParis": "▁Paris", ",": ",", "Ġ,": ",", "ĠÃ©": "▁é"},
        **{"æĹ¥": "日", "Ã": "<0xC3>", "play": "play"},
    },
}


@pytest.mark.parametrize(("source", "target"), SAME)
def test_equal_texts_in_equal_places_correspond_whatever_marks_them(source: str, target: str) -> None:
    assert shared(FAMILIES[source], FAMILIES[target]) == SAME[source, target]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_vocabulary_corresponds_to_itself_token_by_token(name: str) -> None:
    alignment = align(FAMILIES[name], FAMILIES[name])
    assert alignment.source_ids.tolist() == list(range(len(alignment.tokens)))
    assert alignment.overlap == 1.0


def test_a_byte_and_its_letter_stay_apart_between_vocabularies_that_have_both() -> None:
    both = sentencepiece("<0x41>", "A", "▁play")
    assert shared(both, both) == {token: token for token in ("<0x41>", "A", "▁play")}
    assert shared(both, byte_level("A")) == {"A": "A"}  # which is a byte there, and the letter here


@given(st.sampled_from(sorted(FAMILIES)), st.binary(min_size=1, max_size=6), st.booleans())
def test_spelling_reads_what_it_writes(name: str, text: bytes, starts: bool) -> None:
    spelling = Spelling(FAMILIES[name].backend)
    if name != "bytes":
        text = "".join(letter for letter in text.decode("latin-1") if not letter.isspace()).encode() or b"x"
    if name == "bytes" and text.startswith(b" "):
        text = b"x" + text
    if name == "wordpiece" and text == b"##":
        return  # which continues nothing
    assert spelling.form(spelling.write(Form(text, starts))) == Form(text, starts)


def test_special_tokens_correspond_by_role_and_added_ones_by_name() -> None:
    source, target = byte_level("Ġa"), wordpiece("a", "[unused1]", "##<pad>")
    source.backend.add_special_tokens(["[unused1]"])
    alignment, names = align(source, target), source.tokens(source.vocab_size)
    found = [names[number] if number >= 0 else None for number in alignment.source_ids.tolist()]
    assert found == [*ROBERTA, "Ġa", "[unused1]", None]
    assert alignment.rules == ("role",) * 5 + ("text", "special", "new")
    assert alignment.special.tolist() == [True] * 5 + [False] * 3
    assert alignment.counts() == {"role": 5, "text": 1, "special": 1, "new": 1}


def test_case_counts_unless_normalised_and_the_most_frequent_is_taken() -> None:
    source = byte_level("ĠThe", "ĠPARIS", "ĠParis", "Ġthe", "ĠvoilÃł", "Paris")
    target = wordpiece("the", "paris", "##paris", "voila", "Paris")
    assert shared(source, target) == {"the": "Ġthe", "Paris": "ĠParis"}
    assert shared(source, target, normalize=True) == {
        **{"the": "Ġthe", "Paris": "ĠParis", "paris": "ĠPARIS", "##paris": "Paris", "voila": "ĠvoilÃł"}
    }


def test_tokenizers_that_mark_ends_of_words_are_refused() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"))
    with pytest.raises(ConfigError, match="marks ends of words with '</w>'; expected one with marks"):
        Spelling(backend)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "paper", "ours", "normalized"),
    [
        pytest.param("modernbert-base", 56.4, 57.0, 63.2, marks=pytest.mark.slow),
        pytest.param("roberta-base", 59.6, 59.7, 69.8, marks=pytest.mark.slow),
        ("bert-base-cased", 60.9, 60.9, 75.5),
    ],
)
def test_overlaps_with_bert_base_uncased_are_those_of_the_paper(
    data_dir: Path, name: str, paper: float, ours: float, normalized: float
) -> None:
    """Sections 5.2 and 6.4 of the paper, and the table of docs/vocabulary_transfer.md."""
    folder = data_dir / "tokenizers"
    source, target = (Tokenizer.from_pretrained(folder / each) for each in (name, "bert-base-uncased"))
    overlap = 100 * align(source, target).overlap
    assert overlap == pytest.approx(paper, abs=1.0)
    assert overlap == pytest.approx(ours, abs=0.05)
    assert 100 * align(source, target, normalize=True).overlap == pytest.approx(normalized, abs=0.05)


def oracle(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Martins and Astudillo's algorithm 1 in float64."""
    rows = []
    for z in scores.astype(np.float64):
        ordered = np.sort(z)[::-1]
        k = max(k for k in range(1, len(z) + 1) if 1 + k * ordered[k - 1] > ordered[:k].sum())
        rows.append(np.maximum(z - (ordered[:k].sum() - 1) / k, 0))
    return np.array(rows)


@given(
    arrays.arrays(
        np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.floats(-5, 5, width=32)
    )
)
def test_sparsemax_is_the_projection_onto_the_simplex(scores: np.ndarray[Any, Any]) -> None:
    weights = sparsemax(torch.from_numpy(scores))
    assert np.abs(weights.to_dense().double().numpy() - oracle(scores)).max() <= 2**-23
    assert bool((weights.weights > 0).all())


@pytest.mark.parametrize("spread", [1e-4, 3e-3, 1.0])
def test_sparsemax_of_long_rows_with_wide_support(spread: float) -> None:
    scores = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)) * spread
    scores[1] = 0.25  # all alike: each weighs 1 / 3000
    scores[2] += 1e6 if spread == 1.0 else 0.0
    weights = sparsemax(scores)
    assert np.abs(weights.to_dense().double().numpy() - oracle(scores.numpy())).max() <= 2**-23
    assert weights.terms.lengths[1] == 3000
    assert bool((weights[:1].weights.diff() <= 0).all())  # the heaviest first


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 2).long()])
def test_sparsemax_says_what_it_wants(bad: torch.Tensor) -> None:
    with pytest.raises(BadValueError, match=r"expected floats \(n, dim\)"):
        sparsemax(bad)


def test_sparsemax_refuses_what_is_no_number() -> None:
    with pytest.raises(BadValueError, match="NaN or infinite"):
        sparsemax(torch.tensor([[0.0, 1.0], [0.0, float("nan")]]))


def made_up(source_ids: list[int], source_size: int, special: Sequence[int] = ()) -> Alignment:
    flags = torch.zeros(len(source_ids), dtype=torch.bool)
    flags[list(special)] = True
    tokens = tuple(f"t{number}" for number in range(len(source_ids)))
    return Alignment(tokens, torch.tensor(source_ids), ("text",) * len(tokens), flags, source_size)


def test_interpolation_equals_a_float64_oracle() -> None:
    generator = torch.Generator().manual_seed(1)
    ids = [-1 if number % 3 == 0 else number + 5 for number in range(200)]
    alignment = made_up(ids, 220, special=[1, 3])
    target, source = torch.randn(200, 16, generator=generator), torch.randn(220, 24, generator=generator)
    target[6] = 0.0  # has no direction: alike to all
    used = [number for number in range(200) if ids[number] >= 0 and number != 1]
    assert anchors(alignment).tolist() == used
    unit = target.double().numpy()
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    new = [number for number in range(200) if ids[number] < 0]
    weights = oracle(unit[new] @ unit[used].T)
    wanted = weights @ source.double().numpy()[[ids[number] for number in used]]
    mixture = semantic_mixture(alignment, target)
    assert np.abs(mixture.to_dense().double().numpy()[:, [ids[i] for i in used]] - weights).max() < 1e-6
    assert np.abs(mix(mixture, source).double().numpy() - wanted).max() < 1e-5
    result = carry_over(source, alignment, mixture)
    kept = ~alignment.is_new
    assert torch.equal(result[kept], source[alignment.source_ids[kept]])
    assert torch.equal(result[new], mix(mixture, source))
    again = semantic_mixture(alignment, target, scores=1000)  # blocks of few rows
    assert again.terms.lengths.tolist() == mixture.terms.lengths.tolist()
    assert torch.allclose(again.to_dense(), mixture.to_dense(), atol=1e-6)


def test_anchors_are_each_token_of_the_source_once_and_never_special() -> None:
    assert anchors(made_up([4, 2, 2, -1, 7], 8, special=[0])).tolist() == [1, 4]
    with pytest.raises(BadValueError, match="share no tokens to compare with; take subtoken"):
        semantic_mixture(made_up([-1, 0], 1, special=[1]), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("source", "token", "pieces"),
    [
        (wordpiece("sing", "##ing", "##in", "##g", "in"), "singing", ["sing", "##ing"]),
        (wordpiece("in", "##in", "##g"), "##ing", ["##in", "##g"]),
        (wordpiece("in", "##g"), "##ing", ["in", "##g"]),  # no better one
        (wordpiece("paris"), "Paris", ["paris"]),  # as the source writes it
        (wordpiece("a"), "zzz", []),
        (byte_level(*"Ġcl", "Ġc", "Ġcl", *"ears", "ea", "ears"), "clears", ["Ġcl", "ea", "r", "s"]),
        (byte_level(*"ing", "in"), "##ing", ["in", "g"]),
        (byte_level(*"Ġaba", "ab", "Ġa"), "##abab", ["ab", "ab"]),
        (sentencepiece("▁cle", "ars", *"▁clears"), "clears", ["▁cle", "ars"]),
        (sentencepiece("▁", "ing", "in", "g"), "##ing", ["ing"]),
    ],
)
def test_a_new_token_is_cut_as_the_source_would(source: Tokenizer, token: str, pieces: list[str]) -> None:
    target = wordpiece(token)
    alignment = align(source, target)
    assert alignment.tokens[5] == token
    row = subtoken_mixture(alignment, source, target, [5])
    names = source.tokens(source.vocab_size)
    assert [names[piece] for piece in row.terms.values.tolist()] == list(dict.fromkeys(pieces))
    expected = [pieces.count(piece) / len(pieces) for piece in dict.fromkeys(pieces)]
    assert row.weights.tolist() == pytest.approx(expected)


def test_without_a_mixture_tokens_are_the_mean_and_random_ones_are_reproducible() -> None:
    rows = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    alignment = made_up([3, -1, 1, -1, 0], 6, special=[4])
    nothing = Sparse(Ragged(torch.zeros(0).long(), torch.zeros(2)), torch.zeros(0), 6)
    result = carry_over(rows, alignment, nothing)
    assert torch.allclose(result[[1, 3]], rows[[3, 1]].mean(0).expand(2, -1), atol=1e-6)
    drawn = [carry_over(rows, alignment, nothing, torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0][1], drawn[2][1])
    assert torch.equal(drawn[0][[0, 2, 4]], rows[[3, 1, 0]])
    assert 0.9 < float(drawn[0][[1, 3]].std() / rows.std()) < 1.1


def test_prior_keeps_the_range_of_the_source_and_the_order_of_the_target() -> None:
    """Equation 10 in float64; terms that never have a weight count nowhere."""
    generator = torch.Generator().manual_seed(3)
    source, target = torch.randn(50, generator=generator) * 3 - 2, torch.randn(70, generator=generator)
    source[4], target[9] = -1e4, -1e4
    ours, theirs = (np.delete(x.double().numpy(), i) for x, i in ((source, 4), (target, 9)))
    wanted = ours.mean() + ours.std() * (theirs - theirs.mean()) / theirs.std()
    result = align_prior(source, target)
    assert np.abs(np.delete(result.double().numpy(), 9) - wanted).max() < 1e-5
    assert result[9] == -1e4
    flat = align_prior(source, torch.zeros(5))
    assert torch.allclose(flat, torch.full((5,), float(ours.mean())))


def test_counted_tokens_are_smoothed_logarithms_of_shares() -> None:
    tokenizer = wordpiece("a", "b")
    first, again = count_tokens(iter(["a b a", "b a"] * 600), [(tokenizer, 7), (tokenizer, 8)])
    counts = torch.tensor([1, 1, 1, 1, 1, 1801, 1201], dtype=torch.float64)
    assert torch.allclose(first.double(), (counts / counts.sum()).log(), atol=1e-6)
    assert len(again) == 8
