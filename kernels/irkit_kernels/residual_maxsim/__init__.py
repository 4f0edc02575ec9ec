"""Encoding of token vectors as centroids and residuals, and MaxSim over them; see README.md."""

from .op import (
    PackedCentroids,
    QueryTable,
    Tokens,
    assign,
    decode,
    encode,
    interaction,
    pack_centroids,
    probe,
    query_table,
    residual_maxsim,
    train_codebook,
)

__all__ = [
    "PackedCentroids",
    "QueryTable",
    "Tokens",
    "assign",
    "decode",
    "encode",
    "interaction",
    "pack_centroids",
    "probe",
    "query_table",
    "residual_maxsim",
    "train_codebook",
]
