"""The Router of sentence-transformers: modules of their own for queries and for documents.

Source: Router of sentence-transformers 6.2.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from irkit.config import Config, read_json
from irkit.errors import ConfigError, CorruptError
from irkit.heads import Side
from irkit.heads.layer_modules import Modules, known_modules, write_json

ROUTER = "sentence_transformers.models.Router"
"""Type of a Router in modules.json, as versions 5 and 6 name it."""

_ROUTERS = ("Router", "Asym")
_ROUTES = "router_config.json"
_SIDES: tuple[Side, ...] = ("query", "document")


class _Parameters(Config, extra="ignore"):
    route_mappings: dict[str, str] | None = None


class _Routes(Config, extra="ignore"):
    types: dict[str, str]
    structure: dict[str, list[str]]
    parameters: _Parameters = _Parameters()


def read_branches(folder: Path, modules: Modules) -> dict[Side, Modules]:
    """Return the modules of each side; without ``"query"`` if queries use the modules of documents.

    Args:
        folder: Directory of the model.
        modules: The modules that modules.json lists.

    Raises:
        CorruptError: router_config.json names modules or routes that are not there.
        ConfigError: router_config.json has routes for anything but text queries and text documents.
    """
    if not modules or modules[0][0] not in _ROUTERS:
        return {"document": modules}
    home = modules[0][1]
    file = home / (_ROUTES if (home / _ROUTES).is_file() else "config.json")
    config = _Routes.parse(read_json(file), f"reading {file}")
    listed = known_modules(home, ((kind, path) for path, kind in config.types.items()), file.name)
    known = dict(zip(config.types, listed, strict=True))
    routes = {side: _route(side, config, file) for side in _SIDES}
    unused = sorted(config.structure.keys() - set(routes.values()))
    if unused:
        raise ConfigError(
            f"loading {folder}: a Router with the routes {', '.join(map(repr, unused))}; irkit runs one for "
            "text queries and one for text documents"
        )
    sides: dict[Side, Modules] = {}
    for side, route in routes.items():
        names = config.structure[route]
        if not names or not known.keys() >= set(names):
            raise CorruptError(
                f"reading {file}: route {route!r} runs {names!r:.100}, expected some of {', '.join(known)}"
            )
        sides[side] = [known[name] for name in names] + modules[1:]
    if sides["query"] == sides["document"]:
        del sides["query"]
    return sides


def _route(side: Side, config: _Routes, file: Path) -> str:
    """Return the name of the Router's route for texts of ``side``.

    route_mappings decide first; then a route with the name of the side; then a route ``"text"``.

    Args:
        side: Side of the texts.
        config: Content of router_config.json.
        file: Path of router_config.json, for messages.
    """
    rules = {}
    for key, route in (config.parameters.route_mappings or {}).items():
        try:
            rules[ast.literal_eval(key)] = route
        except (ValueError, SyntaxError, TypeError) as error:
            raise CorruptError(f"reading {file}: route_mappings {key!r:.60}, no task and input") from error
    candidates = [rules.get(rule) for rule in ((side, "text"), (side, None), (None, "text"), (None, None))]
    for choice in (*candidates, side, "text"):
        if choice in config.structure:
            return str(choice)
    raise ConfigError(
        f"loading {file.parent}: a Router without a route for a {side}, it has "
        f"{', '.join(map(repr, config.structure))}"
    )


def write_routes(folder: Path, modules: Mapping[Side, list[tuple[str, str]]]) -> None:
    """Write router_config.json.

    Args:
        folder: Directory of the model.
        modules: For each side, the folder and the type of each of its modules, in order.
    """
    write_json(
        folder / _ROUTES,
        {
            "types": {path: kind for part in modules.values() for path, kind in part},
            "structure": {side: [path for path, _ in part] for side, part in modules.items()},
            "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
        },
    )
