"""The part of `irkit.Model` that encodes texts, compares vectors, and names the terms of sparse vectors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sized
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Self, Unpack, cast

import torch
from torch import Tensor

from irkit.arguments import brief, check_functions
from irkit.core.representation import MultiVector, Representation, Several, Sparse, concat
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadValueError
from irkit.heads import Side
from irkit.model.embeddings import (
    Embeddings,
    Vectors,
    as_sparse,
    averaged,
    compare,
    compare_pairs,
    convert,
    decode,
    postprocess,
    sparsity,
)
from irkit.model.encode_options import EncodeOptions, check_encode_options
from irkit.model.hardware import Device, find_devices
from irkit.model.model_parts import ModelParts
from irkit.model.parallel import encode_in_processes
from irkit.model.pipeline import CHUNK, Pipeline, Progress
from irkit.tokenizer import TokenSpan
from irkit.utils.progress import progress_bar


class EncodingModel(ModelParts):
    """The base of `irkit.Model` that encodes texts and compares vectors.

    A call makes the `Pipeline` of its side, see `irkit.Model.pipeline`, and lets the pipeline encode.
    """

    query_model: EncodingModel | None

    def encode_query(self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Embeddings:
        """Encode queries, with the prompt named ``"query"`` unless the options give another.

        For arguments and results see `encode`.
        """
        return self._encode(texts, "query", options)

    def encode_document(self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Embeddings:
        """Encode documents, with the prompt named ``"document"`` unless the options give another.

        For arguments and results see `encode`.
        """
        return self._encode(texts, "document", options)

    def encode(self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]) -> Embeddings:
        """Encode texts to vectors, as sentence-transformers does.

        If the model treats queries and documents differently, the texts are encoded as documents. Only the
        prompt differs: it is the default prompt of the model unless the options give another.

        Args:
            texts: Several texts, or one text.
            options: See `EncodeOptions`.

        Returns:
            A float32 array ``(n, dim)``, or ``(dim,)`` for one text. For a multi-vector model, a list of one
            array ``(tokens, dim)`` per text, or the array itself for one text. For a sparse model, a sparse
            tensor (COO) ``(n, dim)``, or ``(dim,)``, on the device of the model. For a model with several
            heads, a dictionary of these by the name of the head, all from one pass of the encoder.

        Raises:
            BadTypeError: Something is not a string, or an option is unknown.
            BadValueError: The prompt, the head or the device does not exist, or a number is below 1.
        """
        return self._encode(texts, None, options)

    def _encode(self, texts: str | Iterable[str], side: Side | None, options: EncodeOptions) -> Embeddings:
        check_encode_options(options, {name: model.kind for name, model in self.heads.items()})
        if options.get("max_active_dims") is not None:
            options = {**options}
            return self._limited(options.pop("max_active_dims"))._encode(texts, side, options)

        pipeline = self.encoding_pipeline(
            side, prompt=options.get("prompt"), prompt_name=options.get("prompt_name")
        )
        pipeline = replace(pipeline, batch_size=options.get("batch_size"))
        if (names := options.get("heads")) is not None:
            pipeline = replace(pipeline, head=self.head.chosen(names))

        # encode with a bar, if there is to be one
        rows = [texts] if isinstance(texts, str) else texts
        total = len(rows) if isinstance(rows, Sized) else None
        show = options.get("show_progress_bar")
        with progress_bar("encoding", "texts", total) if show else nullcontext() as progress:
            representation = concat(self._stream(rows, pipeline, options.get("device"), progress=progress))
        single = isinstance(texts, str)
        if isinstance(representation, Several):
            models = self.heads
            results = {
                name: models[name]._finish(part, options, single)
                for name, part in representation.parts.items()
            }
            return cast(Any, results)
        return self._finish(representation, options, single)

    def _finish(self, rows: Representation, options: EncodeOptions, single: bool) -> Embeddings:
        """Return rows of a model with one head as `encode` does."""
        if self.kind != "sparse":
            width = options.get("truncate_dim")
            width = self.truncate_dim if width is None else width
            rows = postprocess(self.head, rows, width, options.get("normalize_embeddings", False))
        return convert(rows, options, single, self.device)

    def encoding_pipeline(
        self, side: Side | None, *, prompt: str | None = None, prompt_name: str | None = None
    ) -> Pipeline:
        """Make the pipeline of `encode` (``side`` None), `encode_query` or `encode_document`.

        Args:
            side: Side of the texts; None if the model is to treat them as neither.
            prompt: See `EncodeOptions`.
            prompt_name: See `EncodeOptions`.

        Raises:
            BadValueError: No prompt has this name.
        """
        if prompt is None:
            prompt = self.prompt_named(
                (side or self.default_prompt_name) if prompt_name is None else prompt_name
            )
        pipeline = self.pipeline(side or "document", prompt)
        if side is None and self.head.lengths:  # the lengths of queries and documents do not apply
            pipeline = replace(pipeline, max_length=self.tokenizer.max_length)
        return pipeline

    def _limited(self, limit: int | None) -> Self:
        """Return a copy with the same parameters whose sparse vectors keep the ``limit`` highest weights.

        Raises:
            BadValueError: ``limit`` is not a whole number of 1 or more, or the model is not sparse.
        """
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
            side: ``"query"`` or ``"document"``; decides the prompt, the length and how the head treats texts.
            progress: Called with the number of texts finished since its last call.

        Returns:
            One row per text in order, float32 on the CPU. `irkit.score` of such rows is the similarity of the
            model: for cosine, vectors have length 1; for meanmaxsim, the token vectors of each query are
            divided by their number.

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

        A model that was loaded for several devices encodes in a process per device, unless one chunk holds
        all texts.

        Args:
            texts: Texts, read as they are needed.
            side: ``"query"`` or ``"document"``.
            chunk_size: Number of texts per chunk.
            progress: Called with the number of texts finished since its last call.
            device: Device to move the model to first; or several devices, which encode in a process each.

        Yields:
            The rows of each chunk, in order.
        """
        for model in self.heads.values():
            if model.similarity_name not in ("cosine", "dot", "maxsim", "meanmaxsim"):
                raise BadValueError(
                    f"encode_representation: the similarity of the model is {model.similarity_name}, no "
                    "inner product; use encode and similarity"
                )
        if device is None and len(self.devices) > 1:
            texts = iter(texts)
            first = list(islice(texts, max(0, chunk_size) + 1))
            texts, device = chain(first, texts), self.devices if len(first) > chunk_size else None
        pipeline = self.pipeline(side)
        for part in self._stream(texts, pipeline, device, chunk_size, progress=progress):
            yield self.comparable(part, side)

    def encode_with_token_spans(self, text: str, side: Side) -> tuple[MultiVector, list[TokenSpan]]:
        """Encode one text to token vectors, without token pooling, and find the token of each vector.

        Args:
            text: A text.
            side: ``"query"`` or ``"document"``.

        Returns:
            One row of token vectors, as `encode_representation` returns them, and one span per vector. If the
            encoder pools, a span covers a window of tokens.

        Raises:
            BadTypeError: ``text`` is not a string.
            BadValueError: The model does not make token vectors.
        """
        vectors, spans = self.pipeline(side).encode_with_token_spans(text)
        row = self.comparable(vectors, side)
        assert isinstance(row, MultiVector)
        return row, spans

    def token_spans(self, text: str, side: Side) -> list[TokenSpan]:
        """Return the tokens of a text of ``side``, its prompt included, and the characters that each covers.

        Returns:
            One span per token, with its string and its range of characters in ``text``, see `TokenSpan`.
        """
        pipeline = self.pipeline(side)
        return pipeline.tokenizer.token_spans(text, pipeline.prompt, pipeline.max_length)

    def comparable(self, rows: Representation, side: Side) -> Representation:
        """Truncate and scale rows so that `irkit.score` of them is the similarity of the model.

        Args:
            rows: Result of the pipeline of the side.
            side: Side of the texts.
        """
        if isinstance(rows, Several):
            models = self.heads
            parts = {name: models[name].comparable(part, side) for name, part in rows.parts.items()}
            return cast(Any, Several(parts))
        rows = postprocess(self.head, rows, self.truncate_dim, self.similarity_name == "cosine")
        mean = self.similarity_name == "meanmaxsim" and side == "query"
        return averaged(rows) if mean and isinstance(rows, MultiVector) else rows

    def _stream(
        self,
        texts: Iterable[str],
        pipeline: Pipeline,
        device: Device | None,
        chunk_size: int = CHUNK,
        progress: Progress | None = None,
    ) -> Iterator[Representation]:
        """Encode texts in chunks.

        A single ``device`` encodes in this process, after the model is moved to it. A list of devices encodes
        in one process per device. None encodes in this process, on the device of the model.

        Yields:
            The rows of each chunk; for no texts, one representation without rows.
        """
        check_functions("encode", progress=progress)
        devices = [] if device is None else find_devices(device)
        if isinstance(device, str | torch.device):
            self.to(devices.pop())
        if not devices or isinstance(pipeline.encoder, InferenceFreeEncoder):
            parts = pipeline.stream(texts, chunk_size, progress)
        else:
            parts = encode_in_processes(pipeline, devices, texts, chunk_size, progress)
        first = next(parts, None)
        yield pipeline.encode_tokens(self.tokenizer([])) if first is None else first
        yield from parts

    def similarity(self, a: Vectors, b: Vectors) -> Tensor:
        """Compare each vector of ``a (n, dim)`` with each of ``b (m, dim)``: ``(n, m)``, higher is nearer.

        One vector ``(dim,)`` counts as ``n = 1``. Distances (euclidean, manhattan) are returned with a
        negative sign. For a multi-vector model, ``a`` and ``b`` are lists of arrays ``(tokens, dim)``, or one
        array ``(tokens, dim)`` each.
        """
        self._check_one_head("similarity")
        return compare(self.similarity_name, a, b)

    def similarity_pairwise(self, a: Vectors, b: Vectors) -> Tensor:
        """Compare vector ``i`` of ``a`` with vector ``i`` of ``b``, both ``(n, dim)``: ``(n,)``.

        Types and signs are as in `similarity`.
        """
        self._check_one_head("similarity_pairwise")
        return compare_pairs(self.similarity_name, a, b)

    def _check_one_head(self, operation: str) -> None:
        if self.head.parts:
            name = next(iter(self.heads))
            raise BadValueError(
                f"{operation}: the model has the heads {', '.join(self.heads)}; compare what one of them "
                f"makes, as in model.heads[{name!r}].{operation}"
            )

    def decode(
        self, vectors: Sparse | Tensor, k: int | None = None
    ) -> list[list[tuple[str, float]]] | list[tuple[str, float]]:
        """Return the terms and weights of sparse vectors, the heaviest first.

        Args:
            vectors: Result of `encode` or `encode_representation` of a sparse model.
            k: Largest number of terms per text; None is all.

        Returns:
            For each text, a list of pairs of a term and its weight. For one vector ``(dim,)``, one list of
            pairs.

        Raises:
            BadTypeError: ``vectors`` is neither `Sparse` nor a tensor.
            BadValueError: ``k`` is below 1, the vectors have another width, or the model is not sparse.
        """
        decoded = decode(as_sparse("decode", vectors), self.vocabulary, k)
        return decoded[0] if isinstance(vectors, Tensor) and vectors.dim() == 1 else decoded

    def sparsity(self, vectors: Sparse | Tensor) -> dict[str, float]:
        """Measure how sparse vectors ``(n, dim)`` are.

        Returns:
            ``active_dims``, the mean number of terms per vector, and ``sparsity_ratio``, the mean share of
            the vocabulary without a weight (0 to 1), as in sentence-transformers.
        """
        return sparsity(as_sparse("sparsity", vectors))
