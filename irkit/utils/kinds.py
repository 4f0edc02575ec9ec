"""Fields for a configuration whose class is chosen by its key ``kind``; other packages can add kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from irkit.config import Config
from irkit.utils.plugins import Registry

Kind = TypeVar("Kind", bound=Config)


def own_kinds(*configs: type[Kind]) -> dict[str, type[Kind]]:
    """Return configuration classes by the default of their field ``kind``, for a `Registry`."""
    return {str(config.model_fields["kind"].default): config for config in configs}


@dataclass(frozen=True)
class KindOf:
    """Annotates a field: the key ``kind`` of its value chooses a class from ``table``, which validates it.

    Errors read like pydantic's for a tagged union. The classes of a tagged union have to be imported when
    the class with the field is made. Here a class of another package is imported when a configuration names
    its kind.

    Examples:
        >>> class Recipe(Config):  # doctest: +SKIP
        ...     losses: list[Annotated[BaseLoss, KindOf(LOSSES)]]
        >>> Recipe.parse({"losses": [{"kind": "kl", "temperature": 2}]})  # doctest: +SKIP
    """

    table: Registry[type[Any]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema that validates by `_validate` and writes all keys of the chosen class."""
        return core_schema.no_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda config, info: config.model_dump(mode=info.mode), info_arg=True
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return a JSON schema that allows any kind; error messages take the known keys from this schema."""
        return {"anyOf": [handler(config.__pydantic_core_schema__) for config in self.table.values()]}

    def _validate(self, value: Any) -> Any:
        if isinstance(value, self.table.expected):
            return value
        if not isinstance(value, Mapping):
            raise PydanticKnownError("model_attributes_type")
        if "kind" not in value:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
        kind = value["kind"]
        if not isinstance(kind, str) or kind not in self.table:
            known = ", ".join(map(repr, self.table))
            tag = str(kind).encode(errors="backslashreplace").decode()  # pydantic takes no surrogates
            context = {"discriminator": "'kind'", "tag": tag, "expected_tags": known}
            raise PydanticKnownError("union_tag_invalid", context)
        return self.table[kind].model_validate(value)
