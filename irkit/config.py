"""Configurations: frozen pydantic models, read from YAML or JSON, whose errors name key and file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from irkit.arguments import brief, suggest
from irkit.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _Meta(ModelMetaclass):
    """Metaclass of `Config`: makes the constructor raise ConfigError, as `Config.parse` does."""

    def __call__(cls, *arguments: Any, **values: Any) -> Any:
        try:
            return super().__call__(*arguments, **values)
        except ValidationError as error:
            raise _refusal(cls.__name__, error, cls, values) from error


class Config(BaseModel, metaclass=_Meta):
    """Base of all configurations: immutable, with finite numbers; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: str = "configuration") -> Self:
        """Validate ``data``.

        Args:
            data: Keys and values, possibly nested.
            source: Where the data comes from, for messages (a file name).

        Raises:
            ConfigError: A key is unknown or missing, or a value is impossible.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _refusal(source, error, cls, data) from error

    @classmethod
    def of(cls, config: Any, source: str) -> Self:
        """Return a configuration as it is, or `parse` its keys and values; None has none."""
        return config if isinstance(config, cls) else cls.parse({} if config is None else config, source)

    @classmethod
    def read(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read a YAML or JSON file, with ``overrides`` such as ``"index.ef_search=200"``."""
        return cls.parse(with_overrides(read_mapping(path), overrides), str(path))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, which are checked as in the constructor.

        Raises:
            ConfigError: A key is unknown, or a value is impossible.
        """
        if not update:
            return super().model_copy(deep=deep)
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return self.parse({**values, **update}, type(self).__name__)

    def to_yaml(self) -> str:
        """Return the configuration as YAML, which `read` reads back."""
        return dump_yaml(self.model_dump(mode="json"), default_flow_style=None, width=110)


_MOST_BYTES = 1 << 28  # of a file
_MAX_ALIASED = 100_000  # nodes and characters that all aliases of a file may stand for
_TYPES = ("null", "bool", "int", "float", "str", "seq", "map")


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.1 with the types of JSON: ``1e-5`` is a float, ``2024-05-01`` a string and not a date.

    Aliases are counted before values are built: a few lines of aliases to aliases would grow to billions of
    values, and an alias within its own anchor never ends.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Return the tree of nodes; refuse aliases that stand for too many values or for themselves.

        An alias appears in the tree as a shared node.
        """
        root: yaml.Node | None = super().get_single_node()
        pending, seen, aliased = [root] if root else [], set[int](), 0
        while pending:
            node = pending.pop()
            if id(node) in seen:
                aliased += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
                if aliased > _MAX_ALIASED:
                    raise yaml.YAMLError(
                        f"its aliases stand for more than {_MAX_ALIASED:,} values, or for themselves; write "
                        "the values out"
                    )
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                pending += node.value
            elif isinstance(node, yaml.MappingNode):
                pending += [part for pair in node.value for part in pair]
        return root


_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _TYPES
}

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Puts a string into quotes if `_Loader`, or YAML 1.1, would read something else: ``"1e-5"``."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$|^[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?$"
        ),
        list("-+.0123456789"),
    )


def dump_yaml(settings: Any, **options: Any) -> str:
    """Return keys and values as YAML, which `read_mapping` and `with_overrides` read back.

    Args:
        settings: What JSON can hold.
        options: Options of `yaml.dump`.

    Examples:
        >>> print(dump_yaml({"rate": "1e-5"}), end="")
        rate: '1e-5'
    """
    written: str = yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options)
    return written


_parse_yaml = partial(yaml.load, Loader=_Loader)
# raised by !!int x, !!bool x, numbers with thousands of digits, and a thousand levels of nesting, too
_NOT_PARSED = (yaml.YAMLError, ValueError, LookupError, RecursionError)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML or JSON file whose top level has keys.

    Raises:
        StorageError: The file cannot be read.
        ConfigError: It is not YAML, or has no keys.
    """
    return _read_object(path, "YAML", _parse_yaml, "keys and values at the top level")


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model directory or an index.

    Raises:
        StorageError: The file cannot be read.
        ConfigError: It does not hold a JSON object.
    """
    return _read_object(path, "JSON", json.loads, "a JSON object")


def _read_object(path: str | Path, kind: str, parse: Callable[[str], Any], expected: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as stream:  # a device never ends
            content = stream.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with NUL or an unpaired surrogate
        raise StorageError(f"reading {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path}: it has more than {_MOST_BYTES:,} bytes; expected {expected}")
    try:
        data = parse(content.decode("utf-8"))
    except _NOT_PARSED as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path}: not valid {kind}: {reason}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected {expected}, got {type(data).__name__}")
    return data


def as_list(value: Any) -> Any:
    """Wrap a single value in a list, for fields that take one or several; paths become strings."""
    value = str(value) if isinstance(value, Path) else value
    return [value] if isinstance(value, str | Mapping | Config) else value


