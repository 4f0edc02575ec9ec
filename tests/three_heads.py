"""A small model with three heads, its queries and its weights, for tests of indexes and of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from irkit import Model

HEADS: dict[str, Any] = {"dense": {}, "sparse": "token_weight", "multi_vector": {"projection": {"dim": 8}}}
QUERIES = ["search the index", "neural text"]
WEIGHTS = {"dense": 0.4, "sparse": 0.2, "multi_vector": 0.4}


def make_model(encoder: Path, path: Path) -> Model:
    """Put three heads of random weights on an encoder, and save the model."""
    torch.manual_seed(0)
    model = Model.several(encoder, HEADS, device="cpu")
    model.save_pretrained(path)
    return model
