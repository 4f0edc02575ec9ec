"""Weights over a vocabulary, as in SPLADE: which terms a masked language model sees in a text.

Source: for its files SparseEncoder, SpladePooling and MLMTransformer of sentence-transformers 6.2.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from irkit.config import Config, read_json
from irkit.core.ragged import Ragged
from irkit.core.representation import Sparse
from irkit.encoder import AnyEncoder, Encoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.encoder_config import Activation
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.heads.head import Head, Side
from irkit.heads.layer_modules import Module, OpenedModel
from irkit.heads.masked_lm_parts import (
    ACTIVATIONS,
    HeadParts,
    describe,
    fill,
    has_head,
    is_whole,
    layers_of,
    load_parts,
    transform_layers,
    write_encoder,
)
from irkit.heads.sparse_config import SparseConfig, read_limits, write_limits
from irkit.tokenizer import Tokenizer
from irkit.utils.weights import read_weights

SPARSE_MODULES = "SpladePooling", "SparseHead"
_NEVER = -1e4  # a bias with which no logit is positive; half precision holds it
_ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}  # of SpladePooling: theirs, ours


class _Saved(Config):
    """What config.json of a SparseHead folder says.

    Attributes:
        pooling: As `SparseConfig` has it.
        activation: As `SparseConfig` has it.
        own_weights: Whether weights are beside it. Otherwise the head is that of the masked language model.
        hidden_activation: Activation between the linear layer and the norm; None where there are no layers.
        norm_eps: Added to the variance by the norm.
        vocabulary: The terms; None is the tokens of the tokenizer.
    """

    pooling: str
    activation: str
    own_weights: bool = True
    hidden_activation: Activation | None = None
    norm_eps: float = 1e-12
    vocabulary: tuple[str, ...] | None = None


class SparseHead(Head):
    """A weight for each term of a vocabulary, most of them zero.

    Hidden states go through ``layers``, then through a matrix with a row for each term (often the word
    embeddings of the encoder, the same parameter); logits are activated and pooled over the tokens of the
    text, special tokens included. All but the matrix is float32, however low the precision of the encoder.

    Attributes:
        layers: Modules before the matrix, see `transform_layers`.
        weight: ``(dim, width)``.
        bias: ``(dim,)`` of logits, or None.
        config: What is done with logits.
        vocabulary: The terms, if they are not the tokens of the tokenizer.
        dim: Number of terms.

    Examples:
        >>> head = SparseHead([], nn.Parameter(torch.eye(3)))
        >>> tokens = Ragged.from_rows([[7, 8]])
        >>> hidden = tokens.with_values(torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, 0.0]]))
        >>> head(hidden, tokens).to_dense().tolist()
        [[1.0986123085021973, 0.0, 0.0]]
    """

    config: SparseConfig
    kind: ClassVar[str] = "sparse"
    model_type: ClassVar[str] = "SparseEncoder"
    transformer_type: ClassVar[str] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    transformer_task: ClassVar[str] = "fill-mask"

    def __init__(
        self,
        layers: Iterable[nn.Module],
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        config: SparseConfig | None = None,
        *,
        vocabulary: Sequence[str] | None = None,
    ) -> None:
        """Join the parts.

        Raises:
            BadValueError: Shapes do not fit, or the vocabulary has another length or a term twice.
        """
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.weight, self.bias = weight, bias
        self.config = config or SparseConfig()
        self.dim = len(weight)
        self.vocabulary = None if vocabulary is None else tuple(vocabulary)
        if weight.dim() != 2 or (bias is not None and bias.shape != (self.dim,)):
            shapes = [tuple(part.shape) for part in (weight, bias) if part is not None]
            raise BadValueError(
                f"SparseHead: weight and bias of shapes {shapes}, expected (dim, width), (dim,)"
            )
        terms = self.vocabulary
        if terms is not None and not len(set(terms)) == len(terms) == self.dim:
            raise BadValueError(
                f"SparseHead: {len(terms)} terms, {len(set(terms))} of them distinct, for {self.dim} rows; "
                "expected a distinct one for each"
            )

    @classmethod
    def create(
        cls,
        encoder: AnyEncoder,
        tokenizer: Tokenizer,
        config: Mapping[str, Any] | Config | None = None,
        *,
        vocabulary: Sequence[str] | None = None,
    ) -> Self:
        """Take the head of the checkpoint if it is a masked language model, else make a new one.

        The matrix of a new head is the word embeddings of the encoder. Its layer starts as the identity,
        because hidden states lie near the embeddings of their tokens: a text then weighs its own words and
        words like them before any training. Special tokens get no weights.

        Args:
            encoder: Gives the hidden states.
            tokenizer: Tokenizer of the same model.
            config: How logits of tokens become weights of a text.
            vocabulary: Terms other than the tokens; the row of a term starts as the mean of its tokens.

        Raises:
            BadTypeError: ``vocabulary`` is not a list of strings.
            BadValueError: A term has no tokens, or stands in ``vocabulary`` twice.
        """
        if not isinstance(config, SparseConfig):
            config = SparseConfig.parse({} if config is None else dict(config), "sparse model")
        if has_head(encoder):
            head = cls.from_checkpoint(encoder, "the masked language model", config)
        else:
            matrix, known = encoder.word_embeddings, describe(encoder)
            layers = transform_layers(encoder.hidden_size, width=matrix.shape[1])
            if known is not None and isinstance(encoder, Encoder):
                layers = layers_of(known[0], encoder)
            linear = cast(nn.Linear, layers[0])
            nn.init.eye_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
            head = cls(layers, matrix, nn.Parameter(torch.zeros(len(matrix))), config)
        if vocabulary is None:
            head.exclude_(number for number in tokenizer.special_tokens() if number < head.dim)
            return head
        return head._with_vocabulary(tokenizer, vocabulary)

    def _with_vocabulary(self, tokenizer: Tokenizer, vocabulary: Sequence[str]) -> Self:
        """Return a head whose rows are means of the rows of the tokens of each term."""
        tokens = tokenizer.without_special_tokens()(vocabulary)
        if len(tokens) == 0 or int(tokens.lengths.min()) == 0:
            empty = next((term for term, row in zip(vocabulary, tokens, strict=True) if not len(row)), None)
            raise BadValueError(
                f"sparse model: the vocabulary has {'no terms' if empty is None else repr(empty)}"
            )

        def means(rows: Tensor) -> nn.Parameter:
            mean = nn.functional.embedding_bag(
                tokens.values.int(), rows.detach(), tokens.offsets, mode="mean", include_last_offset=True
            )
            return nn.Parameter(mean)

        bias = None if self.bias is None else nn.Parameter(means(self.bias[:, None])[:, 0].detach())
        return type(self)(self.layers, means(self.weight), bias, self.config, vocabulary=vocabulary)

    @classmethod
    def from_checkpoint(cls, encoder: AnyEncoder, source: str, config: SparseConfig | None = None) -> Self:
        """Make the head whose weights stand beside the encoder in its checkpoint."""
        return cls._join(load_parts(encoder, source), config, source)

    @classmethod
    def _join(
        cls,
        parts: HeadParts,
        config: SparseConfig | None,
        source: str,
        vocabulary: Sequence[str] | None = None,
    ) -> Self:
        """Make a head of parts from a file, which may not fit each other."""
        try:
            return cls(*parts, config, vocabulary=vocabulary)
        except BadValueError as error:
            raise CorruptError(f"loading {source}: {' '.join(str(error).split())}") from error

    @classmethod
    def from_modules(cls, opened: OpenedModel) -> Self:
        """Read SpladePooling or irkit's own SparseHead, and the limits of the directory."""
        listed = ", ".join(name for name, _ in opened.modules) or "nothing"
        if listed not in SPARSE_MODULES:
            raise ConfigError(
                f"loading {opened.folder}: a SparseEncoder with {listed} after its Transformer, expected "
                "SpladePooling"
            )
        folder, source = opened.modules[0][1], f"loading {opened.folder}"
        settings, limits = read_json(folder / "config.json"), read_limits(opened.settings)
        if listed == "SparseHead":
            saved = _Saved.parse(settings, f"loading {folder}")
            shape = {"pooling": saved.pooling, "activation": saved.activation}
            config = SparseConfig.parse(shape | limits, source)
            if saved.own_weights:
                return cls._from_saved(opened.encoder, saved, config, folder)
            return cls.from_checkpoint(opened.encoder, str(opened.folder), config)
        name = settings.get("activation_function", "relu")
        shape = {
            "pooling": settings.get("pooling_strategy", "max"),
            "activation": _ACTIVATIONS.get(name, name),
        }
        config = SparseConfig.parse(shape | limits, source)
        head = cls.from_checkpoint(opened.encoder, str(opened.folder), config)
        width = settings.get("embedding_dimension") or settings.get("word_embedding_dimension") or head.dim
        if width != head.dim:
            raise CorruptError(f"loading {folder}: expects {width} dimensions, the vocabulary has {head.dim}")
        return head

    @classmethod
    def _from_saved(cls, encoder: AnyEncoder, saved: _Saved, config: SparseConfig, folder: Path) -> Self:
        """Read the head in a folder of its own."""
        if saved.hidden_activation is None and isinstance(encoder, TransformersEncoder):
            encoder.load_decoder_()  # hidden states are those that its own decoder gets
        tensors = read_weights(folder)
        layers: list[nn.Module] = []
        if saved.hidden_activation is not None:
            biases = {f"{key}_bias": f"layers.{i}.bias" in tensors for i, key in ((0, "dense"), (2, "norm"))}
            width = tensors["weight"].shape[-1] if "weight" in tensors else None
            layers = transform_layers(
                encoder.hidden_size, saved.hidden_activation, width=width, norm_eps=saved.norm_eps, **biases
            )
        parts = fill(layers, tensors, encoder, str(folder), vocabulary=saved.vocabulary)
        return cls._join(parts, config, str(folder), saved.vocabulary)

    def to_modules(self, encoder: AnyEncoder | InferenceFreeEncoder) -> list[Module]:
        """Return SpladePooling if sentence-transformers computes the same, else irkit's own SparseHead."""
        config, whole = self.config, is_whole(encoder, self)
        if whole and config.activation in _ACTIVATIONS.values():
            names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
            pooling = {
                "pooling_strategy": config.pooling,
                "activation_function": names[config.activation],
                "word_embedding_dimension": self.dim,
            }
            return [("sentence_transformers.sparse_encoder.models.SpladePooling", pooling, {})]
        saved = _Saved(pooling=config.pooling, activation=config.activation, own_weights=not whole)
        if whole:
            return [("irkit.SparseHead", saved.model_dump(), {})]
        norm = self.layers[2] if len(self.layers) else None
        inner = [repr(layer) for layer in self.layers]
        settings = saved.model_dump() | {
            "hidden_activation": next(
                (name for name, layer in ACTIVATIONS.items() if repr(layer) in inner), None
            ),
            "norm_eps": norm.eps if isinstance(norm, nn.LayerNorm) else 0.0,
            "vocabulary": self.vocabulary,
        }
        return [("irkit.SparseHead", settings, self.state_dict())]

    def save_encoder(self, encoder: AnyEncoder, folder: Path) -> None:
        """Write the encoder; as the masked language model of transformers if it is one with the head."""
        write_encoder(encoder, self, folder)

    def directory_settings(self, queries: Head) -> dict[str, Any]:
        """Return the limits of both sides."""
        return write_limits(self.config, queries)

    def exclude_(self, ids: Iterable[int]) -> None:
        """Let these terms never have a weight: their bias becomes -10000, which every format saves.

        `irkit.Model.sparse` does so with special tokens. Models that are loaded stay as they are, because
        sentence-transformers gives weights to special tokens too, and an index may hold them;
        ``model.head.exclude_(model.tokenizer.special_tokens())`` takes them away.

        Raises:
            BadValueError: There is no such term.
        """
        chosen = sorted(set(ids))
        if chosen and not 0 <= chosen[0] <= chosen[-1] < self.dim:
            raise BadValueError(f"exclude_: ids {chosen[0]}..{chosen[-1]}, expected them in [0, {self.dim})")
        if self.bias is None:
            self.bias = nn.Parameter(torch.zeros(self.dim, device=self.weight.device))
        with torch.no_grad():
            self.bias[chosen] = _NEVER

    def included(self) -> Tensor:
        """Return ``(dim,)`` booleans: the terms that can have weights, see `exclude_`."""
        if self.bias is None:
            return torch.ones(self.dim, dtype=torch.bool, device=self.weight.device)
        return self.bias.detach() > _NEVER / 2

    def with_matrix(
        self, weight: nn.Parameter, bias: nn.Parameter | None, vocabulary: Sequence[str] | None = None
    ) -> Self:
        """Return a head with the same layers, configuration and lengths over other terms."""
        head = type(self)(self.layers, weight, bias, self.config, vocabulary=vocabulary)
        head.lengths = {**self.lengths}
        return head

    def pooling_problem(self) -> str | None:
        """Return why the head cannot work on an encoder that pools."""
        return "weights of terms need a row for each token"

    def limited(self, max_active_dims: int) -> Self:
        """Return a copy that shares all weights and keeps that many weights per text."""
        twin = copy.copy(self)
        twin.config = self.config.limited(max_active_dims)
        return twin

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Sparse:
        """Return the weights of the terms for each text.

        Args:
            hidden: Ragged ``(total, hidden_size)``, what the encoder makes of ``tokens``.
            tokens: Ignored.
            prompt_length: Ignored: the tokens of a prompt take part.
            side: What the texts are; decides how many weights are kept.

        Returns:
            Sparse over ``dim`` terms, float32; a text without tokens has no weights. Gradients flow through
            its weights.
        """
        most = self.config.max_active_dims(side)
        if torch.is_grad_enabled():
            return Sparse.from_dense(self.pruned(hidden, side))
        from irkit_kernels.splade_pool import splade_pool_sparse

        lengths, terms, weights = splade_pool_sparse(
            *self._inputs(hidden), activation=self.config.activation, pooling=self.config.pooling, top_k=most
        )
        return Sparse(Ragged(terms, lengths), weights, self.dim)

    if TYPE_CHECKING:  # nn.Module's own says Any
        __call__ = forward

    def dense(self, hidden: Ragged) -> Tensor:
        """All weights before pruning, ``(n, dim)`` float32: what regularisers of training look at."""
        from irkit_kernels.splade_pool import splade_pool

        inputs = self._inputs(hidden)
        return splade_pool(*inputs, activation=self.config.activation, pooling=self.config.pooling)

    def pruned(self, hidden: Ragged, side: Side) -> Tensor:
        """Return ``(n, dim)`` float32 with zeros in place of the weights that are not kept; for training."""
        values, most = self.dense(hidden), self.config.max_active_dims(side)
        if most is None or most >= self.dim:
            return values
        mask = torch.zeros_like(values, dtype=torch.bool)
        mask.scatter_(1, values.topk(most, dim=1, sorted=False).indices, True)
        return torch.where(mask, values, 0.0)

    def _inputs(self, hidden: Ragged) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the kernels' inputs: hidden states in the dtype of the matrix, offsets, matrix, bias."""
        values = hidden.values.to(torch.promote_types(hidden.values.dtype, torch.float32))
        for layer in self.layers:
            values = layer(values)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if weight.dtype == torch.float64:  # which kernels do not know
            weight, bias = weight.float(), None if bias is None else bias.float()
        return values.to(weight.dtype), hidden.offsets, weight, bias

    def extra_repr(self) -> str:
        """Return what a printed head says beside its layers."""
        if self.vocabulary is None:
            return repr(self.config)
        terms = hashlib.blake2b("\n".join(self.vocabulary).encode("utf-8", "replace"), digest_size=8)
        return f"{self.config!r}, {self.dim} terms {terms.hexdigest()}"


def as_sparse_head(head: Head, operation: str) -> SparseHead:
    """Return a head that is known to be sparse and to have an encoder.

    Raises:
        BadValueError: The head is of another kind.
    """
    if not isinstance(head, SparseHead):
        raise BadValueError(f"{operation}: the model makes {head.kind} vectors, expected a sparse one")
    return head
