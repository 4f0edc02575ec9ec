"""Token vectors stored as a centroid and a compressed residual, and MaxSim over them; see README.md."""

from .op import (
    PackedCentroids,
    QueryTable,
    Tokens,
    assign,
    assign_near,
    collect,
    decode,
    encode,
    exact_maxsim,
    interaction,
    least_count,
    pack_centroids,
    probe,
    probe_counts,
    query_table,
    residual_maxsim,
    train_codebook,
)
from .tensor_build import tensor_assign, tensor_encode
from .tensor_op import TensorTokens, tensor_interaction, tensor_maxsim, tensor_probe

__all__ = [
    "PackedCentroids",
    "QueryTable",
    "TensorTokens",
    "Tokens",
    "assign",
    "assign_near",
    "collect",
    "decode",
    "encode",
    "exact_maxsim",
    "interaction",
    "least_count",
    "pack_centroids",
    "probe",
    "probe_counts",
    "query_table",
    "residual_maxsim",
    "tensor_assign",
    "tensor_encode",
    "tensor_interaction",
    "tensor_maxsim",
    "tensor_probe",
    "train_codebook",
]
