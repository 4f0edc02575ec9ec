"""Fingerprints of a model: digits that change when the vectors of documents, or of queries, would change.

An index stores both, so that a model that encodes otherwise is refused before it searches the index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from irkit.encoder import Encoder
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.formats import AnyEncoder
from irkit.heads import Head
from irkit.tokenizer import Tokenizer


def document_fingerprint(
    tokenizer: Tokenizer,
    encoder: AnyEncoder | InferenceFreeEncoder,
    head: Head,
    prompts: Mapping[str, str],
    weights: Iterable[tuple[str, torch.Tensor]],
) -> str:
    """Compute the fingerprint of documents, see `irkit.model.model_parts.ModelParts.fingerprint`.

    Args:
        tokenizer: Tokenizer of the model.
        encoder: Encoder of the model.
        head: Head of the model.
        prompts: Prompts of queries and documents.
        weights: Weights of encoder and head by name; weights of a query model are skipped.
    """
    # settings that document vectors depend on
    parts = f"{head!r} {tokenizer.signature}"
    if "document" in head.lengths:
        parts += f" {head.lengths['document']}"
    if head.kind in ("multi_vector", "several"):
        parts += f" {prompts['query']!r}"
    if head.kind != "dense":
        parts += f" {prompts['document']!r}"
    if isinstance(encoder, Encoder) and any(encoder.config.schedule):
        parts += f" {encoder.config.schedule} {head.pooled_sides or ()}"
    digest = hashlib.blake2b(parts.encode(), digest_size=16)

    # weights, rounded to bfloat16, so that a model in another precision has the same fingerprint
    for name, weight in sorted(weights):
        if not name.startswith("query_model."):
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            plain = weight.to_dense() if weight.is_mkldnn else weight.detach()
            rounded = plain.to("cpu", torch.bfloat16).contiguous()
            digest.update(rounded.view(torch.int16).numpy().data)
    return digest.hexdigest()


def query_fingerprint(prompt: str, length: int | None, encoder: str) -> str:
    """Compute the fingerprint of what only queries depend on.

    Args:
        prompt: Prompt of queries.
        length: Number of tokens that queries are cut at, if the model says one for queries.
        encoder: Fingerprint of the query model; empty if documents and queries share the encoder.
    """
    parts = f"{prompt!r} {encoder}" + (f" {length}" if length is not None else "")
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()
