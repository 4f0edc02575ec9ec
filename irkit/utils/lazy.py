"""Import the public names of a package only when they are first used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` for a package, in this order.

    The names are those that the package imports in its block ``if TYPE_CHECKING:``. Each is imported as
    itself (``from irkit.model import Model as Model``), which marks the name as public for type checkers. A
    module of the package must not have the name of an exported object, which it would hide.

    Args:
        package: ``__name__`` of the package.
        file: ``__file__`` of the package; this file is read to find the block.
    """
    blocks = [node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    home = {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(home), load, lambda: sorted({*vars(sys.modules[package]), *home})
