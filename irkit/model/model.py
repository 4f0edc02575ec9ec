"""A retrieval model as users hold it: loaded, called as in sentence-transformers, saved."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from irkit.arguments import brief, check_functions, check_names, check_path
from irkit.config import Config
from irkit.core.representation import MultiVector, Representation, Sparse, concat
from irkit.encoder import Encoder
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadTypeError, BadValueError, ConfigError
from irkit.formats import Parts, SideParts, read_encoder, read_model, write_model
from irkit.heads import HEADS, ProjectionConfig, Side
from irkit.model.encode_options import EncodeOptions, check_options, with_prompt
from irkit.model.hardware import Device, find_device, find_devices, with_dtype
from irkit.model.hub import local_directory, upload
from irkit.model.model_parts import ModelParts
from irkit.model.parallel import stream_in_processes
from irkit.model.pipeline import CHUNK, Pipeline, Progress
from irkit.model.postprocess import Embeddings, convert
from irkit.model.queries import QueryConfig, query_config, query_parts
from irkit.model.similarity import Vectors, averaged, compare, compare_pairs
from irkit.model.terms import as_sparse, decode, sparsity
from irkit.tokenizer import TokenSpan
from irkit.utils.progress import progress_bar


class Model(ModelParts):
    """Texts in, vectors or representations out.

    A model holds its parts; `pipeline` joins the parts that encode texts of one side.

    Attributes:
        tokenizer: Text to ids.
        encoder: Ids to hidden states.
        head: Hidden states to a representation of each text.
        query_model: What queries go through if that is not the way of documents, see `set_queries`.
        prompts: Written before a text, by name; ``"query"`` and ``"document"`` always exist.
        default_prompt_name: The prompt that `encode` takes if none is named.
        truncate_dim: Number of leading dimensions kept of each vector (Matryoshka); None is all.
        tokens_per_step: Largest number of tokens encoded at once; None is 1024 on a CPU and 32768 on a GPU,
            and up to four times as many where layers pool.
        devices: Devices it was loaded to; a stream of documents is encoded on all of them.
        name: What it was loaded from, or saved to first.

    Examples:
        >>> model = Model.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
        >>> passages = model.encode_document(["Bears sleep in winter.", "Copper conducts."])  # doctest: +SKIP
        >>> model.similarity(model.encode_query("hibernation"), passages)  # doctest: +SKIP
        tensor([[ 0.2479, -0.0165]])
    """

    query_model: Model | None

    def __new__(cls, *parts: Any, **settings: Any) -> Self:
        """Raise BadTypeError for a name or path of a model, and point to `from_pretrained`."""
        if parts and isinstance(parts[0], str | Path):
            raise BadTypeError(
                f"Model: got {brief(str(parts[0]), 100)}, expected tokenizer, encoder and head; a name is "
                f"loaded by Model.from_pretrained({brief(str(parts[0]), 100)})"
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
            revision: A branch, a tag or a commit of the hub, as after ``@``.
            device: Where it runs; by default a GPU if there is one. Of several, such as
                ``["cuda:0", "cuda:1"]``, all encode documents for an index, the first does the rest.
            dtype: Encoder's precision: float32, bfloat16, int8 (CPU), or auto, which is bfloat16 where the
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
        devices = find_devices(device)
        load = partial(Encoder.from_pretrained, attention=attention)
        model = cls._assemble(read_model(local_directory(name_or_path), load), devices, dtype)
        model.name = str(name_or_path)
        return model

    @classmethod
    def multi_vector(
        cls,
        name_or_path: str | Path,
        projection: str | Mapping[str, Any] | ProjectionConfig | None = None,
        config: Mapping[str, Any] | Config | None = None,
        *,
        markers: tuple[str, str] | None = None,
        device: Device | None = None,
        dtype: str = "float32",
        attention: str = "auto",
    ) -> Self:
        """Make a multi-vector model on the encoder of another model: its head is not trained yet.

        Args:
            name_or_path: As for `from_pretrained`; only encoder and tokenizer of the model are used.
            projection: From hidden states to token vectors, of random weights; None takes hidden states
                as they are. Vectors get length 1 in any case.
            config: How texts of either side become token vectors, see `irkit.heads.MultiVectorConfig`.
            markers: Tokens that start queries and documents, such as ``("[Q] ", "[D] ")``; new ones start
                as the mean of all tokens.
            device: As for `from_pretrained`.
            dtype: As for `from_pretrained`.
            attention: As for `from_pretrained`.

        Raises:
            BadTypeError: ``markers`` are not two strings, or ``name_or_path`` is neither a string nor a path.
            ConfigError: There is no such preset, key or value.
        """
        _check_name("multi_vector", name_or_path)
        check_names("Model.multi_vector", dtype=dtype, attention=attention)
        if markers is not None and not (
            isinstance(markers, tuple | list) and [type(marker) for marker in markers] == [str, str]
        ):
            raise BadTypeError(
                f"Model.multi_vector: markers are {brief(markers)}, expected one of queries and one of "
                "documents, such as ('[Q] ', '[D] ')"
            )
        parts = _new_parts("multi_vector", name_or_path, config, attention, markers, projection=projection)
        return cls._assemble(parts, find_devices(device), dtype)

    @classmethod
    def sparse(
        cls,
        name_or_path: str | Path,
        config: Mapping[str, Any] | Config | None = None,
        *,
        vocabulary: Sequence[str] | None = None,
        queries: str | Mapping[str, Any] | QueryConfig | None = None,
        device: Device | None = None,
        dtype: str = "float32",
        attention: str = "auto",
    ) -> Self:
        """Make a learned sparse model on the encoder of another model.

        If the checkpoint is a masked language model, its head is used. Otherwise the head is not trained yet:
        a layer that starts as the identity, and the word embeddings of the encoder, so that
        nearly all terms have weights; ``max_active_dims`` keeps the largest. Special tokens get none.

        Args:
            name_or_path: As for `from_pretrained`; only encoder and tokenizer of the model are used.
            config: How logits of tokens become weights of a text, see `irkit.heads.SparseConfig`.
            vocabulary: What weights are given to, if not to the tokens of the tokenizer; a term starts as the
                mean of its tokens.
            queries: Separate query encoder, see `set_queries`; None encodes them as documents.
            device: As for `from_pretrained`.
            dtype: As for `from_pretrained`.
            attention: As for `from_pretrained`.

        Raises:
            BadTypeError: ``name_or_path`` is neither a string nor a path.
            ConfigError: There is no such key or value.
            BadValueError: A term stands twice in the vocabulary, or it is empty.
        """
        _check_name("sparse", name_or_path)
        check_names("Model.sparse", dtype=dtype, attention=attention)
        parts = _new_parts("sparse", name_or_path, config, attention, vocabulary=vocabulary)
        if queries is not None:
            load = partial(Encoder.from_pretrained, attention=attention)
            parts["query"] = query_parts(query_config(queries), parts["tokenizer"], parts["head"], load)
        return cls._assemble(parts, find_devices(device), dtype)

    @classmethod
    def with_head(
        cls,
        head: str,
        name_or_path: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        device: Device | None = None,
        dtype: str = "float32",
        attention: str = "auto",
    ) -> Self:
        """Make a model with a head of `irkit.heads.HEADS`, such as one of another package, on an encoder.

        Args:
            head: Name of the head.
            name_or_path: As for `from_pretrained`; only encoder and tokenizer of the model are used.
            config: Settings of the head, see `irkit.heads.Head.create`.
            device: As for `from_pretrained`.
            dtype: As for `from_pretrained`.
            attention: As for `from_pretrained`.

        Raises:
            ConfigError: There is no such head, or it takes no such settings.
        """
        _check_name("with_head", name_or_path)
        check_names("Model.with_head", head=head, dtype=dtype, attention=attention)
        if head not in HEADS:
            raise ConfigError(f"Model.with_head: head {brief(head)}, expected one of {', '.join(HEADS)}")
        parts = _new_parts(head, name_or_path, config, attention)
        return cls._assemble(parts, find_devices(device), dtype)

    @classmethod
    def _assemble(cls, parts: Parts, devices: list[torch.device], dtype: str) -> Self:
        """On its device, in its precision."""
        queries = parts.pop("query", None)
        documents: SideParts = parts
        model = cls(**documents).to(devices[0]).eval()
        model.devices = devices
        model.attach_query_encoder(queries)
        for part in (model, model.query_model):
            if part is None or isinstance(part.encoder, InferenceFreeEncoder):
                continue
            if dtype == "int8":
                part._int8_fingerprint = part.fingerprint
            part.encoder = with_dtype(part.encoder, part.head, part.tokenizer, dtype)
        return model

    def encode_query(self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Embeddings:
        """Encode queries: `encode` with the prompt named ``"query"`` unless the options give another."""
        return self._encode(texts, "query", with_prompt("query", options))

    def encode_document(self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Embeddings:
        """Encode documents: `encode` with the prompt named ``"document"`` unless the options give another."""
        return self._encode(texts, "document", with_prompt("document", options))

    def encode(self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Embeddings:
        """Encode texts to vectors, as sentence-transformers does; a multi-vector model encodes documents.

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
            return self._limited(options.pop("max_active_dims"))._encode(texts, side, options)

        # how texts become tokens
        prompt, name = options.get("prompt"), options.get("prompt_name")
        if prompt is None:
            prompt = self.prompt_named(self.default_prompt_name if name is None else name)
        pipeline = self.pipeline(side or "document", prompt)
        if side is None and self.head.lengths:  # those of the sides are not for texts of neither
            pipeline = replace(pipeline, max_length=self.tokenizer.max_length)

        # encode with a bar, if there is to be one
        rows = [texts] if isinstance(texts, str) else texts
        total = len(rows) if isinstance(rows, Sized) else None
        show = options.get("show_progress_bar")
        with progress_bar("encoding", "texts", total) if show else nullcontext() as progress:
            size, device = options.get("batch_size"), options.get("device")
            made = concat(self._stream(rows, pipeline, device, batch_size=size, progress=progress))
        width = options.get("truncate_dim")
        width = self.truncate_dim if width is None else width
        made = self.postprocess(made, width, options.get("normalize_embeddings", False))
        return convert(made, options, isinstance(texts, str), self.device)

    def _limited(self, limit: int | None) -> Self:
        """Return a copy that shares all weights and keeps ``limit`` weights per text."""
        if type(limit) is not int or limit < 1:
            raise BadValueError(
                f"encode: max_active_dims is {brief(limit)}, expected a whole number of 1 or more"
            )
        model = copy.copy(self)
        queries = None if self.query_model is None else self.query_model._limited(limit)
        model._modules = {**self._modules, "head": self.head.limited(limit), "query_model": queries}
        return model

    def encode_representation(
        self, texts: Iterable[str], side: Side, progress: Progress | None = None
    ) -> Representation:
        """Encode texts for an index or a search.

        Args:
            texts: Texts.
            side: ``"query"`` or ``"document"``; decides the prompt and what else the head does to it.
            progress: Called with the number of texts finished since its last call.

        Returns:
            One row per text in order, float32 on the CPU, such that `irkit.score` is the similarity of the
            model: for cosine, vectors have length 1; for meanmaxsim, those of queries are divided by their
            number.

        Raises:
            BadTypeError: Something is not a string.
            BadValueError: The similarity of the model is not an inner product.
        """
        return concat(self.stream_representations(texts, side, progress=progress))

    def stream_representations(
        self,
        texts: Iterable[str],
        side: Side,
        *,
        chunk_size: int = CHUNK,
        progress: Progress | None = None,
        device: Device | None = None,
    ) -> Iterator[Representation]:
        """Encode any number of texts as `encode_representation` does, in chunks.

        A model that was loaded for several devices runs a process on each of them here, unless one chunk
        holds all texts.
        """
        if self.similarity_name not in ("cosine", "dot", "maxsim", "meanmaxsim"):
            raise BadValueError(
                f"encode_representation: the similarity of the model is {self.similarity_name}, no inner "
                "product; use encode and similarity"
            )
        if device is None and len(self.devices) > 1:
            texts = iter(texts)
            first = list(islice(texts, max(0, chunk_size) + 1))
            texts, device = chain(first, texts), self.devices if len(first) > chunk_size else None
        pipeline = self.pipeline(side)
        for part in self._stream(texts, pipeline, device, chunk_size, progress=progress):
            yield self._comparable(part, side)

    def encode_with_token_spans(self, text: str, side: Side) -> tuple[MultiVector, list[TokenSpan]]:
        """Encode one text to token vectors, without token pooling, and say which token each belongs to.

        Where the encoder pools, a vector belongs to a window of tokens, which is one span then.

        Args:
            text: A text.
            side: ``"query"`` or ``"document"``.

        Returns:
            One row, as `encode_representation` gives it; and as many spans as it has vectors.

        Raises:
            BadTypeError: ``text`` is not a string.
            BadValueError: The model does not make token vectors.
        """
        vectors, spans = self.pipeline(side).encode_with_token_spans(text)
        row = self._comparable(vectors, side)
        assert isinstance(row, MultiVector)
        return row, spans

    def token_spans(self, text: str, side: Side) -> list[TokenSpan]:
        """Return the tokens of a text of ``side``, including the prompt, and their characters in it."""
        pipeline = self.pipeline(side)
        return pipeline.tokenizer.token_spans(text, pipeline.prompt, pipeline.max_length)

    def _comparable(self, rows: Representation, side: Side) -> Representation:
        """Return rows whose `irkit.score` is the similarity of the model."""
        rows = self.postprocess(rows, self.truncate_dim, self.similarity_name == "cosine")
        mean = self.similarity_name == "meanmaxsim" and side == "query"
        return averaged(rows) if mean and isinstance(rows, MultiVector) else rows

    def _stream(
        self,
        texts: Iterable[str],
        pipeline: Pipeline,
        device: Device | None,
        chunk_size: int = CHUNK,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Representation]:
        """Encode texts in chunks.

        One device: encode in this process, after the model is moved there. Several: one process per device.

        Yields:
            The rows of each chunk; one part without rows if there are no texts.
        """
        check_functions("encode", progress=progress)
        if isinstance(device, str | torch.device):
            self.to(find_device(device))
            device = None
        if device is None or isinstance(pipeline.encoder, InferenceFreeEncoder):
            parts = pipeline.stream(texts, chunk_size=chunk_size, batch_size=batch_size, progress=progress)
        else:
            devices = find_devices(device)
            parts = stream_in_processes(pipeline, devices, texts, chunk_size, batch_size, progress)
        empty = True
        for part in parts:
            empty = False
            yield part
        if empty:
            yield pipeline.encode_tokens(self.tokenizer([]))

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
            vectors: What `encode` or `encode_representation` of a sparse model returns.
            k: Maximum number of terms per text; None: all.

        Returns:
            Pairs of a term and its weight for each text, in a list, or for one vector ``(dim,)`` alone.

        Raises:
            BadTypeError: ``vectors`` is neither `Sparse` nor a tensor.
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
            raise BadTypeError(f"save_pretrained: got {brief(path)}, expected the path of a directory")
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
            token: Access token of the hub; by default the one you logged in with.
            private: Whether a new repository is private.
            revision: Branch; made if it does not exist.
            commit_message: Message of the commit.

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


def _check_name(operation: str, name: object) -> None:
    if not isinstance(name, str | Path) or not str(name):
        raise BadTypeError(f"Model.{operation}: got {brief(name)}, expected a directory or a name of the hub")


def _new_parts(
    head: str,
    name_or_path: str | Path,
    config: Mapping[str, Any] | Config | None,
    attention: str,
    markers: Iterable[str] | None = None,
    **options: Any,
) -> Parts:
    """Return the encoder of a model with a new head, which takes ``config`` and ``options``."""
    load = partial(Encoder.from_pretrained, attention=attention)
    tokenizer, encoder = read_encoder(local_directory(name_or_path), load)
    for marker in markers or ():
        tokenizer.add_marker(marker)
    if markers:
        encoder.grow_(tokenizer.vocab_size)
    with torch.device("cpu"):
        made = HEADS[head].create(encoder, tokenizer, config, **options)
    prompts = dict(zip(("query", "document"), markers or (), strict=False))
    return {"tokenizer": tokenizer, "encoder": encoder, "head": made, "prompts": prompts}
