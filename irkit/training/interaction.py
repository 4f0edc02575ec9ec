"""Interactions of token vectors in training: MaxSim, XTR, or attention that is trained with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, Self, cast

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from irkit.config import Config, read_json
from irkit.core.late_interaction import (
    MultiVectorAttention,
    mean_maxsim,
    xtr_in_batch,
)
from irkit.core.representation import MultiVector
from irkit.core.token_selection import first_tokens, temporal_pooling
from irkit.errors import BadValueError, ConfigError, CorruptError, StorageError
from irkit.formats import AnyEncoder
from irkit.heads import Side
from irkit.model import Model
from irkit.utils.weights import read_weights

_FOLDER, _CONFIG = "interaction", "config.json"
_SHARPNESS = 20.0  # factor of cosines in the initial attention
_DEVIATION = 0.02  # of new layers of BERT
_CLASS_TOKENS: dict[Side, str] = {"query": "[Q_CLS]", "document": "[D_CLS]"}


class MaxSim(Config):
    """Compare each query token with the best token of the document: the score of the model."""

    kind: Literal["maxsim"] = "maxsim"


class XTR(Config):
    """Compare each query token only with the ``k`` best tokens of the whole batch.

    So tokens of relevant documents learn to be the first that an index of tokens retrieves. Evaluation uses
    the mean MaxSim. XTR equals the mean MaxSim if ``k`` is the number of all tokens.

    Attributes:
        k: Number of tokens, of all documents of the batch.

    Source: Lee et al. 2023, "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval", eq. 5.
    """

    kind: Literal["xtr"] = "xtr"
    k: PositiveInt


class MVA(Config):
    """Let query tokens attend to document tokens, both of which may be pooled first.

    Attributes:
        dim: Width of keys and values of a head; None is the width of the vectors.
        heads: Number of heads, whose scores are added.
        pooling: Pooling of documents. ``"none"`` takes all tokens; ``"first_k"`` the first ``size`` tokens;
            ``"multiple_cls"`` puts ``size`` class tokens before every document and takes only the class
            tokens; ``"temporal"`` concatenates every ``size`` successive tokens.
        size: Parameter of ``pooling``.
        query_classes: Number of class tokens before every query, which alone are compared; None compares all
            tokens of a query.

    Source: Multi-Vector Attention Models for Deep Re-ranking, section 2; tables 3 and 4.
    """

    kind: Literal["mva"] = "mva"
    dim: PositiveInt | None = None
    heads: PositiveInt = 1
    pooling: Literal["none", "first_k", "multiple_cls", "temporal"] = "none"
    size: PositiveInt | None = None
    query_classes: PositiveInt | None = None

    @model_validator(mode="after")
    def _size_goes_with_pooling(self) -> Self:
        if (self.pooling == "none") != (self.size is None):
            raise ValueError(f"size goes with pooling, and with pooling {self.pooling} it is {self.size}")
        return self


Interaction = Annotated[MaxSim | XTR | MVA, Field(discriminator="kind")]


def make_interaction(config: MaxSim | XTR | MVA, model: Model) -> nn.Module | None:
    """Return the module that compares token vectors in training; None stands for MaxSim.

    ``multiple_cls`` and ``query_classes`` change the model: they add class tokens, with an embedding for each
    side, to the prompt of documents or queries, so that the saved model makes the same vectors. If the model
    has a maximum length of such texts, the length grows by the number of class tokens, so that as much of
    each text is read as before.

    Args:
        config: The setting of a recipe.
        model: The model to train. The new weights of MVA come from torch's generator. If the model makes
            vectors of length 1, their scores start close to its mean MaxSim; otherwise weights are drawn as
            for a new layer of BERT (normal, with a deviation of 0.02). A model that was trained with
            attention of the same settings keeps the weights of this attention.

    Raises:
        ConfigError: The model makes no token vectors, averages MaxSim itself, has no class token, or has too
            few positions.
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
    classes: dict[Side, tuple[str, int | None]] = {
        "document": ("pooling: multiple_cls", config.size if config.pooling == "multiple_cls" else None),
        "query": ("query_classes", config.query_classes),
    }
    for side, (key, size) in classes.items():
        if size is None:
            continue
        if model.head.window != (1, 1):
            raise ConfigError(
                f"interaction.{key} needs a vector for each class token, but the encoder pools them; choose "
                "first_k, or leave model.pooling out"
            )
        _prepend_classes(model, size, side)
    attention = PooledAttention(model.dim, config, unit=model.head.unit)
    if (Path(model.name) / _FOLDER).is_dir():  # of an earlier training
        trained = load_interaction(model.name)
        if trained.config == config and trained.query_key.in_features == model.dim:
            attention.load_state_dict(trained.state_dict())
    return attention


