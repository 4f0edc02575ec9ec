"""Tables of parts, such as heads or kinds of index, by name; other packages add parts by entry points."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from irkit.errors import ConfigError

Part = TypeVar("Part")


class Registry(Mapping[str, Part], Generic[Part]):
    """Maps names to parts (objects or classes): irkit's own first, then the parts of other packages, sorted.

    A package adds a part by an entry point in its ``pyproject.toml``::

        [project.entry-points."irkit.heads"]
        my_head = "my_package.my_module:MyHead"

    Looking up a name of irkit never reads the metadata of other packages. Listing the names reads it once per
    process, without importing anything. A part is imported when it is looked up.

    Examples:
        >>> shapes = Registry("irkit.doctest", type, {"row": list, "pair": "builtins:tuple"})
        >>> list(shapes), shapes["pair"]
        (['row', 'pair'], <class 'tuple'>)
    """

    def __init__(
        self, group: str, expected: type, own: Mapping[str, Part | str], reserved: Collection[str] = ()
    ) -> None:
        """Make a table of irkit's own parts, which reads entry points later.

        Args:
            group: Group of the entry points, such as ``"irkit.heads"``.
            expected: Class of the parts: a part must be an instance or a subclass of it.
            own: irkit's parts by name; a string ``"module:name"`` is imported when its name is looked up.
            reserved: Further names that other packages cannot take.
        """
        self.group, self.expected = group, expected
        self._own, self._loaded, self._reserved = dict(own), dict[str, Part](), {*own, *reserved}
        self._added: dict[str, EntryPoint] | None = None

    def __getitem__(self, name: str) -> Part:
        """Return the part with the name ``name``, and import the part if it is not imported yet.

        Raises:
            KeyError: No part has this name.
            ConfigError: The part cannot be imported, or is not of the expected class.
        """
        if name not in self._loaded:
            own = self._own.get(name)
            if own is None:
                self._loaded[name] = self._import(self._find_added()[name])
            else:
                self._loaded[name] = self._import(EntryPoint(name, own, "")) if isinstance(own, str) else own
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._find_added()

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._find_added()

    def __len__(self) -> int:
        return len(self._own) + len(self._find_added())

    def _find_added(self) -> dict[str, EntryPoint]:
        """Return the entry points of other packages by name; the first call reads them.

        Raises:
            ConfigError: A name is irkit's own or reserved, or two packages add the same name.
        """
        if self._added is None:
            added: dict[str, EntryPoint] = {}
            for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
                earlier = added.get(point.name)
                owner = "irkit" if point.name in self._reserved else earlier and _package(earlier)
                if owner and owner != _package(point):  # a path that is listed twice gives each twice
                    raise ConfigError(
                        f"{self.group}: the package {_package(point)} adds {point.name!r}, a name that "
                        f"{owner} has already; uninstall one of them, or rename the entry point"
                    )
                added[point.name] = point
            self._added = added
        return self._added

    def _import(self, point: EntryPoint) -> Part:
        source = f"{self.group}: {point.name!r} of the package {_package(point)} ({point.value})"
        try:
            part: Any = point.load()
        except Exception as error:  # whatever the other package raises
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{source} cannot be imported: {type(error).__name__}: {reason:.200}; repair or uninstall it"
            ) from error
        if isinstance(part, self.expected) or (isinstance(part, type) and issubclass(part, self.expected)):
            return cast(Part, part)
        raise ConfigError(f"{source} is {part!r:.100}, expected a {self.expected.__name__}")


def _package(point: EntryPoint) -> str:
    return "irkit" if point.dist is None else str(point.dist.name)
