"""A plain Hugging Face model: config.json, weights and a tokenizer, without a list of modules.

A masked language model is read as a sparse model. Any other encoder gets mean pooling.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import cast

from irkit.config import read_json
from irkit.encoder import Encoder
from irkit.errors import ConfigError
from irkit.formats.parts import Format, LoadEncoder, Parts, SideParts, static_parts
from irkit.heads import HEADS, SparseHead, StaticHead
from irkit.heads.static_head import read_idf
from irkit.tokenizer import Tokenizer


def _read(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read config.json, weights and tokenizer, and add a new head.

    A masked language model gets a sparse head, see `_read_masked_lm`. Any other encoder gets a head that
    takes the mean over the tokens, and a warning says so unless layers of the encoder pool.

    Raises:
        ConfigError: The directory holds a classifier or a model of something else than text.
    """
    settings = read_json(folder / "config.json")
    for name in settings.get("architectures") or ():
        if str(name).endswith("ForMaskedLM"):
            return _read_masked_lm(folder, load_encoder)
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
    tokenizer = Tokenizer.from_pretrained(folder)
    return {"tokenizer": tokenizer, "encoder": encoder, "head": HEADS["dense"].create(encoder, tokenizer)}


def _read_masked_lm(folder: Path, load_encoder: LoadEncoder) -> Parts:
    """Read a masked language model as a sparse model: SPLADE with max pooling and log(1 + relu).

    If there is a model in ``query/``, as in naver's directories with two encoders, this model encodes
    queries. Otherwise, if there is an ``idf.json`` of OpenSearch, the file gives the weights of query tokens.

    Raises:
        CorruptError: Weights of the head are missing, or of other shapes than config.json says.
    """
    tokenizer = Tokenizer.from_pretrained(folder)
    parts = cast(Parts, _read_sparse_side(folder, load_encoder, tokenizer))
    own, table = folder / "query", folder / "idf.json"
    if (own / "config.json").is_file():
        has_tokenizer = any((own / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json"))
        own_tokenizer = Tokenizer.from_pretrained(own if has_tokenizer else folder)
        parts["query"] = _read_sparse_side(own, load_encoder, own_tokenizer)
    elif table.is_file():
        parts["query"] = static_parts(tokenizer, StaticHead(read_idf(table, tokenizer)))
    return parts


def _read_sparse_side(folder: Path, load_encoder: LoadEncoder, tokenizer: Tokenizer) -> SideParts:
    encoder = load_encoder(folder)
    head = SparseHead.from_checkpoint(encoder, str(folder))
    return {"tokenizer": tokenizer, "encoder": encoder, "head": head}


HUGGINGFACE = Format(lambda folder: (folder / "config.json").is_file(), _read)
