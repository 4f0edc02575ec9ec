"""A retrieval model as users hold it: loaded, called as in sentence-transformers, saved."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from irkit.encoder import Encoder
from irkit.errors import BadValueError
from irkit.formats import read_model, write_model
from irkit.model.hardware import find_device, with_dtype
from irkit.model.hub import local_directory, upload
from irkit.model.pipeline import Device, Pipeline, finished
from irkit.model.similarity import Vectors, compare, compare_pairs
from irkit.representation import Dense, concat

__all__ = ["EncodeOptions", "Model"]


class EncodeOptions(TypedDict, total=False):
    """The options of `Model.encode`, described there."""

    prompt_name: str | None
    prompt: str | None
    convert_to_tensor: bool
    normalize_embeddings: bool
    truncate_dim: int | None
    device: Device | None


class Model(Pipeline):
    """Texts in, vectors or representations out.

    Attributes:
        tokenizer: Text to ids.
        encoder: Ids to hidden states.
        head: Hidden states to a representation of each text.
        prompts: What is written before a text, by name; ``"query"`` and ``"document"`` always exist.
        default_prompt_name: The prompt that `encode` takes if none is named.
        similarity_name: cosine, dot, euclidean or manhattan.
        truncate_dim: Leading dimensions kept of each vector (Matryoshka); None is all.
        tokens_per_step: Most tokens encoded at once; None is 1024 on a CPU and 32768 on a GPU.
        name: What it was loaded from.

    Examples:
        >>> model = Model.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
        >>> passages = model.encode_document(["Bears sleep in winter.", "Copper conducts."])  # doctest: +SKIP
        >>> model.similarity(model.encode_query("hibernation"), passages)  # doctest: +SKIP
        tensor([[ 0.2479, -0.0165]])
    """

    name: str = ""
    _int8_fingerprint: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str = "float32",
        attention: str = "auto",
    ) -> Self:
        """Load a dense model of sentence-transformers or a bare Hugging Face encoder.

        Args:
            name_or_path: A directory, or the name of a repository of the Hugging Face hub.
            device: Where it runs; by default a GPU if there is one.
            dtype: Of the encoder: float32, bfloat16, int8 (CPU), or auto, which is bfloat16 where the
                hardware has it and the model keeps its vectors in it (cosine 0.999).
            attention: auto, eager, sdpa or flash.

        Raises:
            StorageError: There is no such model.
            ConfigError: It is of a kind that irkit cannot run.
            CorruptError: Its files are damaged.
            BadValueError: There is no such dtype, device or attention.
        """
        place = find_device(device)
        load = partial(Encoder.from_pretrained, attention=attention)
        model = cls(**read_model(local_directory(name_or_path), load)).to(place).eval()
        model.name = str(name_or_path)
        if dtype == "int8":
            model._int8_fingerprint = model.fingerprint
        model.encoder = with_dtype(model.encoder, model.head, model.tokenizer, dtype)
        return model

    def save_pretrained(self, path: str | Path) -> None:
        """Write a directory that irkit and sentence-transformers open with the same outputs.

        It appears whole or not at all. A model directory that is there already is replaced.

        Raises:
            StorageError: Something that is not part of a model is in the way, or writing failed.
            BadValueError: The model is in int8, which has no file format.
        """
        if self._int8_fingerprint is not None:
            raise BadValueError("save_pretrained: the weights are int8; load the model in float32 to save it")
        write_model(
            {
                "tokenizer": self.tokenizer,
                "encoder": self.encoder,
                "head": self.head,
                "prompts": self.prompts,
                "default_prompt_name": self.default_prompt_name,
                "similarity_name": self.similarity_name,
                "truncate_dim": self.truncate_dim,
            },
            path,
        )

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
        return upload(self.save_pretrained, repo_id, token, private, revision, commit_message)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that stand for weights, head and tokenizer, in whatever precision they run.

        Computed from the weights at each call, 0.1 s for 20 million.
        """
        return self._int8_fingerprint or super().fingerprint

    def encode_query(
        self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]
    ) -> np.ndarray[Any, Any] | Tensor:
        """Encode queries: `encode` with the prompt named ``"query"`` unless the options give another."""
        return self.encode(texts, **_with_prompt("query", options))

    def encode_document(
        self, texts: str | Iterable[str], **options: Unpack[EncodeOptions]
    ) -> np.ndarray[Any, Any] | Tensor:
        """Encode documents: `encode` with the prompt named ``"document"`` unless the options give another."""
        return self.encode(texts, **_with_prompt("document", options))

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        convert_to_tensor: bool = False,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        device: Device | None = None,
    ) -> np.ndarray[Any, Any] | Tensor:
        """Encode texts to vectors, as sentence-transformers does.

        Args:
            texts: Texts, or one text.
            prompt_name: Which of ``prompts`` is written before each text.
            prompt: What is written before each text, whatever ``prompt_name`` says.
            convert_to_tensor: Return a tensor on the device of the model instead of an array.
            normalize_embeddings: Scale vectors to length 1.
            truncate_dim: Keep this many leading dimensions.
            device: Move the model there first; or several, each of which gets a process of its own.

        Returns:
            float32 ``(n, dim)``, or ``(dim,)`` for one text.

        Raises:
            BadTypeError: Something is not a string.
            BadValueError: There is no prompt of that name, or no such device.
        """
        if prompt is None:
            prompt = self.prompt_named(prompt_name or self.default_prompt_name)
        single = isinstance(texts, str)
        parts = list(self.encode_stream([texts] if isinstance(texts, str) else texts, prompt, device=device))
        width = self.truncate_dim if truncate_dim is None else truncate_dim
        result = finished(concat(parts), width, normalize_embeddings)
        assert isinstance(result, Dense)  # what a PooledHead gives
        values = result.values[0] if single else result.values
        return values.to(self.device) if convert_to_tensor else values.numpy()

    def similarity(self, a: Vectors, b: Vectors) -> Tensor:
        """Compare each vector of ``a (n, dim)`` with each of ``b (m, dim)``: ``(n, m)``, higher is nearer.

        One vector counts as ``n = 1``; distances (euclidean, manhattan) come back negative.
        """
        return compare(self.similarity_name, a, b)

    def similarity_pairwise(self, a: Vectors, b: Vectors) -> Tensor:
        """Compare vector ``i`` of ``a`` with vector ``i`` of ``b``, both ``(n, dim)``: ``(n,)``."""
        return compare_pairs(self.similarity_name, a, b)


def _with_prompt(name: str, options: EncodeOptions) -> EncodeOptions:
    given = options.get("prompt") is not None or options.get("prompt_name") is not None
    return options if given else {**options, "prompt_name": name}
