"""How texts become token vectors: lengths, query expansion, skipped words and token pooling."""

from __future__ import annotations

import string
from typing import Literal, Self

from pydantic import Field, model_validator

from irkit.config import Config
from irkit.heads.head import Side

_LONGEST = 1 << 20  # tokens of a text: queries are filled up to their length


class QueryExpansion(Config):
    """Fills short queries up with copies of one token, whose vectors can match words that the query lacks.

    Attributes:
        length: Number of tokens that a shorter query is filled up to.
        strategy: ``"fixed"`` cuts queries at ``length``, as ColBERT does; ``"min"`` leaves longer ones whole.
        attend: Whether the tokens of the query attend to the added tokens. The added tokens attend to the
            tokens of the query in any case.
        token: Token that is added. None is the mask token. A vocabulary without one gives the end token
            (``eos_token``), and one without both the separator token.
    """

    length: int = Field(32, ge=1, le=_LONGEST)
    strategy: Literal["fixed", "min"] = "fixed"
    attend: bool = False
    token: str | None = None


class TokenPooling(Config):
    """Averages similar vectors of a text into one.

    Attributes:
        method: How vectors are clustered: ``ward``, see `irkit.heads.token_pooling.pool_tokens`; or
            ``attention``, see `irkit.heads.vector_budget.attention_clusters`, which training improves.
        vectors: Number of vectors that a text keeps at most, a fixed budget; None lets ``pool_factor``
            decide.
        pool_factor: Number of vectors for each that is kept: 2 keeps half of the vectors.
        protected_tokens: Number of leading vectors that Ward's method leaves as they are.
        normalize: Whether the means are scaled to length 1.
        sides: Sides whose vectors are pooled.
    """

    method: Literal["ward", "attention"] = "ward"
    vectors: int | None = Field(None, ge=1, le=_LONGEST)
    pool_factor: float = Field(2.0, ge=1)
    protected_tokens: int = Field(1, ge=0)
    normalize: bool = True
    sides: tuple[Side, ...] = ("document",)

    @model_validator(mode="after")
    def _budget_is_given(self) -> Self:
        if self.method == "attention" and self.vectors is None:
            raise ValueError("method 'attention' needs vectors, the number of vectors of a text")
        if self.vectors is not None and self.method == "ward" and self.vectors <= self.protected_tokens:
            raise ValueError(
                f"vectors {self.vectors} are no more than the {self.protected_tokens} protected_tokens"
            )
        return self


class MultiVectorConfig(Config):
    """How texts of either side become token vectors.

    Attributes:
        query_length: Number of tokens at which queries are cut, including special tokens and markers (tokens
            before a text that tell queries from documents, such as ``[Q]``); None is the tokenizer's limit.
            A ``query_expansion`` with the strategy ``"fixed"`` cuts queries at its own length instead.
        document_length: The same for documents.
        query_expansion: How short queries are filled up; None adds nothing to queries.
        skiplist_words: Tokens that give no vector, punctuation by default. Words outside the vocabulary are
            ignored. (PyLate drops the token for unknown words in their place, so that documents lose all
            their unknown words.)
        skiplist_sides: Sides whose texts drop the vectors of ``skiplist_words``.
        token_pooling: How vectors are averaged; None keeps all vectors.
        pooled_sides: Sides whose texts the encoder's pooling layers shorten, if it has any; other texts go
            through the same weights without pooling.

    Examples:
        >>> config = MultiVectorConfig(query_expansion={"length": 32}, document_length=180)
        >>> config.query_expansion.strategy
        'fixed'
    """

    query_length: int | None = Field(None, ge=1, le=_LONGEST)
    document_length: int | None = Field(None, ge=1, le=_LONGEST)
    query_expansion: QueryExpansion | None = None
    skiplist_words: tuple[str, ...] = tuple(string.punctuation)
    skiplist_sides: tuple[Side, ...] = ("document",)
    token_pooling: TokenPooling | None = None
    pooled_sides: tuple[Side, ...] = Field(("document",), repr=False)  # says nothing of most models

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        expansion = self.query_expansion
        if expansion is not None and self.query_length is not None and self.query_length < expansion.length:
            raise ValueError(
                f"query_length {self.query_length} is under the {expansion.length} tokens that queries are "
                "expanded to"
            )
        return self
