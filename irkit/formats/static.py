"""Weights of single tokens in files: SparseStaticEmbedding of sentence-transformers, idf.json of OpenSearch.

Source: SparseStaticEmbedding of sentence-transformers 6.2; the model directories of opensearch-project.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from irkit.config import read_json
from irkit.encoder.lookup import NoEncoder
from irkit.encoder.weights import read_weights, write_weights
from irkit.errors import ConfigError, CorruptError
from irkit.formats.layers import optional, write_json
from irkit.formats.parts import SideParts
from irkit.heads import SparseConfig
from irkit.heads.static import StaticHead
from irkit.tokenizer import Tokenizer

__all__ = ["read", "read_idf", "static_parts", "token_weights", "write"]

_NO_LIMIT = 10**30  # how transformers writes that texts are never cut


def static_parts(tokenizer: Tokenizer, head: StaticHead) -> SideParts:
    """A side without an encoder; texts are tokenized by a copy of ``tokenizer`` without special tokens."""
    return {"tokenizer": tokenizer.without_special_tokens(), "encoder": NoEncoder(), "head": head}


def token_weights(weights: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> Tensor:
    """Weights by id; a token that is not given weighs 0.

    Args:
        weights: By token, each at least 0.
        tokenizer: Whose tokens they are.
        source: Where they come from, for the message.

    Returns:
        ``(tokens of the tokenizer,)`` float32.

    Raises:
        ConfigError: There are none, a token is none of the tokenizer's, or a weight is no finite number of
            at least 0.
    """
    if not weights:
        raise ConfigError(f"{source}: there are no weights, expected one for each token that counts")
    result = torch.zeros(tokenizer.vocab_size, device="cpu")
    unknown = []
    for token, weight in weights.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"{source}: token {token!r} has weight {weight!r:.60}, expected a number >= 0")
        place = tokenizer.backend.token_to_id(token)
        if place is None:
            unknown.append(token)
        else:
            result[place] = weight
    if unknown:
        raise ConfigError(
            f"{source}: {len(unknown)} of {len(weights)} tokens are not in the vocabulary of the tokenizer, "
            f"such as {', '.join(map(repr, unknown[:3]))}; expected weights for the tokens of {tokenizer!r}"
        )
    return result


def read_idf(file: Path, tokenizer: Tokenizer) -> Tensor:
    """Weights by id from a JSON object ``{token: weight}``, see `token_weights`."""
    return token_weights(read_json(file), tokenizer, f"reading {file}")


def read(place: Path, config: SparseConfig) -> SideParts:
    """Read the folder of a SparseStaticEmbedding.

    Raises:
        ConfigError: Its configuration makes no sense.
        CorruptError: Its weights are not one finite number for each token.
    """
    settings = optional(place / "config.json")
    tokenizer = Tokenizer.from_pretrained(place)
    frozen, path = settings.get("frozen", False), settings.get("path")
    if not isinstance(frozen, bool) or not isinstance(path, str | None):
        raise ConfigError(
            f"loading {place}: frozen {frozen!r:.60} and path {path!r:.60}, expected a boolean and a name"
        )
    if path is not None:
        weight = read_idf(place / Path(path).name, tokenizer)
    else:
        tensors = read_weights(place)
        weight = tensors.pop("weight", torch.empty(0, device="cpu"))
        if tensors or weight.shape != (tokenizer.vocab_size,) or not bool(weight.isfinite().all()):
            raise CorruptError(
                f"loading {place}: weights of shape {tuple(weight.shape)} beside {sorted(tensors)}, expected "
                f"'weight' alone with a finite number for each of {tokenizer.vocab_size} tokens"
            )
    return static_parts(tokenizer, StaticHead(weight.float(), None, config, frozen=frozen))


def write(parts: SideParts, place: Path) -> None:
    """Write the folder of a SparseStaticEmbedding, with its tokenizer as it is in memory."""
    head, tokenizer = parts["head"], parts["tokenizer"]
    assert isinstance(head, StaticHead)  # goes with NoEncoder
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / "config.json", {"frozen": head.frozen})
    write_weights(place, {"weight": head.weight})
    backend = json.loads(tokenizer.backend.to_str()) | {"truncation": None}
    (place / "tokenizer.json").write_text(json.dumps(backend, ensure_ascii=False), encoding="utf-8")
    roles = {f"{role}_token": tokenizer.backend.id_to_token(n) for role, n in tokenizer.special_ids.items()}
    limit = _NO_LIMIT if tokenizer.max_length is None else tokenizer.max_length
    write_json(
        place / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": limit, **roles},
    )
