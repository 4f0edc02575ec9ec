"""Settings of each kind of index."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from irkit.config import Config
from irkit.index.metrics import Metric

if TYPE_CHECKING:
    from irkit.core.representation import Representation

Device = Literal["auto", "cpu", "gpu"]


class IndexConfig(Config):
    """Base of the settings of every kind of index.

    Attributes:
        kind: Name of the kind, see `irkit.index.index_kinds`.
    """

    kind: str


class WindowsConfig(Config):
    """How documents are cut into windows, which are encoded and stored as rows of their own.

    Attributes:
        length: Tokens of a window, without special tokens and prompt. None is what the model reads of a text.
        stride: Tokens from the start of one window to the start of the next; less than ``length`` overlaps.
            None is ``length``.
        pool: Score of a document: the score of its best window (``"max"``), the mean over its windows
            (``"mean"``), or the score of its first window (``"first"``, which stores no others).

    Source: FirstP and MaxP of Dai and Callan, arXiv 1905.09217, section 3.
    """

    length: int | None = Field(None, ge=1)
    stride: int | None = Field(None, ge=1)
    pool: Literal["max", "mean", "first"] = "max"

    @model_validator(mode="after")
    def _check_stride(self) -> Self:
        if self.length is not None and self.stride is not None and self.stride > self.length:
            raise ValueError(
                f"stride {self.stride} is more than length {self.length}, so that tokens between two windows "
                "would be lost; expected at most the length"
            )
        return self


class FlatConfig(IndexConfig):
    """Exact search: every stored document is scored. Holds any kind of representation.

    Attributes:
        dtype: How vectors are stored: ``"float32"`` as they are; dense ones also in half of the bytes as
            ``"float16"`` or ``"bfloat16"``; dense ones, and the tokens of multi-vector models, in a quarter
            of the bytes as ``"int8"``, with a scale each. Scores are exact for what is stored.
        codes: Store 8 bits per dimension beside dense vectors. A search scans these first, and scores only
            the vectors that may be among the best by a bound of the error. It finds the same hits in a
            third of the time or less. ``"int8"`` has no other codes.
        device: ``"gpu"`` also keeps dense vectors on a GPU and searches them there by torch. ``"auto"`` does
            so if there is a GPU with enough free memory. Other representations, and vectors that are not
            in float32, are searched on the CPU.
        metric: What a score of dense vectors is: ``"inner_product"``; ``"cosine"``, for which vectors are
            normalised when they are stored; or ``"euclidean"``, the squared distance times -1, whose search
            neither has codes nor uses a GPU.
    """

    kind: Literal["flat"] = "flat"
    dtype: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    codes: bool = True
    device: Device = "cpu"
    metric: Metric = "inner_product"


class FaissConfig(IndexConfig):
    """Approximate search of dense vectors with FAISS. Scores are exact inner products.

    Attributes:
        factory: ``"hnsw"``, ``"ivf"``, ``"pq"``, ``"ivfpqfs"`` (sizes are chosen by the number of documents),
            or any string of FAISS's index factory, such as ``"HNSW48"`` or ``"IVF4096,SQ8"``.
        ef_construction: HNSW: neighbours considered when a vector is added.
        ef_search: HNSW: neighbours considered in a search; more finds more and takes longer.
        nprobe: IVF: lists visited in a search, more where a filter hides documents. Default: 3 times the
            square root of the number of lists.
        refine: Candidates fetched per hit and ranked by exact score, if codes are coarse (under two bytes per
            dimension). 1 fetches no more than the hits.
        train_size: Vectors sampled to train centroids and codes.
        seed: Makes the build reproducible, which for HNSW means one thread. None uses all threads.
        device: ``"gpu"`` trains and searches on a GPU, which needs faiss-gpu instead of faiss-cpu. ``"auto"``
            does so if both are there.

    Source: Douze et al., The Faiss library, arXiv 2401.08281; Malkov and Yashunin, arXiv 1603.09320.
    """

    kind: Literal["faiss"] = "faiss"
    factory: str = "hnsw"
    ef_construction: int = Field(200, ge=1)
    ef_search: int = Field(128, ge=1)
    nprobe: int | None = Field(None, ge=1)
    refine: int = Field(10, ge=1)
    train_size: int = Field(100_000, ge=1)
    seed: int | None = Field(0, ge=0)
    device: Device = "cpu"

    @property
    def is_graph(self) -> bool:
        """Whether a search walks through a graph of the vectors."""
        return self.factory == "hnsw" or bool(re.search(r"(^|,)(HNSW|NSG|NNDescent)", self.factory))


class DenseConfig(IndexConfig):
    """Approximate search of dense vectors by lists and codes. Scores are exact for stored vectors.

    Attributes:
        keep: How vectors are stored: ``"float32"`` as they are, ``"float16"`` in half of the bytes,
            ``"int8"`` in a quarter, with a scale per vector. ``"none"`` stores only codes of four bits per
            dimension, an eighth, and the vectors that they stand for are what is scored and returned.
        lists: Number of lists. Default: 4 times the square root of the number of documents; without vectors
            at most one for 128 documents.
        probes: Lists read in a search; more finds more and takes longer. Default: 6 times the square root
            of the number of lists, 9 times with int8. Many hits, or a filter that leaves little, read more.
        candidates: Documents of these lists that are ranked by their stored vectors. Default: 80, and 2 per
            hit.
        bits: Bits of a code per dimension: 1, 2 or 4; without vectors 2 or 4. The first of them choose
            candidates, of which all rank those that stored vectors rank. Default: 1, without vectors 4.
        seed: Makes the build reproducible.
        metric: What a score is: ``"inner_product"``; ``"cosine"``, for which vectors are normalised when they
            are stored; or ``"euclidean"``, the squared distance times -1.
        device: ``"gpu"`` also keeps lists, codes and vectors on a GPU and searches them there by torch.
            ``"auto"`` does so if there is a GPU with enough free memory. Builds use the CPU.

    Source: Gao and Long, RaBitQ, arXiv 2405.12497; more bits: the same and others, arXiv 2409.09913.
    """

    kind: Literal["dense"] = "dense"
    keep: Literal["none", "int8", "float16", "float32"] = "float16"
    lists: int | None = Field(None, ge=1)
    probes: int | None = Field(None, ge=1)
    candidates: int | None = Field(None, ge=1)
    bits: Literal[1, 2, 4] | None = None
    seed: int = Field(0, ge=0)
    metric: Metric = "inner_product"
    device: Device = "cpu"

    @model_validator(mode="after")
    def _check_codes(self) -> Self:
        if self.keep == "none" and self.bits == 1:
            raise ValueError("bits is 1, but with keep 'none' codes stand for vectors; expected 2 or 4")
        return self


class PlaidConfig(IndexConfig):
    """Approximate MaxSim over compressed tokens: a centroid and a residual of a few bits each.

    Scores are exact for the tokens that the codes stand for, which differ a little from the original ones, or
    for the original tokens with ``keep_tokens``.

    Attributes:
        nbits: Bits per dimension of a residual; fewer take less space and find less.
        centroids: Number of centroids. Default: about 10 times the square root of the number of tokens, at
            most 32,768.
        nprobe: Centroids visited per token of a query. Default: about 32 per query.
        candidates: Documents whose score is computed from more than their centroids, at least twice the hits.
            Default: 256, or 8 per hit. Four times as many are ranked by their centroids, and residuals are
            read for an eighth.
        keep_tokens: Store the tokens, too, with two bytes per dimension, and score the best documents by
            them. Scores are then equal to `irkit.score`, and codes only choose the documents.
        train_size: Tokens sampled to train the centroids, at most.
        seed: Makes the build reproducible.
        device: ``"gpu"`` builds and searches on a GPU by torch. ``"auto"`` does so if there is a GPU with
            enough free memory.

    Source: Santhanam et al., PLAID, arXiv 2205.09707.
    """

    kind: Literal["plaid"] = "plaid"
    nbits: Literal[1, 2, 4, 8] = 4
    centroids: int | None = Field(None, ge=1)
    nprobe: int | None = Field(None, ge=1)
    candidates: int | None = Field(None, ge=1)
    keep_tokens: bool = False
    train_size: int = Field(1_000_000, ge=1)
    seed: int = Field(0, ge=0)
    device: Device = "auto"


class MuveraConfig(IndexConfig):
    """Search of one long vector per document by lists and codes, then exact MaxSim.

    Inner products of the vectors, of ``repetitions * 2**bits * projection`` dimensions, approximate MaxSim.

    Attributes:
        repetitions: Independent encodings that are concatenated.
        bits: Hyperplanes that cut the space of tokens into ``2**bits`` cells.
        projection: Dimensions to which the tokens of a cell are projected.
        candidates: Documents that are ranked by MaxSim, at least twice the hits.
        lists: Number of lists. Default: as in `DenseConfig`, but at least so many documents in each that the
            centroid of a list takes 20 bytes of a document.
        probes: As in `DenseConfig`.
        seed: Seed of the hyperplanes, of the projections and of the centroids.

    Source: Dhulipala et al., MUVERA, arXiv 2405.19504.
    """

    kind: Literal["muvera"] = "muvera"
    repetitions: int = Field(20, ge=1)
    bits: int = Field(4, ge=1, le=10)
    projection: int = Field(8, ge=1)
    candidates: int = Field(200, ge=1)
    lists: int | None = Field(None, ge=1)
    probes: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0)


class InvertedConfig(IndexConfig):
    """Search of sparse representations by lists of the documents that have each term.

    Scores are exact for the weights that are stored.

    Attributes:
        dtype: Type of a stored weight. The integer types are linear from 0 to the largest weight of the
            document, so a weight is wrong by up to 1/510 (uint8) or 1/131070 (uint16) of the largest one.
        mode: ``"exact"`` finds the best documents, ``"approximate"`` most of them in less time. ``"auto"`` is
            exact up to 200,000 documents.
        effort: How much an approximate search reads, between 0 and 1; more finds more and takes longer. About
            0.1 finds 95 of 100 documents, 0.4 finds 99.
    """

    kind: Literal["inverted"] = "inverted"
    dtype: Literal["float32", "float16", "uint16", "uint8"] = "float16"
    mode: Literal["auto", "exact", "approximate"] = "auto"
    effort: float = Field(0.4, gt=0, lt=1)


class AutoConfig(IndexConfig):
    """Choice of the kind by the representations and the number of documents.

    Sparse representations get `inverted`, few documents `flat`, many documents `plaid` or `dense`.
    Vectors that are too wide for `dense`, of more than 4,096 dimensions, get `hnsw`.

    Attributes:
        documents: Number of documents from which an index counts as large.
    """

    kind: Literal["auto"] = "auto"
    documents: int = Field(20_000, ge=1)

    def choose(self, representation: Representation, documents: int) -> IndexConfig:
        """Return the configuration for a number of documents like a representation, which may be empty."""
        if representation.kind == "sparse":
            return InvertedConfig()
        if documents < self.documents:
            return FlatConfig()
        if representation.kind == "multi_vector":
            return PlaidConfig()
        from irkit_kernels.dense_search.rotation import MAX_DIM

        return DenseConfig() if representation.dim <= MAX_DIM else FaissConfig()
