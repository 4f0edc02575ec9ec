"""Estimate how many tokens texts have from their bytes, so that budgets of tokens need no tokenizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irkit.tokenizer import Tokenizer

Array = np.ndarray[Any, Any]

SAMPLE_SIZE = 200  # texts to tokenize for an estimate
_SPECIAL = 2  # special tokens of every text
_WHOLE = 1 << 20  # a length at which no text is truncated


def count_bytes(texts: Sequence[str]) -> Array:
    """Return ``(n,)`` int64, the bytes of each text in UTF-8."""
    return np.asarray([len(text.encode(errors="replace")) for text in texts], np.int64)


@dataclass(frozen=True)
class TokenEstimate:
    """Estimate tokens from bytes: by the tokens per byte of a sample, and not above the maximum length.

    Attributes:
        rate: Tokens per byte, without special tokens.
        limit: Maximum length of a text in tokens.
    """

    rate: float
    limit: float

    @classmethod
    def from_sample(cls, texts: Sequence[str], tokenizer: Tokenizer, max_length: int | None) -> TokenEstimate:
        """Tokenize a sample of texts."""
        tokens = tokenizer(texts, "", _WHOLE).lengths - _SPECIAL
        rate = max(0.0, float(tokens.sum())) / max(1, int(count_bytes(texts).sum()))
        return cls(rate, max_length or math.inf)

    def __call__(self, n_bytes: Any) -> Any:
        """Return the estimate for a number of bytes or for an array of them, as float."""
        return np.minimum(n_bytes * self.rate + _SPECIAL, self.limit)
