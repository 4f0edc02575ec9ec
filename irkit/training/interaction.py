"""How token vectors are compared in training: MaxSim, XTR, or attention that is trained with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, Self, cast

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from irkit.config import Config, read_json
from irkit.encoder.weights import read_weights
from irkit.errors import BadValueError, ConfigError, CorruptError, StorageError
from irkit.heads import MultiVectorHead
from irkit.late_interaction import (
    MultiVectorAttention,
    first_tokens,
    mean_maxsim,
    temporal_pooling,
    xtr_in_batch,
)
from irkit.model import Model
from irkit.ragged import Ragged
from irkit.representation import MultiVector

__all__ = [
    "MVA",
    "XTR",
    "Interaction",
    "MaxSim",
    "PooledAttention",
    "load_interaction",
    "make_interaction",
]

_FOLDER, _CONFIG = "interaction", "config.json"
_SHARPNESS = 20.0  # of the first attention: what cosines are multiplied by


class MaxSim(Config):
    """The best token of a document for each token of the query: the score of the model."""

    kind: Literal["maxsim"] = "maxsim"


class XTR(Config):
    """Only the ``k`` best tokens of the whole batch count for each token of a query.

    Training so makes the tokens of relevant documents those that an index of tokens retrieves first. The
    model is measured by the mean MaxSim, which this is where ``k`` is all tokens.

    Attributes:
        k: Tokens of all documents of the batch.

    Source: Lee et al. 2023, "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval", eq. 5.
    """

    kind: Literal["xtr"] = "xtr"
    k: PositiveInt


class MVA(Config):
    """Each token of the query attends to those of the document, which may be made fewer first.

    Attributes:
        dim: Of keys and values; None is that of the vectors.
        pooling: Of documents: all tokens, the first ``size``, the ``size`` class tokens that the model gets
            in front of every document, or one of every ``size`` in turn that are joined.
        size: What ``pooling`` says.

    Source: Multi-Vector Attention Models for Deep Re-ranking, section 2.
    """

    kind: Literal["mva"] = "mva"
    dim: PositiveInt | None = None
    pooling: Literal["none", "first_k", "multiple_cls", "temporal"] = "none"
    size: PositiveInt | None = None

    @model_validator(mode="after")
    def _size_goes_with_pooling(self) -> Self:
        if (self.pooling == "none") != (self.size is None):
            raise ValueError(f"size goes with pooling, and with pooling {self.pooling} it is {self.size}")
        return self


Interaction = Annotated[MaxSim | XTR | MVA, Field(discriminator="kind")]


def make_interaction(config: MaxSim | XTR | MVA, model: Model) -> nn.Module | None:
    """What compares the token vectors of a model in training; None is MaxSim.

    With ``multiple_cls`` the prompt of documents gets the class tokens, so that the model saved later makes
    the same vectors. Where documents have a length of their own it grows by as many, so that as much of the
    text is read.

    Args:
        config: What a recipe says.
        model: What is trained; new weights come from torch's generator and start near its mean MaxSim.

    Raises:
        ConfigError: The model makes no token vectors, averages MaxSim itself, has no class token of its own,
            or has no positions for more.
    """
    if isinstance(config, MaxSim):
        return None
    if model.kind != "multi_vector":
        raise ConfigError(
            f"interaction: {config.kind} compares token vectors, the model makes {model.kind} ones; leave "
            "interaction out or choose a multi_vector model"
        )
    if model.similarity_name == "meanmaxsim":
        raise ConfigError(f"interaction: {config.kind} is a mean itself; set model.similarity to maxsim")
    if isinstance(config, XTR):
        return _RetrievedTokens(config.k)
    if config.pooling == "multiple_cls" and config.size is not None:
        if isinstance(model.head, MultiVectorHead) and model.head.window != (1, 1):
            raise ConfigError(
                "interaction.pooling: multiple_cls needs a vector for each class token, but the encoder "
                "pools them; choose first_k, or leave model.pooling out"
            )
        _prepend_classes(model, config.size)
    return PooledAttention(model.dim, config)


def load_interaction(path: str | Path) -> PooledAttention:
    """What a model was trained with, from its directory: for `irkit.Retriever.rerank` and `irkit rerank`.

    Raises:
        StorageError: There is none: the model was trained with MaxSim or XTR, whose score is its own.
        CorruptError: It is damaged.

    Examples:
        >>> attention = load_interaction("mva-model")  # doctest: +SKIP
        >>> retriever.rerank("which animals hibernate", run, interaction=attention)  # doctest: +SKIP
    """
    folder = Path(path) / _FOLDER
    if not folder.is_dir():
        raise StorageError(
            f"loading {folder}: no such directory; the model was not trained with attention (kind mva)"
        )
    about = read_json(folder / _CONFIG)
    fingerprint = about.pop("model", None)
    config = MVA.parse(about, str(folder / _CONFIG))
    tensors = {name: value.float() for name, value in read_weights(folder).items()}
    try:
        loaded = PooledAttention(tensors["query_key.weight"].shape[1], config)
        loaded.load_state_dict(tensors)
    except (KeyError, IndexError, RuntimeError) as error:
        raise CorruptError(f"loading {folder}: its weights are not those of {_CONFIG}: {error}") from error
    loaded.fingerprint = fingerprint
    return loaded.eval()


class PooledAttention(MultiVectorAttention):
    """`MultiVectorAttention` that makes the tokens of documents fewer first, as an `MVA` says.

    It starts as the average of the document that is most like MaxSim: keys are sharp, values are kept.

    Attributes:
        config: What it does.
        fingerprint: Of the model that it was saved with, whose vectors it is for; None is not known.

    Examples:
        >>> attention = PooledAttention(4, MVA(pooling="first_k", size=2))
        >>> tokens = MultiVector(Ragged.from_rows([torch.eye(4)]))
        >>> attention.project_documents(tokens).tokens.lengths.tolist()
        [2]
    """

    def __init__(self, width: int, config: MVA) -> None:
        """Build one for vectors of ``width``."""
        factor = config.size if config.pooling == "temporal" and config.size else 1
        super().__init__(width, config.dim, factor * width)
        self.config, self.fingerprint = config, cast("str | None", None)
        dim = self.query_key.out_features
        kept = torch.eye(width) if dim == width else nn.init.orthogonal_(torch.empty(dim, width))
        kept *= (max(width, dim) / dim) ** 0.5  # inner products stay what they are, on average
        sharp = (_SHARPNESS * dim**0.5) ** 0.5
        with torch.no_grad():
            for layer, scale in (
                (self.query_key, sharp),
                (self.query_value, 1.0),
                (self.document_key, sharp / factor),
                (self.document_value, 1.0 / factor),
            ):
                layer.weight.copy_(scale * kept.repeat(1, layer.in_features // width))

    def project_documents(self, documents: MultiVector) -> MultiVector:
        """Keys and values ``(total, 2 dim)`` of the tokens that pooling leaves, side by side."""
        return super().project_documents(MultiVector(self._pooled(documents.tokens)))

    def forward(self, queries: MultiVector, documents: MultiVector) -> Tensor:
        """Score token vectors ``(total, width)`` of both, where they are: ``(n_q, n_d)``.

        Raises:
            BadValueError: They are no token vectors, or of another width.
        """
        if not isinstance(queries, MultiVector):
            raise BadValueError(
                f"attention: got {queries.kind} representations, expected a vector a token; use the model "
                "that it was trained with"
            )
        device, place = queries.tokens.device, self.query_key.weight.device
        return super().forward(queries.to(place), documents.to(place)).to(device)

    def save_pretrained(self, path: str | Path) -> None:
        """Write the directory ``interaction`` into that of the model.

        Raises:
            StorageError: Writing failed.
        """
        folder = Path(path) / _FOLDER
        super().save_pretrained(folder)
        try:
            about = {**self.config.model_dump(), "model": self.fingerprint}
            (folder / _CONFIG).write_text(json.dumps(about, indent=2) + "\n")
        except OSError as error:
            raise StorageError(f"saving {folder}: {error}") from error

    def _pooled(self, rows: Ragged) -> Ragged:
        size = self.config.size
        if size is None:
            return rows
        return temporal_pooling(rows, size) if self.config.pooling == "temporal" else first_tokens(rows, size)


class _RetrievedTokens(nn.Module):
    """XTR in training; else the mean MaxSim: documents are not compared with others of their collection."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, queries: MultiVector, documents: MultiVector) -> Tensor:
        """``(n_q, n_d)``."""
        return xtr_in_batch(queries, documents, self.k) if self.training else mean_maxsim(queries, documents)


def _prepend_classes(model: Model, size: int) -> None:
    """Let documents begin with so many class tokens, the one that all texts begin with among them."""
    tokenizer, pieces = model.tokenizer, model.tokenizer.pieces("a")
    token = pieces[0].token
    if tokenizer.ids([token])[0] not in tokenizer.special_tokens():
        raise ConfigError(
            "interaction.pooling: multiple_cls needs a model whose texts begin with a class token, those of "
            f"this one begin with {token!r}; choose first_k"
        )
    prompt = rest = model.prompts.get("document", "")
    while rest.startswith(token):  # of an earlier training
        rest = rest.removeprefix(token)
    added = size - 1 - (len(prompt) - len(rest)) // len(token)
    if (length := model.head.max_length("document")) is not None:
        most = model.encoder.max_positions
        if most is not None and length + added > most:
            raise ConfigError(
                f"interaction.size: {added} class tokens more make documents of {length + added} tokens, the "
                f"encoder has {most} positions; lower size or model.config.document_length"
            )
        model.set_length("document", length + added)
    model.prompts["document"] = token * (size - 1) + rest
