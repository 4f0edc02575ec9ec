"""An encoder onto another vocabulary: everything but the embeddings and the output stays as it is."""

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
from irkit.encoder.lookup import NoEncoder
from irkit.errors import BadTypeError, BadValueError, ConfigError
from irkit.files import write_text
from irkit.formats import AnyEncoder
from irkit.heads import SparseHead
from irkit.model import Model
from irkit.model.hardware import Device
from irkit.model.hub import local_directory
from irkit.ragged import Ragged
from irkit.representation import Sparse
from irkit.tokenizer import Tokenizer
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
from irkit.vocabulary.report import describe
from irkit.vocabulary.transplanting import set_vocabulary

__all__ = ["FACTS", "Transfer", "read_new_tokens", "transfer_vocabulary"]

FACTS = "vocabulary_transfer.json"
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Transfer:
    """A model on its new vocabulary, and how it got there.

    Attributes:
        model: A sparse model; special tokens never have a weight.
        alignment: Of the two vocabularies.
        mixture: What each new token was made of: a row each, over the ids of the source. Empty rows are
            tokens that began as the mean of all, or were drawn.
        facts: What `save` writes as JSON.
    """

    model: Model
    alignment: Alignment
    mixture: Sparse
    facts: dict[str, Any]

    def save(self, directory: str | Path) -> None:
        """Write a model directory, and last of all the facts in it, ``vocabulary_transfer.json``.

        Raises:
            StorageError: Something that is not part of a model is in the way, or writing failed.
        """
        folder = Path(directory)
        self.model.save_pretrained(folder)
        write_text(folder / FACTS, json.dumps(self.facts, indent=1, ensure_ascii=False) + "\n")


class _Target(NamedTuple):
    """Tokenizer of the target, and of its model embeddings ``(V', width)`` and output bias ``(V',)``."""

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
    """Give an encoder the vocabulary of another tokenizer, at best a lower-cased one made of words.

    Tokens that both have keep their embeddings; new ones begin as mixtures of those (`TransferConfig`). The
    transformer is untouched, and so is the output layer but for a row and a bias a token; an output that is
    tied to the embeddings stays tied. What follows is training: a short phase of masked language modelling,
    calibration, then that of a sparse retriever.

    Args:
        source: Name or directory of an encoder, best a masked language model, as for `Model.sparse`; or a
            sparse model, which stays as it is.
        target: Name or directory of a model, or of a tokenizer alone.
        config: How new tokens begin.
        texts: A sample from which the frequencies of tokens are counted where a side has no output bias that
            says them. Without it such a target gets the mean bias of the source everywhere.
        device: As for `Model.sparse`.

    Returns:
        A new model, and what was done.

    Raises:
        StorageError: There is no such model or tokenizer.
        ConfigError: A key or value of ``config`` is impossible, semantic initialisation is asked for a target
            without embeddings, or a tokenizer cannot be aligned or does not belong to its embeddings.
        BadValueError: The source is no sparse model, or has terms other than its tokens, or a side of its
            own for queries.

    Examples:
        >>> moved = transfer_vocabulary("answerdotai/ModernBERT-base", "bert-base-uncased")  # doctest: +SKIP
        >>> moved.alignment.overlap  # doctest: +SKIP
        0.5699
        >>> moved.save("modernbert-vt")  # doctest: +SKIP

    Source: "Why Advanced Encoders Lag on Sparse Retrieval? The Answer and an Approach to Bridging Vocabulary
    Gaps", 2026, section 4.2.
    """
    start = time.monotonic()
    if not isinstance(config, TransferConfig):
        config = TransferConfig.parse(config or {}, "vocabulary transfer")
    model = _open_source(source, device)
    ours, theirs = model.tokenizer, _open_target(target, model)
    alignment = align(ours, theirs.tokenizer, normalize=config.normalize)
    config, mixture = _mixture(config, alignment, ours, theirs, str(target))
    head, encoder = cast(SparseHead, model.head), cast(AnyEncoder, model.encoder)
    bias, about_bias = _output_bias(head, alignment, mixture, theirs, (config, ours, texts))
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
    moved = partial(carry_over, alignment=known, mixture=mixture, random=random)
    tied = head.weight is encoder.word_embeddings
    set_vocabulary(encoder, moved(before), theirs.tokenizer.special_ids)
    if not tied:
        head.weight.data = moved(head.weight)
    if head.bias is None:
        head.bias = nn.Parameter(bias.to(head.weight.device))
    head.bias.data = bias.to(head.bias)
    model.head = SparseHead(head.layers, head.weight, head.bias, head.config)
    model.head.lengths = {**head.lengths}
    model.head.exclude_(alignment.special.nonzero()[:, 0].tolist())
    theirs.tokenizer.max_length = ours.max_length
    theirs.tokenizer.move()
    model.tokenizer = theirs.tokenizer
    facts = {
        "source": model.name or "a model in memory",
        "target": str(target),
        "config": config.model_dump(),
        "tied": tied,
        **describe(alignment, mixture, (ours, theirs.tokenizer), (before, encoder.word_embeddings.detach())),
        "bias": about_bias,
        "seconds": round(time.monotonic() - start, 2),
    }
    return Transfer(model, alignment, mixture, facts)


