"""Which index to build: a tagged union by ``kind``, and short names for the usual choices."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from irkit.config import Config
from irkit.errors import ConfigError

__all__ = ["FaissConfig", "FlatConfig", "IndexConfig", "index_config"]


class FlatConfig(Config):
    """Exact search over everything that is stored; for any kind of representation."""

    kind: Literal["flat"] = "flat"


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
        device: ``"gpu"`` trains and searches on a GPU (needs faiss-gpu), ``"auto"`` where there is one.

    Source: Douze et al., The Faiss library, arXiv 2401.08281; Malkov and Yashunin, arXiv 1603.09320.
    """

    kind: Literal["faiss"] = "faiss"
    factory: str = "hnsw"
    ef_construction: int = Field(200, ge=1)
    ef_search: int = Field(128, ge=1)
    nprobe: int | None = Field(None, ge=1)
    refine: int = Field(10, ge=1)
    train_size: int = Field(100_000, ge=1)
    seed: int | None = 0
    device: Literal["auto", "cpu", "gpu"] = "cpu"


IndexConfig: TypeAlias = Annotated[FlatConfig | FaissConfig, Field(discriminator="kind")]
"""Configuration of any index; the field ``kind`` tells which."""

_KINDS: dict[str, type[FlatConfig] | type[FaissConfig]] = {"flat": FlatConfig, "faiss": FaissConfig}
_SHORT = ("hnsw", "ivf", "pq", "ivfpqfs")


def index_config(choice: str | Mapping[str, Any] | FlatConfig | FaissConfig) -> FlatConfig | FaissConfig:
    """The configuration that ``choice`` stands for.

    Args:
        choice: A configuration; its keys and values; or a name: ``"flat"``, ``"faiss"``, ``"hnsw"``,
            ``"ivf"``, ``"pq"``, ``"ivfpqfs"`` or a factory string of FAISS.

    Raises:
        ConfigError: There is no such index, key or value.

    Examples:
        >>> index_config("hnsw").kind, index_config({"kind": "faiss", "factory": "IVF64,Flat"}).factory
        ('faiss', 'IVF64,Flat')
    """
    if isinstance(choice, FlatConfig | FaissConfig):
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
            f"index: got {choice!r:.100}, expected a name, a configuration or its keys and values"
        )
    kind = choice.get("kind")
    if kind not in _KINDS:
        raise ConfigError(_unknown(kind))
    return _KINDS[kind].parse(choice, "index")


def _unknown(name: object) -> str:
    known = [*_KINDS, *_SHORT]
    near = difflib.get_close_matches(str(name), known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}, or a FAISS factory string"
    return f"index: unknown kind {name!r}; {hint}"
