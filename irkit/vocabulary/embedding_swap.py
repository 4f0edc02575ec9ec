"""Replace the word embeddings of an encoder, and everything else in it that depends on the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from irkit.encoder import Encoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.families import encoder_config
from irkit.errors import ConfigError
from irkit.formats import AnyEncoder

_ROLES = {"bos": "cls", "eos": "sep"}  # names in the config.json of some families, and the roles of tokens


def set_vocabulary(encoder: AnyEncoder, rows: Tensor, special_ids: Mapping[str, int]) -> None:
    """Replace the word embeddings by ``rows``, in place; a tied output stays tied.

    Args:
        encoder: Encoder; the ids of special tokens in its settings are replaced, too.
        rows: ``(V', width)``.
        special_ids: Ids of special tokens by role, see `irkit.tokenizer.Tokenizer`.

    Raises:
        ConfigError: transformers runs the encoder, and its padding token would get another id.
    """
    if isinstance(encoder, Encoder):
        changes = _changes(encoder.settings, special_ids)
        if encoder.config.position_offset and "pad_token_id" in changes:
            _move_positions(encoder, changes["pad_token_id"] + 1 - encoder.config.position_offset)
        encoder.settings |= changes | {"vocab_size": len(rows)}
        encoder.config = encoder_config(encoder.settings)
        encoder.embeddings.config = encoder.config
        old = encoder.word_embeddings.shape[:1]  # first dimension of task heads over the old vocabulary
        heads = encoder.head_weights.items()
        encoder.head_weights = {name: weight for name, weight in heads if weight.shape[:1] != old}
        encoder.embeddings.word.num_embeddings = len(rows)
    else:
        _set_in_transformers(encoder, len(rows), special_ids)
    encoder.word_embeddings.data = rows


def _changes(settings: Mapping[str, Any], special_ids: Mapping[str, int]) -> dict[str, int]:
    """Return the new ids of the special tokens that config.json names."""
    names = {f"{role}_token_id": role for role in special_ids}
    names |= {f"{name}_token_id": role for name, role in _ROLES.items() if role in special_ids}
    return {name: special_ids[role] for name, role in names.items() if settings.get(name) is not None}


def _move_positions(encoder: Encoder, by: int) -> None:
    """Move the table of positions: RoBERTa counts positions from the id of its padding token plus 1."""
    table = encoder.embeddings.position
    if table is None:
        return
    old = table.weight.detach()
    table.weight.data = torch.cat([old[:1].expand(by, -1), old]) if by > 0 else old[-by:].clone()
    table.num_embeddings = len(table.weight)
    encoder.settings["max_position_embeddings"] = len(table.weight)


def _set_in_transformers(encoder: TransformersEncoder, size: int, special_ids: Mapping[str, int]) -> None:
    """Change the settings of an encoder that transformers runs."""
    settings = encoder.settings.to_dict()
    changes = _changes(settings, special_ids)
    old, new = settings.get("pad_token_id"), changes.get("pad_token_id")
    if old != new and new is not None:
        raise ConfigError(
            f"vocabulary transfer: the padding token of a {encoder.family} has the id {old}, in the target "
            f"{new}; expected the same, because its positions may be counted by it"
        )
    encoder.settings.update(changes | {"vocab_size": size})
    encoder.whole.get_input_embeddings().num_embeddings = size
    if encoder.decoder is not None:
        encoder.decoder.out_features = size
