"""Vocabularies of a domain: train a tokenizer on its texts, and measure tokens per word."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from tokenizers import BertWordPieceTokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Learner

from irkit.config import Config
from irkit.errors import BadValueError
from irkit.tokenizer import Tokenizer

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_INNER = "##"
_BATCH = 1024  # texts tokenised at once
_normalizer, _splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()


class DomainConfig(Config):
    """A vocabulary that is trained on texts.

    Attributes:
        size: Number of tokens, special tokens included; less if the texts do not hold as many.
        min_frequency: How often two tokens must follow each other to be merged.
        alphabet: Number of characters that get a token, the most frequent ones; all others are unknown.
        algorithm: How words are split: ``"wordpiece"`` takes the longest token each time, ``"bpe"`` merges
            pairs in the order in which they were learned. Both have the same tokens.
    """

    algorithm: Literal["wordpiece", "bpe"] = "wordpiece"
    size: int = Field(30522, ge=len(_SPECIAL) + 1)
    min_frequency: int = Field(2, ge=1)
    alphabet: int = Field(1000, ge=1)


def train_vocabulary(texts: Iterable[str], out: str | Path, config: DomainConfig | None = None) -> Tokenizer:
    """Train a WordPiece or BPE tokenizer as BERT splits texts: lower case, no accents, punctuation apart.

    The same texts give the same vocabulary. The trainer of the tokenizers library alone does not ensure that:
    it numbers characters in the order of a hash table, and chooses between equally frequent pairs by these
    numbers. Here the characters are numbered first.

    Args:
        texts: Texts; they are read twice, so an iterator is refused.
        out: Directory of the tokenizer.
        config: Size and limits.

    Returns:
        The tokenizer, with the special tokens of BERT.

    Raises:
        BadValueError: ``texts`` can be read only once, or hold no words, or the size leaves no room for the
            characters.

    Examples:
        >>> tokenizer = train_vocabulary(["gene expression", "genes express"], "out")  # doctest: +SKIP

    Source: "Bridging Vocabulary Gaps", section 6.6.
    """
    config = config or DomainConfig()
    if isinstance(texts, Iterator):
        raise BadValueError(
            "train_vocabulary: texts are read twice; got an iterator, expected a list or such"
        )
    # the alphabet: the most frequent characters, alphabetically among equally frequent ones
    first, inner = _characters(texts)
    ranked = sorted((first + inner).items(), key=lambda item: (-item[1], item[0]))
    alphabet = {letter for letter, _ in ranked[: config.alphabet]}
    inner_tokens = [_INNER + letter for letter in sorted(alphabet & inner.keys())]
    fixed = len(_SPECIAL) + len(alphabet) + len(inner_tokens)
    if not alphabet or fixed >= config.size:
        raise BadValueError(
            f"train_vocabulary: the texts hold {len(alphabet)} characters, which take {fixed} tokens; "
            f"expected some, and fewer than the size of {config.size}: give other texts, a larger size or a "
            "smaller alphabet"
        )
    learned = Learner(models.BPE(unk_token="[UNK]", continuing_subword_prefix=_INNER))
    learned.normalizer, learned.pre_tokenizer = _normalizer, _splitter
    trainer = trainers.BpeTrainer(  # WordPiece learns its tokens in the same way
        vocab_size=config.size,
        min_frequency=config.min_frequency,
        special_tokens=[*_SPECIAL, *inner_tokens],  # their ids are the positions in this list
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=_INNER,
        show_progress=False,
    )
    learned.train_from_iterator(iter(texts), trainer)
    # the files of a BERT tokenizer
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    made = BertWordPieceTokenizer(learned.get_vocab())
    settings: dict[str, Any] = {f"{token[1:-1].lower()}_token": token for token in _SPECIAL}
    if config.algorithm == "bpe":
        state = json.loads(learned.to_str())["model"]
        merges = [tuple(pair) for pair in state["merges"]]
        made._tokenizer.model = models.BPE(
            state["vocab"], merges, unk_token="[UNK]", continuing_subword_prefix=_INNER
        )
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    else:
        settings |= {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "strip_accents": None}
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return Tokenizer.from_pretrained(out)


def fragmentation(tokenizer: Tokenizer, texts: Iterable[str]) -> float:
    """Compute the number of tokens per word, for words as BERT splits them, punctuation apart.

    Args:
        tokenizer: Tokenizer of any family.
        texts: A sample.

    Returns:
        About 1 or more: 1 if every word is a token. NaN for no words.

    Source: "Bridging Vocabulary Gaps", table 9.
    """
    bare = tokenizer.without_special_tokens()
    bare.max_length = None
    words, tokens, stream = 0, 0, iter(texts)
    while batch := list(islice(stream, _BATCH)):
        words += sum(len(_words(text)) for text in batch)
        tokens += len(bare(batch).values)
    return tokens / words if words else math.nan


def _words(text: str) -> list[str]:
    return [word for word, _ in _splitter.pre_tokenize_str(_normalizer.normalize_str(text))]


def _characters(texts: Iterable[str]) -> tuple[Counter[str], Counter[str]]:
    """Count how often each character starts a word, and how often it stands inside one."""
    first: Counter[str] = Counter()
    inner: Counter[str] = Counter()
    for text in texts:
        for word in _words(text):
            first[word[0]] += 1
            inner.update(word[1:])
    return first, inner
