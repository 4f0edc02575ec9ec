"""What identifies a model: 32 hexadecimal digits that stand for weights, head, tokenizer and settings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from irkit.encoder import Encoder
from irkit.model.pipeline import Pipeline


def document_fingerprint(
    pipeline: Pipeline, prompts: Mapping[str, str], weights: Iterable[tuple[str, Tensor]]
) -> str:
    """Return what an index depends on, in whatever precision the model runs.

    Beside weights, head and tokenizer it covers the pooling schedule of the encoder. For a multi-vector model
    it also covers the settings and prompts of both sides, for a sparse one the settings and prompts of
    documents.

    Args:
        pipeline: The side of documents.
        prompts: Prompts of the model by name.
        weights: Names and weights, without the weights of a separate query encoder.
    """
    head, encoder = pipeline.head, pipeline.encoder
    parts = f"{head!r} {pipeline.tokenizer.signature}"
    if "document" in head.lengths:
        parts += f" {head.lengths['document']}"
    if head.kind == "multi_vector":
        parts += f" {prompts['query']!r}"
    if head.kind != "dense":
        parts += f" {prompts['document']!r}"
    if isinstance(encoder, Encoder) and any(encoder.config.schedule):
        parts += f" {encoder.config.schedule} {head.pooled_sides or ()}"
    digest = hashlib.blake2b(parts.encode(), digest_size=16)
    for name, weight in sorted(weights):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        rounded = weight.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.int16).numpy().data)
    return digest.hexdigest()


def query_fingerprint(queries: Pipeline, own: str) -> str:
    """Return what is done to queries alone.

    Args:
        queries: The side of queries.
        own: Fingerprint of a separate query model; empty if queries use the model of documents.
    """
    parts = f"{queries.prompt!r} {own}"
    if "query" in queries.head.lengths:
        parts += f" {queries.head.lengths['query']}"
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()
