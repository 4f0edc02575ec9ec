"""A bare Hugging Face encoder: weights and a tokenizer, and nothing about how to pool."""

from __future__ import annotations

import warnings
from pathlib import Path

from irkit.config import read_json
from irkit.encoder import Encoder
from irkit.errors import ConfigError
from irkit.formats import sparse, stanford
from irkit.formats.parts import LoadEncoder, Parts
from irkit.heads import PooledHead
from irkit.tokenizer import Tokenizer

__all__ = ["read"]

ARCHITECTURES = {"HF_ColBERT": stanford.read}


def read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read config.json, weights and tokenizer; mean pooling, with a warning unless the encoder itself pools.

    Raises:
        ConfigError: The directory holds a classifier or a model of something else than text.
    """
    settings = read_json(folder / "config.json")
    for name in settings.get("architectures") or ():
        if name in ARCHITECTURES:
            return ARCHITECTURES[name](folder, load_encoder)
        if str(name).endswith("ForMaskedLM"):
            return sparse.read(folder, load_encoder)
        if str(name).endswith("ForSequenceClassification"):
            raise ConfigError(
                f"loading {folder}: {name}, such as a cross-encoder, makes no vectors; as a teacher it is "
                f"cross-encoder:{folder}"
            )
    encoder = load_encoder(folder)
    if not (isinstance(encoder, Encoder) and any(encoder.config.schedule)):  # pooling is meant to leave one
        warnings.warn(
            f"{folder} does not say how a text becomes a vector; taking the mean of its tokens. Unless it "
            "was trained that way, expect poor results.",
            stacklevel=4,  # whoever called Model.from_pretrained
        )
    return {
        "tokenizer": Tokenizer.from_pretrained(folder),
        "encoder": encoder,
        "head": PooledHead(encoder.hidden_size, "mean"),
    }
