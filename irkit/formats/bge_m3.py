"""Directories of BGE-M3: an XLM-RoBERTa of sentence-transformers with two linear layers beside it.

``sparse_linear.pt`` maps a hidden state to the weight of its token, ``colbert_linear.pt`` to its vector. The
dense vector is the normalised hidden state of the first token. Token vectors are normalised, the first
token has none, and the scores of a text's vectors are averaged over the tokens of the query. Layers in
``sparse_linear.safetensors`` and ``colbert_linear.safetensors`` are read, too.

Files in ``.pt`` hold tensors only: code in them is refused, not run.

Source: the model card of BAAI/bge-m3; Chen et al. 2024 (arXiv 2402.03216), section 3.2; FlagEmbedding 1.3 for
names of files, excluded tokens and the mean over query tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from irkit.errors import BadValueError, ConfigError, CorruptError, StorageError
from irkit.formats.parts import Format, LoadEncoder, Parts
from irkit.formats.sentence_transformers import SENTENCE_TRANSFORMERS
from irkit.formats.several import as_several, joined
from irkit.heads import (
    Head,
    MultiVectorConfig,
    MultiVectorHead,
    Normalize,
    PooledHead,
    Projection,
    TokenWeightHead,
    registered_name,
)
from irkit.tokenizer import Tokenizer
from irkit.utils.weights import read_tensors

_SPARSE, _COLBERT = "sparse_linear", "colbert_linear"
_SUFFIXES = ".pt", ".safetensors"


def _read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read a directory of BGE-M3.

    Raises:
        StorageError: The directory has one of both layers only.
        CorruptError: A layer does not fit the encoder, or its file is damaged.
        ConfigError: The directory holds something else than a dense model beside the layers, or cuts its
            vectors.
    """
    assert SENTENCE_TRANSFORMERS.read is not None
    if (folder / "modules.json").is_file():
        parts = SENTENCE_TRANSFORMERS.read(folder, load_encoder)
    else:  # only the encoder, as fine-tuning with FlagEmbedding leaves it
        encoder, tokenizer = load_encoder(folder), Tokenizer.from_pretrained(folder)
        head = PooledHead(encoder.hidden_size, "cls", [Normalize()])
        parts = {"tokenizer": tokenizer, "encoder": encoder, "head": head}
    dense, tokenizer = parts["head"], parts["tokenizer"]
    if not isinstance(dense, PooledHead):
        raise ConfigError(f"loading {folder}: {_COLBERT} beside a model of {dense.kind} vectors; no BGE-M3")
    width = dense.hidden_size
    sparse = TokenWeightHead(width, tokenizer.highest_id() + 1)
    _fill(cast(Projection, sparse.layers[0]), _linear(folder, _SPARSE, (1, width)))
    weights = _linear(folder, _COLBERT, (None, width))
    projection = Projection(width, len(weights["weight"]))
    _fill(projection, weights)
    colbert = MultiVectorHead(width, [projection, Normalize()], _without_first(tokenizer, folder))
    heads: dict[str, Head] = {"dense": dense, "sparse": sparse, "multi_vector": colbert}
    own = parts.get("similarity_name")
    return joined(parts, heads, {**({"dense": own} if own else {}), "multi_vector": "meanmaxsim"})


def _without_first(tokenizer: Tokenizer, folder: Path | str) -> MultiVectorConfig:
    """Return the configuration in which the token that texts begin with has no vector."""
    first = tokenizer([""]).values[:1].tolist()
    words = tuple(str(tokenizer.backend.id_to_token(number)) for number in first)
    if not words or first[0] not in tokenizer.special_tokens():
        raise ConfigError(f"loading {folder}: texts begin with no class token, expected <s> of BGE-M3")
    return MultiVectorConfig(skiplist_words=words, skiplist_sides=("query", "document"))


