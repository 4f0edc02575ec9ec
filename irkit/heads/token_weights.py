"""Weights of single tokens by name: checking them, and reading idf.json of OpenSearch.

Source: the model directories of opensearch-project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from irkit.config import read_json
from irkit.errors import ConfigError
from irkit.tokenizer import Tokenizer


def token_weights(weights: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> Tensor:
    """Return weights by token id; a token that is not given weighs 0.

    Args:
        weights: Token -> weight, each at least 0.
        tokenizer: Tokenizer whose vocabulary has the tokens.
        source: Where the weights come from, for the message.

    Returns:
        ``(tokens of the tokenizer,)`` float32.

    Raises:
        ConfigError: There are no weights, the tokenizer lacks a token, or a weight is not a finite number of
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
        token_id = tokenizer.backend.token_to_id(token)
        if token_id is None:
            unknown.append(token)
        else:
            result[token_id] = weight
    if unknown:
        raise ConfigError(
            f"{source}: {len(unknown)} of {len(weights)} tokens are not in the vocabulary of the tokenizer, "
            f"such as {', '.join(map(repr, unknown[:3]))}; expected weights for the tokens of {tokenizer!r}"
        )
    return result


def read_idf(file: Path, tokenizer: Tokenizer) -> Tensor:
    """Return weights by token id from a JSON object ``{token: weight}``, see `token_weights`."""
    return token_weights(read_json(file), tokenizer, f"reading {file}")
