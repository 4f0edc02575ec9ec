"""The parts of a model, how they depend on each other, and how they are changed in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast, get_args

import torch
from torch import nn

from irkit.arguments import brief
from irkit.core.ragged import Ragged
from irkit.core.representation import Representation
from irkit.encoder import Encoder
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadValueError
from irkit.formats import SIMILARITIES, AnyEncoder, Parts, SideParts
from irkit.heads import Head, Side
from irkit.heads.projection import merge_runs
from irkit.model.embeddings import check_dim
from irkit.model.fingerprints import document_fingerprint, query_fingerprint
from irkit.model.hardware import keep_few_shapes
from irkit.model.pipeline import Pipeline, hidden_states
from irkit.model.pooling import PoolingChoice, check_pooling, set_pooling
from irkit.model.queries import QueryConfig, check_terms, query_config, query_parts
from irkit.tokenizer import Tokenizer


class ModelParts(nn.Module):
    """Base of `irkit.Model` that holds its parts; `irkit.Model` describes the attributes."""

    name: str = ""
    _int8_fingerprint: str | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: AnyEncoder | InferenceFreeEncoder,
        head: Head,
        *,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_name: str | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        """Make a model of its parts, see the attributes of `irkit.Model`.

        The `max_length` of ``tokenizer`` is lowered, in place, to the number of positions of the encoder.

        Raises:
            BadValueError: The similarity or the prompt is unknown, queries are expanded beyond the positions
                of the encoder, a length leaves nothing of a text or a vector, or the encoder pools and the
                head needs a hidden state for each token.
        """
        super().__init__()
        keep_few_shapes()
        self.tokenizer, self.encoder, self.head = tokenizer, encoder, head
        self.prompts = {"query": "", "document": "", **(prompts or {})}
        self.default_prompt_name = default_prompt_name
        self.similarity_name = similarity_name or SIMILARITIES[head.kind][0]
        self.truncate_dim = truncate_dim
        self.query_model: ModelParts | None = None
        self.tokens_per_step: int | None = None
        self.devices: list[torch.device] = []

        # parts that depend on each other
        self._follow_pooling()
        head.look_up_words(tokenizer)
        head.to(next((weight.device for weight in encoder.parameters()), None))

        # settings that do not fit the parts
        self.prompt_named(default_prompt_name)
        check_dim("Model", truncate_dim, head.dim)
        if truncate_dim is not None and head.kind in ("sparse", "several"):
            raise BadValueError(
                f"Model: truncate_dim {truncate_dim} of a {head.kind} model, expected None"
                + " and max_active_dims" * (head.kind == "sparse")
            )
        queries, _ = head.expand(Ragged.from_rows([[0]]), "query")
        if encoder.max_positions is not None and queries.max_length > encoder.max_positions:
            raise BadValueError(
                f"Model: queries are expanded to {queries.max_length} tokens, but the encoder has "
                f"{encoder.max_positions} positions"
            )
        limits = [limit for limit in (tokenizer.max_length, encoder.max_positions) if limit is not None]
        tokenizer.max_length = min(limits, default=None)
        for side in get_args(Side):
            tokenizer.check_length(head.max_length(side), f"{side}_length")

    def _follow_pooling(self) -> None:
        """Set the window of the head to the window of the encoder's pooling, after `check_pooling`."""
        if isinstance(self.encoder, Encoder):
            if any(self.encoder.config.schedule):
                check_pooling(self.encoder, self.head)
            self.head.window = self.encoder.config.window

    @property
    def parts(self) -> Parts:
        """Return the arguments that make the model again; ``"query"`` holds the query model's."""
        parts = cast(Parts, {name: getattr(self, name) for name in SideParts.__annotations__})
        if self.query_model is not None:
            parts["query"] = self.query_model.parts
        return parts

    @property
    def kind(self) -> str:
        """Kind of the representations: ``"dense"``, ``"multi_vector"`` or ``"sparse"``; or ``"several"``."""
        return self.head.kind

    @property
    def heads(self) -> Mapping[str, Self]:
        """Return a model for each head, by name; all share the encoder and the tokenizer.

        A model with one head is its only entry, under the name of its kind.
        """
        if not self.head.parts:
            return {self.kind: self}
        settings: dict[str, Any] = {"prompts": self.prompts, "default_prompt_name": self.default_prompt_name}
        models = {}
        for name, head in self.head.parts.items():
            similarity = self.head.similarities.get(name)
            models[name] = model = type(self)(
                self.tokenizer, self.encoder, head, similarity_name=similarity, **settings
            )
            model.name, model.devices, model.tokens_per_step = self.name, self.devices, self.tokens_per_step
            model.training = self.training
        return models

    @property
    def dim(self) -> int:
        """Width of the vectors, after truncation; for a sparse model, the number of terms."""
        return self.truncate_dim or self.head.dim

    @property
    def device(self) -> torch.device:
        """Device of the encoder."""
        return next(self.parameters()).device

    @property
    def similarity_name(self) -> str:
        """Name of the similarity of vectors, one of `irkit.formats.SIMILARITIES` for the kind of the model.

        The default is cosine for dense vectors, dot for sparse ones, and maxsim for token vectors.
        """
        return self._similarity_name

    @similarity_name.setter
    def similarity_name(self, name: str) -> None:
        known = SIMILARITIES[self.kind]
        if not isinstance(name, str) or name not in known:
            raise BadValueError(f"Model: similarity {brief(name)}, expected one of {', '.join(known)}")
        self._similarity_name = name

    @property
    def vocabulary(self) -> list[str]:
        """Return the term of each dimension of a sparse model; ``[id]`` for a dimension without a token.

        Raises:
            BadValueError: The model is not sparse.
        """
        if self.kind != "sparse":
            raise BadValueError(
                f"vocabulary: the model makes {self.kind} vectors, whose dimensions have no names"
            )
        return list(self.head.vocabulary or self.tokenizer.tokens(self.head.dim))

    @property
    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits that change when document vectors would change, except by precision.

        The digits cover weights, head, tokenizer and pooling schedule. For a multi-vector model they also
        cover the settings and prompts of both sides; for a sparse model, the settings and prompts of
        documents. For a model with several heads they cover all heads and the prompts of both sides. The
        weights of a separate query encoder are left out. Each call computes the digits from the weights, in
        0.1 s for 20 million.
        """
        if self._int8_fingerprint:
            return self._int8_fingerprint
        parts = self.tokenizer, self.encoder, self.head, self.prompts
        return document_fingerprint(*parts, self.named_parameters())

    @property
    def query_fingerprint(self) -> str:
        """Return 32 hexadecimal digits that cover what only queries depend on: prompt, length, query encoder.

        The result is empty unless the model is sparse or has a query encoder.
        """
        if self.query_model is None and self.kind != "sparse":
            return ""
        encoder = "" if self.query_model is None else self.query_model.fingerprint
        length = self.side_model("query").head.lengths.get("query")
        return query_fingerprint(self.prompts["query"], length, encoder)

    def prompt_named(self, name: str | None) -> str:
        """Return the prompt with the name ``name``; an empty string for None.

        Raises:
            BadValueError: No prompt has this name.
        """
        if name is not None and (not isinstance(name, str) or name not in self.prompts):
            raise BadValueError(
                f"Model: no prompt is named {brief(name)}, there are " + ", ".join(self.prompts)
            )
        return self.prompts[name] if name is not None else ""

    def max_length(self, side: Side) -> int | None:
        """Return the number of tokens at which texts of ``side`` are cut; None if texts are never cut."""
        model = self.side_model(side)
        length, most = model.head.max_length(side), model.encoder.max_positions
        return model.tokenizer.max_length if length is None else min(length, most or length)

    def set_length(self, side: Side, length: int) -> None:
        """Cut texts of ``side`` at ``length`` tokens, special tokens included.

        The length is saved with the model.

        Raises:
            BadTypeError: ``length`` is not an integer.
            BadValueError: ``length`` leaves no room for text, or the side is unknown.
            ConfigError: Queries are expanded to more than ``length`` tokens.
        """
        if not isinstance(side, str) or side not in get_args(Side):
            raise BadValueError(f"set_length: side {brief(side)}, expected {' or '.join(get_args(Side))}")
        model = self.side_model(side)
        model.tokenizer.check_length(length, f"{side}_length")
        encoder_free = isinstance(model.encoder, InferenceFreeEncoder)
        if model is not self and encoder_free:  # only its tokenizer is saved
            model.tokenizer.max_length = length
        else:
            model.head.set_length(side, length)

    def __repr__(self) -> str:
        """Describe the model in a few lines; print ``encoder`` or ``head`` to see all modules."""
        weights = list(self.parameters())
        number = f"{sum(weight.numel() for weight in weights):,} in {weights[0].dtype}".replace("torch.", "")
        layers = len(getattr(self.encoder, "layers", ()))
        lines = [
            f"{type(self).__name__}({self.name!r})",
            f"  vectors: {self.kind}, {self.dim:,} wide, compared by {self.similarity_name}",
            f"  encoder: {self.encoder.family}" + (f", {layers} layers" if layers else ""),
            f"  weights: {'int8' if self._int8_fingerprint else number} on {self.device}",
            "  tokens: "
            + ", ".join(f"{self.max_length(side) or 'all'} of a {side}" for side in get_args(Side)),
        ]
        if self.query_model is not None:
            lines.append(f"  encoder of queries: {self.query_model.encoder.family}")
        return "\n".join(lines)

    def side_model(self, side: Side) -> ModelParts:
        """Return the model that texts of ``side`` go through: the query model for queries, if it exists."""
        return self if side == "document" or self.query_model is None else self.query_model

    def pipeline(self, side: Side, prompt: str | None = None) -> Pipeline:
        """Make the pipeline that turns texts of ``side`` into representations, with the current parts.

        Args:
            side: Side of the texts.
            prompt: Written before each text; None is the prompt of the side.
        """
        model = self.side_model(side)
        parts = (model.tokenizer, model.encoder, model.head, side)
        prompt = self.prompt_named(side) if prompt is None else prompt
        return Pipeline(*parts, prompt, self.max_length(side), self.tokens_per_step)

    def attach_query_encoder(self, parts: SideParts | None) -> None:
        """Encode queries with separate ``parts`` from now on; None encodes queries like documents.

        Raises:
            BadValueError: The parts give vectors that cannot be compared with the vectors of documents.
        """
        if parts is None:
            self.query_model = None
            return
        queries = type(self)(**parts)
        queries.to(self.device).eval()
        queries.head.match_width(self.head.dim)
        if (queries.kind, queries.head.dim) != (self.kind, self.head.dim):
            raise BadValueError(
                f"Model: queries become {queries.kind} of width {queries.head.dim}, documents {self.kind} of "
                f"width {self.head.dim}; expected the same"
            )
        if self.kind == "sparse":
            special = {*queries.tokenizer.special_tokens(), *self.tokenizer.special_tokens()}
            check_terms(queries.vocabulary, self.vocabulary, special)
        self.query_model = queries

    def forward(self, tokens: Ragged, prompt_length: int = 0, side: Side = "document") -> Representation:
        """Encode token ids, with gradients, for training.

        Args:
            tokens: Ragged int64 on the device of the model.
            prompt_length: Number of leading tokens per row that are the prompt.
            side: Side of the texts.
        """
        model = self.side_model(side)
        tokens, attended = model.head.expand(tokens, side)
        hidden = hidden_states(model.encoder, model.head, tokens, attended, side)
        return model.head(hidden, tokens, prompt_length, side)

    if TYPE_CHECKING:  # nn.Module's own says Any
        __call__ = forward

    def set_queries(self, choice: str | Mapping[str, Any] | QueryConfig | None) -> Self:
        """Choose how a sparse model encodes queries, in place; documents are encoded as before.

        An index that was built with the model can still be used, but its results change. If queries are cut
        at another length than documents, this length is kept.

        Args:
            choice: ``"lexical"``: each distinct token weighs 1, and no encoder runs. ``"static"``: each
                distinct token has a weight from a table, which training changes, and no encoder runs. The
                table starts at 1 for each token, or at ``{"kind": "static", "weights": "idf.json"}``, or at
                ``{"kind": "static", "weights": idf_weights(...)}``. ``{"kind": "encoder", "model": "name"}``:
                another sparse model encodes queries. None: queries are encoded as documents.

        Raises:
            ConfigError: The kind or a key is unknown, or a value is invalid, or weights are not for tokens of
                the model.
            BadValueError: The model is not sparse, or the model for queries has another vocabulary.
            StorageError: The weights or the model do not exist.

        Examples:
            >>> model = Model.from_pretrained("naver/splade-v3").set_queries("lexical")  # doctest: +SKIP
            >>> model.encode_query("rain in bergen")  # doctest: +SKIP
        """
        queries = self.side_model("query")
        length = queries.head.lengths.get("query")  # said of queries alone
        if queries is not self and isinstance(queries.encoder, InferenceFreeEncoder):
            own = queries.tokenizer.max_length
            length = None if own == self.tokenizer.max_length else own
        if choice is None:
            if length is not None and self.query_model is not None:
                self.tokenizer.check_length(length, "query_length")
                self.head.lengths = {**self.head.lengths, "query": length}
            self.attach_query_encoder(None)
            return self
        load = partial(Encoder.from_pretrained, attention=getattr(self.encoder, "attention", "auto"))
        parts = query_parts(query_config(choice), self.tokenizer, self.head, load)
        if length is not None and isinstance(parts["encoder"], InferenceFreeEncoder):
            parts["tokenizer"].max_length = length
        elif length is not None:
            parts["head"].lengths = {"query": length, **parts["head"].lengths}
        self.attach_query_encoder(parts)
        return self

    def add_pooling_layers(self, choice: Mapping[str, Any] | PoolingChoice | Sequence[Any] | None) -> Self:
        """Let layers of the encoder average over neighbouring tokens, in place; all weights stay as they are.

        Later layers then work on fewer hidden states. A multi-vector model makes fewer vectors per document,
        by the same factor; queries keep one vector per token, unless its ``pooled_sides`` name queries.

        Quality suffers until the model is trained with pooling, see
        `irkit.training.pretraining.distillation_objectives`. The fingerprint changes: pool before you build
        an index. Only irkit can open the saved model.

        Args:
            choice: A `irkit.model.pooling.PoolingChoice` or its keys and values, such as ``{"factor": 4}``.
                Or a list with one item per layer: an `irkit.encoder.Pooling`, its keys and values, or None.
                None instead of a list removes all pooling.

        Raises:
            ConfigError: A key is unknown, a value is invalid, or the encoder has too few layers.
            BadValueError: The model is sparse, leaves prompts out of its pooling, or is in int8; or
                transformers runs its encoder. Nothing is changed.

        Examples:
            >>> model = Model.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
            >>> model.add_pooling_layers({"layers": [1, 2]}).save_pretrained("pooled")  # doctest: +SKIP
        """
        self._refuse_int8("add_pooling_layers", "pool the model in float32, save and load it")
        set_pooling(self.encoder, self.head, choice, self.tokenizer.max_length)
        self._follow_pooling()
        return self

    def merge_projections(self) -> Self:
        """Merge consecutive projections of the head into one matrix, in place; outputs stay equal to 1e-5.

        A head that was trained with several linear layers then costs as much as one layer, and is saved as
        one Dense module, which every reader of these files knows. The fingerprint changes: merge before you
        build an index.

        Raises:
            BadValueError: A layer is gated or has an activation, or the model is in int8; nothing is changed.
        """
        self._refuse_int8("merge_projections", "merge in float32, save and load it")
        parts = [part for part in (self, self.query_model) if part is not None]
        heads = [model.head for part in parts for model in part.heads.values()]
        for head, layers in zip(heads, [merge_runs(head.layers) for head in heads], strict=True):
            head.layers = nn.ModuleList(layers)
        return self

    def _refuse_int8(self, operation: str, remedy: str) -> None:
        """Raise BadValueError if weights of the model, or of its query model, are int8.

        The message begins with ``operation`` and ends with ``remedy``.
        """
        if any(part and part._int8_fingerprint for part in (self, self.query_model)):
            raise BadValueError(f"{operation}: the weights are int8; {remedy}")
