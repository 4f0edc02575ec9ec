"""The package as a whole: light imports, public names, rooms in one order that import only earlier ones."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import irkit
from irkit.errors import MissingDependencyError
from irkit.heads import HEADS

ROOT = Path(irkit.__file__).parents[1]
KERNELS = ROOT / "kernels" / "irkit_kernels"

# the rooms of irkit, lowest first: a module imports from its own room and from earlier ones
ROOMS = (
    "errors",
    "arguments",
    "config",
    "utils",
    "core",
    "data",
    "evaluation",
    "tokenizer",
    "encoder",
    "heads",
    "formats",
    "model",
    "index",
    "shards",
    "encoder_free",
    "retrieval",
    "ray_engine",
    "exporting",
    "remote",
    "planning",
    "training",
    "vocabulary",
    "study",
    "client",
    "adapters",
    "serve",
    "__init__",  # the public names
    "cli",
    "__main__",
)

Graph = Mapping[str, set[str]]


@cache
def parsed(file: Path) -> list[ast.AST]:
    """Return all nodes of the code of a file."""
    return list(ast.walk(ast.parse(file.read_text())))


def read_imports(package: Path) -> dict[str, set[str]]:
    """Map each module of a package to the others that its code imports, types included."""
    files = {
        ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in package.rglob("*.py")
    }
    graph = {}
    for module, file in files.items():
        names: set[str] = set()
        for node in parsed(file):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
                start = ".".join(above[: len(above) - node.level + 1]) if node.level else ""
                source = ".".join(filter(None, (start, node.module)))
                full = [f"{source}.{alias.name}" for alias in node.names]
                names |= {name if name in files else source for name in full}
        graph[module] = names & files.keys() - {module}
    return graph


def find_upward_imports(graph: Graph) -> list[str]:
    """List the imports of irkit that lead to a later room."""
    order = {room: position for position, room in enumerate(ROOMS)}

    def room(module: str) -> int:
        return order[module.removeprefix("irkit").strip(".").split(".")[0] or "__init__"]

    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if room(other) > room(module)
    ]


def find_cycle(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def find_twins(modules: Iterable[str]) -> list[str]:
    """List the modules whose last name another module has, too; packages do not count."""
    names = sorted(name.rsplit(".", 1)[-1] for name in modules)
    return [name for name, following in pairwise(names) if name == following]


def test_rooms_import_only_earlier_rooms() -> None:
    graph = read_imports(ROOT / "irkit")
    assert len(graph) > 150
    assert sorted(find_upward_imports(graph)) == []
    planted = {**graph, "irkit.core.ragged": {"irkit.index.flat"}}
    assert "irkit.core.ragged imports irkit.index.flat" in find_upward_imports(planted)


@pytest.mark.parametrize("package", ["irkit", "benchmarks", "kernels/irkit_kernels"])
def test_no_import_cycle(package: str) -> None:
    graph = read_imports(ROOT / package)
    assert any(graph.values())
    assert find_cycle(graph) == []
    first, other = next((module, other) for module, others in graph.items() for other in others)
    assert set(find_cycle({**graph, other: {*graph[other], first}, first: {*graph[first], other}})) >= {
        first,
        other,
    }


def test_architecture_page_lists_the_rooms_in_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == [room for room in ROOMS if "__" not in room]


def test_a_module_is_found_by_its_name() -> None:
    files = [file for file in (ROOT / "irkit").rglob("*.py") if not file.stem.startswith("__")]
    assert find_twins(file.stem for file in files) == []
    assert find_twins(["irkit.index.flat", "irkit.data.flat"]) == ["flat"]


def test_concrete_heads_are_named_in_few_places_outside_their_room() -> None:
    """What other rooms ask of a head are hooks of `Head`, which heads of other packages have, too.

    A format says which heads its files can hold, so each names a few.
    """
    own = [head.__name__ for head in HEADS.values() if head.__module__.startswith("irkit.")]
    names = re.compile(rf"\b({'|'.join([*own, 'SeveralHeads', 'TermHead'])})\b")
    rooms = ROOT / "irkit"
    outside = [file for file in rooms.rglob("*.py") if rooms / "heads" not in file.parents]
    counts = {file.relative_to(rooms): len(names.findall(file.read_text())) for file in outside}
    formats = [count for file, count in counts.items() if file.parts[0] == "formats"]
    assert 0 < max(formats) < 10, counts
    assert sum(counts.values()) - sum(formats) < 10, counts


def test_kernels_know_nothing_of_irkit() -> None:
    assert not (KERNELS.parent / "__init__.py").exists()  # it would shadow Hugging Face's `kernels`
    for file in KERNELS.rglob("*.py"):
        assert "import irkit\n" not in file.read_text(), file
        assert "irkit." not in "".join(line for line in file.read_text().splitlines() if "import" in line), (
            file
        )


def test_public_names_exist_and_are_sorted() -> None:
    assert irkit.__all__ == sorted(irkit.__all__)
    for name in irkit.__all__:
        assert getattr(irkit, name).__module__.startswith("irkit.")
    with pytest.raises(AttributeError, match="nothing"):
        irkit.nothing  # noqa: B018
    for module in read_imports(ROOT / "irkit"):
        if not module.endswith("__main__"):
            with contextlib.suppress(MissingDependencyError):  # of adapters
                loaded = importlib.import_module(module)
                assert all(hasattr(loaded, name) for name in getattr(loaded, "__all__", [])), module


@pytest.mark.parametrize(
    "code", ["import irkit", "import irkit.cli", "import irkit.evaluation.fusion, irkit.data"]
)
def test_imports_are_light(code: str) -> None:
    heavy = {"torch", "transformers", "faiss", "numba", "scipy", "ir_measures", "sentence_transformers"}
    check = f"import sys; {code}; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def find_private_names(package: Path) -> set[str]:
    """Return the names with one leading underscore that the code of a package defines or sets."""
    names: set[str] = set()
    for file in package.rglob("*.py"):
        for node in parsed(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in names if re.match("_[^_]", name)}


def find_replaced(code: str) -> list[str]:
    """List the attributes that the code of a test replaces, by assignment, `setattr` or a patch."""
    replaced = list[str]()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                replaced.append(node.attr)
        elif isinstance(node, ast.Call):
            caller = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if caller in ("setattr", "delattr", "object", "patch"):
                words = [part.value for part in node.args[:2] if isinstance(part, ast.Constant)]
                replaced += [word.rpartition(".")[2] for word in words if isinstance(word, str)]
    return replaced


def test_tests_replace_nothing_private() -> None:
    """Tests reach every method by settings such as `irkit.index.Limits`, and faults by public names."""
    private = set[str]().union(*(find_private_names(ROOT / part) for part in ("irkit", "benchmarks")))
    assert len(private) > 500
    tests = [*(ROOT / "tests").rglob("*.py"), *KERNELS.rglob("test_*.py")]
    found = {file.name: sorted(private.intersection(find_replaced(file.read_text()))) for file in tests}
    assert {file: names for file, names in found.items() if names} == {}
    planted = "store._map = {}; monkeypatch.setattr(store, '_open', 1); patch('irkit.index.store._lock', 2)"
    assert find_replaced(planted) == ["_map", "_open", "_lock"]


def test_the_wheel_holds_all_files_of_irkit_and_no_tests_of_kernels() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    packed = {file.distribution_path for file in wheel.recurse_included_files()}
    files = [file for file in (ROOT / "irkit").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    assert {file.suffix for file in files} > {".py", ".jinja", ".typed"}
    assert {str(file.relative_to(ROOT)) for file in files} <= packed
    kernels = {path for path in packed if path.startswith("irkit_kernels/")}
    assert kernels | {str(file.relative_to(ROOT)) for file in files} == packed
    assert not [path for path in kernels if re.search(r"/(test|bench)_|/_emitted", path)]


def test_the_page_of_serve_takes_nothing_from_elsewhere_and_texts_as_texts() -> None:
    files = list((ROOT / "irkit" / "serve" / "page").iterdir())
    assert files
    for file in files:
        text = file.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        )
        assert not re.search(r"\bstyle=|\bon[a-z]+=\"|<script>|<style|javascript:", text)
        assert set(re.findall(r"https?://[^\"\s]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert len(text.splitlines()) < 400
