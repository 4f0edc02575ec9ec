"""Move an encoder onto another vocabulary: only the embeddings and the output change."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from irkit.config import read_json
from irkit.core.ragged import Ragged
from irkit.core.representation import Sparse
from irkit.encoder import Encoder
from irkit.encoder.families import encoder_config
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadTypeError, BadValueError, ConfigError
from irkit.formats import AnyEncoder
from irkit.heads import as_sparse_head
from irkit.model import Model
from irkit.model.hardware import Device
from irkit.model.hub import local_directory
from irkit.tokenizer import Tokenizer
from irkit.utils.atomic import write_text
from irkit.vocabulary.alignment import Alignment, align
from irkit.vocabulary.initialization import (
    TransferConfig,
    align_prior,
    carry_over,
    count_tokens,
    is_allowed,
    semantic_mixture,
    subtoken_mixture,
)
from irkit.vocabulary.transfer_report import describe

FACTS = "vocabulary_transfer.json"
_ROLES = {"bos": "cls", "eos": "sep"}  # names in the config.json of some families, and the roles of tokens


@dataclass(frozen=True)
class Transfer:
    """A model on its new vocabulary, and a description of how the vocabulary was replaced.

    Attributes:
        model: A sparse model; special tokens can never have a weight.
        alignment: Alignment of the two vocabularies.
        mixture: One row per new token, over the ids of the source: the tokens that it was made of. A row is
            empty if the token started as the mean of the shared tokens, or random.
        facts: Description of the transfer that `save` writes as JSON, see
            `irkit.vocabulary.transfer_report.describe`.
    """

    model: Model
    alignment: Alignment
    mixture: Sparse
    facts: dict[str, Any]

    def save(self, directory: str | Path) -> None:
        """Write a model directory, and then ``facts`` to the file ``vocabulary_transfer.json`` in it.

        Raises:
            StorageError: The directory holds other files, or writing failed.
        """
        folder = Path(directory)
        self.model.save_pretrained(folder)
        write_text(folder / FACTS, json.dumps(self.facts, indent=1, ensure_ascii=False) + "\n")


class _Target(NamedTuple):
    """Tokenizer of the target; embeddings ``(V', width)`` and output bias ``(V',)`` of its model, or None."""

    tokenizer: Tokenizer
    embeddings: Tensor | None = None
    bias: Tensor | None = None


def transfer_vocabulary(
    source: str | Path | Model,
    target: str | Path,
    config: TransferConfig | Mapping[str, Any] | None = None,
    *,
    texts: Iterable[str] | None = None,
    device: Device | None = None,
) -> Transfer:
    """Give an encoder the vocabulary of another tokenizer, best a lower-cased one made of words.

    Shared tokens keep their embeddings, new tokens start as mixtures of them (`TransferConfig`). The
    transformer does not change. In the output layer only the row and the bias of each token change; an output
    that is tied to the embeddings stays tied. Training follows: a short phase of masked language modelling,
    calibration, and fine-tuning.

    Args:
        source: Name or directory of an encoder for `Model.sparse`, best a masked language model; or a sparse
            model, which is not changed.
        target: Name or directory of a model, or of a tokenizer alone.
        config: Initialisation of new tokens.
        texts: A sample in which token frequencies are counted. It serves a source or target whose output bias
            does not reflect token frequencies. Without the sample, such a target gets the mean bias of the
            source everywhere.
        device: Device of the model, see `Model.sparse`.

    Returns:
        A new model, and facts of the transfer.

    Raises:
        StorageError: The model or the tokenizer does not exist.
        ConfigError: A key or value of ``config`` is impossible, the target has no embeddings for semantic
            initialisation, or a tokenizer cannot be aligned or does not fit its embeddings.
        BadValueError: The source is not a sparse model, has terms other than its tokens, or has a separate
            query encoder.

    Examples:
        >>> moved = transfer_vocabulary("answerdotai/ModernBERT-base", "bert-base-uncased")  # doctest: +SKIP
        >>> moved.alignment.overlap  # doctest: +SKIP
        0.5699
        >>> moved.save("modernbert-vt")  # doctest: +SKIP

    Source: "Why Advanced Encoders Lag on Sparse Retrieval? The Answer and an Approach to Bridging Vocabulary
    Gaps", 2026, section 4.2.
    """
    # alignment and mixtures
    start = time.monotonic()
    config = TransferConfig.of(config, "vocabulary transfer")
    model = _open_source(source, device)
    ours, theirs = model.tokenizer, _open_target(target, model)
    alignment = align(ours, theirs.tokenizer, normalize=config.normalize)
    config, mixture = _mixture(config, alignment, ours, theirs, str(target))
    # embeddings and output; random ones do not use the mixture
    head, encoder = as_sparse_head(model.head, "transfer_vocabulary"), cast(AnyEncoder, model.encoder)
    old_bias = torch.zeros(head.dim) if head.bias is None else head.bias.detach()
    bias, about_bias = _output_bias(old_bias, alignment, mixture, theirs, config, ours, texts)
    before = encoder.word_embeddings.detach()
    if alignment.source_size > len(before):
        raise ConfigError(
            f"vocabulary transfer: the source has {len(before)} embeddings for {alignment.source_size} "
            "tokens; they do not belong together"
        )
    known, random = alignment, None
    if config.initialization.startswith("random"):
        random, mixture = torch.Generator().manual_seed(config.seed), _empty(len(mixture), mixture.dim)
    if config.initialization == "random_all":
        known = replace(alignment, source_ids=torch.full_like(alignment.source_ids, -1))
    carry = partial(carry_over, alignment=known, mixture=mixture, random=random)
    tied = head.weight is encoder.word_embeddings
    _set_vocabulary(encoder, carry(before), theirs.tokenizer.special_ids)
    if not tied:
        head.weight.data = carry(head.weight)
    if head.bias is None:
        head.bias = nn.Parameter(bias.to(head.weight.device))
    head.bias.data = bias.to(head.bias)
    model.head = head = head.with_matrix(head.weight, head.bias)
    head.exclude_(alignment.special.nonzero()[:, 0].tolist())
    theirs.tokenizer.max_length = ours.max_length
    theirs.tokenizer.move()
    model.tokenizer = theirs.tokenizer
    # facts
    facts = {
        "source": model.name or "a model in memory",
        "target": str(target),
        "config": config.model_dump(),
        "tied": tied,
        **describe(alignment, mixture, (ours, theirs.tokenizer), (before, encoder.word_embeddings.detach())),
        "bias": about_bias,
        "seconds": round(time.monotonic() - start, 2),
    }
    model.name = ""  # the name leads to the source
    return Transfer(model, alignment, mixture, facts)


def read_new_tokens(directory: str | Path) -> Tensor:
    """Read which tokens of a saved `Transfer` are new, ``(V',)`` bool, as masking needs it.

    Raises:
        StorageError: The directory holds no facts of a transfer.
    """
    facts = read_json(Path(directory) / FACTS)
    is_new = torch.zeros(facts["vocabulary"]["target"], dtype=torch.bool)
    is_new[torch.tensor(facts["new_tokens"], dtype=torch.int64)] = True
    return is_new


def _open_source(source: str | Path | Model, device: Device | None) -> Model:
    """Return a copy of a sparse model, or load one; the caller may change the result."""
    if not isinstance(source, Model):
        if not isinstance(source, str | Path):
            raise BadTypeError(f"transfer_vocabulary: got {source!r:.60}, expected a name, path or Model")
        model = Model.sparse(source, device=device)
        model.name = str(source)
        return model
    head = source.head
    if source.kind != "sparse" or isinstance(source.encoder, InferenceFreeEncoder):
        raise BadValueError(f"transfer_vocabulary: a {source.kind} model; expected one of Model.sparse")
    if head.vocabulary is not None or source.query_model is not None:
        what = "a vocabulary of its own" if head.vocabulary is not None else "a side of its own for queries"
        raise BadValueError(f"transfer_vocabulary: the model has {what}, which has no place on another one")
    return copy.deepcopy(source)


def _open_target(target: str | Path, source: Model) -> _Target:
    """Open tokenizer and model of the target; its embeddings are on the device of the source."""
    if not isinstance(target, str | Path):
        raise BadTypeError(f"transfer_vocabulary: target {target!r:.60}, expected a name or directory")
    folder = local_directory(target)
    weights = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")]
    has_weights = (folder / "config.json").is_file() and weights
    if not has_weights and not (folder / "modules.json").is_file():
        return _Target(Tokenizer.from_pretrained(folder))
    model = Model.sparse(folder, device="cpu")
    bias = as_sparse_head(model.head, "transfer_vocabulary").bias
    embeddings = cast(AnyEncoder, model.encoder).word_embeddings.detach()
    embeddings = embeddings.to(next(source.parameters()).device)
    return _Target(model.tokenizer, embeddings, None if bias is None else bias.detach())


def _mixture(
    config: TransferConfig, alignment: Alignment, source: Tokenizer, target: _Target, name: str
) -> tuple[TransferConfig, Sparse]:
    """Return the configuration with "auto" resolved, and the mixtures of the new tokens."""
    kind = config.initialization
    if kind == "auto":
        kind = "subtoken" if target.embeddings is None else "semantic"
        config = config.model_copy(update={"initialization": kind})
    if kind == "semantic":
        if target.embeddings is None:
            raise ConfigError(
                f"vocabulary transfer: semantic initialisation needs embeddings of the target, but {name} is "
                "a tokenizer alone; take subtoken, or a model with this vocabulary"
            )
        if len(target.embeddings) < len(alignment.tokens):
            raise ConfigError(
                f"vocabulary transfer: {name} has {len(target.embeddings)} embeddings for "
                f"{len(alignment.tokens)} tokens; they do not belong together"
            )
        return config, semantic_mixture(alignment, target.embeddings[: len(alignment.tokens)])
    if kind == "mean":
        return config, _empty(int(alignment.is_new.sum()), alignment.source_size)
    return config, subtoken_mixture(alignment, source, target.tokenizer)


def _output_bias(
    source_bias: Tensor,
    alignment: Alignment,
    mixture: Sparse,
    target: _Target,
    config: TransferConfig,
    tokenizer: Tokenizer,
    texts: Iterable[str] | None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the output bias ``(V',)`` on the CPU, and facts about its origin."""
    ours = source_bias.float().cpu()
    theirs = torch.zeros(len(alignment.tokens))
    if target.bias is not None:
        theirs = target.bias.float()[: len(theirs)]
    sides = {"source": ours, "target": theirs}
    origin = {side: "model" if _varies(bias) else "none" for side, bias in sides.items()}
    if config.bias == "copied":
        bias = carry_over(ours[:, None], alignment, mixture)[:, 0]
    else:
        if texts is not None and "none" in origin.values():
            counted = count_tokens(texts, [(tokenizer, len(ours)), (target.tokenizer, len(theirs))])
            if origin["source"] == "none":  # counts give differences of biases, but not their mean
                allowed = is_allowed(ours)
                shift = ours[allowed].mean() - counted[0][allowed].mean()
                ours, origin["source"] = torch.where(allowed, counted[0] + shift, ours), "texts"
            if origin["target"] == "none":
                theirs, origin["target"] = counted[1].masked_fill(alignment.special, -torch.inf), "texts"
        bias = align_prior(ours, theirs)
    return bias, {"method": config.bias, **origin, "before": _spread(ours), "after": _spread(bias)}


def _varies(bias: Tensor) -> bool:
    """Return True if terms that can have a weight differ in bias."""
    values = bias[is_allowed(bias)]
    return len(values) > 1 and float(values.std()) > 1e-6


def _spread(bias: Tensor) -> dict[str, float]:
    values = bias[is_allowed(bias)].double()
    return {"mean": float(values.mean()), "deviation": float(values.std(correction=0))}


def _empty(rows: int, size: int) -> Sparse:
    """Return a Sparse of ``rows`` rows without terms, over ``size`` terms."""
    return Sparse(Ragged(torch.zeros(0).long(), torch.zeros(rows)), torch.zeros(0), size)


def _set_vocabulary(encoder: AnyEncoder, rows: Tensor, special_ids: Mapping[str, int]) -> None:
    """Replace the word embeddings of an encoder in place, and the settings that depend on the vocabulary.

    Args:
        encoder: Encoder.
        rows: ``(V', width)``, the new word embeddings.
        special_ids: Ids of special tokens by role, see `irkit.tokenizer.Tokenizer`; they replace those that
            config.json names.

    Raises:
        ConfigError: transformers runs the encoder, and its padding token would get another id.
    """
    settings = encoder.settings if isinstance(encoder, Encoder) else encoder.settings.to_dict()
    roles = {role: role for role in special_ids}
    roles |= {name: role for name, role in _ROLES.items() if role in special_ids}
    keys = {f"{name}_token_id": special_ids[role] for name, role in roles.items()}
    changes = {key: number for key, number in keys.items() if settings.get(key) is not None}
    old, new = settings.get("pad_token_id"), changes.get("pad_token_id")
    if isinstance(encoder, Encoder):
        later = encoder_config({**encoder.settings, **changes, "max_position_embeddings": 1 << 30})
        _move_positions(encoder, later.position_offset - encoder.config.position_offset)
    elif new not in (None, old):
        raise ConfigError(
            f"vocabulary transfer: the padding token of a {encoder.family} has the id {old}, in the target "
            f"{new}; expected the same, because its positions may be counted by it"
        )
    encoder.set_embeddings_(rows, changes)


def _move_positions(encoder: Encoder, by: int) -> None:
    """Shift the learned positions of an encoder by ``by`` rows, in place.

    RoBERTa counts positions from the id of its padding token plus 1, so another id moves the table. MPNet
    counts them from 2, whatever the id.
    """
    table = encoder.embeddings.position
    if table is None or not by:
        return
    old = table.weight.detach()
    table.weight.data = torch.cat([old[:1].expand(by, -1), old]) if by > 0 else old[-by:].clone()
    table.num_embeddings = len(table.weight)
    encoder.settings["max_position_embeddings"] = len(table.weight)
