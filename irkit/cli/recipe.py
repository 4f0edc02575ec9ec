"""Recipe of `irkit index`: everything that decides what an index will hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from irkit.config import Config, read_mapping, with_overrides
from irkit.errors import ConfigError
from irkit.index import FlatConfig, IndexConfig, index_config

__all__ = ["IndexRecipe"]


class IndexRecipe(Config):
    """What to index, and how.

    Attributes:
        model: Directory, or name on the Hugging Face hub.
        corpus: Source of the documents, see `irkit.data`.
        index: Kind of index and its settings.
        dtype: Precision of the encoder.
        device: Where it runs, one or several with commas between; by default a GPU if there is one.
        chunk_size: Documents encoded and stored together; a killed build goes on after the last chunk.
    """

    model: str
    corpus: str
    index: IndexConfig = FlatConfig()
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    device: str | None = None
    chunk_size: int = Field(1024, ge=1)

    @classmethod
    def resolve(cls, choice: str, given: Mapping[str, Any], overrides: Iterable[str]) -> IndexRecipe:
        """Put a recipe together.

        Args:
            choice: Name of an index, or a YAML file: a recipe, or with the key ``kind`` that of an index.
            given: Keys and values that go before those of the file; None is not given.
            overrides: ``"key=value"`` that goes before all: a key of the recipe, or of its index.

        Raises:
            ConfigError: A key or a value is unknown, or missing.
            StorageError: The file cannot be read.
        """
        is_file = Path(choice).suffix in (".yaml", ".yml", ".json")
        data: dict[str, Any] = read_mapping(choice) if is_file else {"index": choice}
        if "kind" in data:
            data = {"index": data}
        data |= {key: value for key, value in given.items() if value is not None}
        data["index"] = index_config(data.get("index", "flat")).model_dump(mode="json")
        full = [
            item if item.split("=")[0].split(".")[0] in cls.model_fields else f"index.{item}"
            for item in overrides
        ]
        data, source = with_overrides(data, full), choice if is_file else "recipe"
        if isinstance(data["index"], str):  # --set index=hnsw
            data["index"] = index_config(data["index"]).model_dump(mode="json")
        if missing := [name.upper() for name in ("model", "corpus") if data.get(name) is None]:
            expected = "MODEL CORPUS on the command line" + (f" or as keys of {choice}" if is_file else "")
            raise ConfigError(f"irkit index: no {' and no '.join(missing)}; expected {expected}")
        return cls.parse(data, source)

    def to_yaml(self) -> str:
        """As a file that `resolve` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
