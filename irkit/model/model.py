"""A retrieval model as users hold it: loaded, called as in sentence-transformers, saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import torch

from irkit.arguments import brief, check_flags, check_names, check_options, check_path
from irkit.config import Config
from irkit.encoder import Encoder
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadTypeError, BadValueError, ConfigError
from irkit.formats import SIMILARITIES, AnyEncoder, Parts, SideParts, read_encoder, read_model, write_model
from irkit.heads import HEADS, Head, ProjectionConfig, SeveralHeads, check_names_of_heads, names_of_new_heads
from irkit.model.encoding_model import EncodingModel
from irkit.model.hardware import Device, find_devices, with_dtype
from irkit.model.hub import local_directory, upload
from irkit.model.queries import QueryConfig, query_config, query_parts
from irkit.tokenizer import Tokenizer


class LoadOptions(TypedDict, total=False):
    """Where and how an encoder runs, see `Model.from_pretrained`."""

    device: Device | None
    dtype: str
    attention: str


class Model(EncodingModel):
    """Encodes texts to vectors or representations, and compares vectors.

    A model holds its parts; `pipeline` joins the parts that encode texts of one side.

    Attributes:
        tokenizer: Text to ids.
        encoder: Ids to hidden states.
        head: Hidden states to a representation of each text.
        query_model: Model that encodes queries, see `set_queries`; None if queries and documents share one.
        prompts: Text to write before each text, by name; ``"query"`` and ``"document"`` always exist.
        default_prompt_name: Name of the prompt of `encode` if the caller names none; with None, texts get no
            prompt.
        truncate_dim: Number of leading dimensions kept of each vector (Matryoshka); None is all.
        tokens_per_step: Largest number of tokens encoded at once; None is 1024 on a CPU and 32768 on a GPU,
            and up to four times as many where layers pool.
        devices: Devices that the model was loaded for; `stream_representations` encodes on all of them.
        name: Name or path that the model was loaded from, or else saved to first.

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

        Reads the formats of sentence-transformers, PyLate, Stanford's ColBERT, BGE-M3 and SPLADE. A bare
        masked language model becomes a sparse model with max pooling and log(1 + relu).

        Args:
            name_or_path: A directory, or the name of a repository of the Hugging Face hub.
                ``"name@revision"`` is one state of the repository; this form is allowed wherever a model is
                named.
            revision: A branch, a tag or a commit of the repository, as after ``@``.
            device: Device of the model; by default a GPU if there is one. With several devices, such as
                ``["cuda:0", "cuda:1"]``, all encode documents for an index, and the first does the rest.
            dtype: Encoder's precision: float32, bfloat16, int8 (CPU) or auto. The last is bfloat16 if the
                device multiplies it faster and it hardly changes the vectors (cosine 0.999), else float32.
            attention: auto, eager, sdpa or flash.

        Raises:
            StorageError: The model does not exist.
            ConfigError: The model is of a kind that irkit cannot run.
            CorruptError: The model's files are damaged.
            BadValueError: The dtype, the device or the attention is unknown.
        """
        operation = "Model.from_pretrained"
        _check_source(operation, name_or_path, revision=revision, dtype=dtype, attention=attention)
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
        normalize: bool = True,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """Make a multi-vector model with a new, untrained head on the encoder of another model.

        Args:
            name_or_path: As for `from_pretrained`; only encoder and tokenizer of the model are used.
            projection: Layers, of random weights, that turn hidden states into token vectors, see
                `irkit.heads.projection.projection_config`. None takes hidden states as they are.
            config: How texts of either side become token vectors, see `irkit.heads.MultiVectorConfig`.
            markers: Tokens that start queries and documents, such as ``("[Q] ", "[D] ")``; new ones start
                as the mean of all tokens.
            normalize: Whether vectors are scaled to length 1. Attention (`irkit.training.interaction.MVA`)
                may take them as they are.
            options: ``device``, ``dtype`` and ``attention`` as for `from_pretrained`.

        Raises:
            BadTypeError: ``markers`` are not two strings, ``name_or_path`` is neither a string nor a path, or
                an option is unknown.
            ConfigError: The preset or a key is unknown, or a value is invalid.
        """
        if markers is not None and not (
            isinstance(markers, tuple | list) and [type(marker) for marker in markers] == [str, str]
        ):
            raise BadTypeError(
                f"Model.multi_vector: markers are {brief(markers)}, expected one of queries and one of "
                "documents, such as ('[Q] ', '[D] ')"
            )
        check_flags("Model.multi_vector", normalize=normalize)
        settings = {"projection": projection, "normalize": normalize}
        return cls._make(
            "Model.multi_vector", name_or_path, "multi_vector", config, settings, markers or (), **options
        )

    @classmethod
    def sparse(
        cls,
        name_or_path: str | Path,
        config: Mapping[str, Any] | Config | None = None,
        *,
        vocabulary: Sequence[str] | None = None,
        queries: str | Mapping[str, Any] | QueryConfig | None = None,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """Make a learned sparse model on the encoder of another model.

        If the checkpoint is a masked language model, its head is used. Otherwise the head is new and
        untrained: a layer that starts as the identity, and the word embeddings of the encoder. With a new
        head nearly all terms get weights, of which ``max_active_dims`` keeps the largest. Special tokens get
        no weights.

        Args:
            name_or_path: As for `from_pretrained`; only encoder and tokenizer of the model are used.
            config: How logits of tokens become weights of a text, see `irkit.heads.SparseConfig`.
            vocabulary: Terms that get weights; None is the tokens of the tokenizer. The matrix row of a term
                starts as the mean of the rows of its tokens.
            queries: Separate query encoder, see `set_queries`; None encodes queries as documents.
            options: ``device``, ``dtype`` and ``attention`` as for `from_pretrained`.

        Raises:
            BadTypeError: ``name_or_path`` is neither a string nor a path, or an option is unknown.
            ConfigError: A key is unknown, or a value is invalid.
            BadValueError: A term stands twice in the vocabulary or has no tokens, or the vocabulary is empty.
        """
        settings = {"vocabulary": vocabulary}
        return cls._make("Model.sparse", name_or_path, "sparse", config, settings, (), queries, **options)

    @classmethod
    def with_head(
        cls,
        head: str,
        name_or_path: str | Path,
        config: Mapping[str, Any] | None = None,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """Make a model with a new head of any registered kind on the encoder of another model.

        Args:
            head: Name in `irkit.heads.HEADS`, to which other packages can add heads; not ``"static"``, which
                works without an encoder.
            name_or_path: As for `from_pretrained`; only encoder and tokenizer of the model are used.
            config: Settings of the head, see `irkit.heads.Head.create`.
            options: ``device``, ``dtype`` and ``attention`` as for `from_pretrained`.

        Raises:
            BadTypeError: ``head`` is not a string, or an option is unknown.
            ConfigError: The head is unknown, or does not take these settings.
        """
        check_names("Model.with_head", head=head)
        if head not in (known := names_of_new_heads()):
            raise ConfigError(f"Model.with_head: head {brief(head)}, expected one of {', '.join(known)}")
        return cls._make("Model.with_head", name_or_path, head, config, {}, **options)

    @classmethod
    def _make(
        cls,
        operation: str,
        name_or_path: str | Path,
        head: str | Callable[[Tokenizer, AnyEncoder], Head],
        config: Mapping[str, Any] | Config | None,
        settings: Mapping[str, Any],
        markers: Sequence[str] = (),
        queries: str | Mapping[str, Any] | QueryConfig | None = None,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """Make a model with a new head on the encoder of another model.

        Args:
            operation: Name of the caller, for messages.
            name_or_path: As for `from_pretrained`.
            head: Name in `irkit.heads.HEADS`, or a function that makes the head.
            config: Configuration of the head.
            settings: Further arguments of the head's `create`.
            markers: Prompts of queries and of documents, which become tokens; or nothing.
            queries: As for `sparse`.
            options: ``device``, ``dtype`` and ``attention`` as for `from_pretrained`.

        Raises:
            BadTypeError: An option does not exist.
        """
        check_options(operation, options, LoadOptions.__annotations__)
        dtype, attention = options.get("dtype", "float32"), options.get("attention", "auto")
        _check_source(operation, name_or_path, dtype=dtype, attention=attention)
        devices = find_devices(options.get("device"))
        load = partial(Encoder.from_pretrained, attention=attention)
        tokenizer, encoder = read_encoder(local_directory(name_or_path), load)
        for marker in markers:
            tokenizer.add_marker(marker)
        if markers:
            encoder.grow_(tokenizer.highest_id() + 1)
        with torch.device("cpu"):
            if isinstance(head, str):
                new_head = HEADS[head].create(encoder, tokenizer, config, **settings)
            else:
                new_head = head(tokenizer, encoder)
        prompts = dict(zip(("query", "document"), markers, strict=False))
        parts: Parts = {"tokenizer": tokenizer, "encoder": encoder, "head": new_head, "prompts": prompts}
        if queries is not None:
            parts["query"] = query_parts(query_config(queries), tokenizer, new_head, load)
        return cls._assemble(parts, devices, dtype)

    @classmethod
    def _assemble(cls, parts: Parts, devices: list[torch.device], dtype: str) -> Self:
        """Make a model of its parts, on the first of ``devices``, with encoders in precision ``dtype``."""
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

    @classmethod
    def several(
        cls,
        name_or_path: str | Path,
        heads: Mapping[str, str | Mapping[str, Any]],
        **options: Unpack[LoadOptions],
    ) -> Self:
        """Make a model with several new, untrained heads on the encoder of another model.

        One pass of the encoder gives the representations of all heads, see `encode` and `heads`.

        Args:
            name_or_path: As for `from_pretrained`; only encoder and tokenizer of the model are used.
            heads: Settings of two or more heads by name. ``head`` names one of `irkit.heads.HEADS` and may be
                left out if it is the name. ``similarity`` sets how the head compares, and ``projection`` is
                the argument of `multi_vector`. The others are settings of the head, see
                `irkit.heads.Head.create`. A string is the ``head`` with its default settings.
            options: ``device``, ``dtype`` and ``attention`` as for `from_pretrained`.

        Raises:
            BadValueError: There are fewer than two heads, heads cut texts at different lengths, or a
                similarity does not compare what its head makes.
            ConfigError: The head is unknown, or does not take these settings.

        Examples:
            >>> model = Model.several(
            ...     "BAAI/bge-small-en-v1.5",
            ...     {"dense": {"pooling": "cls"}, "sparse": "token_weight", "multi_vector": {}},
            ... )  # doctest: +SKIP
            >>> sorted(model.encode_document("Bears sleep in winter."))  # doctest: +SKIP
            ['dense', 'multi_vector', 'sparse']
        """
        check_names_of_heads(heads)
        similarities = dict[str, str]()

        def create(tokenizer: Tokenizer, encoder: AnyEncoder) -> Head:
            new_heads = dict[str, Head]()
            for name, chosen in heads.items():
                settings: dict[str, Any] = {"head": chosen} if isinstance(chosen, str) else dict(chosen)
                kind, similarity = settings.pop("head", name), settings.pop("similarity", None)
                if kind not in (known := names_of_new_heads()):
                    raise ConfigError(
                        f"Model.several: head {brief(kind)} of {name!r}, expected one of {', '.join(known)}"
                    )
                own = {"projection": settings.pop("projection", None)} if kind == "multi_vector" else {}
                new_heads[name] = HEADS[kind].create(encoder, tokenizer, settings, **own)
                if similarity is not None and similarity not in SIMILARITIES[new_heads[name].kind]:
                    raise BadValueError(
                        f"Model.several: similarity {brief(similarity)} of {name!r}, expected one of "
                        + ", ".join(SIMILARITIES[new_heads[name].kind])
                    )
                if similarity is not None:
                    similarities[name] = similarity
            return SeveralHeads(new_heads, similarities)

        return cls._make("Model.several", name_or_path, create, None, {}, **options)

    def save_pretrained(self, path: str | Path, format: str | None = None) -> None:
        """Write a directory that irkit and sentence-transformers open with the same outputs.

        Only irkit opens the directory of a TITE or of another encoder that pools. The directory appears whole
        or not at all, and replaces a model directory of that name. A model without a name takes ``path`` as
        its name, so that an index that it builds finds it again.

        Args:
            path: Directory to write to.
            format: ``"sentence-transformers"``; ``"stanford"``, which writes a checkpoint of Stanford's
                ColBERT if the model can be expressed as one; or, for a model with several heads,
                ``"several-heads"`` or ``"bge-m3"``. By default ``"several-heads"`` for such a model and
                ``"sentence-transformers"`` for any other.

        Raises:
            StorageError: Something that is not part of a model is in the way, or writing failed.
            BadValueError: The model is in int8, which has no file format, or ColBERT cannot express it.
        """
        self._refuse_int8("save_pretrained", "load the model in float32 to save it")
        if not isinstance(path, str | Path):
            raise BadTypeError(f"save_pretrained: got {brief(path)}, expected the path of a directory")
        check_path("save_pretrained", path)
        if format is None:
            format = "several-heads" if self.kind == "several" else "sentence-transformers"
        check_names("save_pretrained", format=format)
        write_model(self.parts, path, format)
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
            private: Whether a new repository is private; None is the default of the hub.
            revision: Branch, which is made if it does not exist; None is the main branch.
            commit_message: Message of the commit.

        Returns:
            Address of the commit.
        """
        encoder, opens = self.encoder, None if self.head.model_type == "irkit" else self.head.model_type
        if isinstance(encoder, Encoder) and (encoder.family == "tite" or any(encoder.config.schedule)):
            opens = None
        twin = copy.copy(self)  # which gets the name of the folder that is uploaded
        address = upload(twin.save_pretrained, opens, repo_id, token, private, revision, commit_message)
        self.name = self.name or (repo_id if revision is None else f"{repo_id}@{revision}")
        return address


def _check_source(operation: str, name: object, **settings: object) -> None:
    if not isinstance(name, str | Path) or not str(name):
        raise BadTypeError(f"{operation}: got {brief(name)}, expected a directory or a name of the hub")
    check_names(operation, **settings)
