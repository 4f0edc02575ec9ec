"""The recipe of `irkit index`: all settings that decide what an index holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from irkit.config import Config, dump_yaml, read_mapping, with_overrides
from irkit.encoder_free.settings import BM25Config, encoder_free_index, is_encoder_free
from irkit.errors import ConfigError
from irkit.index.index_kinds import AnyIndexConfig, index_config
from irkit.index.index_settings import WindowsConfig


class IndexRecipe(Config):
    """The model, the documents and the settings of an index.

    Attributes:
        model: Directory, or name on the Hugging Face hub; or bm25, impacts or vectors.
        corpus: Source of the documents, see `irkit.data`.
        id_column: Key or column of the id of a document; this and the next three as in `read_documents`.
        text_column: Key or column of its text, or several.
        title_column: Key or column of its title.
        metadata_columns: Keys or columns that are kept as metadata; by default all others.
        index: Kind of index and its settings; by default the kind that suits the model.
        bm25: Settings of the model bm25.
        dtype: Precision of the encoder.
        device: Device of the encoder, or several separated by commas; by default a GPU if there is one.
        chunk_size: Documents encoded and stored together; a killed build resumes after the last chunk.
        shards: Number of directories among which documents are divided; by default there is one index.
        windows: How long documents are cut into windows; by default only the beginning is encoded.
    """

    model: str
    corpus: str
    id_column: str | None = None
    text_column: str | list[str] | None = None
    title_column: str | None = None
    metadata_columns: list[str] | None = None
    index: AnyIndexConfig | None = None
    bm25: BM25Config | None = None
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    device: str | None = None
    chunk_size: int = Field(1024, ge=1)
    shards: int | None = Field(None, ge=1, le=1000)
    windows: WindowsConfig | None = None

    @classmethod
    def resolve(
        cls, choice: str | None, settings: Mapping[str, Any], overrides: Iterable[str]
    ) -> IndexRecipe:
        """Make a recipe of the arguments of the command line.

        Args:
            choice: Name of an index, or a YAML file. A file with the key ``kind`` holds the settings of an
                index; any other file holds a recipe. None stands for the index that suits the model; if
                an override sets a key of an index, None stands for a flat index.
            settings: Keys and values that override the file; a value of None overrides nothing.
            overrides: ``"key=value"``, which override file and settings. A key of BM25 or of the index needs
                no prefix: ``k1=1.2`` is ``bm25.k1=1.2`` if the model is bm25.

        Raises:
            ConfigError: A key or a value is unknown or missing.
            StorageError: The file cannot be read.
        """
        is_file = choice is not None and Path(choice).suffix in (".yaml", ".yml", ".json")
        data: dict[str, Any] = read_mapping(str(choice)) if is_file else {"index": choice}
        if "kind" in data:
            data = {"index": data}
        given = {key: value for key, value in settings.items() if value is not None}
        if "windows" in given and isinstance(data.get("windows"), dict):  # a length, beside other keys
            given["windows"] = data["windows"] | given["windows"]
        data |= given
        if data.get("index") is None and is_encoder_free(data.get("model")) and data["model"] != "vectors":
            data["index"] = encoder_free_index(str(data["model"]))
        full = [_whole_key(item, data.get("model") == "bm25") for item in overrides]
        if data.get("index") is not None or any(item.startswith("index.") for item in full):
            data["index"] = index_config(data.get("index") or "flat").model_dump(mode="json")
        data, source = with_overrides(data, full), str(choice) if is_file else "recipe"
        if isinstance(data.get("index"), str):  # --set index=hnsw
            data["index"] = index_config(data["index"]).model_dump(mode="json")
        if missing := [name.upper() for name in ("model", "corpus") if data.get(name) is None]:
            expected = "MODEL CORPUS on the command line" + (f" or as keys of {choice}" if is_file else "")
            raise ConfigError(f"irkit index: no {' and no '.join(missing)}; expected {expected}")
        recipe = cls.parse(data, source)
        if recipe.bm25 and recipe.model != "bm25":
            raise ConfigError(f"{source}: bm25 has settings, but the model is {recipe.model}; expected bm25")
        if is_encoder_free(recipe.model) and (recipe.device or recipe.dtype != "auto"):
            raise ConfigError(f"{source}: {recipe.model} has no weights; leave dtype and device out")
        if recipe.model == "bm25" and not recipe.bm25:
            return recipe.model_copy(update={"bm25": BM25Config()})
        return recipe

    def to_yaml(self) -> str:
        """Return the recipe as YAML, which `resolve` reads back."""
        settings = self.model_dump(mode="json")
        for name in ("bm25", "windows", "id_column", "text_column", "title_column", "metadata_columns"):
            if settings[name] is None:  # most indexes need none of these
                del settings[name]
        return dump_yaml(settings)


def _whole_key(override: str, is_bm25: bool) -> str:
    """Return ``"key=value"`` with the section that the key belongs to, ``bm25`` or ``index``."""
    key = override.split("=")[0].split(".")[0]
    if key in IndexRecipe.model_fields:
        return override
    in_bm25 = is_bm25 and key in BM25Config.model_fields and key != "kind"  # an index has a kind, too
    return f"{'bm25' if in_bm25 else 'index'}.{override}"
