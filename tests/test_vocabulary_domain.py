"""Vocabularies trained on texts: those of BERT in form, always the same, and fewer pieces a word."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irkit.errors import BadValueError, ConfigError
from irkit.tokenizer import Tokenizer
from irkit.training.domain_vocabulary import DomainConfig, fragmentation, train_vocabulary
from irkit.vocabulary.alignment import align

TEXTS = [
    "Gene expression in the naïve T-cells of mice; gene expression profiles.",
    "Expression of genes: Phosphorylation and dephosphorylation of kinases.",
    "Kinases phosphorylate; phosphorylated genes express. 3,141 mice!",
] * 3


def test_the_tokenizer_is_one_of_bert(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = train_vocabulary(TEXTS, tmp_path, DomainConfig(size=200))
    assert made.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    text = "Naïve GENE-expression, phosphorylation of 漢字?"
    words = [piece.token for piece in made.token_spans(text)]
    assert words[:6] == ["[CLS]", "naive", "gene", "-", "expression", ","]
    assert words[-4:] == ["[UNK]", "[UNK]", "[UNK]", "[SEP]"]  # none of these texts has a question mark
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert peer(text)["input_ids"] == made([text]).values.tolist()
    assert peer.mask_token == "[MASK]"


def test_whole_words_are_tokens_until_the_size_is_reached(tmp_path: Path) -> None:
    large = train_vocabulary(TEXTS, tmp_path / "large", DomainConfig(size=2000, min_frequency=1))
    small = train_vocabulary(TEXTS, tmp_path / "small", DomainConfig(size=90))
    assert small.vocab_size == 90 < large.vocab_size < 2000
    assert fragmentation(large, TEXTS) == 1.0
    # by hand: 2 words, ["gene", "##s"] and "of"
    bare = train_vocabulary(
        ["gene of gene of genes"] * 2, tmp_path / "bare", DomainConfig(size=30, min_frequency=4)
    )
    assert [piece.token for piece in bare.token_spans("genes of")][1:-1] == ["gene", "##s", "of"]
    assert fragmentation(bare, ["genes of", "Of!"]) == 5 / 4


def test_bpe_merges_the_pairs_that_it_learned(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made, other = (
        train_vocabulary(TEXTS, tmp_path / name, DomainConfig(size=90, algorithm=name))
        for name in ("bpe", "wordpiece")
    )
    assert made.backend.get_vocab() == other.backend.get_vocab()
    assert made.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    text = "Naïve kinases; GENES expressed 3"
    assert made.token_spans(text)[0].token == "[CLS]"
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bpe")
    assert peer(text)["input_ids"] == made([text]).values.tolist()
    # "##es" is learned before "ge", so BPE splits where the longest tokens would not
    words = ["xes", "es", "yes", "gee", "ge"]
    small = {"size": 22, "min_frequency": 1}
    bpe, longest = (
        train_vocabulary(words * 2, tmp_path / f"small-{name}", DomainConfig(algorithm=name, **small))
        for name in ("bpe", "wordpiece")
    )
    assert bpe.backend.get_vocab() == longest.backend.get_vocab()
    found = {
        name: [p.token for p in made.token_spans("gees")][1:-1]
        for name, made in (("bpe", bpe), ("longest", longest))
    }
    assert found == {"bpe": ["ge", "##es"], "longest": ["gee", "##s"]}


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.sampled_from("abcdé- .x"), max_size=30), min_size=1, max_size=8),
    size=st.integers(30, 60),
)
def test_the_same_texts_give_the_same_vocabulary(tmp_path: Path, texts: list[str], size: int) -> None:
    """Ties between pairs are many here; in one process two trainings of the library itself often differ."""
    texts = [*texts, "abc"]
    config = DomainConfig(size=size, min_frequency=1)
    first, second = (train_vocabulary(texts, tmp_path / name, config) for name in ("one", "two"))
    assert first.backend.get_vocab() == second.backend.get_vocab()
    assert sorted(first.backend.get_vocab().values()) == list(range(first.vocab_size))  # no id is left out
    ids = first(texts).values
    assert not (ids == first.special_ids["unk"]).any()  # every character has a token


def test_rare_characters_are_left_out_of_a_small_alphabet(tmp_path: Path) -> None:
    made = train_vocabulary(["aa ab b", "ab z"], tmp_path, DomainConfig(size=40, alphabet=2))
    assert {"a", "b", "##a", "##b"} <= made.backend.get_vocab().keys()
    assert [piece.token for piece in made.token_spans("ab z")][1:-1] == ["ab", "[UNK]"]


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="got an iterator"):
        train_vocabulary(iter(TEXTS), tmp_path)
    with pytest.raises(BadValueError, match="hold 0 characters"):
        train_vocabulary(["", " "], tmp_path)
    with pytest.raises(BadValueError, match="larger size or a smaller alphabet"):
        train_vocabulary(TEXTS, tmp_path, DomainConfig(size=20))
    with pytest.raises(ConfigError, match="size"):
        DomainConfig(size=3)
    assert not list(tmp_path.iterdir())


@pytest.mark.data
def test_science_falls_into_fewer_pieces(data_dir: Path, tmp_path: Path) -> None:
    from irkit.data import read_documents

    texts = [document.full_text for document in read_documents(data_dir / "scifact")][:1500]
    general = Tokenizer.from_pretrained(data_dir / "tokenizers" / "bert-base-uncased")
    made = train_vocabulary(texts[100:], tmp_path, DomainConfig(size=8192))
    unseen = texts[:100]
    # these and the next ones are in docs/vocabulary_transfer.md
    assert fragmentation(made, unseen) == pytest.approx(1.21, abs=0.005)
    assert fragmentation(general, unseen) == pytest.approx(1.25, abs=0.005)


@pytest.mark.data
@pytest.mark.slow
def test_a_quarter_of_the_tokens_makes_fewer_pieces_of_science(data_dir: Path, tmp_path: Path) -> None:
    from irkit.training.pretraining.corpus import read_texts

    texts = read_texts(data_dir / "scifact")
    general = Tokenizer.from_pretrained(data_dir / "tokenizers" / "bert-base-uncased")
    made = train_vocabulary(texts, tmp_path, DomainConfig(size=8192))
    assert fragmentation(made, texts) == pytest.approx(1.17, abs=0.005)
    assert fragmentation(general, texts) == pytest.approx(1.24, abs=0.005)
    assert align(general, made).overlap == pytest.approx(0.56, abs=0.005)  # MiniLM has BERT's tokens
