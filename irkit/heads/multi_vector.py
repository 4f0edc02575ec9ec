"""One vector a token, as in ColBERT: project, normalise, leave out tokens without meaning."""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.config import Config
from irkit.errors import BadValueError
from irkit.heads.base import Head, Normalize, Side, width_after
from irkit.heads.token_pooling import pool_rows
from irkit.heads.windows import windows
from irkit.ragged import Ragged
from irkit.representation import MultiVector

__all__ = ["MultiVectorConfig", "MultiVectorHead", "QueryExpansion", "TokenPooling"]

_LONGEST = 1 << 20  # tokens of a text: queries are filled up to their length


class QueryExpansion(Config):
    """Queries are filled up with a token whose vectors then stand for words that were not asked for.

    Attributes:
        length: Tokens of a query after it.
        strategy: ``"fixed"`` cuts queries at ``length``, as ColBERT does; ``"min"`` leaves longer ones whole.
        attend: Whether the other tokens see the added ones, which see the others in any case.
        token: What is added; by default the mask token, else the last token of every text.
    """

    length: int = Field(32, ge=1, le=_LONGEST)
    strategy: Literal["fixed", "min"] = "fixed"
    attend: bool = False
    token: str | None = None


class TokenPooling(Config):
    """Similar vectors of a text become one, see `irkit.heads.token_pooling.pool_tokens`.

    Attributes:
        pool_factor: Keep one vector of so many.
        protected_tokens: Leading vectors that stay as they are.
        normalize: Scale the results to length 1.
        sides: Whose texts.
    """

    pool_factor: float = Field(2.0, ge=1)
    protected_tokens: int = Field(1, ge=0)
    normalize: bool = True
    sides: tuple[Side, ...] = ("document",)


