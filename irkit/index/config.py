"""Which index to build: a tagged union by ``kind``, and short names for the usual choices."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from irkit.arguments import shown
from irkit.config import Config
from irkit.errors import ConfigError

__all__ = [
    "AutoConfig",
    "FaissConfig",
    "FlatConfig",
    "IndexConfig",
    "InvertedConfig",
    "MuveraConfig",
    "PlaidConfig",
    "index_config",
]


class FlatConfig(Config):
    """Exact search over everything that is stored; for any kind of representation.

    Attributes:
        dtype: ``"int8"`` keeps the tokens of multi-vector models in 8 bits a dimension and searches them so:
            a quarter of the bytes, several times as fast. Scores are exact for what is kept.
        device: ``"gpu"`` keeps dense vectors on a GPU, too, and searches them there by torch; ``"auto"`` does
            where there is one with enough free memory. Of other kinds ``"auto"`` is the CPU.
    """

    kind: Literal["flat"] = "flat"
    dtype: Literal["float32", "int8"] = "float32"
    device: Literal["auto", "cpu", "gpu"] = "cpu"


class FaissConfig(Config):
    """Approximate search of dense vectors with FAISS; scores are exact inner products all the same.

    Attributes:
        factory: ``"hnsw"``, ``"ivf"``, ``"pq"``, ``"ivfpqfs"`` (sizes chosen by the number of documents),
            or any string of FAISS's index factory, such as ``"HNSW48"`` or ``"IVF4096,SQ8"``.
        ef_construction: HNSW: neighbours considered when a vector is added.
        ef_search: HNSW: neighbours considered in a search; more finds more and takes longer.
        nprobe: IVF: lists visited in a search; by default 3 times the root of their number.
        refine: Candidates fetched for each hit, to be ranked by exact score, where codes are coarse
            (under two bytes a dimension); 1 fetches no more than the hits.
        train_size: Vectors sampled to train centroids and codes.
        seed: Makes the build reproducible, which for HNSW means one thread; None uses all threads.
        device: ``"gpu"`` trains and searches on a GPU, which needs faiss-gpu in the place of faiss-cpu;
            ``"auto"`` does where both are there.

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
    device: Literal["auto", "cpu", "gpu"] = "cpu"


