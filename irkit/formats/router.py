"""Router of sentence-transformers: modules of their own for queries and for documents.

Whatever its default route is, `Model.encode` takes that of documents. Modules that both routes start with are
loaded for each of them.

Source: Router of sentence-transformers 6.2.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from irkit.config import Config, read_json
from irkit.errors import ConfigError, CorruptError
from irkit.formats.layers import Modules, known_modules, write_json
from irkit.heads import Side

__all__ = ["TYPE", "branches", "write"]

TYPE = "sentence_transformers.models.Router"  # its name of versions 5 and 6
_NAMES = ("Router", "Asym")
_FILE = "router_config.json"
_SIDES: tuple[Side, ...] = ("query", "document")


class _Parameters(Config, extra="ignore"):
    route_mappings: dict[str, str] | None = None


class _Routes(Config, extra="ignore"):
    types: dict[str, str]
    structure: dict[str, list[str]]
    parameters: _Parameters = _Parameters()


def branches(folder: Path, modules: Modules) -> dict[Side, Modules]:
    """The modules of either side; those of documents alone where queries go the same way.

    Args:
        folder: Of the model.
        modules: Those of modules.json.

    Raises:
        CorruptError: Its router_config.json names modules or routes that are not there.
        ConfigError: It has routes for something else than text queries and documents.
    """
    if not modules or modules[0][0] not in _NAMES:
        return {"document": modules}
    place = modules[0][1]
    file = place / (_FILE if (place / _FILE).is_file() else "config.json")
    given = _Routes.parse(read_json(file), f"reading {file}")
    listed = known_modules(place, ((kind, path) for path, kind in given.types.items()), file.name)
    known = dict(zip(given.types, listed, strict=True))
    routes = {side: _route(side, given, file) for side in _SIDES}
    unused = sorted(given.structure.keys() - set(routes.values()))
    if unused:
        raise ConfigError(
            f"loading {folder}: a Router with the routes {', '.join(map(repr, unused))}; irkit runs one for "
            "text queries and one for text documents"
        )
    found: dict[Side, Modules] = {}
    for side, route in routes.items():
        names = given.structure[route]
        if not names or not known.keys() >= set(names):
            raise CorruptError(
                f"reading {file}: route {route!r} runs {names!r:.100}, expected some of {', '.join(known)}"
            )
        found[side] = [known[name] for name in names] + modules[1:]
    if found["query"] == found["document"]:
        del found["query"]
    return found


def _route(side: Side, given: _Routes, file: Path) -> str:
    """The route that texts of ``side`` take: what is written for a task and a kind of input goes first."""
    rules = {}
    for key, route in (given.parameters.route_mappings or {}).items():
        try:
            rules[ast.literal_eval(key)] = route
        except (ValueError, SyntaxError, TypeError) as error:
            raise CorruptError(f"reading {file}: route_mappings {key!r:.60}, no task and input") from error
    asked = [rules.get(rule) for rule in ((side, "text"), (side, None), (None, "text"), (None, None))]
    for choice in (*asked, side, "text"):
        if choice in given.structure:
            return str(choice)
    raise ConfigError(
        f"loading {file.parent}: a Router without a route for a {side}, it has "
        f"{', '.join(map(repr, given.structure))}"
    )


def write(folder: Path, modules: Mapping[Side, list[tuple[str, str]]]) -> None:
    """Write router_config.json.

    Args:
        folder: Of the model.
        modules: Folder and type of each module of either side.
    """
    write_json(
        folder / _FILE,
        {
            "types": {path: kind for part in modules.values() for path, kind in part},
            "structure": {side: [path for path, _ in part] for side, part in modules.items()},
            "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
        },
    )