def load_interaction(path: str | Path) -> PooledAttention:
    """Load the attention that a model was trained with, for `irkit.Retriever.rerank` and `irkit rerank`.

    Raises:
        StorageError: The directory holds no attention: the model was trained with MaxSim or XTR.
        CorruptError: The file of the attention is damaged.

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
    """`MultiVectorAttention` that pools the tokens of documents first.

    For vectors of length 1 the initial weights approximate MaxSim: keys make attention sharp, values preserve
    the vectors.

    Attributes:
        config: The settings.
        fingerprint: Fingerprint of the model whose vectors this attention was trained on; None if unknown.

    Examples:
        >>> from irkit import Ragged
        >>> attention = PooledAttention(4, MVA(pooling="first_k", size=2))
        >>> tokens = MultiVector(Ragged.from_rows([torch.eye(4)]))
        >>> attention.project_documents(tokens).tokens.lengths.tolist()
        [2]
    """

    def __init__(self, width: int, config: MVA, *, unit: bool = True) -> None:
        """Create initial weights for vectors of ``width``, which have length 1 if ``unit`` is set."""
        factor = config.size if config.pooling == "temporal" and config.size else 1
        super().__init__(width, config.dim, factor * width, config.heads)
        self.config, self.fingerprint = config, cast("str | None", None)
        if not unit:
            for weight in self.parameters():
                nn.init.normal_(weight, std=_DEVIATION)
            return
        dim = self.query_key.out_features // config.heads
        one_head = [
            torch.eye(width) if dim == width else nn.init.orthogonal_(torch.empty(dim, width))
            for _ in range(config.heads)
        ]
        projection = torch.cat(one_head) * (max(width, dim) / dim) ** 0.5  # keeps inner products, on average
        sharp = (_SHARPNESS * dim**0.5) ** 0.5
        with torch.no_grad():
            for layer, scale in (
                (self.query_key, sharp),
                (self.query_value, 1.0 / config.heads),
                (self.document_key, sharp / factor),
                (self.document_value, 1.0 / factor),
            ):
                layer.weight.copy_(scale * projection.repeat(1, layer.in_features // width))

    def project_queries(self, queries: MultiVector) -> MultiVector:
        """Project the tokens of queries, or with ``query_classes`` only their class tokens."""
        if (size := self.config.query_classes) is not None:
            queries = MultiVector(first_tokens(queries.tokens, size))
        return super().project_queries(queries)

    def project_documents(self, documents: MultiVector) -> MultiVector:
        """Pool each document, and project the pooled tokens."""
        rows, size = documents.tokens, self.config.size
        if size is not None:
            pool = temporal_pooling if self.config.pooling == "temporal" else first_tokens
            rows = pool(rows, size)
        return super().project_documents(MultiVector(rows))

    def forward(self, queries: MultiVector, documents: MultiVector) -> Tensor:
        """Compute scores ``(n_q, n_d)`` of token vectors ``(total, width)`` on any device.

        Raises:
            BadValueError: The representations are not token vectors, or have another width.
        """
        if not isinstance(queries, MultiVector):
            raise BadValueError(
                f"attention: got {queries.kind} representations, expected a vector a token; use the model "
                "that it was trained with"
            )
        device, own = queries.tokens.device, self.query_key.weight.device
        return super().forward(queries.to(own), documents.to(own)).to(device)

    def save_pretrained(self, path: str | Path) -> None:
        """Write the directory ``interaction`` into the directory of the model.

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


class _RetrievedTokens(nn.Module):
    """Computes XTR in training mode, else the mean MaxSim, which needs no other documents."""

    compares_batch = True  # a score depends on the other documents

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, queries: MultiVector, documents: MultiVector) -> Tensor:
        """Compute scores ``(n_q, n_d)``: `xtr_in_batch` in training mode, else `mean_maxsim`."""
        return xtr_in_batch(queries, documents, self.k) if self.training else mean_maxsim(queries, documents)


def _prepend_classes(model: Model, size: int, side: Side) -> None:
    """Extend the prompt of a side of the model, so that its texts begin with ``size`` class tokens.

    The first is the tokenizer's own. The others are a token of this side, ``[D_CLS]`` or ``[Q_CLS]``, whose
    embedding starts as a copy of the first and is trained.
    """
    key = "size" if side == "document" else "query_classes"
    tokenizer, encoder = model.tokenizer, cast(AnyEncoder, model.encoder)
    first, learned = tokenizer.token_spans("a")[0].token, _CLASS_TOKENS[side]
    if tokenizer.ids([first])[0] not in tokenizer.special_tokens():
        raise ConfigError(
            f"interaction.{key}: multiple_cls needs a model whose texts begin with a class token, those of "
            f"this one begin with {first!r}; choose first_k"
        )
    prompt = rest = model.prompts.get(side, "")
    while rest.startswith(learned):  # added by an earlier training
        rest = rest.removeprefix(learned)
    added = size - 1 - (len(prompt) - len(rest)) // len(learned)
    if (length := model.head.max_length(side)) is not None:
        most = encoder.max_positions
        if most is not None and length + added > most:
            raise ConfigError(
                f"interaction.{key}: {added} class tokens more make texts of {length + added} tokens, the "
                f"encoder has {most} positions; lower {key} or model.config.{side}_length"
            )
        model.set_length(side, length + added)
    if size > 1 and not tokenizer.ids([learned]):
        tokenizer.add_marker(learned)
        encoder.grow_(tokenizer.highest_id() + 1)
        new, start = tokenizer.ids([learned, first])
        with torch.no_grad():
            encoder.word_embeddings[new] = encoder.word_embeddings[start]
    model.prompts[side] = learned * (size - 1) + rest