def with_overrides(data: Mapping[str, Any], overrides: str | Iterable[str]) -> dict[str, Any]:
    """Return a copy of ``data`` changed by ``"a.b=value"`` strings.

    Values are YAML; a number in a path is the position in a list. A single string is one override.

    Raises:
        ConfigError: A string has no ``=``, a path leads through a value without keys, or ``data`` has a value
            that YAML cannot express.
    """
    try:
        result = json.loads(json.dumps(data))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"configuration: {error}; expected keys, numbers, strings, lists and nothing else"
        ) from error
    for override in [overrides] if isinstance(overrides, str) else overrides:
        path, equals, value = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"override {override!r}: expected key=value, such as index.ef_search=128")
        *parents, last = path.strip().split(".")
        node: Any = result
        for parent in parents:
            key = _find_key(node, parent, override)
            if isinstance(node, dict) and node.get(key) is None:
                node[key] = {}
            node = node[key]
            if not isinstance(node, dict | list):
                raise ConfigError(f"override {override!r}: {parent!r} is a value and has no keys below it")
        key = _find_key(node, last, override)
        try:
            node[key] = _parse_yaml(value)
        except _NOT_PARSED as error:
            raise ConfigError(f"override {override!r}: {value!r} is not a YAML value") from error
    return dict(result)


def _find_key(node: dict[str, Any] | list[Any], key: str, override: str) -> Any:
    """Return the key of a dictionary, or the position in a list."""
    if isinstance(node, dict):
        return key
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError(f"override {override!r}: expected a number below {len(node)} in place of {key!r}")
    return int(key)


def _refusal(source: str, error: ValidationError, model: Any, data: Any) -> ConfigError:
    problems = (_explain(problem, model, data) for problem in error.errors())
    return ConfigError(f"{source}: " + "; ".join(problems))


def _written_path(location: Sequence[str | int], data: Any) -> list[str | int]:
    """Return the path of a problem without the positions in lists that the user wrote as a single value."""
    path = list[str | int]()
    for part in location:
        if isinstance(part, int) and not isinstance(data, list | tuple):
            continue  # `as_list` made the list
        path.append(part)
        if isinstance(part, int):
            data = data[part] if part < len(data) else None  # a validator made the list longer
        elif isinstance(data, Mapping):  # pydantic adds the kind of a union to the path
            data = data.get(part, data)
    return path


def _explain(problem: Any, model: type[BaseModel], data: Any) -> str:
    known, path = _known_keys(model), _written_path(problem["loc"], data)
    # pydantic also puts the kind of a union into the path, although it is not a key of the file
    named = [part for part in path[:-1] if part in known or isinstance(part, int)] + path[-1:]
    key = ".".join(map(str, named)) or "(top level)"
    if problem["type"] == "extra_forbidden":
        here = model.model_fields.keys() if len(path) == 1 else known - model.model_fields.keys()
        hint = suggest(str(path[-1]), sorted(known), f"known keys: {', '.join(sorted(here))}")
        if path[-1] in known:
            hint = "it belongs to another part or another kind"
        return f"unknown key {key!r}; {hint}"
    if problem["type"] == "missing":
        return f"missing key {key!r}"
    if problem["type"] == "union_tag_invalid":
        kind, kinds = problem["ctx"]["tag"], re.findall(r"'([^']*)'", problem["ctx"]["expected_tags"])
        return f"{key}: unknown kind {kind!r}; {suggest(str(kind), sorted(set(kinds)))}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("model_attributes_type", "model_type", "dict_type"):
        message = f"expected keys and values{_such_as(problem, model)}"
    return f"{key}: {message}, got {brief(problem['input'], 100)}"


def _such_as(problem: Any, model: type[BaseModel]) -> str:
    """Return an example for an error message about a string where keys and values belong.

    The example is ``" such as {KEY: STRING}"``, where the key is the only required one, or ``kind`` if the
    string is a kind. Without such a key it is ``""``.

    Args:
        problem: Error of pydantic.
        model: Class of the whole configuration.
    """
    text, parts = problem["input"], list(_nested_schemas(model.model_json_schema()))
    if not isinstance(text, str):
        return ""
    kinds = {part["properties"].get("kind", {}).get("const") for part in parts}
    name = problem.get("ctx", {}).get("class_name")
    required: list[str] = next((part.get("required", []) for part in parts if part.get("title") == name), [])
    key = "kind" if problem["type"] == "model_attributes_type" and text in kinds else None
    key = required[0] if len(required) == 1 else key
    return f" such as {{{key}: {text}}}" if key else ""


def _known_keys(model: type[BaseModel]) -> set[str]:
    """Return the keys of a configuration and of everything in it."""
    return {key for part in _nested_schemas(model.model_json_schema()) for key in part["properties"]}


def _nested_schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON schemas that have properties, at any depth."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield schema
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from _nested_schemas(part)
