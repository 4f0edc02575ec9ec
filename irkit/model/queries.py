"""The query side of sparse models: tokens of weight 1, tokens with weights, or another encoder."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tokenizers
import torch
from pydantic import BeforeValidator
from tokenizers import models, normalizers, pre_tokenizers

from irkit.arguments import brief
from irkit.config import Config
from irkit.errors import BadValueError, ConfigError
from irkit.formats import LoadEncoder, SideParts, read_model, static_parts
from irkit.heads import Head, StaticHead
from irkit.heads.static_head import read_idf, token_weights
from irkit.model.hub import local_directory
from irkit.model.pipeline import chunks
from irkit.tokenizer import Tokenizer, strings

_CHUNK = 2048  # texts counted together
_Name = Annotated[str, BeforeValidator(lambda name: str(name) if isinstance(name, Path) else name)]


class LexicalQueries(Config):
    """Query side without an encoder: each distinct token weighs 1, special tokens weigh nothing.

    Nothing of it is trained.
    """

    kind: Literal["lexical"] = "lexical"


class StaticQueries(Config):
    """Query side without an encoder: a table gives the weight of each distinct token of a query.

    Attributes:
        weights: Weights at the start: by token, as `idf_weights` gives them; or an ``idf.json`` of
            OpenSearch, or a directory or a repository of the hub that holds this file. None is 1 for each
            token, and 0 for special tokens.
        frozen: Whether training leaves the weights as they are.
    """

    kind: Literal["static"] = "static"
    weights: dict[str, float] | _Name | None = None
    frozen: bool = False


class EncodedQueries(Config):
    """Query side with an encoder of its own.

    Attributes:
        model: Name of a sparse model, as for `Model.from_pretrained`, with the vocabulary of the documents'
            model. If the named model has a query side of its own, this side encodes the queries.
    """

    kind: Literal["encoder"] = "encoder"
    model: _Name


QueryConfig = LexicalQueries | StaticQueries | EncodedQueries
_CLASSES: dict[str, type[QueryConfig]] = {
    kind.model_fields["kind"].default: kind for kind in (LexicalQueries, StaticQueries, EncodedQueries)
}


def query_config(choice: str | Mapping[str, Any] | QueryConfig) -> QueryConfig:
    """Return the configuration of a query side that ``choice`` stands for.

    Args:
        choice: A configuration; its keys and values; or ``"lexical"`` or ``"static"``.

    Raises:
        ConfigError: The kind or a key is unknown, or a value is invalid.

    Examples:
        >>> query_config({"kind": "static", "weights": {"cat": 2.5}}).weights
        {'cat': 2.5}
    """
    if isinstance(choice, QueryConfig):
        return choice
    settings = {"kind": choice} if isinstance(choice, str) else choice
    kind = settings.get("kind") if isinstance(settings, Mapping) else None
    if not isinstance(settings, Mapping) or not isinstance(kind, str) or kind not in _CLASSES:
        raise ConfigError(
            f"queries: got {brief(choice, 100)}, expected 'lexical', 'static' or keys and values with a kind "
            f"of {', '.join(_CLASSES)}"
        )
    return _CLASSES[kind].parse(settings, "queries")


def query_parts(
    config: QueryConfig, tokenizer: Tokenizer, head: Head, load_encoder: LoadEncoder
) -> SideParts:
    """Make the tokenizer, the encoder and the head of a query side.

    Args:
        config: Kind of the side, and its settings.
        tokenizer: Tokenizer for documents.
        head: Head for documents.
        load_encoder: Function that makes an encoder from a directory.

    Raises:
        BadValueError: The head is not sparse.
        ConfigError: The weights are not for tokens of the vocabulary.
        StorageError: The weights or the model do not exist.
    """
    if head.kind != "sparse":
        raise BadValueError(f"queries: a {config.kind} side is for sparse models, this one makes {head.kind}")
    if isinstance(config, EncodedQueries):
        parts = read_model(local_directory(config.model), load_encoder)
        return parts.get("query", parts)
    tokenizer = tokenizer if head.vocabulary is None else _words(head.vocabulary)
    frozen = isinstance(config, LexicalQueries) or config.frozen
    weights = None if isinstance(config, LexicalQueries) else config.weights
    if weights is None:
        weight = torch.ones(tokenizer.highest_id() + 1, device="cpu")
        weight[tokenizer.special_tokens()] = 0.0
    elif isinstance(weights, str):
        file = Path(weights)
        is_file = file.is_file() or file.suffix == ".json"  # such a name is a file's, even if it is missing
        weight = read_idf(file if is_file else local_directory(weights) / "idf.json", tokenizer)
    else:
        weight = token_weights(weights, tokenizer, "queries")
    limits = cast(Any, head.config)
    return static_parts(tokenizer, StaticHead(weight, head.dim, limits, frozen=frozen))


def idf_weights(texts: Iterable[str], tokenizer: Tokenizer) -> dict[str, float]:
    """Compute weights of query tokens by their document frequency: ``log(1 + (n - df + 0.5) / (df + 0.5))``.

    ``n`` is the number of texts that have at least one token, and ``df`` the number of texts that hold the
    token. Written to a file as JSON, the result is an ``idf.json`` of OpenSearch.

    Args:
        texts: Texts of a collection, read once, as they are needed. Long texts are not cut.
        tokenizer: Tokenizer of the model.

    Returns:
        A number above 0 for each token that a text holds, in the order of ids, without special tokens.

    Raises:
        BadTypeError: Something is not a string.
        BadValueError: No text holds a token.

    Examples:
        >>> weights = idf_weights(texts, model.tokenizer)  # doctest: +SKIP
        >>> model.set_queries({"kind": "static", "weights": weights})  # doctest: +SKIP

    Source: Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond", with the 1
    of Lucene; the tables of Geng et al. 2024 (arXiv 2411.04403) are computed so.
    """
    plain = tokenizer.without_special_tokens()
    plain.max_length = None
    weight = torch.ones(plain.highest_id() + 1, device="cpu")
    weight[plain.special_tokens()] = 0.0
    head = StaticHead(weight, frozen=True)
    total, frequencies = 0, torch.zeros(len(weight), dtype=torch.float64, device="cpu")
    for chunk in chunks(strings(texts), _CHUNK):
        terms = head.look_up(plain(chunk)).terms
        total += int((terms.lengths > 0).sum())
        frequencies += torch.bincount(terms.values, minlength=len(frequencies))
    if not total:
        raise BadValueError("idf_weights: no text holds a token, expected the texts of a collection")
    weights = torch.log1p((total - frequencies + 0.5) / (frequencies + 0.5)).tolist()
    tokens = plain.tokens(len(weight))
    return {tokens[i]: weights[i] for i in frequencies.nonzero().flatten().tolist()}


def check_terms(queries: Sequence[str], documents: Sequence[str], special: Container[int]) -> None:
    """Raise BadValueError unless each dimension has the same term on both sides.

    Args:
        queries: Term of each dimension, for queries.
        documents: Term of each dimension, for documents; as many.
        special: Dimensions of special tokens, whose terms may differ.
    """
    for number, (query, document) in enumerate(zip(queries, documents, strict=True)):
        if query != document and number not in special:
            raise BadValueError(
                f"Model: term {number} is {query!r} for queries and {document!r} for documents; expected one "
                "vocabulary"
            )


def _words(vocabulary: Sequence[str]) -> Tokenizer:
    """Make a tokenizer that splits at spaces and punctuation; ids are positions in ``vocabulary``.

    If all words of the vocabulary are lower-case, texts are lower-cased first.
    """
    unknown = " "  # no word of a text has a space
    numbers = {word: number for number, word in enumerate([*vocabulary, unknown])}
    backend = tokenizers.Tokenizer(models.WordLevel(numbers, unk_token=unknown))
    if all(word == word.lower() for word in vocabulary):
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return Tokenizer(backend, Path(), {"unk_token": unknown})
