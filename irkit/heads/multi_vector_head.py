"""One vector per token, as in ColBERT: leave out punctuation, project and normalise the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from irkit_kernels.ragged_pool import pooled_lengths
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.config import Config, read_json
from irkit.core.ragged import Ragged
from irkit.core.representation import MultiVector
from irkit.encoder import AnyEncoder
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.heads.head import Head, Side, width_after
from irkit.heads.layer_modules import Module, Modules, OpenedModel, layer_module, read_layers
from irkit.heads.multi_vector_config import MultiVectorConfig, TokenPooling
from irkit.heads.onnx_graph import Graph, add_layers
from irkit.heads.projection import Normalize, ProjectionConfig, projection_config, projection_layers
from irkit.heads.token_pooling import pool_rows
from irkit.heads.token_pooling_module import pooling_module, read_pooling
from irkit.heads.vector_budget import attention_clusters
from irkit.tokenizer import Tokenizer

_FEATURE, _POOLED_SIDES = "token_embeddings", "pooled_sides"
_LENGTHS = ("query_length", "document_length", "query_expansion")  # as in sentence_bert_config.json
_MASK_TYPE = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"


class MultiVectorHead(Head):
    """Turns the hidden states of a text into one vector per token; tokens of a skip list give none.

    On an encoder that pools, each vector stands for a window of tokens. A window gives no vector if all its
    tokens are on the skip list.

    Everything runs in float32 (or float64), however low the precision of the encoder.

    Attributes:
        layers: Modules applied to the hidden states, `Projection` and `Normalize` in any order.
        config: Lengths, query expansion, skip list and token pooling.
        skip_ids: ``(s,)`` int64 ids of the tokens that give no vector; None until a model looks up
            ``config.skiplist_words``.
        expansion_id: Id of the token that fills queries up.
        attending: ``(hidden_size,)``, learned, for token pooling by attention; None for other pooling.
        window: Kernel and stride, in tokens, of the windows that a pooling encoder makes one row of.
        dim: Width of a token vector.

    Examples:
        >>> tokens = Ragged.from_rows([[101, 7, 1012, 102]])
        >>> hidden = tokens.with_values(torch.full((4, 4), 3.0))
        >>> MultiVectorHead(4, [Normalize()], skip_ids=[1012])(hidden, tokens).tokens[0].tolist()
        [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]]

    Source: Khattab and Zaharia 2020, "ColBERT", section 3.2.
    """

    config: MultiVectorConfig
    kind: ClassVar[str] = "multi_vector"
    model_type: ClassVar[str] = "MultiVectorEncoder"
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
        """Make a head of layers and a configuration.

        Args:
            hidden_size: Width of hidden states.
            layers: Modules applied to the hidden states, in order.
            config: See `MultiVectorConfig`.
            skip_ids: Ids of ``config.skiplist_words``; None lets the model that gets the head look them up.
            expansion_id: Id of the token that fills queries up.

        Raises:
            BadValueError: The widths of two layers do not fit, or ``config`` expands queries but
                ``expansion_id`` is None.
        """
        super().__init__()
        self.hidden_size, self.layers = hidden_size, nn.ModuleList(layers)
        self.config = config or MultiVectorConfig()
        self.dim = width_after(self.layers, hidden_size, "MultiVectorHead")
        self.expansion_id = expansion_id
        self.attending: nn.Parameter | None = None
        self.pool_tokens(self.config.token_pooling)
        self.skip_ids: Tensor | None = None  # on the CPU, as are the ids of a batch when they are looked at
        if skip_ids is not None:
            self.skip(skip_ids)
        if self.config.query_expansion is not None and expansion_id is None:
            token = self.config.query_expansion.token or "a mask token"
            raise BadValueError(
                f"MultiVectorHead: query_expansion with {token}, which the vocabulary lacks; name another"
            )

    @classmethod
    def create(
        cls,
        encoder: AnyEncoder,
        tokenizer: Tokenizer,
        config: Mapping[str, Any] | Config | None = None,
        *,
        projection: str | Mapping[str, Any] | ProjectionConfig | None = None,
        normalize: bool = True,
    ) -> Self:
        """Make a head with a projection of random weights.

        Args:
            encoder: Encoder whose hidden states the head gets.
            tokenizer: Tokenizer of the same model.
            config: A `MultiVectorConfig`, or its keys and values; None is the default.
            projection: As for `projection_config`; None projects nothing.
            normalize: Whether vectors are scaled to length 1.
        """
        layers: list[nn.Module] = [Normalize()] if normalize else []
        if projection is not None:
            layers[:0] = projection_layers(projection_config(projection), encoder.hidden_size)
        return cls.from_layers(encoder, tokenizer, layers, config)

    @classmethod
    def from_layers(
        cls,
        encoder: AnyEncoder,
        tokenizer: Tokenizer,
        layers: Iterable[nn.Module],
        config: Mapping[str, Any] | Config | None,
        source: str = "multi-vector model",
    ) -> Self:
        """Make a head of ``layers``; the tokenizer gives the id of the token that fills queries up.

        ``source`` names the configuration in messages.
        """
        if not isinstance(config, MultiVectorConfig):
            config = MultiVectorConfig.parse({} if config is None else dict(config), source)
        expansion, special = config.query_expansion, tokenizer.special_ids
        end = special.get("sep") if tokenizer.end_id is None else tokenizer.end_id
        filler = special.get("mask", end)
        if expansion is not None and expansion.token is not None:
            filler = next(iter(tokenizer.ids([expansion.token])), None)
        return cls(encoder.hidden_size, layers, config, expansion_id=filler)

    @classmethod
    def from_modules(cls, opened: OpenedModel) -> Self:
        """Make the head from Dense, Normalize and MultiVectorMask; HierarchicalTokenPooling may come last.

        Raises:
            ConfigError: There is another module, or one after HierarchicalTokenPooling, or it is for images.
        """
        layers: Modules = []
        mask: dict[str, Any] | None = None
        pooling: dict[str, Any] | None = None
        attending: Tensor | None = None
        # sort the modules: layers, mask and token pooling
        for name, folder in opened.modules:
            if pooling is not None:
                raise ConfigError(
                    f"loading {opened.folder}: module {name} follows token pooling, expected none"
                )
            if name == "MultiVectorMask":
                saved = read_json(folder / "config.json")
                if saved.get("keep_only_token_ids"):
                    raise ConfigError(
                        f"loading {folder}: keep_only_token_ids is for images; irkit encodes plain text"
                    )
                words, sides = (saved.get(f"skiplist_{key}") for key in ("words", "tasks"))
                sides = ("document",) if sides is None else sides  # no sides are none
                mask = {"skiplist_words": words or (), "skiplist_sides": sides}
            elif name in ("HierarchicalTokenPooling", "TokenPooling"):
                pooling, attending = read_pooling(name, folder)
            else:
                layers.append((name, folder))
        # settings of the head
        settings = {key: opened.transformer.get(key) for key in _LENGTHS}
        expansion = settings["query_expansion"]
        if expansion is not None and mask is None and not expansion.get("attend"):
            settings["query_expansion"] = None  # nobody sees the added tokens, and they give no vectors
        settings |= {"token_pooling": pooling, "skiplist_words": (), **(mask or {})}
        if _POOLED_SIDES in opened.settings:
            settings[_POOLED_SIDES] = opened.settings[_POOLED_SIDES]
        # layers with their weights
        made, source = read_layers(layers, _FEATURE), f"loading {opened.folder}"
        head = cls.from_layers(opened.encoder, opened.tokenizer, made, settings, source)
        head._attend_by(attending, source)
        return head

    def _attend_by(self, attending: Tensor | None, source: str) -> None:
        """Set the learned vector of token pooling by attention, if the head has one."""
        if self.attending is None:
            return
        if attending is None or attending.shape != self.attending.shape:
            raise CorruptError(
                f"{source}: the weights of token pooling are of shape {getattr(attending, 'shape', None)}, "
                f"expected attending of {tuple(self.attending.shape)}"
            )
        self.attending.data = attending.float()

    def to_modules(self, encoder: AnyEncoder) -> list[Module]:
        """Return the modules to write: the layers, MultiVectorMask and, if tokens are pooled, the pooling."""
        config, pooling = self.config, self.config.token_pooling
        mask = {
            "skiplist_words": list(config.skiplist_words),
            "skiplist_tasks": list(config.skiplist_sides),
            "keep_only_token_ids": None,
        }
        modules = [*(layer_module(layer, _FEATURE) for layer in self.layers), (_MASK_TYPE, mask, {})]
        return modules if pooling is None else [*modules, pooling_module(pooling, self.attending)]

    def transformer_settings(self) -> dict[str, Any]:
        """Return the keys of sentence_bert_config.json that the head decides: task, lengths, expansion."""
        settings = self.config.model_dump()
        return {
            "transformer_task": self.transformer_task,
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": _FEATURE,
            **{key: settings[key] for key in _LENGTHS},
        }

    def read_lengths(self, lengths: Mapping[Side, int]) -> None:
        """Do nothing: `from_modules` has read the lengths into the configuration."""

    def directory_settings(self, queries: Head) -> dict[str, Any]:
        """Return ``pooled_sides`` unless it is the default; sentence-transformers ignores this key."""
        default = MultiVectorConfig.model_fields[_POOLED_SIDES].default
        pooled = self.config.pooled_sides
        return {} if pooled == default else {_POOLED_SIDES: list(pooled)}

    def skip(self, ids: Iterable[int]) -> None:
        """Replace the skip list, in place: from now on only tokens ``ids`` give no vector."""
        self.skip_ids = torch.tensor(sorted(set(ids)), dtype=torch.int64, device="cpu")

    def look_up_words(self, tokenizer: Tokenizer) -> None:
        """Look up the ids of ``skiplist_words``, unless the head has them already."""
        if self.skip_ids is None:
            self.skip(tokenizer.ids(self.config.skiplist_words))

    @property
    def pooled_sides(self) -> tuple[Side, ...]:
        """Return the sides on which the pooling layers of an encoder work."""
        return self.config.pooled_sides

    def max_length(self, side: Side) -> int | None:
        """Return the number of tokens at which texts of ``side`` are cut; None leaves it to the tokenizer."""
        config, expansion = self.config, self.config.query_expansion
        if side == "document":
            return config.document_length
        return expansion.length if expansion and expansion.strategy == "fixed" else config.query_length

    def set_length(self, side: Side, length: int) -> None:
        """Cut texts of ``side`` at ``length`` tokens; `config` is replaced by one with this length."""
        settings = self.config.model_dump() | {f"{side}_length": length}
        expansion = self.config.query_expansion
        if side == "query" and expansion and expansion.strategy == "fixed":  # all queries have its length
            settings["query_expansion"] = expansion.model_dump() | {"length": length}
        self.config = MultiVectorConfig.parse(settings, "multi-vector model")

    def pool_tokens(self, pooling: TokenPooling | None) -> None:
        """Pool token vectors by other settings from now on, in place; what attention has learned stays."""
        self.config = self.config.model_copy(update={"token_pooling": pooling})
        attends = pooling is not None and pooling.method == "attention"
        if not attends or self.attending is None:
            self.attending = nn.Parameter(torch.zeros(self.hidden_size)) if attends else None

    def expand(self, tokens: Ragged, side: Side) -> tuple[Ragged, Tensor | None]:
        """Fill queries up to the length of the query expansion; other texts stay as they are.

        Returns:
            Ragged ids; and ``(n,)`` numbers of leading tokens that are attended to, None for all tokens.
        """
        expansion = self.config.query_expansion
        if side != "query" or expansion is None or self.expansion_id is None:
            return tokens, None
        lengths, ids = tokens.lengths.clamp(min=expansion.length), tokens.host()
        filler = ids.values.new_full((int(lengths.sum()),), self.expansion_id)
        longer = Ragged(filler, lengths)
        longer.values[longer.part_positions(torch.zeros_like(lengths), ids.lengths).values] = ids.values
        # a text without any token of its own can only see what was added
        attended = torch.where(tokens.lengths > 0, tokens.lengths, lengths)
        return longer.to(tokens.device), None if expansion.attend else attended

    def spans(self, tokens: Ragged, side: Side) -> Ragged:
        """Return, for each hidden state, the range of expanded tokens that it stands for, see `windows`."""
        return windows(tokens, *(self.window if self.pools(side) else (1, 1)))

    def has_vector(self, tokens: Ragged, side: Side) -> Tensor:
        """Tell which hidden states give a vector: ``(hidden states,)`` booleans on the CPU."""
        tokens = tokens.host()
        skip_ids = self.skip_ids if side in self.config.skiplist_sides else None
        if skip_ids is not None and len(skip_ids):
            mask = ~torch.isin(tokens.values, skip_ids)
        else:
            mask = tokens.values >= 0
        if self.window == (1, 1) or not self.pools(side):
            return mask
        before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
        return before[self.spans(tokens, side).values].diff(dim=1).squeeze(1) > 0

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> MultiVector:
        """Make the token vectors of each text, after token pooling.

        Args:
            hidden: Ragged ``(total, hidden_size)``, the encoder's output for ``tokens``.
            tokens: Ragged ids, as `expand` gives them.
            prompt_length: Ignored: the tokens of a prompt give vectors too.
            side: Side of the texts.

        Returns:
            MultiVector of width ``dim``, float32. A text all of whose tokens are skipped has no vector.

        Raises:
            BadValueError: The number of hidden states does not fit ``window``.
        """
        vectors = self.token_vectors(hidden, tokens, side)
        pooling = self.config.token_pooling
        if pooling is not None and side in pooling.sides:
            if self.attending is not None and pooling.vectors is not None:
                states = hidden.where(self.has_vector(tokens, side))
                vectors = attention_clusters(states, vectors, self.attending, pooling.vectors)
            else:
                kept = pooling.pool_factor, pooling.protected_tokens
                vectors = pool_rows(vectors, *kept, most=pooling.vectors)
            if pooling.normalize:
                vectors = vectors.with_values(F.normalize(vectors.values, dim=-1))
        return MultiVector(vectors)

    if TYPE_CHECKING:  # nn.Module's own says Any
        __call__ = forward

    def token_vectors(self, hidden: Ragged, tokens: Ragged, side: Side) -> Ragged:
        """Make the token vectors of each text, Ragged ``(vectors, dim)``, without token pooling.

        Only the hidden states that `has_vector` marks give a vector.
        """
        mask = self.has_vector(tokens, side)
        if len(hidden.values) != len(mask):
            kernel, stride = self.window if self.pools(side) else (1, 1)
            raise BadValueError(
                f"MultiVectorHead: the encoder gives {len(hidden.values)} vectors of {len(tokens.values)} "
                f"tokens; expected {len(mask)}, one of each {kernel} tokens, every {stride}"
            )
        vectors = hidden.where(mask)
        return vectors.with_values(self.apply_layers(vectors.values))

    def to_onnx(self, graph: Graph, hidden: str, ids: str, mask: str) -> str:
        """Add the layers to an ONNX graph; return the name of the vectors ``(batch, length, dim)``.

        Raises:
            BadValueError: The head pools tokens.
        """
        if self.config.token_pooling is not None:
            raise BadValueError(
                "exporting to ONNX: the head pools tokens by clusters, which the graph cannot; expected a "
                "head without token_pooling"
            )
        return add_layers(graph, self.layers, hidden)

    def onnx_settings(self) -> dict[str, Any]:
        """Return how queries are filled up, by which token, and the tokens that give no vector."""
        expansion = self.config.query_expansion
        return {
            "query_expansion": None if expansion is None else expansion.model_dump(mode="json"),
            "mask_id": self.expansion_id,
            "skip_ids": [] if self.skip_ids is None else self.skip_ids.tolist(),
            "skip_sides": list(self.config.skiplist_sides),
        }

    def extra_repr(self) -> str:
        """Return what a printed head says beside its layers."""
        return repr(self.config)


def windows(tokens: Ragged, kernel: int, stride: int) -> Ragged:
    """Return, for each hidden state that is left after pooling, the range of tokens that it covers.

    Args:
        tokens: Ragged ``(total, ...)`` tokens that the encoder gets.
        kernel: Tokens per window; the last window of a text may be shorter.
        stride: Tokens from the start of a window to the start of the next.

    Returns:
        Ragged ``(hidden states, 2)`` int64: first position in ``tokens.values``, and the one after the last.

    Examples:
        >>> windows(Ragged.from_rows([[7, 8, 9], [5]]), 2, 2).values.tolist()
        [[0, 2], [2, 3], [3, 4]]
    """
    lengths = pooled_lengths(tokens.lengths, kernel, stride)
    rows = Ragged(torch.arange(int(lengths.sum()), device=tokens.device), lengths)
    offsets, text = tokens.offsets.long(), rows.row_ids()
    starts = offsets[text] + stride * rows.positions()
    return rows.with_values(torch.stack([starts, torch.minimum(starts + kernel, offsets[text + 1])], dim=1))