def _linear(folder: Path, stem: str, shape: tuple[int | None, int]) -> dict[str, Tensor]:
    """Read the weight and the bias of a linear layer.

    Raises:
        StorageError: The file does not exist.
        CorruptError: It holds something else.
    """
    files = [folder / f"{stem}{suffix}" for suffix in _SUFFIXES]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise StorageError(
            f"loading {folder}: a part of BGE-M3 is missing, expected {files[0].name} or {files[1].name}; "
            "download or save the model again"
        )
    tensors = read_tensors(file)
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    rows = shape[0] or (got.get("weight") or (0,))[0]
    if got != {"weight": (rows, shape[1]), "bias": (rows,)}:
        raise CorruptError(
            f"loading {file}: tensors {got}, expected weight {(shape[0] or 'dim', shape[1])} and bias "
            "of as many rows"
        )
    return tensors


def _fill(layer: Projection, tensors: dict[str, Tensor]) -> None:
    layer.linear.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def _write(parts: Parts, folder: Path) -> None:
    """Write a directory that FlagEmbedding opens as BGE-M3.

    Raises:
        BadValueError: The model has other heads than BGE-M3.
    """
    head = as_several(parts, "bge-m3")
    heads: dict[str, Any] = dict(head.parts)
    dense, sparse, colbert = (heads.get(name) for name in _NAMES)
    if problems := _problems(parts, dense, sparse, colbert):
        raise BadValueError(
            f"saving a model: BGE-M3 has no place for {', '.join(problems)}; save it as 'several-heads'"
        )
    assert SENTENCE_TRANSFORMERS.write is not None
    settings = {key: value for key, value in parts.items() if key not in ("head", "similarity_name")}
    similarity = head.similarities.get("dense")
    SENTENCE_TRANSFORMERS.write(
        cast(Parts, {**settings, "head": dense, "similarity_name": similarity}), folder
    )
    for stem, name in ((_SPARSE, "sparse"), (_COLBERT, "multi_vector")):
        layer = heads[name].layers[0]
        state = layer.linear.state_dict()
        torch.save({name: value.detach().cpu() for name, value in state.items()}, folder / f"{stem}.pt")


_NAMES = "dense", "sparse", "multi_vector"


def _problems(parts: Parts, dense: Any, sparse: Any, colbert: Any) -> list[str]:
    """Return the features of a model that BGE-M3 cannot express, as phrases for a message."""
    heads = parts["head"]
    classes = {name: registered_name(head) for name, head in heads.parts.items()}
    if classes != {"dense": "dense", "sparse": "token_weight", "multi_vector": "multi_vector"}:
        return [f"heads {', '.join(heads.parts)}; expected dense, token weights as sparse, and multi_vector"]
    # what the three heads of BGE-M3 are made of
    own = colbert.config
    layers = [*colbert.layers]
    is_linear = (
        len(layers) == 2
        and isinstance(layers[0], Projection)
        and isinstance(layers[1], Normalize)
        and sorted(name for name, _ in layers[0].named_parameters()) == ["linear.bias", "linear.weight"]
        and isinstance(layers[0].activation, nn.Identity)
        and not layers[0].use_residual
    )
    expected = _without_first(parts["tokenizer"], "this model")
    limits = sparse.config.query_max_active_dims or sparse.config.document_max_active_dims
    similarity = heads.similarities.get
    # each feature, and whether the model has it
    problems = {
        "another dense vector than the normalised first token": dense.pooling != ("cls",)
        or [type(layer) for layer in dense.layers] != [Normalize],
        "limits of sparse weights": bool(limits),
        "other layers of token vectors than one linear layer with bias, then length 1": not is_linear,
        "a skip-list other than the first token on both sides": own.skiplist_words != expected.skiplist_words
        or {*own.skiplist_sides} != {"query", "document"},
        "token pooling": own.token_pooling is not None,
        "lengths of its own": bool(heads.lengths),
        "other similarities than cosine, dot and meanmaxsim": similarity("multi_vector") != "meanmaxsim"
        or similarity("dense") not in (None, "cosine", "dot")
        or similarity("sparse") not in (None, "dot"),
    }
    return [problem for problem, is_there in problems.items() if is_there]


def _fits(folder: Path) -> bool:
    names = [f"{stem}{suffix}" for stem in (_SPARSE, _COLBERT) for suffix in _SUFFIXES]
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in names)


BGE_M3 = Format(_fits, _read, _write)
