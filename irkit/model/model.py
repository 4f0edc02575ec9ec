"""A retrieval model as users hold it: loaded, called as in sentence-transformers, saved."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack, get_args

import numpy as np
import torch
from torch import Tensor, nn

from irkit.arguments import check_names, check_path, shown
from irkit.bars import bar
from irkit.encoder import Encoder
from irkit.encoder.lookup import NoEncoder
from irkit.errors import BadTypeError, BadValueError
from irkit.formats import Parts, SideParts, multi_vector, read_encoder, read_model, sparse, write_model
from irkit.heads import MultiVectorConfig, Normalize, ProjectionConfig, Side, SparseConfig, SparseHead
from irkit.heads.projection import fold_runs, projection_config, projection_layers
from irkit.heads.static import StaticHead
from irkit.model.hardware import Device, find_devices, with_dtype
from irkit.model.hub import local_directory, upload
from irkit.model.options import EncodeOptions, check_options, with_prompt
from irkit.model.pipeline import Pipeline
from irkit.model.pooling import PoolingChoice, pool_encoder
from irkit.model.queries import QueryConfig, query_config, query_parts
from irkit.model.similarity import Vectors, compare, compare_pairs
from irkit.model.terms import as_sparse, decode, sparsity
from irkit.representation import Dense, MultiVector, Sparse, concat

__all__ = ["Model"]


Embeddings = np.ndarray[Any, Any] | Tensor | list[Tensor] | list[np.ndarray[Any, Any]]


class Model(Pipeline):
    """Texts in, vectors or representations out.

    Attributes:
        tokenizer: Text to ids.
        encoder: Ids to hidden states.
        head: Hidden states to a representation of each text.
        query_model: What queries go through where that is not the way of documents, see `set_queries`.
        prompts: What is written before a text, by name; ``"query"`` and ``"document"`` always exist.
        default_prompt_name: The prompt that `encode` takes if none is named.
        similarity_name: cosine, dot, euclidean or manhattan; maxsim or meanmaxsim of token vectors. The
            default is cosine, dot of a sparse model, or maxsim.
        truncate_dim: Leading dimensions kept of each vector (Matryoshka); None is all.
        tokens_per_step: Most tokens encoded at once; None is 1024 on a CPU and 32768 on a GPU, and up to
            four times as many where layers pool.
        devices: Where it was loaded to; a stream of documents is encoded on all of them.
        name: What it was loaded from, or saved to first.

    Examples:
        >>> model = Model.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
        >>> passages = model.encode_document(["Bears sleep in winter.", "Copper conducts."])  # doctest: +SKIP
        >>> model.similarity(model.encode_query("hibernation"), passages)  # doctest: +SKIP
        tensor([[ 0.2479, -0.0165]])
    """

    name: str = ""
    query_model: Model | None
    _int8_fingerprint: str | None = None

    def __new__(cls, *parts: Any, **settings: Any) -> Self:
        """Refuse a name, which other libraries take here."""
        if parts and isinstance(parts[0], str | Path):
            raise BadTypeError(
                f"Model: got {shown(str(parts[0]), 100)}, expected tokenizer, encoder and head; a name is "
                f"loaded by Model.from_pretrained({shown(str(parts[0]), 100)})"
            )
        return super().__new__(cls)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        device: Device | None = None,
        dtype: str = "float32",
        attention: str = "auto",
    ) -> Self:
        """Load a dense, multi-vector or learned sparse model, or a bare Hugging Face encoder.

        Formats are those of sentence-transformers, PyLate, Stanford's ColBERT and SPLADE: a bare masked
        language model is taken for a sparse model with max pooling and log(1 + relu).

        Args:
            name_or_path: A directory, or the name of a repository of the Hugging Face hub, where
                ``"name@revision"`` is one of its states; this can be written wherever a model is named.
            revision: The same: a branch, a tag or a commit of the hub.
            device: Where it runs; by default a GPU if there is one. Of several, such as
                ``["cuda:0", "cuda:1"]``, all encode documents for an index, the first does the rest.
            dtype: Of the encoder: float32, bfloat16, int8 (CPU), or auto, which is bfloat16 where the
                hardware has it and the model keeps its vectors in it (cosine 0.999).
            attention: auto, eager, sdpa or flash.

        Raises:
            StorageError: There is no such model.
            ConfigError: It is of a kind that irkit cannot run.
            CorruptError: Its files are damaged.
            BadValueError: There is no such dtype, device or attention.
        """
        _check_name("from_pretrained", name_or_path)
        check_names("Model.from_pretrained", revision=revision, dtype=dtype, attention=attention)
        if revision is not None:
            name_or_path = f"{name_or_path}@{revision}"
        places = find_devices(device)
        load = partial(Encoder.from_pretrained, attention=attention)
        model = cls._ready(read_model(local_directory(name_or_path), load), places, dtype)
        model.name = str(name_or_path)
        return model

    @classmethod
    def multi_vector(
        cls,
        name_or_path: str | Path,
        projection: str | Mapping[str, Any] | ProjectionConfig | None = None,
        config: Mapping[str, Any] | MultiVectorConfig | None = None,
        *,
        markers: tuple[str, str] | None = None,
        device: Device | None = None,
        dtype: str = "float32",
        attention: str = "auto",
    ) -> Self:
        """A new multi-vector model on the encoder of another model: its head is not trained yet.

        Args:
            name_or_path: As for `from_pretrained`; of a model only encoder and tokenizer are used.
            projection: From hidden states to token vectors, of random weights; None takes hidden states
                as they are. Vectors get length 1 in any case.
            config: How texts of either side become token vectors.
            markers: Tokens that start queries and documents, such as ``("[Q] ", "[D] ")``; new ones start
                as the mean of all tokens.
            device: As for `from_pretrained`.
            dtype: As for `from_pretrained`.
            attention: As for `from_pretrained`.

        Raises:
            BadTypeError: ``markers`` are not two strings, or ``name_or_path`` is no name.
            ConfigError: There is no such preset, key or value.
        """
        _check_name("multi_vector", name_or_path)
        check_names("Model.multi_vector", dtype=dtype, attention=attention)
        if markers is not None and not (
            isinstance(markers, tuple | list) and [type(marker) for marker in markers] == [str, str]
        ):
            raise BadTypeError(
                f"Model.multi_vector: markers are {shown(markers)}, expected one of queries and one of "
                "documents, such as ('[Q] ', '[D] ')"
            )
        places = find_devices(device)
        load = partial(Encoder.from_pretrained, attention=attention)
        tokenizer, encoder = read_encoder(local_directory(name_or_path), load)
        for marker in markers or ():
            tokenizer.add_marker(marker)
        encoder.grow_(tokenizer.vocab_size)
        size = encoder.hidden_size
        with torch.device("cpu"):
            layers = [] if projection is None else projection_layers(projection_config(projection), size)
        if not isinstance(config, MultiVectorConfig):
            config = MultiVectorConfig.parse({} if config is None else config, "multi-vector model")
        parts: Parts = {
            "tokenizer": tokenizer,
            "encoder": encoder,
            "head": multi_vector.make_head(size, [*layers, Normalize()], config, tokenizer),
            "prompts": dict(zip(("query", "document"), markers or (), strict=False)),
        }
        return cls._ready(parts, places, dtype)

    @classmethod
    def sparse(
        cls,
        name_or_path: str | Path,
        config: Mapping[str, Any] | SparseConfig | None = None,
        *,
        vocabulary: Sequence[str] | None = None,
        queries: str | Mapping[str, Any] | QueryConfig | None = None,
        device: Device | None = None,
        dtype: str = "float32",
        attention: str = "auto",
    ) -> Self:
        """A new learned sparse model on the encoder of another model.

        Its head is that of the masked language model in the checkpoint, if it is one. Otherwise it is not
        trained yet: a layer that starts as the identity, and the word embeddings of the encoder, so that
        nearly all terms have weights; ``max_active_dims`` keeps the largest. Special tokens get none.

        Args:
            name_or_path: As for `from_pretrained`; of a model only encoder and tokenizer are used.
            config: How logits of tokens become weights of a text.
            vocabulary: What weights are given to, if not to the tokens of the tokenizer; a term starts as the
                mean of its tokens.
            queries: A side of their own for queries, see `set_queries`; None encodes them as documents.
            device: As for `from_pretrained`.
            dtype: As for `from_pretrained`.
            attention: As for `from_pretrained`.

        Raises:
            BadTypeError: ``name_or_path`` is no name.
            ConfigError: There is no such key or value.
            BadValueError: A term stands twice in the vocabulary, or it is empty.
        """
        _check_name("sparse", name_or_path)
        check_names("Model.sparse", dtype=dtype, attention=attention)
        places = find_devices(device)
        load = partial(Encoder.from_pretrained, attention=attention)
        tokenizer, encoder = read_encoder(local_directory(name_or_path), load)
        if not isinstance(config, SparseConfig):
            config = SparseConfig.parse({} if config is None else config, "sparse model")
        with torch.device("cpu"):
            head = sparse.make_head(encoder, tokenizer, config, vocabulary)
        parts: Parts = {"tokenizer": tokenizer, "encoder": encoder, "head": head}
        if queries is not None:
            parts["query"] = query_parts(query_config(queries), tokenizer, head, load)
        return cls._ready(parts, places, dtype)

    @classmethod
    def _ready(cls, parts: Parts, places: list[torch.device], dtype: str) -> Self:
        """On its device, in its precision."""
        queries = parts.pop("query", None)
        documents: SideParts = parts
        model = cls(**documents).to(places[0]).eval()
        model.devices = places
        model.join_queries(queries)
        for part in (model, model.query_model):
            if part is None or isinstance(part.encoder, NoEncoder):
                continue
            if dtype == "int8":
                part._int8_fingerprint = part.fingerprint
            part.encoder = with_dtype(part.encoder, part.head, part.tokenizer, dtype)
        return model

    def set_queries(self, choice: str | Mapping[str, Any] | QueryConfig | None) -> Self:
        """Give queries of a sparse model a side of their own, in place; documents stay what they are.

        An index that was built with the model stays of use, but its results change. A length that queries had
        of their own stays theirs.

        Args:
            choice: ``"lexical"``: each distinct token weighs 1. ``"static"``: each has a weight of its own,
                which training changes; ``{"kind": "static", "weights": "idf.json"}``, or weights by token as
                `idf_weights` gives them, says where it starts. Neither runs an encoder.
                ``{"kind": "encoder", "model": "name"}``: the encoder of another sparse model. None: queries
                are encoded as documents.

        Raises:
            ConfigError: There is no such kind, key or value, or weights are not for tokens of the model.
            BadValueError: The model is not sparse, or the other one has another vocabulary.
            StorageError: There are no such weights, or there is no such model.

        Examples:
            >>> model = Model.from_pretrained("naver/splade-v3").set_queries("lexical")  # doctest: +SKIP
            >>> model.encode_query("rain in bergen")  # doctest: +SKIP
        """
        length = self._query_length()
        if choice is None:
            if length is not None and self.query_model is not None:
                self.tokenizer.check_length(length, "query_length")
                self.head.lengths = {**self.head.lengths, "query": length}
            self.join_queries(None)
            return self
        load = partial(Encoder.from_pretrained, attention=getattr(self.encoder, "attention", "auto"))
        parts = query_parts(query_config(choice), self.tokenizer, self.head, load)
        if length is not None and isinstance(parts["encoder"], NoEncoder):
            parts["tokenizer"].max_length = length
        elif length is not None:
            parts["head"].lengths = {"query": length, **parts["head"].lengths}
        self.join_queries(parts)
        return self

    def pool(self, choice: Mapping[str, Any] | PoolingChoice | Sequence[Any] | None) -> Self:
        """Let layers of the encoder average over neighbouring tokens, in place; all weights stay as they are.

        Later layers then work on fewer rows, and a multi-vector model makes as many times fewer vectors of a
        document; of queries as before, unless its ``pooled_sides`` name them. Quality suffers until the model
        was trained like this, see `irkit.training.pretraining.distillation`. The fingerprint changes: pool
        before you build an index. Only irkit opens what is saved then.

        Args:
            choice: Which layers, see `irkit.model.pooling.PoolingChoice`: its keys and values, such as
                ``{"factor": 4}``; or a list with an `irkit.encoder.Pooling`, its keys and values, or None for
                each layer. None pools nowhere.

        Raises:
            ConfigError: There is no such key or value, or the encoder has too few layers.
            BadValueError: The model is sparse, leaves prompts out of its mean, or is in int8; or transformers
                runs its encoder. Nothing is changed.

        Examples:
            >>> model = Model.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
            >>> model.pool({"layers": [1, 2]}).save_pretrained("pooled-minilm")  # doctest: +SKIP
        """
        if self._int8_fingerprint is not None:
            raise BadValueError("pool: the weights are int8; pool the model in float32, save and load it")
        pool_encoder(self.encoder, self.head, choice, self.tokenizer.max_length)
        self._follow_pooling()
        return self

    def fold(self) -> Self:
        """Collapse the projections of the head into one matrix, in place; outputs stay equal to 1e-5.

        What was trained with several linear layers then costs what one does, and is saved as the one Dense
        that every reader of these files knows. The fingerprint changes: fold before you build an index.

        Raises:
            BadValueError: A layer is gated or has an activation, or the model is in int8; nothing is changed.
        """
        if self._int8_fingerprint is not None:
            raise BadValueError("fold: the weights are int8; fold the model in float32, save and load it")
        heads = [part.head for part in (self, self.query_model) if part is not None]
        for head, layers in zip(heads, [fold_runs(head.layers) for head in heads], strict=True):
            head.layers = nn.ModuleList(layers)
        return self

    def __repr__(self) -> str:
        """What it is in a few lines; ``encoder``, ``head`` and ``query_model`` show their modules."""
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

    def save_pretrained(self, path: str | Path, format: str = "sentence-transformers") -> None:
        """Write a directory that irkit and sentence-transformers open with the same outputs.

        Of a TITE, or where layers pool, irkit alone does. It appears whole or not at all. A model directory
        that is there already is replaced. A model without a name gets this one, so that an index that it
        builds finds it again.

        Args:
            path: The directory.
            format: ``"stanford"`` writes a checkpoint of Stanford's ColBERT instead, of models that are one.

        Raises:
            StorageError: Something that is not part of a model is in the way, or writing failed.
            BadValueError: The model is in int8, which has no file format, or ColBERT cannot express it.
        """
        if any(part and part._int8_fingerprint for part in (self, self.query_model)):
            raise BadValueError("save_pretrained: the weights are int8; load the model in float32 to save it")
        if not isinstance(path, str | Path):
            raise BadTypeError(f"save_pretrained: got {shown(path)}, expected the path of a directory")
        check_path("save_pretrained", path)
        check_names("save_pretrained", format=format)
        parts: Parts = {
            "tokenizer": self.tokenizer,
            "encoder": self.encoder,
            "head": self.head,
            "prompts": self.prompts,
            "default_prompt_name": self.default_prompt_name,
            "similarity_name": self.similarity_name,
            "truncate_dim": self.truncate_dim,
        }
        if (queries := self.query_model) is not None:
            parts["query"] = {
                "tokenizer": queries.tokenizer,
                "encoder": queries.encoder,
                "head": queries.head,
            }
        write_model(parts, path, format)
        self.name = self.name or str(path)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload model",
    ) -> str:
        """Upload the model to a repository of the Hugging Face hub.

        Args:
            repo_id: ``"user/name"``; made if it does not exist.
            token: Of the hub; by default the one you logged in with.
            private: Whether a new repository is private.
            revision: Branch; made if it does not exist.
            commit_message: For the history of the repository.

        Returns:
            Address of the commit.
        """
        classes = {
            "dense": "SentenceTransformer",
            "multi_vector": "MultiVectorEncoder",
            "sparse": "SparseEncoder",
        }
        encoder, opens = self.encoder, classes.get(self.kind)
        if isinstance(encoder, Encoder) and (encoder.family == "tite" or any(encoder.config.schedule)):
            opens = None
        twin = copy.copy(self)  # which gets the name of the folder that is uploaded
        address = upload(twin.save_pretrained, opens, repo_id, token, private, revision, commit_message)
        self.name = self.name or (repo_id if revision is None else f"{repo_id}@{revision}")
        return address

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that stand for weights, head and tokenizer, in whatever precision they run.

        Computed from the weights at each call, 0.1 s for 20 million.
        """
        return self._int8_fingerprint or super().fingerprint

    def encode_query(self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Embeddings:
        """Encode queries: `encode` with the prompt named ``"query"`` unless the options give another."""
        return self._encode(texts, "query", with_prompt("query", options))

    def encode_document(self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Embeddings:
        """Encode documents: `encode` with the prompt named ``"document"`` unless the options give another."""
        return self._encode(texts, "document", with_prompt("document", options))

    def encode(self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Embeddings:
        """Encode texts to vectors, as sentence-transformers does; token vectors are those of documents.

        Args:
            texts: Texts, or one text.
            options: See `EncodeOptions`.

        Returns:
            float32 ``(n, dim)``, or ``(dim,)`` for one text. Of a multi-vector model an array
            ``(tokens, dim)`` a text, in a list, or for one text alone. Of a sparse model a sparse tensor
            (COO) ``(n, dim)``, or ``(dim,)``, on its device.

        Raises:
            BadTypeError: Something is not a string, or there is no such option.
            BadValueError: There is no prompt of that name, no such device, or a number is below 1.
        """
        return self._encode(texts, None, options)

    def _encode(self, texts: str | Iterable[str], side: Side | None, options: EncodeOptions) -> Embeddings:
        check_options(options, self.kind)
        if options.get("max_active_dims") is not None:
            options = {**options}
            return self._pruned(options.pop("max_active_dims"))._encode(texts, side, options)
        prompt, name = options.get("prompt"), options.get("prompt_name")
        if prompt is None:
            prompt = self.prompt_named(self.default_prompt_name if name is None else name)
        template = self.template(side or "document", prompt)
        if side is None and self.head.lengths:  # those of the sides are not for texts of neither
            template = replace(template, max_length=self.tokenizer.max_length)
        rows = [texts] if isinstance(texts, str) else texts
        total = len(rows) if isinstance(rows, Sized) else None
        shown = bar("encoding", "texts", total) if options.get("show_progress_bar") else nullcontext()
        with shown as progress:
            parts = self.encode_stream(
                rows,
                template,
                batch_size=options.get("batch_size"),
                progress=progress,
                device=options.get("device"),
            )
            whole = concat(parts)
        width = options.get("truncate_dim")
        width = self.truncate_dim if width is None else width
        result = self.finished(whole, width, options.get("normalize_embeddings", False))
        if isinstance(result, MultiVector):
            tensors = [row.clone() for row in result.tokens]  # each of which may outlive the others
            if options.get("convert_to_tensor") or not options.get("convert_to_numpy", True):
                moved = [row.to(self.device) if options.get("convert_to_tensor") else row for row in tensors]
                return moved[0] if isinstance(texts, str) else moved
            arrays = [row.numpy() for row in tensors]
            return arrays[0] if isinstance(texts, str) else arrays
        if isinstance(result, Sparse):
            return self._tensors(result, isinstance(texts, str), options)
        assert isinstance(result, Dense)  # what a PooledHead gives
        values = result.values[0] if isinstance(texts, str) else result.values
        if options.get("convert_to_tensor"):
            return values.to(self.device)
        if options.get("convert_to_numpy", True):
            return values.numpy()
        return values if isinstance(texts, str) else list(values)

    def _pruned(self, limit: int | None) -> Self:
        """A copy that shares all weights and keeps so many of each text."""
        if type(limit) is not int or limit < 1:
            raise BadValueError(
                f"encode: max_active_dims is {shown(limit)}, expected a whole number of 1 or more"
            )
        model, head = copy.copy(self), copy.copy(self.head)
        assert isinstance(head, SparseHead | StaticHead)  # by its kind, checked before
        limits = {f"{side}_max_active_dims": limit for side in get_args(Side)}
        head.config = head.config.model_copy(update=limits)
        queries = None if self.query_model is None else self.query_model._pruned(limit)
        model._modules = {**self._modules, "head": head, "query_model": queries}
        return model

    def _tensors(self, rows: Sparse, single: bool, options: EncodeOptions) -> Tensor | list[Tensor]:
        """A sparse tensor (COO) on the device of the model, or as the options wish."""
        if options.get("convert_to_sparse_tensor", True):
            places = torch.stack([rows.terms.row_ids(), rows.terms.values.long()])
            more: dict[str, Any] = {"check_invariants": False, "device": places.device}
            tensor = torch.sparse_coo_tensor(places, rows.weights, (len(rows), rows.dim), **more).coalesce()
        else:
            tensor = rows.to_dense()
        tensor = tensor.to(self.device)
        if single:
            return tensor[0]
        return tensor if options.get("convert_to_tensor", True) else list(tensor)

    def similarity(self, a: Vectors, b: Vectors) -> Tensor:
        """Compare each vector of ``a (n, dim)`` with each of ``b (m, dim)``: ``(n, m)``, higher is nearer.

        One vector counts as ``n = 1``; distances (euclidean, manhattan) come back negative. Of a
        multi-vector model ``a`` and ``b`` are lists of arrays ``(tokens, dim)``, or one such array.
        """
        return compare(self.similarity_name, a, b)

    def similarity_pairwise(self, a: Vectors, b: Vectors) -> Tensor:
        """Compare vector ``i`` of ``a`` with vector ``i`` of ``b``, both ``(n, dim)``: ``(n,)``."""
        return compare_pairs(self.similarity_name, a, b)

    def decode(
        self, vectors: Sparse | Tensor, k: int | None = None
    ) -> list[list[tuple[str, float]]] | list[tuple[str, float]]:
        """Terms and weights of sparse vectors, the heaviest first.

        Args:
            vectors: What `encode` or `represent` of a sparse model returns.
            k: Terms of a text, at most; None is all.

        Returns:
            Pairs of a term and its weight for each text, in a list, or for one vector ``(dim,)`` alone.

        Raises:
            BadTypeError: These are no vectors.
            BadValueError: ``k`` is below 1, the vectors have another width, or the model is not sparse.
        """
        decoded = decode(as_sparse("decode", vectors), self.vocabulary, k)
        return decoded[0] if isinstance(vectors, Tensor) and vectors.dim() == 1 else decoded

    def sparsity(self, vectors: Sparse | Tensor) -> dict[str, float]:
        """How many terms sparse vectors have, and which share of the vocabulary they leave out, on average.

        Returns:
            ``{"active_dims": ..., "sparsity_ratio": ...}``, as in sentence-transformers.
        """
        return sparsity(as_sparse("sparsity", vectors))


def _check_name(operation: str, name: object) -> None:
    if not isinstance(name, str | Path) or not str(name):
        raise BadTypeError(f"Model.{operation}: got {shown(name)}, expected a directory or a name of the hub")
