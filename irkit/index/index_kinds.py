"""The one table of index kinds, and how a name or a mapping becomes the configuration of an index.

The table decides which kinds exist: `index_config`, `open_index`, the checks of a stored index, the help of
the command line, the table in ``docs/indexes.md`` and the contract tests read it. To add a kind to irkit, add
a row.

Another package adds a kind by an entry point in its ``pyproject.toml``, without any change to irkit::

    [project.entry-points."irkit.indexes"]
    nearest = "my_package.nearest:KIND"

where ``KIND`` is a row of the table::

    class NearestConfig(IndexConfig):
        kind: Literal["nearest"] = "nearest"
        width: int = 8

    KIND = IndexKind(NearestConfig, "my_package.nearest:Nearest", ("dense",))

``Nearest`` derives from `irkit.index.StoredRows`, which stores representations and answers everything but a
search, or from `irkit.index.Index`. The package is imported when its kind is used. A kind that cannot be
imported, and a name that is in use, are a ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import Field, PlainValidator, SerializeAsAny
from pydantic_core import PydanticKnownError

from irkit.arguments import brief, suggest
from irkit.errors import ConfigError
from irkit.index.array_files import Entry
from irkit.index.index_settings import (
    AutoConfig,
    DenseConfig,
    FaissConfig,
    FlatConfig,
    IndexConfig,
    InvertedConfig,
    MuveraConfig,
    PlaidConfig,
)
from irkit.utils.plugins import Registry

Entries: TypeAlias = Mapping[str, Entry]
Expected: TypeAlias = tuple[str, str, tuple[int, ...], int | None]
"""An array of a stored index: name, possible dtypes in one string, row shape, and rows (None: any number)."""


@dataclass(frozen=True)
class IndexKind:
    """A row of the table of index kinds.

    Attributes:
        config: Class of its settings, whose field ``kind`` has the name of the kind.
        index: Class of the index, or a function that returns one, as ``"module:name"``. It is imported when
            an index is opened, and called with the store and the configuration.
        holds: Kinds of representation that it can hold: ``"dense"``, ``"multi_vector"``, ``"sparse"``.
        arrays: Function that yields the arrays that a stored index has; a manifest is compared with them
            before anything is read. Its arguments are the arrays of the manifest by name, the values that the
            manifest has of the index (``rows``, ``dim``, ``representation``, ...), and its configuration.
            None compares nothing.
        short: Names that stand for the kind with some settings.
    """

    config: type[IndexConfig]
    index: str
    holds: tuple[str, ...]
    arrays: Callable[[Entries, Mapping[str, Any], Any], Iterator[Expected]] | None = None
    short: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def count_rows(entries: Entries, name: str) -> int:
    """Return the rows of an array; 0 if the manifest lacks it."""
    return entries[name].rows if name in entries else 0


def common_arrays(entries: Entries) -> Iterator[Expected]:
    """Yield the arrays of any index: removed rows, documents, vocabularies."""
    yield "removed.bin", "<i8", (), None
    yield "removed_documents.bin", "<i8", (), None
    yield "hashes.bin", "<u8", (), None
    yield "sorted_hashes.bin", "<u8", (), None
    yield "sorted_rows.bin", "<u4", (), count_rows(entries, "sorted_hashes.bin")
    old = "metadata.jsonl" in entries  # before there were columns of metadata
    yield "ends.bin", "<i8", (3 if old else 2,), count_rows(entries, "hashes.bin")
    for name in ("ids.bin", "documents.jsonl", "metadata.jsonl", "vocabulary.txt", "frequencies.bin"):
        yield name, "|u1", (), None
    yield "sequence.bin", "<i8", (), count_rows(entries, "hashes.bin") if "sequence.bin" in entries else None
    yield "field_entries.bin", "<i8", (2,), None
    yield "field_runs.bin", "<i8", (3,), None
    yield "field_strings.bin", "|u1", (), None
    yield "field_ends.bin", "<i8", (), None
    yield "field_order.bin", "<u4", (), None
    yield "field_sorted.bin", "<i8", (), count_rows(entries, "field_order.bin")
    yield "field_groups.bin", "<i8", (3,), None


def flat_arrays(entries: Entries, about: Mapping[str, Any], config: FlatConfig) -> Iterator[Expected]:
    """Yield dense vectors and their codes, tokens with scales in 8 bits, or what `StoredRows` keeps."""
    n, dim = about["rows"], about["dim"]
    if about["representation"] == "dense":
        dtype = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int8": None}[config.dtype]
        if dtype:
            yield "values.bin", dtype, (dim,), n
        yield from _code_arrays(entries, n, dim, needed=not dtype)
        return
    yield "lengths.bin", "<i8", (), n
    if about["representation"] == "sparse":
        yield "terms.bin", "<i4", (), None
        yield "weights.bin", "<f4", (), count_rows(entries, "terms.bin")
    elif config.dtype == "int8":
        yield "values.bin", "|i1", (dim,), None
        yield "scales.bin", "<f4", (), count_rows(entries, "values.bin")
    else:
        yield "values.bin", "<f4", (dim,), None


def _code_arrays(entries: Entries, n: int, dim: int, needed: bool) -> Iterator[Expected]:
    """Yield the codes of `irkit.index.flat_dense`: all of them, or none if they are not needed."""
    shapes: dict[str, tuple[int, ...]] = {"codes.bin": (dim + -dim % 64,)}
    shapes |= dict.fromkeys(("scales.bin", "margins.bin", "norms.bin"), ())
    if needed or not entries.keys().isdisjoint(shapes):
        for name, shape in shapes.items():
            yield name, "<f4" if shape == () else "|u1", shape, n


def inverted_arrays(entries: Entries, about: Mapping[str, Any], config: InvertedConfig) -> Iterator[Expected]:
    """Yield file name, dtype, row shape and row count expected for each array of an inverted index.

    The weights of BM25 are counts.
    """
    weights = "<u2" if "bm25" in about else np.dtype(config.dtype).newbyteorder("<").str
    yield "lengths.bin", "<i8", (), about["rows"]
    if "bm25" not in about and config.dtype.startswith("uint"):
        yield "scales.bin", "<f4", (), about["rows"]
    yield "terms.bin", "<u2 <u4", (), None
    yield "weights.bin", weights, (), count_rows(entries, "terms.bin")


def faiss_arrays(entries: Entries, about: Mapping[str, Any], config: Any) -> Iterator[Expected]:
    """Yield the vectors, their codes, and the structure if it covers rows."""
    rows = count_rows(entries, "faiss.index")
    yield from _code_arrays(entries, about["rows"], about["dim"], needed=False)
    yield "values.bin", "<f4", (about["dim"],), about["rows"]
    yield "faiss.index", "|u1", (), rows or 1 if about.get("covered", 0) else None


def dense_arrays(entries: Entries, about: Mapping[str, Any], config: DenseConfig) -> Iterator[Expected]:
    """Yield the vectors, their rotation, and the centroids if rows are in lists."""
    n, dim, width = about["rows"], about["dim"], about["dim"] + -about["dim"] % 64
    dtype = {"int8": "|i1", "float16": "<f2"}.get(config.keep, "<f4")
    segments = about.get("segments")
    waiting = n - segments[-1]["stop"] if segments and config.keep == "none" else n
    yield "values.bin", dtype, (width if config.keep == "int8" else dim,), waiting
    if config.keep == "int8":
        yield "scales.bin", "<f4", (), n
    yield from _coded_arrays(entries, about, width)


def _coded_arrays(entries: Entries, about: Mapping[str, Any], width: int) -> Iterator[Expected]:
    """Yield the rotation of vectors, padded to ``width``, and the centroids if rows are in lists."""
    rotations = 3 if about["rows"] else None
    yield "rotation_signs.bin", "|i1", (width,), rotations
    yield "rotation_order.bin", "<i4", (width,), rotations
    lists = count_rows(entries, "centroids.bin")
    yield "centroids.bin", "|i1", (width,), lists or 1 if about.get("segments") else None
    yield "centroid_scales.bin", "<f4", (), lists
    yield "margins.bin", "<f4", (), lists if "margins.bin" in entries else None


def muvera_arrays(entries: Entries, about: Mapping[str, Any], config: MuveraConfig) -> Iterator[Expected]:
    """Yield the tokens in float16, and what the codes of their encodings need."""
    width = config.repetitions * (1 << config.bits) * config.projection
    yield "lengths.bin", "<i8", (), about["rows"]
    yield "values.bin", "<f2", (about["dim"],), None
    yield from _coded_arrays(entries, about, width + -width % 64)


def plaid_arrays(entries: Entries, about: Mapping[str, Any], config: Any) -> Iterator[Expected]:
    """Yield the arrays of compressed tokens, of uncompressed tokens, and of the lists."""
    dim, tokens = about["dim"], count_rows(entries, "codes.bin")
    residuals, means = entries.get("residuals.bin"), count_rows(entries, "means.bin")
    yield "lengths.bin", "<i8", (), about["rows"]
    yield "values.bin", "<f2", (dim,), None
    hubs, near = count_rows(entries, "hubs.bin"), entries.get("hub_centroids.bin")
    yield "centroids.bin", "<f2", (dim,), None
    yield "hubs.bin", "<f2", (dim,), None
    yield "hub_centroids.bin", "<i4", near.shape[:1] if near else (0,), hubs
    yield "codes.bin", "<u2 <i4", (), None
    yield "coefficients.bin", "<f2", (2,), tokens
    yield "residuals.bin", "|u1", residuals.shape[:1] if residuals else (0,), tokens
    yield "means.bin", "|i1", (dim,), None
    yield "scales.bin", "<f4", (), means
    yield "list_offsets.bin", "<i8", (), None
    yield "lists.bin", "|u1", (), None


_ALL = ("dense", "multi_vector", "sparse")
_FACTORIES = {name: {"factory": name} for name in ("hnsw", "ivf", "pq", "ivfpqfs")}

OWN_KINDS = {
    "flat": IndexKind(FlatConfig, "irkit.index.flat:open_flat", _ALL, flat_arrays),
    "inverted": IndexKind(InvertedConfig, "irkit.index.inverted:Inverted", ("sparse",), inverted_arrays),
    "dense": IndexKind(DenseConfig, "irkit.index.dense_codes:open_dense", ("dense",), dense_arrays),
    "faiss": IndexKind(FaissConfig, "irkit.index.faiss:Faiss", ("dense",), faiss_arrays, _FACTORIES),
    "plaid": IndexKind(PlaidConfig, "irkit.index.plaid:Plaid", ("multi_vector",), plaid_arrays),
    "muvera": IndexKind(MuveraConfig, "irkit.index.muvera:Muvera", ("multi_vector",), muvera_arrays),
}

INDEX_KINDS: Registry[IndexKind] = Registry("irkit.indexes", IndexKind, OWN_KINDS)


def index_names(kinds: Mapping[str, IndexKind] = INDEX_KINDS) -> list[str]:
    """Return every name that `index_config` knows, apart from factory strings of FAISS."""
    names = ["auto"]
    for name, kind in kinds.items():
        names += [*kind.short, name]
    return names


def suitable_names(representation: str) -> str:
    """Return the names of the kinds that hold a kind of representation, for messages."""
    kinds = {name: kind for name, kind in INDEX_KINDS.items() if representation in kind.holds}
    return ", ".join(index_names(kinds)[1:]) + " or auto"


def index_config(choice: str | Mapping[str, Any] | IndexConfig) -> IndexConfig:
    """Return the configuration that a name, or keys and values, stand for.

    Args:
        choice: A configuration; its keys and values; or a name: ``"auto"``, ``"flat"``, ``"plaid"``,
            ``"muvera"``, ``"inverted"``, ``"faiss"``, ``"hnsw"``, ``"ivf"``, ``"pq"``, ``"ivfpqfs"``, a kind
            of an installed package, or a factory string of FAISS. For the keys of ``"several"`` see
            `SeveralConfig`.

    Raises:
        ConfigError: The index or a key is unknown, or a value is invalid.

    Examples:
        >>> index_config("hnsw").kind, index_config({"kind": "faiss", "factory": "IVF64,Flat"}).factory
        ('faiss', 'IVF64,Flat')
    """
    if isinstance(choice, IndexConfig):
        return choice
    if isinstance(choice, str):
        choice = _named(choice)
    if not isinstance(choice, Mapping):
        raise ConfigError(
            f"index: got {brief(choice, 100)}, expected a name, a configuration or its keys and values"
        )
    if "kind" not in choice:
        known = ", ".join(["auto", *INDEX_KINDS])
        raise ConfigError(f"index: missing key 'kind' in {brief(dict(choice), 100)}; known: {known}")
    if isinstance(choice["kind"], str) and choice["kind"] == "several":
        return SeveralConfig.parse(choice, "index")
    config = _config_class(choice["kind"])
    if config is None:
        raise ConfigError(_unknown(choice["kind"]))
    return config.parse(choice, "index")


def _named(name: str) -> Mapping[str, Any]:
    """Return the keys and values that a name stands for."""
    if re.match(r"[A-Z]", name):
        return {"kind": "faiss", "factory": name}
    for kinds in (OWN_KINDS, INDEX_KINDS):  # irkit's own names import no other package
        for kind, row in kinds.items():
            if name in row.short:
                return {"kind": kind, **row.short[name]}
        if name == "auto" or name in kinds:
            return {"kind": name}
    raise ConfigError(_unknown(name))


def _config_class(kind: Any) -> type[IndexConfig] | None:
    if not isinstance(kind, str):
        return None
    if kind == "auto":
        return AutoConfig
    return INDEX_KINDS[kind].config if kind in INDEX_KINDS else None


def _unknown(name: object) -> str:
    known = index_names()
    hint = suggest(brief(name).strip("'"), known, f"known: {', '.join(known)}, or a FAISS factory string")
    return f"index: unknown kind {brief(name)}; {hint}"


def _validate(value: Any) -> IndexConfig:
    """Validate the settings of an index in another configuration, so that messages name that one."""
    if isinstance(value, IndexConfig):
        return value
    kind = value.get("kind") if isinstance(value, Mapping) else value
    config = _config_class(kind) if isinstance(value, Mapping) else None
    if config is None:
        tags = ", ".join(map(repr, ["auto", *INDEX_KINDS]))
        context = {"discriminator": "'kind'", "tag": str(kind), "expected_tags": tags}
        raise PydanticKnownError("union_tag_invalid", context)
    return config.model_validate(value)


_OWN_CONFIGS: Any = reduce(or_, [kind.config for kind in OWN_KINDS.values()], AutoConfig)  # a union
AnyIndexConfig: TypeAlias = Annotated[
    SerializeAsAny[IndexConfig], PlainValidator(_validate, json_schema_input_type=_OWN_CONFIGS)
]
"""Field of a configuration that holds the settings of any index; the key ``kind`` tells which."""


def _of_part(value: Any) -> IndexConfig:
    config = index_config(value)
    if isinstance(config, SeveralConfig):
        raise ValueError("an index of several parts as a part of another")
    return config


class SeveralConfig(IndexConfig):
    """One index for each representation of a model with several heads.

    Attributes:
        indexes: Index of each head by its name, as for `index_config`. In a build, a head that is not named
            has the default of its kind.
    """

    kind: Literal["several"] = "several"
    indexes: dict[str, Annotated[SerializeAsAny[IndexConfig], PlainValidator(_of_part)]] = Field(
        default_factory=dict
    )