class PlaidConfig(Config):
    """Approximate MaxSim over compressed tokens: each is its centroid and a residual of a few bits.

    Scores are exact for the tokens that the codes stand for, which differ a little from those given; or for
    those, if they are kept.

    Attributes:
        nbits: Bits of each dimension of a residual; fewer are smaller and find less.
        centroids: Their number; by default some 10 times the root of the number of tokens.
        nprobe: Centroids visited for each token of a query; by default some 32 for all of them.
        candidates: Documents looked at beyond their centroids, at least twice the hits wanted; by default
            256, or 8 for each hit. Four times as many are ranked by their centroids, an eighth by residuals.
        keep_tokens: Keep the tokens as well, at two bytes a dimension, and score the best documents by them:
            scores are then those of `irkit.score`, and codes only choose the documents.
        train_size: Tokens sampled to train the centroids, at most.
        seed: Makes the build reproducible.
        device: ``"gpu"`` builds and searches on a GPU by torch; ``"auto"`` where there is one with enough
            free memory.

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
    device: Literal["auto", "cpu", "gpu"] = "auto"


class MuveraConfig(Config):
    """FAISS search of one long vector a document, whose inner products approximate MaxSim, then exact MaxSim.

    That vector has ``repetitions * 2**bits * projection`` dimensions.

    Attributes:
        repetitions: Independent encodings, one after the other.
        bits: Hyperplanes that cut the space of tokens into ``2**bits`` cells.
        projection: Dimensions kept of the tokens in a cell.
        candidates: Documents that are ranked by MaxSim; at least twice the hits wanted.
        factory: As of `FaissConfig`.
        seed: Of hyperplanes and projections, and of the training of FAISS.

    Source: Dhulipala et al., MUVERA, arXiv 2405.19504.
    """

    kind: Literal["muvera"] = "muvera"
    repetitions: int = Field(20, ge=1)
    bits: int = Field(4, ge=1, le=10)
    projection: int = Field(8, ge=1)
    candidates: int = Field(200, ge=1)
    factory: str = "pq"
    seed: int = Field(0, ge=0)


class InvertedConfig(Config):
    """Search of sparse representations by lists of the documents that have each term.

    Scores are exact for the weights that are kept.

    Attributes:
        dtype: Of a weight that is kept. The integer kinds are linear, from 0 to the largest weight of the
            document, which makes them wrong by up to 1/510 (uint8) or 1/131070 (uint16) of that.
        mode: ``"exact"`` finds the best; ``"approximate"`` most of them, sooner; ``"auto"`` is exact up to
            200,000 documents.
        effort: How much an approximate search reads, between 0 and 1; more finds more and takes longer. Some
            0.1 finds 95 of 100, 0.4 finds 99.
    """

    kind: Literal["inverted"] = "inverted"
    dtype: Literal["float32", "float16", "uint16", "uint8"] = "float16"
    mode: Literal["auto", "exact", "approximate"] = "auto"
    effort: float = Field(0.4, gt=0, lt=1)


class AutoConfig(Config):
    """By kind: `inverted` for sparse; else exact search of few documents, of many `plaid` or `hnsw`.

    Attributes:
        documents: How many are many.
    """

    kind: Literal["auto"] = "auto"
    documents: int = Field(20_000, ge=1)

    def choose(self, representation: str, documents: int) -> IndexConfig:
        """The configuration for ``documents`` of a kind of representation."""
        if representation == "sparse":
            return InvertedConfig()
        if documents < self.documents:
            return FlatConfig()
        return PlaidConfig.model_validate({}) if representation == "multi_vector" else index_config("hnsw")


IndexConfig: TypeAlias = Annotated[
    AutoConfig | FlatConfig | FaissConfig | PlaidConfig | MuveraConfig | InvertedConfig,
    Field(discriminator="kind"),
]
"""Configuration of any index; the field ``kind`` tells which."""

_CLASSES = (AutoConfig, FlatConfig, FaissConfig, PlaidConfig, MuveraConfig, InvertedConfig)
_KINDS: dict[str, Any] = {cls.model_fields["kind"].default: cls for cls in _CLASSES}
_SHORT = ("hnsw", "ivf", "pq", "ivfpqfs")


def index_config(choice: str | Mapping[str, Any] | IndexConfig) -> IndexConfig:
    """The configuration that ``choice`` stands for.

    Args:
        choice: A configuration; its keys and values; or a name: ``"auto"``, ``"flat"``, ``"plaid"``,
            ``"muvera"``, ``"inverted"``, ``"faiss"``, ``"hnsw"``, ``"ivf"``, ``"pq"``, ``"ivfpqfs"`` or a
            factory string.

    Raises:
        ConfigError: There is no such index, key or value.

    Examples:
        >>> index_config("hnsw").kind, index_config({"kind": "faiss", "factory": "IVF64,Flat"}).factory
        ('faiss', 'IVF64,Flat')
    """
    if isinstance(choice, _CLASSES):
        return choice
    if isinstance(choice, str):
        if choice in _KINDS:
            choice = {"kind": choice}
        elif choice in _SHORT or re.match(r"[A-Z]", choice):
            choice = {"kind": "faiss", "factory": choice}
        else:
            raise ConfigError(_unknown(choice))
    if not isinstance(choice, Mapping):
        raise ConfigError(
            f"index: got {shown(choice, 100)}, expected a name, a configuration or its keys and values"
        )
    if "kind" not in choice:
        raise ConfigError(
            f"index: missing key 'kind' in {shown(dict(choice), 100)}; known: {', '.join(_KINDS)}"
        )
    kind = choice["kind"]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(_unknown(kind))
    config: IndexConfig = _KINDS[kind].parse(choice, "index")
    return config


def _unknown(name: object) -> str:
    known = [*_KINDS, *_SHORT]
    near = difflib.get_close_matches(shown(name).strip("'"), known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}, or a FAISS factory string"
    return f"index: unknown kind {shown(name)}; {hint}"