class MultiVectorConfig(Config):
    """How texts of either side become token vectors.

    Attributes:
        query_length: Tokens at which queries are cut, markers and special tokens included; None is where
            the tokenizer cuts. With ``query_expansion`` of the fixed kind its length counts.
        document_length: The same for documents.
        query_expansion: None adds nothing to queries.
        skiplist_words: Tokens that give no vector, punctuation by default. Those that the vocabulary does
            not have are ignored. (PyLate looks up the token for unknown words in their place, so that
            documents lose all their unknown words.)
        skiplist_sides: Whose texts leave them out.
        token_pooling: None keeps all vectors.
        pooled_sides: Whose texts the pooling layers of the encoder work on, if it has any; the others go
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


class MultiVectorHead(Head):
    """One vector a token, of the tokens that its configuration does not leave out.

    Of an encoder that pools, a vector stands for a window of tokens, and is left out if all of them are.

    Everything runs in float32 (or float64), however low the precision of the encoder.

    Attributes:
        layers: What is done with the hidden states, `Projection` and `Normalize` in any order.
        config: What is done with the texts of either side.
        skip_ids: ``(s,)`` ids of the tokens that give no vector; None until a model looks up the words of
            its configuration.
        expansion_id: Id of the token that fills queries up.
        window: Kernel and stride, in tokens, of the rows that the encoder makes of texts that it pools.
        dim: Width of a token vector.

    Examples:
        >>> tokens = Ragged.from_rows([[101, 7, 1012, 102]])
        >>> hidden = tokens.with_values(torch.full((4, 4), 3.0))
        >>> MultiVectorHead(4, [Normalize()], skip_ids=[1012])(hidden, tokens).tokens[0].tolist()
        [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]]

    Source: Khattab and Zaharia 2020, "ColBERT", section 3.2.
    """

    kind: ClassVar[str] = "multi_vector"
    skip_ids: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        layers: Iterable[nn.Module] = (),
        config: MultiVectorConfig | None = None,
        *,
        skip_ids: Iterable[int] | None = None,
        expansion_id: int | None = None,
    ) -> None:
        """Join layers and a configuration.

        Args:
            hidden_size: Width of hidden states.
            layers: What is done with them.
            config: See there.
            skip_ids: Ids of its ``skiplist_words``; None lets the model that gets the head look them up.
            expansion_id: Id of the token that fills queries up.

        Raises:
            BadValueError: The widths of two layers do not meet, or there is no token to expand with.
        """
        super().__init__()
        self.hidden_size, self.layers = hidden_size, nn.ModuleList(layers)
        self.config = config or MultiVectorConfig()
        self.dim = width_after(self.layers, hidden_size, "MultiVectorHead")
        self.expansion_id = expansion_id
        self.window = (1, 1)
        self.skip_ids: Tensor | None = None  # on the CPU, as are the ids of a batch when they are looked at
        if skip_ids is not None:
            self.skip(skip_ids)
        if self.config.query_expansion is not None and expansion_id is None:
            token = self.config.query_expansion.token or "a mask token"
            raise BadValueError(
                f"MultiVectorHead: query_expansion with {token}, which the vocabulary lacks; name another"
            )

    def skip(self, ids: Iterable[int]) -> None:
        """Let these tokens give no vector, in place."""
        self.skip_ids = torch.tensor(sorted(set(ids)), dtype=torch.int64, device="cpu")

    @property
    def unit(self) -> bool:
        """Whether the layers end in vectors of length 1."""
        return bool(self.layers) and isinstance(self.layers[-1], Normalize)

    def max_length(self, side: Side) -> int | None:
        """Tokens at which texts of ``side`` are cut; None is where the tokenizer cuts them."""
        config, expansion = self.config, self.config.query_expansion
        if side == "document":
            return config.document_length
        return expansion.length if expansion and expansion.strategy == "fixed" else config.query_length

    def expand(self, tokens: Ragged, side: Side) -> tuple[Ragged, Tensor | None]:
        """Fill queries up.

        Returns:
            Ragged ids, and ``(n,)`` lengths of what the encoder attends to; None where that is all.
        """
        expansion = self.config.query_expansion
        if side != "query" or expansion is None or self.expansion_id is None:
            return tokens, None
        lengths, given = tokens.lengths.clamp(min=expansion.length), tokens.host()
        filler = given.values.new_full((int(lengths.sum()),), self.expansion_id)
        longer = Ragged(filler, lengths)
        longer.values[longer.places(torch.zeros_like(lengths), given.lengths).values] = given.values
        # a text without any token of its own can only see what was added
        attended = torch.where(tokens.lengths > 0, tokens.lengths, lengths)
        return longer.to(tokens.device), None if expansion.attend else attended

    def pools(self, side: Side) -> bool:
        """Whether the pooling layers of an encoder, if it has any, work on texts of ``side``."""
        return side in self.config.pooled_sides

    def spans(self, tokens: Ragged, side: Side) -> Ragged:
        """Ragged ``(rows, 2)``: the tokens of `expand` behind each row of the encoder, see `windows`."""
        return windows(tokens, *(self.window if self.pools(side) else (1, 1)))

    def kept(self, tokens: Ragged, side: Side) -> Tensor:
        """``(rows,)`` booleans on the CPU: the rows of the encoder that give a vector."""
        tokens = tokens.host()
        skip_ids = self.skip_ids if side in self.config.skiplist_sides else None
        if skip_ids is not None and len(skip_ids):
            kept = ~torch.isin(tokens.values, skip_ids)
        else:
            kept = tokens.values >= 0
        if self.window == (1, 1) or not self.pools(side):
            return kept
        before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
        return before[self.spans(tokens, side).values].diff(dim=1).squeeze(1) > 0

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(  # noqa: D102
            self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
        ) -> MultiVector: ...

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> MultiVector:
        """Make token vectors.

        Args:
            hidden: Ragged ``(total, hidden_size)``, what the encoder makes of ``tokens``.
            tokens: Ragged ids, as `expand` gives them.
            prompt_length: Of no use to this head: the tokens of a prompt give vectors too.
            side: What the texts are.

        Returns:
            MultiVector of width ``dim``, float32. A text all of whose tokens are left out has no vector.

        Raises:
            BadValueError: The encoder pools in another way than ``window`` says.
        """
        vectors = self.token_vectors(hidden, tokens, side)
        pooling = self.config.token_pooling
        if pooling is not None and side in pooling.sides:
            vectors = _pooled(vectors, pooling)
        return MultiVector(vectors)

    def token_vectors(self, hidden: Ragged, tokens: Ragged, side: Side) -> Ragged:
        """As `forward`, before token pooling: a vector of each of the `kept` rows."""
        kept = self.kept(tokens, side)
        if len(hidden.values) != len(kept):
            kernel, stride = self.window if self.pools(side) else (1, 1)
            raise BadValueError(
                f"MultiVectorHead: the encoder gives {len(hidden.values)} vectors of {len(tokens.values)} "
                f"tokens; expected {len(kept)}, one of each {kernel} tokens, every {stride}"
            )
        vectors = hidden.where(kept)
        values = vectors.values.to(torch.promote_types(vectors.values.dtype, torch.float32))
        for layer in self.layers:
            values = layer(values)
        return vectors.with_values(values)

    def extra_repr(self) -> str:
        """What a printed head says beside its layers."""
        return repr(self.config)


def _pooled(vectors: Ragged, pooling: TokenPooling) -> Ragged:
    vectors = pool_rows(vectors, pooling.pool_factor, pooling.protected_tokens)
    return vectors.with_values(F.normalize(vectors.values, dim=-1)) if pooling.normalize else vectors
