"""Weights over a vocabulary, as in SPLADE: which terms a masked language model sees in a text.

Source: for its files SparseEncoder, SpladePooling and MLMTransformer of sentence-transformers 6.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from irkit.config import Config, read_json
from irkit.core.ragged import Ragged
from irkit.core.representation import Dense, Sparse
from irkit.encoder import AnyEncoder, Encoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.family import MaskedLM
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.heads import masked_lm_parts
from irkit.heads.head import Side
from irkit.heads.layer_modules import Module, OpenedModel
from irkit.heads.masked_lm_parts import (
    HeadParts,
    SavedHead,
    describe,
    describe_layers,
    layers_of,
    transform_layers,
)
from irkit.heads.onnx_graph import Graph, add_layers
from irkit.heads.term_head import SparseConfig, TermHead, read_limits
from irkit.tokenizer import Tokenizer

SPARSE_MODULES = "SpladePooling", "SparseHead"
_NEVER = -1e4  # a bias with which no logit is positive; half precision holds it
_ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}  # of SpladePooling: theirs, ours


class SparseHead(TermHead):
    """Turns the hidden states of a text into a weight for each term of a vocabulary, most of them zero.

    Hidden states go through ``layers``, then through a matrix with a row for each term. Often this matrix is
    the parameter of the encoder's word embeddings. The resulting logits are activated, then pooled over the
    tokens of the text, special tokens included. All but the matrix is float32, however low the precision of
    the encoder.

    Attributes:
        layers: Modules before the matrix, see `transform_layers`.
        weight: The matrix, ``(dim, width)``.
        bias: Bias of the logits, ``(dim,)``, or None.
        config: Activation and pooling of the logits, and how many weights a text keeps.
        vocabulary: The terms; None if the terms are the tokens of the tokenizer.
        dim: Number of terms.

    Examples:
        >>> head = SparseHead([], nn.Parameter(torch.eye(3)))
        >>> tokens = Ragged.from_rows([[7, 8]])
        >>> hidden = tokens.with_values(torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, 0.0]]))
        >>> head(hidden, tokens).to_dense().tolist()
        [[1.0986123085021973, 0.0, 0.0]]
    """

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
        """Make a head of its parts, see the attributes of the class.

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
        """Take the head of the encoder's checkpoint if this is a masked language model; else make a new one.

        The matrix of a new head is the word embeddings of the encoder, and its layer starts as the identity.
        Hidden states lie near the embeddings of their tokens, so that even without training the words of a
        text, and words like them, get weights. Special tokens get no weights.

        Args:
            encoder: Gives the hidden states.
            tokenizer: Tokenizer of the same model.
            config: How logits of tokens become weights of a text.
            vocabulary: Terms of the head; None is the tokens. The matrix row of a term starts as the mean of
                the rows of its tokens.

        Raises:
            BadTypeError: ``vocabulary`` is not a list of strings.
            BadValueError: A term has no tokens, or stands in ``vocabulary`` twice.
        """
        if not isinstance(config, SparseConfig):
            config = SparseConfig.parse({} if config is None else dict(config), "sparse model")
        if masked_lm_parts.has_head(encoder):
            head = cls.from_checkpoint(encoder, "the masked language model", config)
        else:
            matrix, known = encoder.word_embeddings, describe(encoder)
            if known is not None:
                layers = layers_of(known[0], encoder)
            else:
                layers = transform_layers(encoder.hidden_size, width=matrix.shape[1])
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
        """Return a head over the terms ``vocabulary``, with the same layers and configuration.

        The row of a term in the new matrix is the mean of the old rows of the term's tokens; so is its bias.
        """
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
        """Make the head of the masked language model that the encoder was loaded from, see `load_parts`."""
        return cls._join(masked_lm_parts.load_parts(encoder, source), config, source)

    @classmethod
    def _join(
        cls,
        parts: HeadParts,
        config: SparseConfig | None,
        source: str,
        vocabulary: Sequence[str] | None = None,
    ) -> Self:
        """Make a head of parts that were read from a file.

        Raises:
            CorruptError: The parts do not fit each other; the message names ``source``.
        """
        try:
            return cls(*parts, config, vocabulary=vocabulary)
        except BadValueError as error:
            raise CorruptError(f"loading {source}: {' '.join(str(error).split())}") from error

    @classmethod
    def from_modules(cls, opened: OpenedModel) -> Self:
        """Make the head from a module SpladePooling or irkit's own SparseHead.

        config_sentence_transformers.json gives the numbers of weights to keep.
        """
        listed = ", ".join(name for name, _ in opened.modules) or "nothing"
        if listed not in SPARSE_MODULES:
            raise ConfigError(
                f"loading {opened.folder}: a SparseEncoder with {listed} after its Transformer, expected "
                "SpladePooling"
            )
        folder, width = opened.modules[0][1], None
        settings = read_json(folder / "config.json")
        if listed == "SpladePooling":  # the masked language model has the head
            width = settings.get("embedding_dimension") or settings.get("word_embedding_dimension")
            name = settings.get("activation_function", "relu")
            settings = {
                "pooling": settings.get("pooling_strategy", "max"),
                "activation": _ACTIVATIONS.get(name, name),
                "own_weights": False,
            }
        saved = SavedHead.parse(settings, f"loading {folder}")
        shape = {"pooling": saved.pooling, "activation": saved.activation}
        config = SparseConfig.parse(shape | read_limits(opened.settings), f"loading {opened.folder}")
        if saved.own_weights:
            parts = masked_lm_parts.read_parts(opened.encoder, saved, folder)
        else:
            parts = masked_lm_parts.load_parts(opened.encoder, str(opened.folder))
        head = cls._join(parts, config, str(folder), saved.vocabulary)
        if width and width != head.dim:
            raise CorruptError(f"loading {folder}: expects {width} dimensions, the vocabulary has {head.dim}")
        return head

    def _masked_lm(self, encoder: AnyEncoder) -> tuple[MaskedLM, dict[str, Any]] | None:
        """Describe encoder and head as one masked language model of transformers.

        Returns:
            A `MaskedLM`, with the model's class and its names of the head's weights; and the content of its
            config.json. None, without a tuple, if transformers has no such model.
        """
        known = describe(encoder, dict(self.named_parameters()))
        if known is None or self.vocabulary is not None or self.weight.shape != encoder.word_embeddings.shape:
            return None
        return known if repr(self.layers) == repr(nn.ModuleList(layers_of(known[0], encoder))) else None

    def to_modules(self, encoder: AnyEncoder) -> list[Module]:
        """Return one module: SpladePooling if it gives the same weights, else irkit's own SparseHead."""
        if isinstance(encoder, TransformersEncoder) and (decoder := encoder.decoder) is not None:
            own = decoder.weight is self.weight and decoder.bias is self.bias
            is_whole = own and self.vocabulary is None
        else:
            is_whole = self._masked_lm(encoder) is not None
        config = self.config
        name = next((theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation), None)
        if is_whole and name is not None:
            pooling = {
                "pooling_strategy": config.pooling,
                "activation_function": name,
                "word_embedding_dimension": self.dim,
            }
            return [("sentence_transformers.sparse_encoder.models.SpladePooling", pooling, {})]
        saved = SavedHead(pooling=config.pooling, activation=config.activation, own_weights=not is_whole)
        if is_whole:
            return [("irkit.SparseHead", saved.model_dump(), {})]
        settings = saved.model_dump() | describe_layers(self.layers) | {"vocabulary": self.vocabulary}
        return [("irkit.SparseHead", settings, self.state_dict())]

    def save_encoder(self, encoder: AnyEncoder, folder: Path) -> None:
        """Write the encoder.

        If transformers has a masked language model that consists of this encoder and this head, the head is
        written with it.
        """
        known = self._masked_lm(encoder)
        if known is None or not isinstance(encoder, Encoder):
            encoder.save_pretrained(folder)
            return
        tied = self.weight is encoder.word_embeddings
        masked_lm_parts.join(encoder, *known, dict(self.named_parameters()), tied).save_pretrained(folder)

    def exclude_(self, ids: Iterable[int]) -> None:
        """Exclude the terms ``ids`` from all results, in place: their bias becomes -10000.

        Every format saves this bias. `irkit.Model.sparse` excludes special tokens. Loaded models are not
        changed, because sentence-transformers gives weights to special tokens too, and an index may hold
        these weights; ``model.head.exclude_(model.tokenizer.special_tokens())`` excludes them.

        Raises:
            BadValueError: An id is below 0, or not below ``dim``.
        """
        chosen = sorted(set(ids))
        if chosen and not 0 <= chosen[0] <= chosen[-1] < self.dim:
            raise BadValueError(f"exclude_: ids {chosen[0]}..{chosen[-1]}, expected them in [0, {self.dim})")
        if self.bias is None:
            self.bias = nn.Parameter(torch.zeros(self.dim, device=self.weight.device))
        with torch.no_grad():
            self.bias[chosen] = _NEVER

    def included(self) -> Tensor:
        """Return ``(dim,)`` booleans: True for each term that can have a weight, see `exclude_`."""
        if self.bias is None:
            return torch.ones(self.dim, dtype=torch.bool, device=self.weight.device)
        return self.bias.detach() > _NEVER / 2

    def with_matrix(
        self, weight: nn.Parameter, bias: nn.Parameter | None, vocabulary: Sequence[str] | None = None
    ) -> Self:
        """Return a head over other terms: with this matrix and bias, and the same layers and settings."""
        head = type(self)(self.layers, weight, bias, self.config, vocabulary=vocabulary)
        head.lengths = {**self.lengths}
        return head

    def pooling_problem(self) -> str | None:
        """Return why the head cannot work on an encoder that pools; never None."""
        return "weights of terms need a row for each token"

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Sparse:
        """Return the weights of the terms for each text.

        Args:
            hidden: Ragged ``(total, hidden_size)``, the encoder's output for the tokens.
            tokens: Ignored.
            prompt_length: Ignored: the tokens of a prompt are pooled too.
            side: Side of the texts; decides how many weights are kept.

        Returns:
            Sparse over ``dim`` terms, float32; a text without tokens has no weights. Gradients flow through
            the weights.
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

    def for_training(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Dense:
        """Return the weights of all terms, ``(n, dim)``, with zeros in place of those that are not kept."""
        return Dense(self.pruned(hidden, side))

    def dense(self, hidden: Ragged) -> Tensor:
        """Return the weights of all terms, before any are dropped: ``(n, dim)`` float32.

        Regularisers of training take these weights.
        """
        from irkit_kernels.splade_pool import splade_pool

        inputs = self._inputs(hidden)
        return splade_pool(*inputs, activation=self.config.activation, pooling=self.config.pooling)

    def pruned(self, hidden: Ragged, side: Side) -> Tensor:
        """Return `dense` with zeros in place of the weights that ``config`` does not keep for ``side``."""
        values, most = self.dense(hidden), self.config.max_active_dims(side)
        if most is None or most >= self.dim:
            return values
        mask = torch.zeros_like(values, dtype=torch.bool)
        mask.scatter_(1, values.topk(most, dim=1, sorted=False).indices, True)
        return torch.where(mask, values, 0.0)

    def _inputs(self, hidden: Ragged) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the inputs of the kernels: hidden states after ``layers``, row offsets, matrix and bias.

        Hidden states get the dtype of the matrix; float64 becomes float32.
        """
        values, weight, bias = self.apply_layers(hidden.values), self.weight, self.bias
        if weight.dtype == torch.float64:  # which kernels do not know
            return values.float(), hidden.offsets, weight.float(), None if bias is None else bias.float()
        return values.to(weight.dtype), hidden.offsets, weight, bias

    def to_onnx(self, graph: Graph, hidden: str, ids: str, mask: str) -> str:
        """Add the head to an ONNX graph; return the name of the weights of all terms ``(batch, dim)``."""
        logits = graph.linear(add_layers(graph, self.layers, hidden), self.weight, self.bias)
        weights = graph("Relu", logits)
        for _ in range(self.config.activation.count("log1p")):
            weights = graph("Log", graph("Add", weights, graph.floats(1)))
        weights = graph("Mul", weights, graph("Unsqueeze", graph("Cast", mask, to=1), graph.ints(2)))
        if self.config.pooling == "sum":
            return str(graph("ReduceSum", weights, graph.ints(1), keepdims=0))
        return str(graph("ReduceMax", weights, axes=[1], keepdims=0))

    def extra_repr(self) -> str:
        """Return what a printed head says beside its layers."""
        if self.vocabulary is None:
            return repr(self.config)
        terms = hashlib.blake2b("\n".join(self.vocabulary).encode("utf-8", "replace"), digest_size=8)
        return f"{self.config!r}, {self.dim} terms {terms.hexdigest()}"