def read_new_tokens(directory: str | Path) -> Tensor:
    """Which tokens of a saved `Transfer` are new, ``(V',)`` bool: what masking and reports go by.

    Raises:
        StorageError: There are no facts of a transfer in the directory.
    """
    facts = read_json(Path(directory) / FACTS)
    is_new = torch.zeros(facts["vocabulary"]["target"], dtype=torch.bool)
    is_new[torch.tensor(facts["new_tokens"], dtype=torch.int64)] = True
    return is_new


def _open_source(source: str | Path | Model, device: Device | None) -> Model:
    """A model that may be changed."""
    if not isinstance(source, Model):
        if not isinstance(source, str | Path):
            raise BadTypeError(f"transfer_vocabulary: got {source!r:.60}, expected a name, path or Model")
        model = Model.sparse(source, device=device)
        model.name = str(source)
        return model
    head = source.head
    if not isinstance(head, SparseHead) or isinstance(source.encoder, NoEncoder):
        raise BadValueError(f"transfer_vocabulary: a {source.kind} model; expected one of Model.sparse")
    if head.vocabulary is not None or source.query_model is not None:
        what = "a vocabulary of its own" if head.vocabulary is not None else "a side of its own for queries"
        raise BadValueError(f"transfer_vocabulary: the model has {what}, which has no place on another one")
    return copy.deepcopy(source)


def _open_target(target: str | Path, source: Model) -> _Target:
    """What is known of the target, embeddings on the device of the source."""
    if not isinstance(target, str | Path):
        raise BadTypeError(f"transfer_vocabulary: target {target!r:.60}, expected a name or directory")
    folder = local_directory(target)
    whole = (folder / "config.json").is_file() and any(next(folder.glob(each), None) for each in _WEIGHTS)
    if not whole and not (folder / "modules.json").is_file():
        return _Target(Tokenizer.from_pretrained(folder))
    model = Model.sparse(folder, device="cpu")
    bias = cast(SparseHead, model.head).bias
    embeddings = cast(AnyEncoder, model.encoder).word_embeddings.detach()
    embeddings = embeddings.to(next(source.parameters()).device)
    return _Target(model.tokenizer, embeddings, None if bias is None else bias.detach())


def _mixture(
    config: TransferConfig, alignment: Alignment, source: Tokenizer, target: _Target, name: str
) -> tuple[TransferConfig, Sparse]:
    """What new tokens are made of, and the configuration with "auto" resolved."""
    has_embeddings = target.embeddings is not None
    kind = config.initialization
    if kind == "auto":
        kind = "semantic" if has_embeddings else "subtoken"
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
    head: SparseHead,
    alignment: Alignment,
    mixture: Sparse,
    target: _Target,
    more: tuple[TransferConfig, Tokenizer, Iterable[str] | None],
) -> tuple[Tensor, dict[str, Any]]:
    """Output bias ``(V',)`` on the CPU, and where it comes from."""
    config, tokenizer, texts = more
    ours = torch.zeros(head.dim) if head.bias is None else head.bias.detach().float().cpu()
    theirs = torch.zeros(len(alignment.tokens))
    if target.bias is not None:
        theirs = target.bias.float()[: len(theirs)]
    said = {"source": "model" if _varies(ours) else "none", "target": "model" if _varies(theirs) else "none"}
    if config.bias == "copied":
        bias = carry_over(ours[:, None], alignment, mixture)[:, 0]
    else:
        if texts is not None and "none" in said.values():
            sides = [(tokenizer, len(ours)), (target.tokenizer, len(theirs))]
            counted = count_tokens(texts, sides)
            if said["source"] == "none":  # counts say how far apart biases are, not where their mean is
                allowed = is_allowed(ours)
                shift = ours[allowed].mean() - counted[0][allowed].mean()
                ours, said["source"] = torch.where(allowed, counted[0] + shift, ours), "texts"
            if said["target"] == "none":
                theirs, said["target"] = counted[1].masked_fill(alignment.special, -torch.inf), "texts"
        bias = align_prior(ours, theirs)
    return bias, {
        "method": config.bias,
        **said,
        **{k: _spread(v) for k, v in (("before", ours), ("after", bias))},
    }


def _varies(bias: Tensor) -> bool:
    kept = bias[is_allowed(bias)]
    return len(kept) > 1 and float(kept.std()) > 1e-6


def _spread(bias: Tensor) -> dict[str, float]:
    kept = bias[is_allowed(bias)].double()
    return {"mean": float(kept.mean()), "deviation": float(kept.std(correction=0))}


def _empty(rows: int, size: int) -> Sparse:
    return Sparse(Ragged(torch.zeros(0).long(), torch.zeros(rows)), torch.zeros(0), size)
